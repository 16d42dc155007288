"""What can be read off a training script: remarks on lines of its source."""

from msgspec import Struct

from ddpdiag.model.report import Severity

LINT_SCHEMA = "ddpdiag.lint/1"


class Remark(Struct, frozen=True, kw_only=True):
    """One pitfall at one place: `line` and `column` count from 1; `message` is what goes wrong, `remedy` what to do."""

    code: str
    name: str
    severity: Severity
    path: str
    line: int
    column: int
    message: str
    remedy: str


class ScriptLine(Struct, frozen=True, kw_only=True):
    """One script: how many remarks its comments keep quiet, and why it was not judged (None: it was)."""

    path: str
    ignored: int = 0
    not_judged: str | None = None


class LintReport(Struct, frozen=True, kw_only=True):
    """The remarks by file and line; `errors` are sentences on files that could not be read."""

    scripts: tuple[ScriptLine, ...]
    remarks: tuple[Remark, ...]
    errors: tuple[str, ...]
    exit_code: int
    schema: str = LINT_SCHEMA
