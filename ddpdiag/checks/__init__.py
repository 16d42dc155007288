"""The list of checks, in the order in which they run and are judged."""

from functools import cache
from importlib import import_module
from typing import Any

from ddpdiag.check import Check
from ddpdiag.errors import UsageError

_MODULES = (
    "lch001",
    "lch002",
    "lch003",
    "lch004",
    "hst001",
    "hst002",
    "hst003",
    "hst004",
    "hst005",
    "hst006",
    "gpu001",
    "gpu002",
    "gpu003",
    "gpu004",
    "gpu005",
    "gpu006",
    "gpu007",
    "gpu008",
    "gpu009",
    "gpu010",
    "gpu011",
    "rdz001",
    "rdz002",
    "rdz003",
    "rdz004",
    "rdz005",
    "rdz006",
    "rdz007",
    "col001",
    "col002",
    "p2p001",
    # Before the copies: what gets a job going comes first, should the time be short.
    "p2p003",
    "p2p002",
    "p2p004",
    "fab001",
    "fab002",
    "trn001",
    "trn002",
    "trn003",
    "run001",
    "run002",
    "run003",
    "run004",
    "run005",
    "cmp001",
)


def all_checks() -> tuple[Check[Any], ...]:
    """Every check."""
    return tuple(_load(module) for module in _MODULES)


def by_code(code: str) -> Check[Any]:
    """The check of that code; UsageError if there is none. Imports that one file only."""
    module = code.split(".")[0].lower()
    if module not in _MODULES:
        raise UsageError(f"no check has the code {code!r}; `ddpdiag checks` lists them")
    return _load(module)


@cache
def _load(module: str) -> Check[Any]:
    check: Check[Any] = import_module(f"ddpdiag.checks.{module}").CHECK
    return check
