"""Versions, which should be the same on every rank.

Ranks with different versions of torch, CUDA or NCCL use different protocols: they fail in the rendezvous, hang in the
first collective, or compute different results. A Python that differs by its patch level only is a warning.

A slow `import torch` makes ranks join minutes apart, so that the rendezvous times out. It is caused by a network file
system under load or by busy cores; the finding shows which of them.
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
from collections.abc import Iterator
from statistics import median

from msgspec import structs

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import names_text, odd_text, ranks_text
from ddpdiag.checks.launch.variables import setting
from ddpdiag.comparison.noise import median_without
from ddpdiag.model import Finding, Kind, Scalar, Severity
from ddpdiag.model.report import Setting
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import Versions, driver_version, versions
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


class Data(Versions, frozen=True, kw_only=True):
    """Also that of the driver; `import_seconds` is what `import torch` took for this rank, and `import_core_seconds`
    how much of it was on a core or in waiting for one. `not_forked` is why workers are no forks of a process that has
    imported torch."""

    driver: str | None = None
    import_seconds: float | None = None
    import_core_seconds: float | None = None
    not_forked: str | None = None


def measure(ctx: Context) -> Data:
    return Data(
        **structs.asdict(versions()),
        driver=driver_version(proc_root(os.environ)),
        import_seconds=_seconds(os.environ.get("DDPDIAG_IMPORT_SECONDS")),
        import_core_seconds=_seconds(os.environ.get("DDPDIAG_IMPORT_CORE_SECONDS")),
        not_forked=os.environ.get("DDPDIAG_NOT_FORKED"),
    )


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
    if ranks := tuple(rank for rank, own in seen.by_rank.items() if own.not_forked):
        yield seen.finding(
            "not-forked",
            "importing torch starts CUDA",
            f"{ranks_text(ranks)} on {names_text(seen.world.nodes_of(ranks))}: {seen.by_rank[ranks[0]].not_forked}; a "
            "forked process cannot use CUDA then, so each worker imported torch separately.",
            fix="Find the module that starts CUDA when it is imported (sitecustomize, *.pth files): data loaders that "
            "fork fail, too.",
        )
    yield from _slow_imports(seen)


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
    most, ratio = seen.number("slow_import_seconds"), seen.number("slow_import_ratio")
    took = {rank: own.import_seconds for rank, own in seen.by_rank.items() if own.import_seconds}
    by_host: defaultdict[str, list[float]] = defaultdict(list)
    for rank, seconds in took.items():
        by_host[seen.world.node_of(rank)].append(seconds)
    medians = {node: median(seconds) for node, seconds in by_host.items()}
    ordered = sorted(medians.values())
    # Of each host the median of the others.
    usual = {node: median_without(ordered, own) for node, own in medians.items()} if len(ordered) > 1 else {}
    slow = {
        rank: seconds
        for rank, seconds in took.items()
        if seconds > most
        and (_waits_for_files(seen.by_rank[rank]) or seconds >= ratio * usual.get(seen.world.node_of(rank), math.inf))
    }
    if slow:
        worst = max(slow, key=lambda rank: slow[rank])
        own, node = seen.by_rank[worst], seen.world.node_of(worst)
        core, others = own.import_core_seconds, usual.get(node)
        spent = f" The slowest spent {core:.1f} s of it on a core or waiting for one." if core is not None else ""
        median_text = f", the median of the other hosts is {others:.1f} s" if others is not None else ""
        yield seen.finding(
            "slow-import",
            "importing torch is slow",
            f"`import torch` took up to {slow[worst]:.1f} s (rank {worst} on {node}; too slow on "
            f"{ranks_text(tuple(slow))}); at most {most:g} s expected{median_text}.{spent}",
            ranks=tuple(slow),
            evidence={"seconds": round(slow[worst], 3), "core_seconds": core, "usual_seconds": others},
            fix="Find the other processes that keep the cores of these hosts busy (`top`)."
            if core is not None and not _waits_for_files(own)
            else "Put the environment on a local disk (or a container image), or copy it there at the job's start.",
        )


def _waits_for_files(own: Data) -> bool:
    """Was most of the import spent neither on a core nor in waiting for one? Where that is not known, no."""
    seconds, core = own.import_seconds, own.import_core_seconds
    return seconds is not None and core is not None and core <= _BUSY_SHARE * seconds


def runs_with(seen: Seen[Data]) -> Iterator[Setting]:
    for name in ("torch", "cuda", "hip", "nccl", "driver", "python"):
        yield from setting("version", name, {rank: getattr(own, name) for rank, own in seen.by_rank.items()})


def figures(seen: Seen[Data]) -> dict[str, Scalar]:
    """What the imports of the rank that spent most took."""
    took = [own.import_seconds for own in seen.by_rank.values() if own.import_seconds is not None]
    return {"seconds.import": max(took)} if took else {}


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
