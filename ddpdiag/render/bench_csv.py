"""A benchmark for spreadsheets and data frames: one line for each row and mode, in SI units."""

import csv
from io import StringIO

from ddpdiag.codec import readable
from ddpdiag.model import Report
from ddpdiag.model.bench import BenchRow, Measured
from ddpdiag.render.bench_rows import devices, measured, modes, slowest
from ddpdiag.render.page import one_line

# New columns go to the end: scripts may count.
COLUMNS = (
    "backend",
    "collective",
    "cycle",
    "size_bytes",
    "count",
    "dtype",
    "op",
    "root",
    "mode",
    "seconds",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "wrong",
    "calls",
    "transfer_seconds",
    "skew_seconds",
    "slowest_rank",
    "slowest_host",
    "slowest_min_seconds",
    "slowest_median_seconds",
    "slowest_p95_seconds",
    "slowest_p99_seconds",
    "slowest_cv",
)
_Cell = str | int | float | None


def render(report: Report) -> str:
    """`report.bench` as CSV with a header. What is not known is empty; a non-finite number is nan, inf or -inf.

    The slowest rank of a line is the one with the longest mean time.
    """
    bench, text = measured(report), StringIO()
    hosts = {line.rank: readable(one_line(line.node)) for line in devices(bench)}
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in bench.rows:
        for name, mode in modes(row):
            writer.writerow((*_key(row), name, *_figures(mode), *_slowest(mode, hosts)))
    return text.getvalue()


def _key(row: BenchRow) -> tuple[_Cell, ...]:
    words = (row.backend, row.collective, row.dtype, row.op)
    backend, collective, dtype, op = (readable(one_line(word)) for word in words)
    return backend, collective, row.cycle, row.size_bytes, row.count, dtype, op, row.root


def _figures(mode: Measured) -> tuple[_Cell, ...]:
    return (
        mode.seconds,
        mode.algbw_bytes_per_s,
        mode.busbw_bytes_per_s,
        mode.wrong,
        mode.calls,
        mode.transfer_seconds,
        mode.skew_seconds,
    )


def _slowest(mode: Measured, hosts: dict[int, str]) -> tuple[_Cell, ...]:
    of = slowest(mode)
    if of is None:
        return (None,) * 7
    spread = of.seconds
    return (of.rank, hosts.get(of.rank), spread.min, spread.median, spread.p95, spread.p99, spread.cv)
