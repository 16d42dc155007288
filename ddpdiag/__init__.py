"""ddpdiag shows if an allocation can train with DistributedDataParallel, how fast, and if not, what is at fault."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdiag.api import check, explain_text, judge
    from ddpdiag.errors import UsageError
    from ddpdiag.model import Finding, Report, Severity, Verdict

__version__ = "0.1.0"
__all__ = ["Finding", "Report", "Severity", "UsageError", "Verdict", "__version__", "check", "explain_text", "judge"]
_HOMES = {
    **dict.fromkeys(("check", "explain_text", "judge"), "ddpdiag.api"),
    **dict.fromkeys(("Finding", "Report", "Severity", "Verdict"), "ddpdiag.model"),
    "UsageError": "ddpdiag.errors",
}


def __getattr__(name: str) -> object:
    """Import a name of the Python API at its first use. Every command imports this package, and few need the API."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpdiag' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
