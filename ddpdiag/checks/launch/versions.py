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

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import names_text, odd_text, ranks_text
from ddpdiag.checks.launch.variables import setting
from ddpdiag.model import Finding, Kind, Scalar, Severity
from ddpdiag.model.report import Setting
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import driver_version, versions
from ddpdiag.probes.host.kernel import proc_root
from ddpdiag.stats import odd_ones_out

FINDINGS = {
    **dict.fromkeys(
        ("torch", "cuda", "hip", "nccl"),
        Explained(
            "ranks have different versions of it. A different torch brings different versions of the others, so only "
            "torch is reported then."
        ),
    ),
    "python": Explained("another minor version is an error, another patch level a warning."),
    "driver": Explained("NVIDIA driver versions differ; most of them work together, so this is a warning."),
    "not-forked": Explained.note(
        "an import of this environment starts CUDA, so each worker imports torch separately, and the run takes longer."
    ),
    "slow-import": Explained.warning(
        "`import torch` took longer than `slow_import_seconds` on some ranks, and at least `slow_import_ratio` times "
        "as long as the median of the other hosts, or most of it in waiting for files. Nothing is reported where all "
        "hosts are equally slow and their cores are busy."
    ),
}

# Beyond this share a slow import is a matter of the cores, and not of the file system.
_BUSY_SHARE = 0.5


class Data(Struct, frozen=True, kw_only=True):
    """Version texts, None where a part is missing; `import_seconds` is what `import torch` took for this rank, and
    `import_core_seconds` how much of it was on a core or in waiting for one. `import_pid` is the process that did it,
    one for several ranks of a host. `not_forked` is why workers are no forks of a process that has imported torch."""

    python: str
    torch: str
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None
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
        for what in ("CUDA", "HIP", "NCCL"):
            yield from _differing(seen, what, Severity.ERROR)
    alike = len({tuple(own.python.split(".")[:2]) for own in rows}) == 1
    yield from _differing(seen, "Python", Severity.WARNING if alike else Severity.ERROR)
    # CUDA's minor version compatibility lets different drivers work together, mostly.
    yield from _differing(seen, "NVIDIA driver", Severity.WARNING)
    yield from _not_forked(seen)
    yield from _slow_imports(seen)


def _not_forked(seen: Seen[Data]) -> Iterator[Finding]:
    ranks = tuple(rank for rank, own in seen.by_rank.items() if own.not_forked)
    if ranks:
        yield seen.finding(
            "not-forked",
            "importing torch starts CUDA",
            f"{ranks_text(ranks)} on {names_text(seen.world.nodes_of(ranks))}: {seen.by_rank[ranks[0]].not_forked}; a "
            "forked process cannot use CUDA then, so each worker imported torch separately.",
            fix="Find the module that starts CUDA when it is imported (sitecustomize, *.pth files): data loaders that "
            "fork fail, too.",
        )


def _differing(seen: Seen[Data], what: str, severity: Severity) -> Iterator[Finding]:
    word = what.split()[-1].lower()
    found = {rank: getattr(own, word) for rank, own in seen.by_rank.items()}
    if word == "driver":  # which not every rank can read
        found = {rank: version for rank, version in found.items() if version is not None}
    if odd := odd_ones_out(found):
        yield seen.finding(
            word,
            f"{what} versions differ",
            f"{what}: {odd_text(odd, missing='none')}; one version on every rank is expected"
            + ("." if odd.ranks else " (no majority, so no rank is blamed)."),
            severity=severity,
            ranks=odd.ranks,
            evidence={ranks_text(ranks): None if value is None else str(value) for value, ranks in odd.groups.items()},
            fix=f"Use the same {what} on every host: one environment or container image for all of them.",
        )


def _slow_imports(seen: Seen[Data]) -> Iterator[Finding]:
    most = seen.number("slow_import_seconds")
    sharing = _sharing(seen)
    took = {
        rank: _seconds_of_a_job(seen, own, sharing.get(rank, ()))
        for rank, own in seen.by_rank.items()
        if own.import_seconds
    }
    usual = _usual_imports(seen, took)
    slow = {
        rank: seconds
        for rank, seconds in took.items()
        if seconds > most
        and (_waits_for_files(seen.by_rank[rank]) or _is_far(seen, seconds, usual[seen.world.node_of(rank)]))
    }
    if slow:
        worst = max(slow, key=lambda rank: slow[rank])
        own, node = seen.by_rank[worst], seen.world.node_of(worst)
        core, others = own.import_core_seconds, usual[node]
        spent = f" The slowest spent {core:.1f} s of it on a core or waiting for one." if core is not None else ""
        served = len(sharing.get(worst, (worst,)))
        shared = (
            f" One import of {own.import_seconds:.1f} s served {served} ranks of this host; the ranks of a job import "
            "torch at the same time."
            if served > 1
            else ""
        )
        median_text = f", the median of the other hosts is {others:.1f} s" if others is not None else ""
        yield seen.finding(
            "slow-import",
            "importing torch is slow",
            f"`import torch` {'takes' if shared else 'took'} up to {slow[worst]:.1f} s (rank {worst} on {node}; too "
            f"slow on {ranks_text(tuple(slow))}); at most {most:g} s expected{median_text}.{spent}{shared}",
            ranks=tuple(slow),
            evidence={"seconds": round(slow[worst], 3), "core_seconds": core, "usual_seconds": others},
            fix="Find the other processes that keep the cores of these hosts busy (`top`)."
            if core is not None and not _waits_for_files(own)
            else "Put the environment on a local disk (or a container image), or copy it there at the job's start.",
        )


def _sharing(seen: Seen[Data]) -> dict[int, tuple[int, ...]]:
    """For each rank all ranks of its host that share an import with it, itself included; without those that do not."""
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, own in seen.by_rank.items():
        if own.import_pid is not None and own.not_forked is None:
            groups[seen.world.node_of(rank), own.import_pid].append(rank)
    return {rank: tuple(ranks) for ranks in groups.values() if len(ranks) > 1 for rank in ranks}


def _seconds_of_a_job(seen: Seen[Data], own: Data, sharing: Sequence[int]) -> float:
    """What an import takes where each of these ranks does it at the same time, as far as the cores decide."""
    seconds, core = own.import_seconds or 0.0, own.import_core_seconds or 0.0
    cores = seen.world.cores_of(sharing)
    return seconds + core * max(0.0, len(sharing) / cores - 1.0) if cores else seconds


def _usual_imports(seen: Seen[Data], took: Mapping[int, float]) -> dict[str, float | None]:
    """For each host the median of the other hosts, each with the median of its ranks; None where there is no other."""
    by_host: defaultdict[str, list[float]] = defaultdict(list)
    for rank, seconds in took.items():
        by_host[seen.world.node_of(rank)].append(seconds)
    own = {node: median(seconds) for node, seconds in by_host.items()}
    every = sorted(own.values())
    return {node: _median_without(every, mine) for node, mine in own.items()}


def _median_without(rising: Sequence[float], one: float) -> float | None:
    """The median of all but one of them; of many hosts a copy for each would take minutes."""
    if len(rising) < 2:
        return None
    at, left = bisect_left(rising, one), len(rising) - 1
    middle = ((left - 1) // 2, left // 2)
    return fmean(rising[place + (place >= at)] for place in middle)


def _is_far(seen: Seen[Data], seconds: float, usual: float | None) -> bool:
    return usual is not None and seconds >= seen.number("slow_import_ratio") * usual


def _waits_for_files(own: Data) -> bool:
    """Was most of the import spent neither on a core nor in waiting for one? Where that is not known, no."""
    seconds, core = own.import_seconds, own.import_core_seconds
    return seconds is not None and core is not None and core <= _BUSY_SHARE * seconds


def runs_with(seen: Seen[Data]) -> Iterator[Setting]:
    """The versions of the ranks."""
    for name in ("torch", "cuda", "hip", "nccl", "driver", "python"):
        yield from setting("version", name, {rank: getattr(own, name) for rank, own in seen.by_rank.items()})


def figures(seen: Seen[Data]) -> dict[str, Scalar]:
    """What the slowest import took, and how many ranks of a host shared one."""
    took = [own.import_seconds for own in seen.by_rank.values() if own.import_seconds is not None]
    found: dict[str, Scalar] = {"seconds.import": max(took)} if took else {}
    sharing = max(map(len, _sharing(seen).values()), default=0)
    return found | {"import.ranks": sharing} if sharing else found


CHECK = Check(
    "LCH003",
    "versions",
    Stage.LAUNCH,
    Scope.RANK,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    figures=figures,
    runs_with=runs_with,
    kind=Kind.TORCH,
    deadline=10.0,
    settings={"slow_import_seconds": 10, "slow_import_ratio": 3},
)
