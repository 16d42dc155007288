"""The rules, in the order of their codes."""

from functools import cache

from ddpdiag.errors import UsageError
from ddpdiag.lint import Rule
from ddpdiag.lint.rules import data, devices, model, processes, training

_MODULES = (devices, processes, data, model, training)


@cache
def all_rules() -> tuple[Rule, ...]:
    return tuple(sorted((rule for module in _MODULES for rule in module.RULES), key=lambda rule: rule.code))


def rule_of(code: str) -> Rule:
    """The rule of that code; UsageError if there is none."""
    for rule in all_rules():
        if rule.code == code.split(".")[0].upper():
            return rule
    raise UsageError(f"no rule has the code {code!r}; `ddpdiag checks` lists them")
