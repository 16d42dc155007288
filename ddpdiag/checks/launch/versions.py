"""Versions, which should be the same on every rank.

Ranks with different versions of torch, CUDA or NCCL use different protocols: they fail in the rendezvous, hang in the
first collective, or compute different results. A Python that differs by its patch level only is a warning.

A slow `import torch` makes ranks join minutes apart, so that the rendezvous times out. It is caused by a network file
system under load or by busy cores; the finding shows which of them. Ranks of a host that are alike share one import
here (measurement import.ranks in the JSON report), where each rank of a job imports torch for itself: what an import
needs of the cores is multiplied by the ranks that share it, for each core. What it waits for files is not, so a file
server that many ranks ask at once can be slower than shown.
Causes: a virtual environment or container image that was not updated on one host, a module that only some hosts load.

Findings:

Fix: use one environment or container image on all hosts; load the same modules in every rank's shell.

Confirm by hand: On each host, inside the job, `python -c 'import sys, torch; print(sys.version, torch.__version__,
torch.version.cuda, torch.cuda.nccl.version())'`; `python -X importtime -c 'import torch'` shows where an import spends
its time.

Sources: NCCL's src/init.cc ("Mismatched NCCL version detected"); CUDA compatibility guide, minor version compatibility
(docs.nvidia.com/deploy/cuda-compatibility).
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, names_text, odd_text, ranks_text
from ddpdiag.checks.launch.variables import setting
from ddpdiag.checks.odd import odd_finding
from ddpdiag.comparison import median_without
from ddpdiag.model import Finding, Kind, Scalar, Severity
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import Versions, driver_version, versions
from ddpdiag.probes.host.kernel import proc_root
from ddpdiag.stats import Odd, odd_ones_out
from ddpdiag.text import count

FINDINGS = {
    **dict.fromkeys(
        ("torch", "cuda", "hip", "nccl"),
        FindingSpec(
            "ranks have different versions of it. A different torch brings different versions of the others, so only "
            "torch is reported then."
        ),
    ),
    "python": FindingSpec("another minor version is an error, another patch level a warning."),
    "driver": FindingSpec("NVIDIA driver versions differ; most of them work together, so this is a warning."),
    "slow-import": FindingSpec.warning(
        "`import torch` took longer than `slow_import_seconds` on some ranks, and at least `slow_import_ratio` times "
        "as long as the median of the other hosts, or most of it in waiting for files. Nothing is reported where all "
        "hosts are equally slow and their cores are busy."
    ),
}


class Part(NamedTuple):
    """A part whose versions are compared, in words; `shown` is the Python code that shows it on a rank."""

    name: str
    title: str
    said: str
    expected: str
    shown: str
    more: str = ""


_SAME_BUILD = "Every rank needs the same build of torch."
_PARTS = {
    "torch": Part(
        "torch",
        "ranks have different versions of torch",
        "torch is",
        "Every rank needs the same version.",
        "import torch; print(torch.__file__, torch.__version__)",
    ),
    "cuda": Part(
        "CUDA",
        "ranks have torch for different CUDA versions",
        "torch was built for CUDA",
        _SAME_BUILD,
        "import torch; print(torch.__file__, torch.version.cuda)",
    ),
    "hip": Part(
        "HIP",
        "ranks have torch for different HIP versions",
        "torch was built for HIP",
        _SAME_BUILD,
        "import torch; print(torch.__file__, torch.version.hip)",
    ),
    "nccl": Part(
        "NCCL",
        "ranks have different versions of NCCL",
        "torch uses NCCL",
        "Ranks with different versions of NCCL cannot communicate.",
        "import torch; print(torch.__file__, torch.cuda.nccl.version())",
        # It shows the version that torch was built with; the library that is loaded may be another one.
        " If torch is the same everywhere, compare `python -m pip list | grep -i nccl` and `echo $LD_LIBRARY_PATH "
        "$LD_PRELOAD`.",
    ),
    "python": Part(
        "Python",
        "ranks have different versions of Python",
        "Python is",
        "The same version is expected on every rank.",
        "import sys; print(sys.executable, sys.version)",
    ),
    "driver": Part(
        "The NVIDIA driver",
        "hosts have different NVIDIA drivers",
        "The NVIDIA driver is",
        "The same version is expected on every host, but most versions work together.",
        "",
    ),
}
_FIX = (
    "Use one Python environment or container image for all hosts. This command, started like the job, shows which one "
    "each rank uses: `python -c '{}'`."
)

# Beyond this share a slow import is a matter of the cores, and not of the file system.
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
    return Data(
        **structs.asdict(versions()),
        driver=driver_version(proc_root(os.environ)),
        import_seconds=_seconds(os.environ.get("DDPDIAG_IMPORT_SECONDS")),
        import_core_seconds=_seconds(os.environ.get("DDPDIAG_IMPORT_CORE_SECONDS")),
        import_pid=_whole(os.environ.get("DDPDIAG_IMPORT_PID")),
        not_forked=os.environ.get("DDPDIAG_NOT_FORKED"),
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    rows = seen.by_rank.values()
    yield from _differing(seen, "torch", Severity.ERROR)
    # Another torch brings other CUDA and NCCL libraries: one cause, one finding.
    if len({own.torch for own in rows}) <= 1:
        for what in ("cuda", "hip", "nccl"):
            yield from _differing(seen, what, Severity.ERROR)
    alike = len({tuple(own.python.split(".")[:2]) for own in rows}) == 1
    yield from _differing(seen, "python", Severity.WARNING if alike else Severity.ERROR)
    # CUDA's minor version compatibility lets different drivers work together, mostly.
    yield from _differing(seen, "driver", Severity.WARNING)
    yield from _slow_imports(seen)


def _differing(seen: Seen[Data], word: str, severity: Severity) -> Iterator[Finding]:
    found = {rank: getattr(own, word) for rank, own in seen.by_rank.items()}
    if word == "driver":  # which not every rank can read
        found = {rank: version for rank, version in found.items() if version is not None}
    odd = odd_ones_out(found)
    if odd is None:
        return
    part = _PARTS[word]
    values = odd_text(
        odd,
        missing="missing",
        where=lambda ranks: f"{names_text(seen.world.hosts_of(ranks), 3)} ({ranks_text(ranks)})",
    )
    said = f"{part.name} is {values}" if None in odd.groups else f"{part.said} {values}"
    yield odd_finding(
        seen,
        word,
        odd,
        part.title,
        f"{said}. {part.expected}",
        severity=severity,
        fix=_driver_fix(seen, odd) if word == "driver" else _FIX.format(part.shown) + part.more,
    )


def _driver_fix(seen: Seen[Data], odd: Odd) -> str:
    begin = "If the other checks pass, there is nothing to do. If CUDA or NCCL fails,"
    if not odd.ranks:
        return f"{begin} ask the administrator to install the same driver on all hosts."
    out = leave_out(seen.world.hosts_of(odd.ranks))
    return f"{begin} {out}, and ask the administrator to install driver {odd.usual} there."


def _slow_imports(seen: Seen[Data]) -> Iterator[Finding]:
    """Imports that take long, and wait for files or take longer than on the other hosts."""
    most, ratio = seen.number("slow_import_seconds"), seen.number("slow_import_ratio")
    sharing, host_of = _sharing(seen), seen.world.host_of
    took = {
        rank: _seconds_of_a_job(seen, own, sharing.get(rank, ()))
        for rank, own in seen.by_rank.items()
        if own.import_seconds
    }
    by_host: defaultdict[str, list[float]] = defaultdict(list)
    for rank, seconds in took.items():
        by_host[host_of(rank)].append(seconds)
    medians = {node: median(seconds) for node, seconds in by_host.items()}
    ordered = sorted(medians.values())
    # Of each host the median of the others.
    usual = {node: median_without(ordered, own) for node, own in medians.items()} if len(ordered) > 1 else {}
    slow = {
        rank: seconds
        for rank, seconds in took.items()
        if seconds > most
        and (_waits_for_files(seen.by_rank[rank]) or seconds >= ratio * usual.get(host_of(rank), math.inf))
    }
    if not slow:
        return
    worst = max(slow, key=lambda rank: slow[rank])
    own, core, others = seen.by_rank[worst], seen.by_rank[worst].import_core_seconds, usual.get(host_of(worst))
    is_busy = core is not None and not _waits_for_files(own)
    median_text = f", and the median of the other hosts is {others:.1f} s" if others is not None else ""
    cause = "the cores are busy" if is_busy else "the rest waited, most likely for files"
    spent = f" {core:.1f} s were on a core or waiting for one: {cause}." if core is not None else ""
    shared = ""
    if worst in sharing:
        ranks = count(len(sharing[worst]), "rank")
        shared = f" {ranks} of this host shared one import of {own.import_seconds:.1f} s; those of a job do not."
    yield seen.finding(
        "slow-import",
        "importing torch is slow",
        f"`import torch` {'would take' if shared else 'took'} {slow[worst]:.1f} s on rank {worst} ({host_of(worst)}); "
        f"at most {most:g} s is expected{median_text}.{spent}{shared}",
        ranks=tuple(slow),
        evidence={"seconds": round(slow[worst], 3), "core_seconds": core, "usual_seconds": others},
        fix=f"On {host_of(worst)} find the processes that use the cores (`top`), and stop them or "
        f"{leave_out(seen.world.hosts_of(tuple(slow)))}."
        if is_busy
        else "Put the Python environment on a local disk: copy it to $TMPDIR at the start of the job, or use a "
        "container image.",
    )


def _sharing(seen: Seen[Data]) -> dict[int, tuple[int, ...]]:
    """For each rank all ranks of its host that share an import with it, itself included; without those that do not."""
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, own in seen.by_rank.items():
        if own.import_pid is not None and own.not_forked is None:
            groups[seen.world.host_of(rank), own.import_pid].append(rank)
    return {rank: tuple(ranks) for ranks in groups.values() if len(ranks) > 1 for rank in ranks}


def _seconds_of_a_job(seen: Seen[Data], own: Data, sharing: Sequence[int]) -> float:
    """Seconds of an import where each of these ranks does it at the same time, as far as the cores decide."""
    seconds, core = own.import_seconds or 0.0, own.import_core_seconds or 0.0
    cores = seen.world.cores_of(sharing)
    return seconds + core * max(0.0, len(sharing) / cores - 1.0) if cores else seconds


def _waits_for_files(own: Data) -> bool:
    """Whether most of the import was neither on a core nor waiting for one; false where that is not known."""
    seconds, core = own.import_seconds, own.import_core_seconds
    return seconds is not None and core is not None and core <= _BUSY_SHARE * seconds


def report(seen: Seen[Data]) -> Contribution:
    """The versions; the seconds of the slowest import, and how many ranks of a host shared one."""
    rows = seen.by_rank
    names = ("torch", "cuda", "hip", "nccl", "driver", "python")
    settings = (setting("version", name, {rank: getattr(own, name) for rank, own in rows.items()}) for name in names)
    took = [own.import_seconds for own in rows.values() if own.import_seconds is not None]
    sharing = max(map(len, _sharing(seen).values()), default=0)
    figures: dict[str, Scalar] = {"seconds.import": max(took)} if took else {}
    inventory = {
        rank: {"torch": own.torch, "CUDA": own.cuda or NONE, "NCCL": own.nccl or NONE}
        | ({"driver": own.driver} if own.driver else {})
        for rank, own in rows.items()
    }
    return Contribution(
        figures=figures | ({"import.ranks": sharing} if sharing else {}),
        settings=tuple(chain.from_iterable(settings)),
        inventory=inventory,
    )


SETTINGS = {"slow_import_seconds": 10, "slow_import_ratio": 3}
CHECK: Check[Data] = Check(__name__, "LCH003", "versions", Stage.LAUNCH, Scope.RANK, Kind.TORCH, deadline=10.0)
