"""Read recordings and reports of earlier runs from files."""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import SMALLEST_NUMBER, decode, read_bytes, read_recording, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.model import Recording, Report
from ddpdiag.model.options import Snapshot
from ddpdiag.model.report import SCHEMA


class _SchemaOnly(Struct):
    schema: str = ""


def read_run(path: str) -> Recording | Report:
    """Read a recording from a file or folder, or a JSON report from a file. UsageError if it is neither."""
    try:
        return read_recording([Path(path)])
    except UsageError as error:
        if os.path.isdir(path):
            raise
        not_a_recording = error
    name = readable(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    is_neither = f"{name} is neither a recording (--record) nor a report (--json) of ddpdiag"
    if not data.lstrip().startswith(b"{"):
        raise UsageError(is_neither)
    try:
        schema = decode(data, _SchemaOnly).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise not_a_recording from None  # not a single JSON document, so the first error is shown
    if schema.startswith("ddpdiag.recording/"):
        raise not_a_recording
    if schema != SCHEMA:
        raise UsageError(is_neither + (f": its schema is {readable(schema)!r}" if schema else ""))
    try:
        return decode(data, Report, min_magnitude=SMALLEST_NUMBER)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: not a report that this version of ddpdiag can read: {error}") from error


def read_report(path: str) -> Report:
    """Read a JSON report, or judge a recording, and return the report. UsageError if the file is neither."""
    run = read_run(path)
    return run if isinstance(run, Report) else judge(run, all_checks())


def read_baseline(path: str) -> Snapshot:
    """Read the figures of an earlier run from a file. UsageError, which names --baseline, if the file has none."""
    try:
        snapshot = read_report(path).snapshot
    except UsageError as error:
        raise UsageError(f"--baseline: {error}") from error
    if snapshot is None or not (snapshot.figures or snapshot.series):
        raise UsageError(f"--baseline {readable(path)}: that run measured nothing; give the recording of one that did")
    return snapshot
