"""Releases of torch: healthy checks on 2 and 4 ranks, a rank that hangs, one that crashes, and every strategy.

    python tests/processes/releases.py                         the torch of this environment
    python tests/processes/releases.py 2.6.0 2.15.0            these releases, from the package index
    python tests/processes/releases.py --keep DIR 2.6.0        in DIR/2.6.0, which is made if it is missing, and kept

Each release gets an environment of its own with this ddpdiag; the package index has CUDA builds of some 3 GB, which run
gloo where there is no GPU. A release that cannot be installed is skipped with the reason. The exit code is 1 if a cell
is not what it must be; the reason is below the row.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from jobs import CHECK, INJECT, Job

ROOT = Path(__file__).parents[2]
GUILTY = 2
# Of train, without dp, which needs GPUs.
STRATEGIES = ("single", "ddp", "fsdp", "tensor-parallel", "pipeline", "model-parallel")
# What torch and gloo write by themselves, and no user asked for.
NOISE = ("Warning:", "[Gloo]", "Traceback")
PATIENCE_SECONDS = 120.0
TRAIN = ("-m", "ddpdiag", "train", "--nproc-per-node", "2", "--steps", "6", "--strategy")
FAULT = (*CHECK, "--nproc-per-node", "3", "--select", "LCH003,COL001", "--set", "COL001.deadline_seconds=5")


def healthy(job: Job) -> dict[str, str]:
    """FIT, without an error."""
    assert (job.report["exit_code"], job.errors) == (0, []), job.report["sentence"]
    return {}


def guilty_alone(job: Job) -> dict[str, str]:
    """UNFIT, and the guilty rank is blamed alone."""
    assert job.report["exit_code"] == 1, job.report["sentence"]
    assert job.blamed == {GUILTY}, f"blamed: {sorted(job.blamed)}; {job.report['sentence']}"
    return {}


def trained(job: Job) -> dict[str, str]:
    """FIT: a strategy works, or torch cannot do it; the reasons of those, by strategy."""
    healthy(job)
    ended = {row["strategy"]: (row["status"], row["reason"]) for row in job.report["train"]["rows"]}
    bad = {name: how for name, how in ended.items() if how[0] not in ("works", "not possible here")}
    assert not bad, bad
    return {name: why for name, (how, why) in ended.items() if how == "not possible here"}


@dataclass(frozen=True)
class Attempt:
    """A command, and what looks at its report: AssertionError, or what was not possible."""

    arguments: tuple[str, ...]
    look: Callable[[Job], dict[str, str]]
    variables: Mapping[str, str] = field(default_factory=dict)


ATTEMPTS = {
    "2 ranks": Attempt((*CHECK, "--nproc-per-node", "2"), healthy),
    "4 ranks": Attempt((*CHECK, "--nproc-per-node", "4"), healthy),
    "hang": Attempt(FAULT, guilty_alone, {"DDPDIAG_TEST_FAULT": f"sleep {GUILTY}"}),
    "crash": Attempt(FAULT, guilty_alone, {"DDPDIAG_TEST_FAULT": f"segv {GUILTY}"}),
    "strategies": Attempt((*TRAIN, ",".join(STRATEGIES)), trained),
    # Its warnings must not reach the terminal, and pipelining without it is no fault of the machine.
    "no NumPy": Attempt((*TRAIN, "ddp,pipeline"), trained, {"PYTHONPATH": f"{INJECT / 'no_numpy'}:{INJECT}"}),
}


@dataclass
class Release:
    """What came of one release. `wrong` holds, by attempt, what was not as it must be."""

    torch: str
    seconds: dict[str, float] = field(default_factory=dict)
    lacks: dict[str, dict[str, str]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def tried(python: str, folder: Path) -> Release:
    """Every attempt with the torch of this interpreter, one after the other."""
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    )
    release = Release(version.stdout.strip())
    for name, attempt in ATTEMPTS.items():
        begin = time.monotonic()
        job = Job(
            folder / name.replace(" ", "-"), (*attempt.arguments, "--json", "{json}"), attempt.variables, python=python
        )
        try:
            job.wait(PATIENCE_SECONDS)
            release.lacks[name] = attempt.look(job)
            noise = [line for line in (job.stdout + job.stderr).splitlines() if any(word in line for word in NOISE)]
            assert not noise, f"on the terminal: {noise[0]}"
        except (AssertionError, FileNotFoundError) as error:  # there is no report
            release.wrong[name] = f"{error}\n{job.stderr}".strip()
        finally:
            job.destroy()
        release.seconds[name] = time.monotonic() - begin
    return release


# The table -----------------------------------------------------------------------------------------------------------

COLUMNS = ("torch", "2 ranks", "4 ranks", "hang", "crash", *STRATEGIES, "no NumPy", "check")
_FORM = "{:<14}{:>8}{:>8}{:>8}{:>8}" + "".join(f"{{:>{max(len(name), 6) + 2}}}" for name in STRATEGIES) + "{:>10}{:>8}"


def cells(release: Release) -> Iterator[str]:
    """One row."""
    yield release.torch
    for name, right in (
        ("2 ranks", "FIT"),
        ("4 ranks", "FIT"),
        ("hang", f"rank {GUILTY}"),
        ("crash", f"rank {GUILTY}"),
    ):
        yield "WRONG" if name in release.wrong else right
    for strategy in STRATEGIES:
        lacks = strategy in release.lacks.get("strategies", ())
        yield "WRONG" if "strategies" in release.wrong else "cannot" if lacks else "works"
    yield "WRONG" if "no NumPy" in release.wrong else "quiet"
    yield f"{release.seconds['2 ranks']:.1f} s"


def shown(release: Release) -> Iterator[str]:
    """Its row, and below it what is wrong and what this torch cannot do."""
    yield _FORM.format(*cells(release))
    for name, why in release.wrong.items():
        yield f"    WRONG, {name}: {why}"
    for strategy, why in release.lacks.get("strategies", {}).items():
        yield f"    {strategy}: {why}"


@contextmanager
def environment(version: str, kept: Path | None) -> Iterator[str]:
    """The interpreter of an environment with this release; OSError says why there is none."""
    with nullcontext(str(kept)) if kept is not None else tempfile.TemporaryDirectory(prefix="torch-") as parent:
        python = Path(parent) / version / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
            packages = [str(ROOT), f"torch=={version}", "numpy"]
            install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", *packages]
            made = subprocess.run(install, capture_output=True, text=True, check=False)
            if made.returncode:
                lines = made.stderr.splitlines()
                raise OSError(next((line for line in lines if line.startswith("ERROR")), "it cannot be installed"))
        yield str(python)


def main(words: Sequence[str]) -> int:
    """The table on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where environments are, and stay")
    asked = parser.parse_args(words)
    print(f"{date.today().isoformat()}; hang, crash: the rank that is named; check: seconds of the one on 2 ranks")
    print(_FORM.format(*COLUMNS))
    wrong = False
    for version in asked.versions or [None]:
        try:
            with (
                environment(version, asked.keep) if version else nullcontext(sys.executable) as python,
                tempfile.TemporaryDirectory() as folder,
            ):
                release = tried(python, Path(folder))
        except OSError as error:
            print(f"{version:<14}  skipped: {error}", flush=True)
            continue
        print(*shown(release), sep="\n", flush=True)
        wrong = wrong or bool(release.wrong)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
