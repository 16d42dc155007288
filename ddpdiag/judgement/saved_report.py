"""The report of an earlier run: its JSON file, or its recording, judged again."""

from pathlib import Path

import msgspec
from msgspec import Struct

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import SMALLEST_NUMBER, decode, read_bytes, read_recording, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement.judge import judge
from ddpdiag.model import Report
from ddpdiag.model.options import Snapshot
from ddpdiag.model.report import SCHEMA


class _Head(Struct):
    schema: str = ""


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
