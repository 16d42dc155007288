"""`ddpdiag lint`: files into remarks, remarks onto the terminal and into JSON."""

import os
import sys
from collections.abc import Iterator, Sequence

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import is_one_file, show, terminal
from ddpdiag.codec import read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.lint import read_remarks, text
from ddpdiag.lint.rule import LintReport, Remark, ScriptLine
from ddpdiag.model import Severity
from ddpdiag.render import files

# What nobody wrote by hand, or wrote for this job.
_SKIPPED = ("__pycache__", "site-packages", "node_modules")
# The longest scripts that people train with have half of it.
_LARGEST_BYTES = 512 << 10


def run(paths: Sequence[str], json: str | None, *, details: bool) -> int:
    """The exit code: 0 clean, 1 something was found (hints do not count), 2 a file could not be read."""
    if json is not None:
        if any(is_one_file(json, path) for path in paths):
            raise UsageError(f"--json {json} would overwrite the script that is read; give it another file")
        files.check_writable(json)
    report = judged(paths)
    stream = sys.stderr if json == "-" else sys.stdout
    width, color = terminal(stream)
    if json is not None:
        files.write(json, text.as_json(report))
    show(text.page(report, details=details, width=width, color=color), stream)
    for sentence in report.errors:
        complain(sentence)
    return report.exit_code


def judged(paths: Sequence[str]) -> LintReport:
    """The remarks on every script; what cannot be read does not keep the others from being judged."""
    scripts: list[ScriptLine] = []
    remarks: list[Remark] = []
    errors: list[str] = []
    for path in dict.fromkeys(os.path.normpath(file) for each in paths for file in _walked(each, errors)):
        try:
            read = read_remarks(_bytes_of(path), readable(path))
        except UsageError as error:
            errors.append(str(error))
        else:
            scripts.append(read.script)
            remarks += read.remarks
    found = any(remark.severity is not Severity.INFO for remark in remarks)
    code = ExitCode.USAGE if errors else ExitCode.UNFIT if found else ExitCode.FIT
    return LintReport(scripts=tuple(scripts), remarks=tuple(remarks), errors=tuple(errors), exit_code=code)


def _walked(path: str, errors: list[str]) -> Iterator[str]:
    """The file itself, or the Python files of a directory, in the order of their names."""
    if not os.path.isdir(path):
        yield path
        return
    found = False
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(each for each in inner if not each.startswith(".") and each not in _SKIPPED)
        for name in sorted(names):
            if name.endswith(".py"):
                found = True
                yield os.path.join(folder, name)
    if not found:
        errors.append(f"{readable(path)}: no Python file (*.py) in this directory")


def _bytes_of(path: str) -> bytes:
    try:
        return read_bytes(path, _LARGEST_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{readable(path)}: cannot be read: {reason}") from error
