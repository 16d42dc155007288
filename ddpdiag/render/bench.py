"""A benchmark for people, and for scripts that read the output of nccl-tests.

In a log, first what was asked for and the table, as nccl-tests print them: what is no row of the table starts with "#".
In a terminal the verdict, a line on what was measured, and the figures. Then the ranks, what the figures mean, the
findings and, last, the verdict.
"""

from collections.abc import Callable, Iterator, Sequence

from ddpdiag import __version__
from ddpdiag.model import Report, Verdict, WorldLine
from ddpdiag.model.bench import Average, Bench, BenchRank, BenchReport, Blocking, Bottleneck
from ddpdiag.render import bench_bars, bench_table
from ddpdiag.render.bench_meaning import write_meaning
from ddpdiag.render.bench_rows import Part, devices, measured, parts, reaches, short_pci
from ddpdiag.render.hosts import fold_hosts
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.terminal.findings import LIST_SHOWN, write_findings
from ddpdiag.render.terminal.ranks import WORST_SHOWN
from ddpdiag.render.terminal.report import write_head, write_notes, write_verdict
from ddpdiag.render.terminal.stages import write_timings
from ddpdiag.render.terminal.tables import ALL_SHOWN
from ddpdiag.render.units import count

_AVERAGES = {
    Average.RANK_0: "rank 0",
    Average.MEAN: "mean of all ranks",
    Average.FASTEST: "fastest rank",
    Average.SLOWEST: "slowest rank",
}
_BLOCKING = {
    None: "calls follow each other pipelined on GPUs; on a CPU each is waited for",
    Blocking.PIPELINED: "calls follow each other pipelined (-z 0)",
    Blocking.BARRIER: "each call is waited for, with a barrier behind it that counts (-z 1)",
    Blocking.WAIT: "each call is waited for, without a barrier (-z 2)",
    Blocking.APART: "each call is waited for, with a barrier behind it that does not count (-z 3)",
}


def render(report: Report, *, tty: bool, color: bool, width: int, details: bool = False, timings: bool = False) -> str:
    """`report.bench` as text; `details` shortens nothing, `timings` adds where the run's seconds went.

    In a terminal (`tty`) the rows fit `width`; elsewhere they are those of nccl-tests, however wide they are.
    """
    page, bench = Page(color=color, width=width, tty=tty), measured(report)
    if tty:
        write_head(page, report)
        page.write(_measured(bench), style="dim")
    if details or not tty:
        for line in _head(bench, report.world, details=details):
            _comment(page, line)
    for part in parts(bench):
        _part(page, bench, part)
    _commented(page, lambda inner: write_meaning(inner, bench, details=details))
    if timings:
        _commented(page, lambda inner: write_timings(inner, report, details=details))
    write_findings(page, report.findings, details=details)
    write_notes(page, report.notes)
    # What holds ranks back is no praise; scripts look for "FIT:".
    but = color and report.verdict is Verdict.FIT and _begins_with_slow_ranks(report.sentence, bench)
    write_verdict(page, report, after=", but " if but else ": ")
    return page.text()


def _begins_with_slow_ranks(sentence: str, bench: BenchReport) -> bool:
    return any(
        series.bottleneck is Bottleneck.SLOW_RANK and sentence.startswith(series.sentence) for series in bench.series
    )


def _measured(bench: BenchReport) -> str:
    """What a row of the table is, in a line."""
    asked = bench.asked
    versions = (("torch", bench.torch_version), ("nccl", bench.nccl_version))
    calls = f"{count(asked.iterations, 'call')} a size after {asked.warmup:,} to warm up"
    parts = (*(f"{name} {it}" for name, it in versions if it), calls, f"times of the {_AVERAGES[asked.average]}")
    return one_line("; ".join(parts))


def _comment(page: Page, text: str) -> None:
    """A line that is no row; wrapped for eyes only."""
    if page.tty:
        page.write(text, lead="# ", style="dim", lead_style="dim")
    else:
        page.verbatim(f"# {text}")


def _commented(page: Page, draw: Callable[[Page], None]) -> None:
    """What `draw` writes; in a log as comments, or tables that begin with a number would be read as rows."""
    if page.tty:
        draw(page)
        return
    inner = Page(color=False, width=page.width - 2)
    draw(inner)
    for line in inner.text().rstrip("\n").split("\n"):
        page.verbatim(f"# {line}")
    page.blank()


def _head(bench: BenchReport, world: WorldLine, *, details: bool) -> Iterator[str]:
    """What was asked for, and on what."""
    asked = bench.asked
    versions = (("torch", bench.torch_version), ("nccl", bench.nccl_version))
    yield one_line(" ".join((f"ddpdiag version {__version__}", *(f"{name}={it}" for name, it in versions if it))))
    yield one_line(f"{_world(bench, world)} {_sizes(asked)}")
    yield _BLOCKING[asked.blocking]
    if asked.per_iteration:
        yield "Per-Iteration Report: i_* are those of the rank that took longest"
    yield f"a row shows the {_AVERAGES[asked.average]} (-a {asked.average.value})"
    if any(name in asked.collectives for name in ("all_reduce", "broadcast", "reduce")):
        yield "out of place torch has no all_reduce, broadcast or reduce: a copy comes first, and counts"
    yield "sizes: K, M and G are powers of 1024; GB/s is 1e9 bytes/s"
    yield ""
    yield from _devices(devices(bench), limit=None if details else ALL_SHOWN)


def _world(bench: BenchReport, world: WorldLine) -> str:
    backends = dict.fromkeys(row.backend for row in bench.rows) or dict.fromkeys(
        bench.asked.backends or (world.backend,)
    )
    hosts = f" ({fold_hosts(world.nodes, limit=LIST_SHOWN)})" if world.nodes else ""
    return f"nRanks {world.size} nHosts {len(world.nodes)}{hosts} backend {','.join(backends)}"


def _sizes(asked: Bench) -> str:
    step = f"{asked.step_bytes}(bytes)" if asked.step_bytes else f"{asked.factor:g}(factor)"
    return (
        f"minBytes {asked.min_bytes} maxBytes {asked.max_bytes} step: {step} warmup iters: {asked.warmup} "
        f"iters: {asked.iterations} agg iters: {asked.aggregate} validation: {asked.checks}"
    )


def _devices(ranks: Sequence[BenchRank], limit: int | None) -> Iterator[str]:
    if not ranks:
        return
    yield "Using devices"
    shown = ranks if limit is None or len(ranks) <= limit else ranks[:WORST_SHOWN]
    for rank in shown:
        head = f" Rank {rank.rank:2d} Group  0 Pid {rank.pid:6d} on {one_line(rank.node):>10} device "
        name = one_line(rank.device)
        yield head + (
            name if rank.device_index is None else f"{rank.device_index:2d} [{short_pci(rank.pci or '?')}] {name}"
        )
    if len(shown) < len(ranks):
        yield f" ... {count(len(ranks) - len(shown), 'more rank')}"


def _part(page: Page, bench: BenchReport, part: Part) -> None:
    """One table, between nccl-tests' comments."""
    if page.tty:
        _part_for_eyes(page, bench, part)
    else:
        _comment(page, "")
        _comment(page, f"Collective test starting: {one_line(part.name)}")
        _comment(page, "")
        for line in bench_table.header(per_iteration=bench.asked.per_iteration):
            page.verbatim(line)
        for row in part.rows:
            page.verbatim(bench_table.line(row, per_iteration=bench.asked.per_iteration))
    for line in bench_table.footer(part, reaches(bench, (part,))):
        page.verbatim(line)
    if not page.tty:
        _comment(page, "")
        _comment(page, f"Collective test {'concluded' if bench.complete else 'cut short'}: {one_line(part.name)}")


def _part_for_eyes(page: Page, bench: BenchReport, part: Part) -> None:
    page.blank()
    page.write(one_line(part.name) + ("" if bench.complete else ", cut short"), style="bold")
    of = [series for series in bench.series if (series.backend, series.collective) == (part.backend, part.collective)]
    full, calls = bench_bars.scale(part, of), bench.asked.per_iteration
    table = bench_bars.wide(part, full, per_iteration=calls, width=page.width)
    if table is not None:
        page.table(table)
        return
    for name, table in bench_bars.narrow(part, full, per_iteration=calls, width=page.width):
        page.blank()
        page.write(", ".join(filter(None, (name, bench_bars.alike(part)))), style="bold")
        page.table(table)
    page.blank()
