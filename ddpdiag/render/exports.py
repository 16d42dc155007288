"""Variables as a shell reads them: single lines in a finding, and the file of `--env-file`."""

from collections.abc import Mapping
from shlex import quote

from ddpdiag.model import Report


def shell_line(name: str, value: str | None) -> str:
    """A line that sets or unsets a variable; a value with unseen characters is written so that bash reads it back."""
    if value is None:
        return f"unset {quote(name)}"
    if value.isprintable():
        return f"export {quote(name)}={quote(value)}"
    escaped = value.encode("unicode_escape").decode().replace("'", "\\'")
    return f"export {quote(name)}=$'{escaped}'"


def render(report: Report) -> str:
    """A file to be sourced before the job starts; a comment alone where nothing has to be set."""
    return "".join(f"{line}\n" for line in (f"# ddpdiag, run {report.run_id}: {_why(report)}", *_lines(report.exports)))


def _lines(exports: Mapping[str, str | None]) -> list[str]:
    return [shell_line(name, value) for name, value in exports.items()]


def _why(report: Report) -> str:
    if report.exports:
        return f"what {report.world.backend} needs here, as it was tried"
    return "no variable was found to be needed, or to help"
