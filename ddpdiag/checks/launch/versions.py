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
    """A library or driver whose versions are compared, the expectation, and Python code that shows the version."""

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

# Above this share of time on or waiting for a core, the cause of a slow import is busy cores (HST001), not files.
_BUSY_SHARE = 0.5


class Data(Versions, frozen=True, kw_only=True):
    """The versions on a rank, also of the driver. `import_seconds` is the time of `import torch`, `import_core_seconds`
    the part of it on a core or waiting for one. The process `import_pid` did the import, one for several ranks of
    a host. `not_forked` is the reason why workers are no forks of a process that has imported torch."""

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
    # A different torch has different CUDA and NCCL libraries: this one cause gets one finding.
    words = ("torch",) if len({row.torch for row in rows}) > 1 else ("cuda", "hip", "nccl")
    minors = {tuple(row.python.split(".")[:2]) for row in rows}
    for word in words:
        yield from _differing(seen, word, Severity.ERROR)
    yield from _differing(seen, "python", Severity.WARNING if len(minors) == 1 else Severity.ERROR)
    # CUDA's minor version compatibility lets different drivers work together, mostly.
    yield from _differing(seen, "driver", Severity.WARNING)
    yield from _slow_imports(seen)


def _differing(seen: Seen[Data], word: str, severity: Severity) -> Iterator[Finding]:
    values = {rank: getattr(row, word) for rank, row in seen.by_rank.items()}
    if word == "driver":  # not every rank can read its version
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
    """The finding for slow imports, unless busy cores are known to be the cause."""
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
    """The part of the report on the slowest import, the ranks that shared an import, and versions by host."""
    rows = seen.by_rank
    took = [row.import_seconds for row in rows.values() if row.import_seconds is not None]
    forked = {rank: row.import_pid for rank, row in rows.items() if row.import_pid is not None and not row.not_forked}
    sharing = max(Counter((seen.world.host_of(rank), pid) for rank, pid in forked.items()).values(), default=0)
    figures: dict[str, Scalar] = {"seconds.import": max(took)} if took else {}
    inventory = {
        rank: {"torch": row.torch, "CUDA": row.cuda or NONE, "NCCL": row.nccl or NONE}
        | ({"driver": row.driver} if row.driver else {})
        for rank, row in rows.items()
    }
    return Contribution(
        figures=figures | ({"import.ranks": sharing} if sharing > 1 else {}),
        inventory=inventory,
    )


SETTINGS = {"slow_import_seconds": 10}
CHECK: Check[Data] = Check(__name__, "LCH003", "versions", Stage.LAUNCH, Scope.RANK, Kind.TORCH, deadline=10.0)
