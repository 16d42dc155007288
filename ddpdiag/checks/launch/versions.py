"""Versions, which should be the same on every rank.

Ranks with different versions of torch, CUDA or NCCL use different protocols: they fail in the rendezvous, hang in the
first collective, or compute different results.

A slow `import torch` makes ranks join minutes apart, so that the rendezvous times out. In a job each rank imports torch
itself; in ddpdiag ranks of a host with equal settings share one import (import.ranks in the JSON report).

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
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import begun

_TORCH_LIBRARY = FindingSpec(
    "ranks have different versions of this library. If torch differs, only torch is reported, since its CUDA, HIP and "
    "NCCL differ with it."
)
FINDINGS = {
    **dict.fromkeys(("torch", "cuda", "hip", "nccl"), _TORCH_LIBRARY),
    "python": FindingSpec("ranks have different versions of Python: an error, or a warning if only the patch differs."),
    "driver": FindingSpec("NVIDIA driver versions differ; most of them work together, so this is a warning."),
    "slow-import": FindingSpec.warning(
        "`import torch` took longer than `slow_import_seconds` on some ranks, most of the time in waiting for files."
    ),
}


class Component(NamedTuple):
    """A library or driver whose versions are compared. `expectation` is a sentence for the finding. `version_code` is a
    Python expression for the version; empty for the driver, whose version Python does not show."""

    name: str
    expectation: str
    version_code: str = ""


_SAME_BUILD = "Every rank needs the same build of torch."
COMPONENTS = {
    "torch": Component("torch", "Every rank needs the same version.", "torch.__version__"),
    "cuda": Component("torch's CUDA", _SAME_BUILD, "torch.version.cuda"),
    "hip": Component("torch's HIP", _SAME_BUILD, "torch.version.hip"),
    "nccl": Component("NCCL", "Ranks with different versions of NCCL cannot communicate.", "torch.cuda.nccl.version()"),
    "python": Component("Python", "The same version is expected on every rank.", "sys.version"),
    "driver": Component("the NVIDIA driver", "The same version is expected, but most versions work together."),
}
_FIX = (
    "Use one Python environment or container image for all hosts. This command, started like the job, shows which one "
    "each rank uses: `python -c 'import sys, torch; print(sys.executable, torch.__file__, {})'`."
)
_DRIVER_FIX = (
    "If CUDA or NCCL fails, ask the administrator to install the same driver on all hosts. Otherwise there is nothing "
    "to do."
)

# If a slow import spent more than this share of its time on a core or waiting for one, files are not the cause.
_BUSY_SHARE = 0.5


class Data(Versions, frozen=True, kw_only=True):
    """A rank's versions, with the driver's. `import_seconds` is the time of `import torch`, `import_core_seconds`
    the part of it on a core or waiting for one. `import_pid` is the process that imported torch; several ranks of a
    host may share it. `exec_reason` says why workers are started by exec, and not forked from that process."""

    driver: str | None = None
    import_seconds: float | None = None
    import_core_seconds: float | None = None
    import_pid: int | None = None
    exec_reason: str | None = None


def measure(ctx: Context) -> Data:
    pid = os.environ.get("DDPDIAG_IMPORT_PID", "")
    return Data(
        **structs.asdict(versions()),
        driver=driver_version(proc_root(os.environ)),
        import_seconds=_number_or_none(os.environ.get("DDPDIAG_IMPORT_SECONDS")),
        import_core_seconds=_number_or_none(os.environ.get("DDPDIAG_IMPORT_CORE_SECONDS")),
        import_pid=int(pid) if pid.isdigit() else None,
        exec_reason=os.environ.get("DDPDIAG_NOT_FORKED"),
    )


def _number_or_none(text: str | None) -> float | None:
    return float(text) if text else None


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    rows = seen.by_rank.values()
    # A different torch has different CUDA and NCCL libraries: this one cause gets one finding.
    words = ("torch",) if len({row.torch for row in rows}) > 1 else ("cuda", "hip", "nccl")
    minors = {tuple(row.python.split(".")[:2]) for row in rows}
    for word in words:
        yield from _version_difference(seen, word, Severity.ERROR)
    yield from _version_difference(seen, "python", Severity.WARNING if len(minors) == 1 else Severity.ERROR)
    # CUDA's minor version compatibility lets different drivers work together, mostly.
    yield from _version_difference(seen, "driver", Severity.WARNING)
    yield from _slow_imports(seen)


def _version_difference(seen: Seen[Data], word: str, severity: Severity) -> Iterator[Finding]:
    """The finding if the versions of a component differ between ranks. `word` is the component's key in COMPONENTS."""
    values = {rank: getattr(row, word) for rank, row in seen.by_rank.items()}
    if word == "driver":  # ranks that cannot read the driver's version are left out
        values = {rank: version for rank, version in values.items() if version is not None}
    odd = find_odd_ranks(values)
    if odd is None:
        return
    component = COMPONENTS[word]
    text = odd_text(
        odd,
        missing="missing",
        show=lambda ranks: f"{names_text(seen.world.host_names(ranks), 3)} ({ranks_text(ranks)})",
    )
    yield odd_finding(
        seen,
        word,
        odd,
        f"ranks have different versions of {component.name}",
        f"{begun(component.name)} is {text}. {component.expectation}",
        severity=severity,
        fix=_FIX.format(component.version_code) if component.version_code else _DRIVER_FIX,
    )


def _slow_imports(seen: Seen[Data]) -> Iterator[Finding]:
    """The finding on ranks with a slow import of torch, unless it mostly ran on a core or waited for one."""
    limit = seen.setting("slow_import_seconds")
    slow = {
        rank: seconds
        for rank, row in seen.by_rank.items()
        if (seconds := row.import_seconds or 0.0) > limit and (row.import_core_seconds or 0.0) <= _BUSY_SHARE * seconds
    }
    if slow:
        slowest = max(slow, key=lambda rank: slow[rank])
        core = seen.by_rank[slowest].import_core_seconds
        details = "" if core is None else f" {core:.1f} s were on a core or waiting for one, the rest likely for files."
        yield seen.finding(
            "slow-import",
            "importing torch is slow",
            f"`import torch` took {slow[slowest]:.1f} s on rank {slowest} ({seen.world.host_name(slowest)}); at most "
            f"{limit:g} s is expected.{details}",
            ranks=tuple(slow),
            evidence={"seconds": round(slow[slowest], 3), "core_seconds": core},
            fix="Put the Python environment on a local disk: copy it to $TMPDIR at the start of the job, or use a "
            "container image.",
        )


def report(seen: Seen[Data]) -> Contribution:
    """Contribute the seconds of the slowest import, the largest number of ranks that shared one, and all versions."""
    rows = seen.by_rank
    import_times = [row.import_seconds for row in rows.values() if row.import_seconds is not None]
    pids = {rank: row.import_pid for rank, row in rows.items() if row.import_pid is not None and not row.exec_reason}
    sharing_ranks = max(Counter((seen.world.host_name(rank), pid) for rank, pid in pids.items()).values(), default=0)
    figures: dict[str, Scalar] = {"seconds.import": max(import_times)} if import_times else {}
    if sharing_ranks > 1:
        figures["import.ranks"] = sharing_ranks
    inventory = {
        rank: {"torch": row.torch, "CUDA": row.cuda or NONE, "NCCL": row.nccl or NONE}
        | ({"driver": row.driver} if row.driver else {})
        for rank, row in rows.items()
    }
    return Contribution(figures=figures, inventory=inventory)


SETTINGS = {"slow_import_seconds": 10}
CHECK: Check[Data] = Check(__name__, "LCH003", "versions", Stage.LAUNCH, Scope.RANK, Kind.TORCH, deadline=10.0)
