"""GitHub's workflow commands, which Actions shows at a line of a file.

Source: docs.github.com/actions/reference/workflow-commands-for-github-actions, "Setting a warning message".
"""


def annotation(
    level: str, message: str, *, title: str, path: str = "", line: int | None = None, column: int | None = None
) -> str:
    """One command; `level` is error, warning or notice. Without a path it belongs to the run, not to a file."""
    place = {"file": path or None, "line": line if path else None, "col": column if path else None, "title": title}
    properties = ",".join(f"{name}={_property(str(value))}" for name, value in place.items() if value is not None)
    return f"::{level} {properties}::{_escaped(message)}\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
