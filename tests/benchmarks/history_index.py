"""The index of `ddpdiag history`: seconds, memory and disk for a first index, the next call and a day's increment.

With `--duckdb` (python -m pip install duckdb) the rows of the index are also copied into DuckDB, for comparison.
"""

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpdiag.codec import encode
from ddpdiag.simulate.months import FleetMonths, Plan

TABLES = ("names", "files", "runs", "hosts", "blames", "figures", "counters")


def call(folder: Path, index: Path, until: str, what: str) -> None:
    """Run the command as users do, for the last 30 days, and print its time, memory and index."""
    words = [str(folder), "--index", str(index), "--until", until, "-q"]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "ddpdiag", "history", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds, size = time.perf_counter() - began, index.stat().st_size / (1 << 20)
    print(f"{what}: {seconds:.1f} s ({used.ru_utime + used.ru_stime:.1f} s of a core), peak", end=" ")
    code = os.waitstatus_to_exitcode(status)
    print(f"{used.ru_maxrss >> 10:,} MiB, index {size:.0f} MiB, exit code {code}", flush=True)


def copy_to_duckdb(index: Path, path: Path) -> None:
    """Copy all tables by way of CSV, DuckDB's fast way without pandas or pyarrow, and print time and size."""
    import csv

    import duckdb

    source, target = sqlite3.connect(index), duckdb.connect(str(path))
    seconds = 0.0
    for table in TABLES:
        cursor = source.execute(f"SELECT * FROM {table}")
        rows = path.with_suffix(".csv")
        with rows.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([column[0] for column in cursor.description])
            writer.writerows(cursor)
        began = time.perf_counter()
        target.execute(f"CREATE TABLE {table} AS SELECT * FROM read_csv('{rows}', header=true, all_varchar=false)")
        seconds += time.perf_counter() - began
    target.close()
    print(f"DuckDB: {seconds:.1f} s to load the rows from CSV, {path.stat().st_size / (1 << 20):.0f} MiB")
    query = (
        "SELECT host, count(*), sum(CASE WHEN state = 3 THEN 1 ELSE 0 END) FROM hosts JOIN runs ON runs.id = hosts.run "
        "WHERE begin_seconds > 0 GROUP BY host"
    )
    for name, database in (("SQLite", source), ("DuckDB", duckdb.connect(str(path)))):
        began = time.perf_counter()
        number = len(database.execute(query).fetchall())
        print(f"{name}: {time.perf_counter() - began:.2f} s to count the failures of {number:,} hosts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", type=int, default=100_000)
    parser.add_argument("--duckdb", action="store_true")
    words = parser.parse_args()
    day = 300
    plan = Plan(days=words.reports // day + 2, jobs_per_day=day)
    with tempfile.TemporaryDirectory() as folder:
        reports, index = Path(folder, "reports"), Path(folder, "history.db")
        began, made, size = time.perf_counter(), 0, 0
        source = FleetMonths(plan).reports()
        until = ""

        def write(number: int) -> None:
            nonlocal made, size, until
            for report in (next(source) for _ in range(number)):
                data = encode(report)
                # 1,000 files in a folder, as a folder for each day has.
                path = reports / f"{made // 1000:04d}" / f"{report.run_id}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                made, size, until = made + 1, size + len(data), report.created

        write(words.reports)
        print(f"{made:,} reports, {size / (1 << 20):,.0f} MiB, written in {time.perf_counter() - began:.0f} s")
        print(f"load {os.getloadavg()[0]:.1f}")
        call(reports, index, until, "first index")
        call(reports, index, until, "nothing new")
        write(day)
        call(reports, index, until, f"a day more ({day} reports)")
        if words.duckdb:
            copy_to_duckdb(index, Path(folder, "history.duckdb"))


if __name__ == "__main__":
    main()
