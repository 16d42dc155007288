"""Functions that read recordings and reports of earlier runs from files."""

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


class _Head(Struct):
    schema: str = ""


def read_run(path: str) -> Recording | Report:
    """The recording in a file or folder, or the JSON report in a file; UsageError for anything else."""
    try:
        return read_recording([Path(path)])
    except UsageError as error:
        if os.path.isdir(path):
            raise
        refused = error
    where = readable(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}") from error
    try:
        schema = decode(data, _Head).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise refused from None  # not a single JSON document, so the first error is shown
    if schema.startswith("ddpdiag.recording/"):
        raise refused
    if schema != SCHEMA:
        raise UsageError(
            f"{where} is neither a recording (--record) nor a report (--json) of ddpdiag"
            + (f": its schema is {readable(schema)!r}" if schema else "")
        )
    try:
        return decode(data, Report, least=SMALLEST_NUMBER)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not a report that this version of ddpdiag can read: {error}") from error


def read_report(path: str) -> Report:
    """The report in a JSON file, or the report judged from a recording; UsageError for anything else."""
    run = read_run(path)
    return run if isinstance(run, Report) else judge(run, all_checks())


def read_baseline(path: str) -> Snapshot:
    """The figures of the earlier run in a file; UsageError that names --baseline if there are none."""
    try:
        snapshot = read_report(path).snapshot
    except UsageError as error:
        raise UsageError(f"--baseline: {error}") from error
    if snapshot is None or not (snapshot.figures or snapshot.series):
        raise UsageError(f"--baseline {readable(path)}: that run measured nothing; give the recording of one that did")
    return snapshot
