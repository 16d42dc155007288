"""The rules, in the order of their codes: processes and devices, data, the model, checkpoints."""

from functools import cache
from importlib import import_module

from ddpdiag.errors import UsageError
from ddpdiag.lint.rule import Rule

_LAST = 25


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule."""
    return tuple(_load(f"lnt{number:03}") for number in range(1, _LAST + 1))


def rule_of(code: str) -> Rule:
    """The rule of that code; UsageError if there is none."""
    for rule in all_rules():
        if rule.code == code.split(".")[0].upper():
            return rule
    raise UsageError(f"no rule has the code {code!r}; `ddpdiag checks` lists them")


def _load(module: str) -> Rule:
    rule: Rule = import_module(f"ddpdiag.lint.rules.{module}").RULE
    return rule
