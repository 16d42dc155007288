"""Versions, which should be the same on every rank.

Ranks with different versions of torch, CUDA or NCCL use different protocols: they fail in the rendezvous, hang in the
first collective, or compute different results.

A slow `import torch` makes ranks join minutes apart, so that the rendezvous times out. Ranks of a host that are alike
share one import here (measurement import.ranks in the JSON report), where each rank of a job imports torch for itself.

Causes: a virtual environment or container image that was not updated on one host, a module that only some hosts load; a
network file system under load.

Findings:

Fix: use one environment or container image on all hosts; load the same modules in every rank's shell.

Confirm by hand: On each host, inside the job, `python -c 'import sys, torch; print(sys.version, torch.__version__,
torch.version.cuda, torch.cuda.nccl.version())'`; `python -X importtime -c 'import torch'` shows where an import spends
its time.

Sources: NCCL's src/init.cc ("Mismatched NCCL version detected"); CUDA compatibility guide, minor version compatibility
(docs.nvidia.com/deploy/cuda-compatibility).
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text, odd_text, ranks_text
from ddpdiag.checks.odd import odd_finding
from ddpdiag.model import Finding, Kind, Scalar, Severity
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import Versions, driver_version, versions
from ddpdiag.probes.host.kernel import proc_root
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import begun

_OF_TORCH = FindingSpec(
    "ranks have different versions of it. A different torch brings different versions of the others, so only torch is "
    "reported then."
)
FINDINGS = {
    **dict.fromkeys(("torch", "cuda", "hip", "nccl"), _OF_TORCH),
    "python": FindingSpec("another minor version is an error, another patch level a warning."),
    "driver": FindingSpec("NVIDIA driver versions differ; most of them work together, so this is a warning."),
    "slow-import": FindingSpec.warning(
        "`import torch` took longer than `slow_import_seconds` on some ranks, most of it in waiting for files."
    ),
}


class Part(NamedTuple):
    """A part whose versions are compared, what is expected, and the Python code that shows it on a rank."""

    name: str
    expected: str
    shown: str = ""


_SAME_BUILD = "Every rank needs the same build of torch."
PARTS = {
    "torch": Part("torch", "Every rank needs the same version.", "torch.__version__"),
    "cuda": Part("torch's CUDA", _SAME_BUILD, "torch.version.cuda"),
    "hip": Part("torch's HIP", _SAME_BUILD, "torch.version.hip"),
    "nccl": Part("NCCL", "Ranks with different versions of NCCL cannot communicate.", "torch.cuda.nccl.version()"),
    "python": Part("Python", "The same version is expected on every rank.", "sys.version"),
    "driver": Part("the NVIDIA driver", "The same version is expected, but most versions work together."),
}
_FIX = (
    "Use one Python environment or container image for all hosts. This command, started like the job, shows which one "
    "each rank uses: `python -c 'import sys, torch; print(sys.executable, torch.__file__, {})'`."
)
_DRIVER_FIX = (
    "If CUDA or NCCL fails, ask the administrator to install the same driver on all hosts. Otherwise there is nothing "
    "to do."
)

# Beyond this share a slow import is a matter of busy cores (HST001), and not of the file system.
_BUSY_SHARE = 0.5


class Data(Versions, frozen=True, kw_only=True):
    """Also that of the driver; `import_seconds` is what `import torch` took for this rank, and `import_core_seconds`
    how much of it was on a core or in waiting for one. `import_pid` is the process that did it, one for several ranks
    of a host. `not_forked` is why workers are no forks of a process that has imported torch."""

    driver: str | None = None
    import_seconds: float | None = None
    import_core_seconds: float | None = None
    import_pid: int | None = None
    not_forked: str | None = None


def measure(ctx: Context) -> Data:
    pid = os.environ.get("DDPDIAG_IMPORT_PID", "")
    return Data(
        **structs.asdict(versions()),
        driver=driver_version(proc_root(os.environ)),
        import_seconds=_seconds(os.environ.get("DDPDIAG_IMPORT_SECONDS")),
        import_core_seconds=_seconds(os.environ.get("DDPDIAG_IMPORT_CORE_SECONDS")),
        import_pid=int(pid) if pid.isdigit() else None,
        not_forked=os.environ.get("DDPDIAG_NOT_FORKED"),
    )


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    rows = seen.by_rank.values()
    # Another torch brings other CUDA and NCCL libraries: one cause, one finding.
    words = ("torch",) if len({own.torch for own in rows}) > 1 else ("cuda", "hip", "nccl")
    minors = {tuple(own.python.split(".")[:2]) for own in rows}
    for word in words:
        yield from _differing(seen, word, Severity.ERROR)
    yield from _differing(seen, "python", Severity.WARNING if len(minors) == 1 else Severity.ERROR)
    # CUDA's minor version compatibility lets different drivers work together, mostly.
    yield from _differing(seen, "driver", Severity.WARNING)
    yield from _slow_imports(seen)


def _differing(seen: Seen[Data], word: str, severity: Severity) -> Iterator[Finding]:
    values = {rank: getattr(own, word) for rank, own in seen.by_rank.items()}
    if word == "driver":  # which not every rank can read
        values = {rank: version for rank, version in values.items() if version is not None}
    odd = odd_ones_out(values)
    if odd is None:
        return
    part = PARTS[word]
    text = odd_text(
        odd,
        missing="missing",
        where=lambda ranks: f"{names_text(seen.world.hosts_of(ranks), 3)} ({ranks_text(ranks)})",
    )
    yield odd_finding(
        seen,
        word,
        odd,
        f"ranks have different versions of {part.name}",
        f"{begun(part.name)} is {text}. {part.expected}",
        severity=severity,
        fix=_FIX.format(part.shown) if part.shown else _DRIVER_FIX,
    )


def _slow_imports(seen: Seen[Data]) -> Iterator[Finding]:
    """Imports that take long, unless it is known that busy cores, and not files, are the reason."""
    most = seen.number("slow_import_seconds")
    slow = {
        rank: seconds
        for rank, row in seen.by_rank.items()
        if (seconds := row.import_seconds or 0.0) > most and (row.import_core_seconds or 0.0) <= _BUSY_SHARE * seconds
    }
    if slow:
        worst = max(slow, key=lambda rank: slow[rank])
        core = seen.by_rank[worst].import_core_seconds
        spent = "" if core is None else f" {core:.1f} s were on a core or waiting for one, the rest likely for files."
        yield seen.finding(
            "slow-import",
            "importing torch is slow",
            f"`import torch` took {slow[worst]:.1f} s on rank {worst} ({seen.world.host_of(worst)}); at most "
            f"{most:g} s is expected.{spent}",
            ranks=tuple(slow),
            evidence={"seconds": round(slow[worst], 3), "core_seconds": core},
            fix="Put the Python environment on a local disk: copy it to $TMPDIR at the start of the job, or use a "
            "container image.",
        )


def report(seen: Seen[Data]) -> Contribution:
    """The seconds of the slowest import, how many ranks of a host shared one, and versions by host."""
    rows = seen.by_rank
    took = [own.import_seconds for own in rows.values() if own.import_seconds is not None]
    forked = {rank: own.import_pid for rank, own in rows.items() if own.import_pid is not None and not own.not_forked}
    sharing = max(Counter((seen.world.host_of(rank), pid) for rank, pid in forked.items()).values(), default=0)
    figures: dict[str, Scalar] = {"seconds.import": max(took)} if took else {}
    inventory = {
        rank: {"torch": own.torch, "CUDA": own.cuda or NONE, "NCCL": own.nccl or NONE}
        | ({"driver": own.driver} if own.driver else {})
        for rank, own in rows.items()
    }
    return Contribution(
        figures=figures | ({"import.ranks": sharing} if sharing > 1 else {}),
        inventory=inventory,
    )


SETTINGS = {"slow_import_seconds": 10}
CHECK: Check[Data] = Check(__name__, "LCH003", "versions", Stage.LAUNCH, Scope.RANK, Kind.TORCH, deadline=10.0)
