"""The list of checks, in the order in which they run and are judged.

A module name without the prefix `ddpdiag.` is relative to `ddpdiag.checks`. Modules are imported at their first use.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddpdiag.errors import UsageError

if TYPE_CHECKING:
    from ddpdiag.checks.api import Check

MODULES = {
    "LCH001": "launch.ranks",
    "LCH002": "launch.variables",
    "LCH003": "launch.versions",
    "LCH004": "launch.slurm_step",
    "HST001": "host.cores",
    "HST002": "host.memory",
    "HST003": "host.shared_memory",
    "HST004": "host.limits",
    "HST005": "host.arithmetic",
    "HST006": "host.network_ports",
    "HST007": "host.rdma_ports",
    "GPU001": "gpu.present",
    "GPU002": "gpu.devices",
    "GPU003": "gpu.memory_errors",
    "GPU004": "gpu.pcie_link",
    "GPU005": "gpu.clocks",
    "GPU006": "gpu.nvlink",
    "GPU007": "gpu.nvswitch",
    "GPU008": "gpu.other_users",
    "GPU010": "gpu.counters",
    "GPU011": "gpu.driver_log",
    "GPU012": "gpu.compute",
    "RDZ001": "rendezvous.methods",
    "RDZ002": "rendezvous.coordinator_name",
    "RDZ003": "rendezvous.interfaces",
    "RDZ004": "rendezvous.mesh",
    "RDZ005": "rendezvous.master_port",
    "RDZ006": "rendezvous.shared_dir",
    "COL001": "collective.all_reduce",
    "COL002": "ddpdiag.bench.check",
    "COL003": "collective.nccl_diagnostics",
    "P2P001": "p2p.paths",
    # Before the copies, because a way to run the job at all is more important if time is short.
    "P2P003": "p2p.fallback.check",
    "P2P002": "p2p.copies.check",
    "P2P004": "p2p.transport",
    "P2P005": "p2p.speed",
    "FAB001": "fabric.hosts",
    "FAB002": "fabric.gpus",
    "TRN001": "training.mnist",
    "TRN002": "ddpdiag.strategies.check",
    "TRN003": "training.ddp_step",
    "TRN004": "training.soak",
    "RUN001": "run.roll_call",
    "RUN002": "run.presence",
    "RUN003": "run.trials",
    "RUN004": "run.budget",
    "CMP001": "run.baseline",
}

# These checks run only if `--select` names their whole code, or in a command of their own (such as `allreduce-bench`).
ONLY_BY_WHOLE_CODE = ("HST005", "COL002", "TRN002")
# This check runs only if an option gives its duration.
SOAK = "TRN004"


def all_checks() -> "tuple[Check[Any], ...]":
    return tuple(_load(code) for code in MODULES)


def check_by_code(code: str) -> "Check[Any]":
    """Return the check with this code (or finding's code), and import its module. UsageError if there is none."""
    check_code = code.split(".")[0].upper()
    if check_code not in MODULES:
        raise UsageError(f"no check has the code {code!r}; `ddpdiag checks` lists them")
    return _load(check_code)


def module_of(code: str) -> str:
    """Return the full name of a check's module."""
    name = MODULES[code]
    return name if name.startswith("ddpdiag.") else f"ddpdiag.checks.{name}"


@cache
def _load(code: str) -> "Check[Any]":
    check: Check[Any] = import_module(module_of(code)).CHECK
    return check
