"""Show a benchmark as blocks for Markdown and HTML, and as text in the format of nccl-tests.

The text begins with the table of nccl-tests. The tables of peak rates and of ranks follow, with "#" before each line,
because scripts for nccl-tests skip such lines. The findings and the verdict are at the end.
"""

from collections.abc import Iterator, Sequence

from ddpdiag import __version__
from ddpdiag.bench import rows as tables
from ddpdiag.bench.rows import SweepTable, bench_of, rank_devices, reaches_minimum, sweep_tables
from ddpdiag.model import Report, WorldSummary
from ddpdiag.model.bench import BenchRank, BenchReport, BenchRow, Expectation, Series
from ddpdiag.render.blocks import Block, Cell, Chart, Column, Fold, Items, Line, Mark, Section, Table, Text
from ddpdiag.render.findings import LIST_SHOWN, write_findings
from ddpdiag.render.page import ROWS_SHOWN, Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.render.terminal import write_file_problems, write_verdict
from ddpdiag.text import byte_count, count, fold_hosts, is_exceeded


def blocks(report: Report) -> Iterator[Section]:
    """Yield the section of a benchmark: the tables of peaks and ranks, a chart, and the tables of sizes in folds."""
    bench = bench_of(report)
    rows = (Fold(part.name, (_sizes_table(part),)) for part in sweep_tables(bench))
    yield Section("Benchmark", (*_result_blocks(report), *_bandwidth_chart(bench), *rows), name="benchmark")


def _result_blocks(report: Report) -> Iterator[Block]:
    """Yield the table of peaks and the tables of ranks, each with the sentences that explain its numbers."""
    bench = bench_of(report)
    if bench.series:
        yield _series_table(bench.series)
    elif not bench.rows:
        yield Text("nothing was measured")
    # The report's own sentence is shown elsewhere. Sentences that it contains are not repeated here.
    sentences = (one.sentence for one in bench.series if one.sentence and one.sentence not in report.sentence)
    if items := tuple(dict.fromkeys((*sentences, *bench.omissions))):
        yield Items(items, "What the numbers mean")
    ranks_of_tables: dict[tuple[str, str, int], list[BenchRank]] = {}
    for rank in bench.ranks:
        ranks_of_tables.setdefault((rank.collective, rank.backend, rank.size_bytes), []).append(rank)
    for (collective, backend, size), ranks in ranks_of_tables.items():
        yield _ranks_table(f"Ranks of {collective} over {backend} at {byte_count(size)}", ranks)
        slow_ranks = tuple(f"rank {rank.rank} on {rank.host}: {rank.slow_reason}" for rank in ranks if rank.slow_reason)
        if slow_ranks:
            yield Items(slow_ranks, "Slow ranks")


def plausible_expectation(series: Series) -> Expectation | None:
    """The expected bandwidth of a series. None if it is unknown, or if the measured peak shows that it is too low."""
    expected = series.expectation
    is_wrong = expected is not None and is_exceeded(series.peak_busbw_bytes_per_s, expected.busbw_bytes_per_s)
    return None if is_wrong else expected


def _series_table(series: Sequence[Series]) -> Table:
    expectations = [plausible_expectation(one) for one in series]
    sources = dict.fromkeys(level.source for level in expectations if level)
    return Table(
        columns=(
            *map(Column, ("collective", "backend", "type")),
            Column("peak busbw", "busbw_bytes_per_s", bar=True),
            Column("at", "size_bytes"),
            Column("expected", "busbw_bytes_per_s"),
            Column("reached", "reached_share"),
            Column("latency", "latency_seconds"),
        ),
        rows=tuple(
            (
                one.collective,
                one.backend,
                one.dtype,
                one.peak_busbw_bytes_per_s,
                one.best_size_bytes,
                level.busbw_bytes_per_s if level else None,
                one.share if level else None,
                one.latency_seconds,
            )
            for one, level in zip(series, expectations, strict=True)
        ),
        noun="collective",
        note=f"expected: {'; '.join(sources)}" if sources else "",
    )


def _ranks_table(title: str, ranks: Sequence[BenchRank]) -> Table:
    """The table of ranks at one size. A shortened table keeps slow ranks and the ranks with the longest calls."""
    keys = [(not rank.slow_reason, -(rank.seconds or 0.0)) for rank in ranks]
    return Table(
        title=title,
        columns=(
            Column("rank"),
            Column("host"),
            Column("time", "_seconds"),
            Column("busbw", "_bytes_per_s", bar=True),
            Column("spread", "spread_share"),
            Column("lag", "lag_seconds", bar=True),
            Column("copy", "copy_bytes_per_s"),
            Column("device"),
        ),
        rows=tuple(
            (
                Cell(rank.rank, Mark.WARNING if rank.slow_reason else Mark.NONE),
                rank.host,
                rank.seconds,
                rank.busbw_bytes_per_s,
                rank.spread_share,
                rank.lag_seconds,
                rank.copy_bytes_per_s,
                rank.device,
            )
            for rank in ranks
        ),
        noun="rank",
        note="time: median of the calls; spread: their coefficient of variation; lag: start after the first rank; "
        "copy: in its own memory",
        order=tuple(sorted(range(len(ranks)), key=keys.__getitem__)),
    )


def _sizes_table(table: SweepTable) -> Table:
    return Table(
        columns=(
            Column("size", "size_bytes"),
            Column("type"),
            Column("time", "_seconds"),
            Column("algbw", "_bytes_per_s"),
            Column("busbw", "_bytes_per_s"),
            Column("wrong"),
        ),
        rows=tuple(
            (
                row.size_bytes,
                row.dtype,
                row.seconds,
                row.algbw_bytes_per_s,
                row.busbw_bytes_per_s,
                Cell(row.wrong, Mark.ERROR if row.wrong else Mark.NONE),
            )
            for row in table.rows
        ),
    )


def _bandwidth_chart(bench: BenchReport) -> Iterator[Chart]:
    """Yield the chart of bus bandwidth over size, with expectations as dashed lines, unless there are no rows."""
    curves: dict[tuple[str, str, str], dict[float, float]] = {}
    for row in bench.rows:
        if row.size_bytes > 0:
            curves.setdefault(_series_key(row), {})[float(row.size_bytes)] = row.busbw_bytes_per_s
    lines = [
        Line(f"{collective} over {backend}, {dtype}", tuple(sorted(points.items())))
        for (collective, backend, dtype), points in curves.items()
    ]
    for one in bench.series:
        if (level := plausible_expectation(one)) is not None and (points := curves.get(_series_key(one), {})):
            name = f"expected of {one.collective} over {one.backend}"
            ends = tuple((size, level.busbw_bytes_per_s) for size in (min(points), max(points)))
            lines.append(Line(name, ends, is_dashed=True))
    if lines:
        title = "Bus bandwidth over size"
        yield Chart(title=title, x_name="size_bytes", y_name="busbw_bytes_per_s", lines=tuple(lines))


def _series_key(item: BenchRow | Series) -> tuple[str, str, str]:
    return item.collective, item.backend, item.dtype


def render(report: Report, *, color: bool, width: int, details: bool = False) -> str:
    """The report as text. With `details`, no list or table is shortened.

    Above the findings, all lines are rows or begin with "#", so that scripts for nccl-tests' output can read them.
    """
    page = Page(color=color, width=width)
    for line in table_lines(report, details=details):
        page.write_verbatim(line)
    inner = Page(color=False, width=page.width - 2)
    paint(inner, _result_blocks(report), details=details)
    for line in inner.text().rstrip("\n").split("\n"):
        page.write_verbatim(f"# {line}")
    page.blank()
    write_findings(page, report.findings, details=details)
    write_file_problems(page, report.recording_problems)
    write_verdict(page, report)
    return page.text()


def table_lines(report: Report, *, details: bool, is_running: bool = False) -> Iterator[str]:
    """Yield the text above the findings: comment lines about the run, and the rows of each collective and backend.

    With `is_running`, rows may be missing in the last table, whose end is not written. The lines of a running benchmark
    are then the first lines of the same benchmark later.
    """
    bench = bench_of(report)
    yield from _head_lines(bench, report.world)
    all_tables, shown_devices = sweep_tables(bench), list[str]()
    for part in all_tables:
        name, is_last = one_line(part.name), part is all_tables[-1]
        yield "# "
        if (devices := list(_device_lines(rank_devices(bench, part), details=details))) != shown_devices:
            yield from (*devices, "# ")
            shown_devices = devices
        yield from (f"# Collective test starting: {name}", "# ")
        yield from tables.HEADER_LINES
        yield from map(tables.row_line, part.rows)
        if is_running and is_last:
            return
        yield from tables.footer_lines(part, reaches_minimum(bench, part))
        is_cut = tables.lacks_sizes(part, bench.request, report.world.size) or (is_last and not bench.complete)
        yield from ("# ", f"# Collective test {'cut short' if is_cut else 'concluded'}: {name}")
    yield "# "


def _head_lines(bench: BenchReport, world: WorldSummary) -> Iterator[str]:
    """Yield comment lines with the versions, and the requested sizes and calls."""
    request = bench.request
    versions = {"torch": bench.torch_version, "nccl": bench.nccl_version}
    version_words = (f"{name}={version}" for name, version in versions.items() if version)
    yield one_line(" ".join((f"# ddpdiag version {__version__}", *version_words)))
    backends = request.backend or (world.backend,)
    hosts = f" ({fold_hosts(world.hosts, limit=LIST_SHOWN)})" if world.hosts else ""
    yield one_line(
        f"# nRanks {world.size} nHosts {len(world.hosts)}{hosts} backend {','.join(backends)} "
        f"minBytes {request.minbytes} maxBytes {request.maxbytes} step: {request.stepfactor:g}(factor) "
        f"warmup iters: {request.warmup_iters} iters: {request.iters} validation: {request.check}"
    )
    yield "# torch has all_reduce, broadcast and reduce in place only; the others are measured out of place"
    yield "# a row shows the slowest rank; K, M and G are powers of 1024; GB/s is 1e9 bytes/s"


def _device_lines(ranks: Sequence[BenchRank], *, details: bool) -> Iterator[str]:
    if not ranks:
        return
    yield "# Using devices"
    shown = ranks if details else ranks[:ROWS_SHOWN]
    for rank in shown:
        number = "" if rank.device_index is None else f"{rank.device_index:2d} [{_short_pci(rank.pci or '?')}] "
        beginning = f"#  Rank {rank.rank:2d} Group  0 Pid {rank.pid:6d} on {one_line(rank.host):>10} device "
        yield f"{beginning}{number}{one_line(rank.device)}"
    if len(shown) < len(ranks):
        yield f"#  ... {count(len(ranks) - len(shown), 'more rank')}"


def _short_pci(pci: str) -> str:
    """A PCI address in nccl-tests' form: "0000:17:00" for NVML's "00000000:17:00.0"."""
    domain, _, rest = one_line(pci).partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else domain
