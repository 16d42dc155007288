"""`--parquet DIR`: all runs as Parquet files, for an engine that reads more than one machine holds.

DIR has a folder for each table, and in it one for each day (UTC): `runs/day=2026-11-28/`. The tables have the fields of
Run, HostRow, Blame and Figure, and the run's id; `counters` has the last total of each day. A day that is written again
replaces its files.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from msgspec.json import encode

from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.history.rows import Reading, Run

_RUN = {"day": "VARCHAR", "run_id": "VARCHAR", "begin_seconds": "DOUBLE"}
_TABLES: Mapping[str, Mapping[str, str]] = {
    "runs": {**_RUN, "verdict": "VARCHAR", "sentence": "VARCHAR", "ranks": "BIGINT", "codes": "VARCHAR[]"},
    "hosts": {**_RUN, "host": "VARCHAR", "state": "VARCHAR", "gpus": "VARCHAR[]", "facts": "VARCHAR[]"},
    "blames": {
        **_RUN,
        "code": "VARCHAR",
        "title": "VARCHAR",
        "hosts": "VARCHAR[]",
        "gpus": "VARCHAR[]",
        "is_error": "BOOLEAN",
    },
    "figures": {**_RUN, "subject": "VARCHAR", "name": "VARCHAR", "value": "DOUBLE"},
    "counters": {
        "day": "VARCHAR",
        "begin_seconds": "DOUBLE",
        "host": "VARCHAR",
        "part": "VARCHAR",
        "name": "VARCHAR",
        "total": "BIGINT",
    },
}


def check_available() -> None:
    """Raise UsageError if DuckDB, which writes the files, is not installed. Does not import it."""
    if find_spec("duckdb") is None:
        raise UsageError("--parquet needs DuckDB: python -m pip install 'ddpdiag[parquet]'")


def write(folder: str, runs: Iterable[Run], readings: Iterable[Reading]) -> None:
    """Write the tables into `folder`, which is made if it is missing. UsageError if that fails."""
    import duckdb

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ddpdiag-") as parts, duckdb.connect(config={"threads": 1}) as database:
            # With one thread, a day has one file, which the next call replaces.
            with ExitStack() as stack:
                files = {name: stack.enter_context(Path(parts, name).open("wb")) for name in _TABLES}
                for name, row in _rows(runs, readings):
                    files[name].write(encode(row) + b"\n")
            for name, file in files.items():
                if Path(file.name).stat().st_size:
                    target = str(Path(folder, name)).replace("'", "''")
                    database.execute(
                        f"COPY (SELECT * FROM read_json(?, columns = ?, format = 'newline_delimited')) TO '{target}' "
                        "(FORMAT parquet, PARTITION_BY (day), OVERWRITE_OR_IGNORE)",
                        [file.name, _TABLES[name]],
                    )
    except (OSError, duckdb.Error) as error:
        raise UsageError(f"--parquet {readable(folder)}: {readable(str(error))}") from error


def _rows(runs: Iterable[Run], readings: Iterable[Reading]) -> Iterator[tuple[str, dict[str, object]]]:
    for run in runs:
        of_run = {"day": _day(run.begin_seconds), "run_id": run.run_id, "begin_seconds": run.begin_seconds}
        own = {"verdict": run.verdict, "sentence": run.sentence, "ranks": run.ranks, "codes": sorted(run.codes)}
        yield "runs", of_run | own
        for host in run.hosts:
            yield "hosts", of_run | host._asdict() | {"state": host.state.name.lower()}
        for blame in run.blames:
            yield "blames", of_run | blame._asdict()
        for figure in run.figures:
            yield "figures", of_run | figure._asdict()
    for reading in readings:
        part = {"day": _day(reading.seconds), "begin_seconds": reading.seconds, "host": reading.host}
        for name, total in reading.totals.items():
            yield "counters", {**part, "part": reading.part, "name": name, "total": total}


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
