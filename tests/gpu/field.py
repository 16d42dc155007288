"""The field run: what is done first on a real machine with GPUs, and the archive that is left of it.

Nothing here needs a GPU. A step of the run notes facts (numbers, for people) and what was unexpected; runs of ddpdiag
leave recordings. The archive has no names, addresses or secrets of the machine (see anonymise.py), and each recording
in it can be judged again: `tar xf gpu-field-run.tar.gz; ddpdiag judge gpu-field-run/recordings/NAME.jsonl`.
"""

import getpass
import io
import json
import re
import socket
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anonymise import Texts, anonymise_with, hosts_in

from ddpdiag.codec import readable
from ddpdiag.sanitize import without_secrets

# Two ranks are strangers to NCCL then, so it does not mind that they share a GPU, and goes through a socket (NCCL
# init.cc compares GPUs of one host only; misc/utils.cc, getHostHash).
ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
NAME = "gpu-field-run"
# "At most 8 minutes on one GPU"; what eight GPUs are asked for takes longer.
SECONDS, SECONDS_OF_EIGHT = 480.0, 1800.0
# Of nvidia-smi and in logs: who bought the card, and whose processes use it.
_PRIVATE = re.compile(
    r"^(\s*(?:<(?:serial|board_part_number|gpu_part_number|process_name)>|"
    r"(?:Serial Number|Board Part Number|GPU Part Number|Process Name|Name)\s*:)).*$",
    re.MULTILINE,
)


@dataclass
class Step:
    """One thing that was done: how long it took, what it gave, what was unexpected, or why it was not done."""

    name: str
    seconds: float = 0.0
    facts: dict[str, object] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    skipped: str = ""


@dataclass
class FieldRun:
    """All steps so far, with the files for the archive by their names in it."""

    limit_seconds: float = SECONDS
    clock: Callable[[], float] = time.monotonic
    steps: list[Step] = field(default_factory=list)
    recordings: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin = self.clock()

    @property
    def left(self) -> float:
        """Seconds that the run may still take."""
        return self.limit_seconds - (self.clock() - self.begin)

    def keep_recording(self, name: str, path: Path) -> None:
        """Keep a recording, if the run wrote one."""
        if path.exists() and (lines := path.read_text().splitlines()):
            self.recordings[name] = lines

    def keep_text(self, name: str, text: str) -> None:
        """Keep an output; of a long one the beginning and the end."""
        most = 400_000
        cut = f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}" if len(text) > most else text
        self.texts[name] = readable(cut)

    @property
    def lines(self) -> Iterator[str]:
        """What is shown at the end: each step, and what was unexpected in it."""
        for step in self.steps:
            said = step.skipped or f"{len(step.unexpected) or 'nothing'} unexpected"
            yield f"{step.name:<44}{step.seconds:>7.1f} s   {said}"
            yield from (f"    {name}: {_short(value)}" for name, value in step.facts.items())
            yield from (f"  ! {text}" for text in step.unexpected)

    def write_archive(self, path: Path, versions: Mapping[str, object]) -> None:
        """One .tar.gz of all that was kept."""
        private = private_names(socket.gethostname(), getpass.getuser(), Path.home())
        texts = Texts(
            [*private, *dict.fromkeys(name for lines in self.recordings.values() for name in hosts_in(lines))]
        )
        report = {"versions": dict(versions), "steps": [vars(step) for step in self.steps]}
        files = {
            f"recordings/{name}.jsonl": _joined(anonymise_with(own, texts)) for name, own in self.recordings.items()
        }
        files |= {name: public(text, texts) for name, text in self.texts.items()}
        files["field.json"] = public(json.dumps(report, indent=1, default=str), texts)
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                info = tarfile.TarInfo(f"{NAME}/{name}")
                data = text.encode()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def private_names(host: str, user: str, home: Path) -> list[str]:
    """What says whose machine it is; names that are words of their own in most logs are left."""
    names = [host, host.partition(".")[0], *([] if user in ("root", "user", "") else [user])]
    return [*dict.fromkeys(name for name in names if len(name) > 2), *([str(home)] if len(home.parts) > 2 else [])]


def public(text: str, texts: Texts) -> str:
    """A text without secrets, and without what tells whose machine it is from."""
    return texts(_PRIVATE.sub(r"\1 [left out]", without_secrets(text)))


def _joined(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _short(value: object) -> str:
    text = json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


# What was to be expected ----------------------------------------------------------------------------------------------


def unexpected_in(
    report: Mapping, *, verdict: str = "fit", known: Sequence[str] = (), blamed: Sequence[int] = ()
) -> list[str]:
    """What a JSON report says beyond its expected verdict: every error and warning but those of `known` codes.

    With `blamed` errors are expected, and must name these ranks and no others.
    """
    found = [] if report["verdict"] == verdict else [f"verdict {report['verdict']}, {verdict} expected"]
    told = [own for own in report["findings"] if own["severity"] != "note" and not own["code"].startswith(tuple(known))]
    if blamed:
        named = {rank for own in told if own["severity"] == "error" for rank in own["ranks"]}
        found += [] if named == {*blamed} else [f"ranks {sorted(named)} are blamed, {sorted(blamed)} expected"]
        told = [own for own in told if own["severity"] != "error"]
    alike = {code: [own for own in told if own["code"] == code] for code in dict.fromkeys(own["code"] for own in told)}
    for code, (first, *others) in alike.items():
        more = f" (and {len(others)} more)" if others else ""
        found.append(f"{first['severity']} {code}: {first['message']}{more}")
    return found


@dataclass(frozen=True)
class ForkServer:
    """What the fork server is before its first fork, and what became of a child that used the GPU."""

    threads: tuple[str, ...]
    devices: tuple[str, ...]
    initialised: bool
    bad_fork: bool
    child: str
    child_seconds: float

    @property
    def unexpected(self) -> list[str]:
        """Whatever would make a fork of it unsafe for CUDA."""
        found = [f"it has {len(self.threads)} threads: {', '.join(self.threads)}"] if len(self.threads) > 1 else []
        found += [f"it has {', '.join(self.devices)} open"] if self.devices else []
        found += ["CUDA is initialised in it"] if self.initialised else []
        found += ["torch says that it is a bad fork"] if self.bad_fork else []
        return found + ([] if self.child == "0" else [f"its forked child ended with {self.child}"])


@dataclass(frozen=True)
class Kill:
    """A process with a kernel that never ends, and SIGKILL: seconds until it was gone (None: not in the time given),
    and bytes of the GPU in use before it, with it, and when they were given back."""

    seconds: float | None
    used_before: int | None
    used_with: int | None
    used_after: int | None
    xids: tuple[str, ...] = ()

    def unexpected(self, limit_seconds: float) -> list[str]:
        """Against the limit of the product, and memory that stays in use."""
        took = "it was never gone" if self.seconds is None else f"it was gone after {self.seconds:.1f} s"
        found = (
            []
            if self.seconds is not None and self.seconds <= limit_seconds
            else [f"{took}, {limit_seconds:g} s expected"]
        )
        if None not in (self.used_before, self.used_with, self.used_after):
            kept = self.used_after - self.used_before
            found += [f"{kept >> 20} MiB stay in use"] if kept > 32 << 20 else []
        # A SIGKILL is enough for Xid 45, as the driver's log says of any program that was ended.
        return found + [f"the kernel log has {xid}" for xid in self.xids if " 45" not in xid.partition(",")[0]]
