"""`ddpdiag compare`, and the file of `check --baseline`: recordings and JSON reports, mixed as they come."""

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from ddpdiag.cli.outputs import is_one_file, show, terminal
from ddpdiag.codec import SMALLEST_NUMBER, decode, read_bytes, read_recording, readable
from ddpdiag.comparison.reports import compare
from ddpdiag.errors import UsageError
from ddpdiag.model import Report
from ddpdiag.model.report import SCHEMA
from ddpdiag.model.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files to write; '-' is standard output."""

    json: str | None = None
    markdown: str | None = None

    @property
    def named(self) -> dict[str, str]:
        both = {"--json": self.json, "--markdown": self.markdown}
        return {option: path for option, path in both.items() if path is not None}


class _Head(Struct):
    schema: str = ""


def run(old: str, new: str, files: Files) -> int:
    """0 no regression, 1 regression, 3 not known; UsageError (2) for what cannot be read."""
    from ddpdiag.render import comparison as rendering
    from ddpdiag.render.files import check_writable, write

    for option, path in files.named.items():
        if any(is_one_file(path, given) for given in (old, new)):
            raise UsageError(f"{option} {path} would overwrite a run that is read; give it another file")
        check_writable(path)
    if len(set(files.named.values())) < len(files.named):
        raise UsageError("--json and --markdown name one file; give each its own")
    found = compare(read_report(old), read_report(new), old_source=readable(old), new_source=readable(new))
    makers = {"--json": rendering.as_json, "--markdown": rendering.as_markdown}
    for option, path in files.named.items():
        write(path, makers[option](found))
    stream = sys.stderr if "-" in files.named.values() else sys.stdout
    width, color = terminal(stream)
    show(rendering.render(found, width=width, color=color), stream)
    return found.exit_code


def read_report(path: str) -> Report:
    """The report in a JSON file, or that of a recording; UsageError for anything else."""
    where = readable(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}") from error
    try:
        schema = decode(data, _Head).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _of_recording(path)  # many lines, and so no JSON by itself
    if schema == SCHEMA:
        return _of_json(data, where)
    if schema.startswith("ddpdiag.recording/"):
        return _of_recording(path)
    raise UsageError(
        f"{where} is neither a recording (--record) nor a report (--json) of ddpdiag"
        + (f": its schema is {readable(schema)!r}" if schema else "")
    )


def _of_json(data: bytes, where: str) -> Report:
    try:
        return decode(data, Report, least=SMALLEST_NUMBER)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} is no report that this ddpdiag reads: {error}") from error


def _of_recording(path: str) -> Report:
    from ddpdiag.checks.registry import all_checks
    from ddpdiag.judgement import judge

    return judge(read_recording([Path(path)]), all_checks())


def read_baseline(path: str) -> Snapshot:
    """What a run can be held against; UsageError, with the option as its subject, where the file has no such thing."""
    try:
        snapshot = read_report(path).snapshot
    except UsageError as error:
        raise UsageError(f"--baseline: {error}") from error
    if snapshot is None or not (snapshot.figures or snapshot.series):
        raise UsageError(f"--baseline {readable(path)}: nothing was measured in that run; give a recording of one")
    return snapshot
