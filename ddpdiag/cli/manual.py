"""Manual pages and the list of codes: the checks of `ddpdiag check` and the rules of `ddpdiag lint` side by side."""

from ddpdiag.render.manual import CheckRow, explain

# In the place of a stage: no stage of a run has this name.
_LINT = "lint"


def manual_page(code: str, *, width: int, color: bool) -> str:
    """The page of a check, of a finding (`TRN001.diverged`) or of a rule; UsageError for a code that is neither."""
    if code.upper().startswith("LNT"):
        from ddpdiag.lint import rule_of

        rule = rule_of(code)
        manual = f"{rule.manual.rstrip()}\n\nSeverity: {rule.severity.value}. Quiet: # ddpdiag: ignore[{rule.code}]\n"
        return explain(CheckRow(rule.code, rule.name, _LINT, rule.title), manual, {}, width=width, color=color)
    from ddpdiag.checks import by_code

    check = by_code(code)
    row = CheckRow(check.code, check.name, check.stage.value, check.title)
    return explain(row, check.manual, check.thresholds, width=width, color=color)


def rows() -> list[CheckRow]:
    """Checks in the order in which they run, then rules in the order of their codes."""
    from ddpdiag.checks import all_checks
    from ddpdiag.lint import all_rules

    return [
        *(CheckRow(check.code, check.name, check.stage.value, check.title) for check in all_checks()),
        *(CheckRow(rule.code, rule.name, _LINT, rule.title) for rule in all_rules()),
    ]
