"""ddpdiag shows whether an allocation can train with DistributedDataParallel and how fast, or else what is at fault."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdiag.api import check, explain_text, judge, preflight
    from ddpdiag.errors import UnfitError, UsageError
    from ddpdiag.model import Finding, Report, Severity, Verdict

__version__ = "0.1.0"
__all__ = [
    "Finding",
    "Report",
    "Severity",
    "UnfitError",
    "UsageError",
    "Verdict",
    "__version__",
    "check",
    "explain_text",
    "judge",
    "preflight",
]
_MODULE_OF = {
    **dict.fromkeys(("check", "explain_text", "judge", "preflight"), "ddpdiag.api"),
    **dict.fromkeys(("Finding", "Report", "Severity", "Verdict"), "ddpdiag.model"),
    **dict.fromkeys(("UnfitError", "UsageError"), "ddpdiag.errors"),
}


def __getattr__(name: str) -> object:
    """Import a name of the Python API at its first use, because most commands import this package without the API."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ddpdiag' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
