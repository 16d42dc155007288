"""A benchmark for people, and for scripts that read the output of nccl-tests.

In a log, first what was asked for and the table, as nccl-tests print them: what is no row of the table starts with "#".
In a terminal the verdict, a line on what was measured, and the figures. Then the ranks, what the figures mean, the
findings and, last, the verdict.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from rich.table import Table
from rich.text import Text

from ddpdiag import __version__
from ddpdiag.bench import rows as tables
from ddpdiag.bench.rows import Part, devices, measured, parts, reaches, short_pci, traits
from ddpdiag.model import Report, Severity, WorldLine
from ddpdiag.model.bench import BenchRank, BenchReport, Bottleneck, Fit, Series
from ddpdiag.render.findings import LIST_SHOWN, write_findings
from ddpdiag.render.page import ALL_SHOWN, Page, one_line, write_hosts_rule
from ddpdiag.render.ranks import WORST_SHOWN, Ranks
from ddpdiag.render.terminal import write_head, write_notes, write_timings, write_verdict
from ddpdiag.text import ABSENT, byte_count, bytes_per_s, count, figure, fold_hosts, is_exceeded, percent, seconds


def render(report: Report, *, tty: bool, color: bool, width: int, details: bool = False, timings: bool = False) -> str:
    """`report.bench` as text; `details` shortens nothing, `timings` adds where the run's seconds went.

    In a terminal (`tty`) the rows fit `width`; elsewhere they are those of nccl-tests, however wide they are.
    """
    page, bench = Page(color=color, width=width, tty=tty), measured(report)
    if tty:
        write_head(page, report)
        # What a row of the table is, in a line.
        asked = bench.asked
        versions = [f"{name} {it}" for name, it in _versions(bench)]
        calls = f"{count(asked.iters, 'call')} per size after {asked.warmup_iters:,} to warm up"
        page.write(one_line("; ".join((*versions, calls, "times of the slowest rank"))), style="dim")
    if details or not tty:
        for line in _head(bench, report.world, details=details):
            _comment(page, line)
    for part in parts(bench):
        _part(page, bench, part)
    _commented(page, lambda inner: _write_meaning(inner, bench, details=details))
    if timings:
        _commented(page, lambda inner: write_timings(inner, report, details=details))
    write_findings(page, report.findings, details=details)
    write_notes(page, report.notes)
    write_verdict(page, report)
    return page.text()


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
    versions = (f"{name}={it}" for name, it in _versions(bench))
    yield one_line(" ".join((f"ddpdiag version {__version__}", *versions)))
    backends = dict.fromkeys(row.backend for row in bench.rows) or asked.backend or (world.backend,)
    hosts = f" ({fold_hosts(world.hosts, limit=LIST_SHOWN)})" if world.hosts else ""
    step = f"{asked.stepbytes}(bytes)" if asked.stepbytes else f"{asked.stepfactor or 2:g}(factor)"
    yield one_line(
        f"nRanks {world.size} nHosts {len(world.hosts)}{hosts} backend {','.join(backends)} "
        f"minBytes {asked.minbytes} maxBytes {asked.maxbytes} step: {step} warmup iters: {asked.warmup_iters} "
        f"iters: {asked.iters} validation: {asked.check}"
    )
    yield "calls follow each other pipelined on GPUs, each started from Python; on a CPU each is waited for"
    yield "a row shows the slowest rank"
    if any(name in asked.collective for name in ("all_reduce", "broadcast", "reduce")):
        yield "torch has no all_reduce, broadcast or reduce out of place: a copy is made first, and counts"
    yield "sizes: K, M and G are powers of 1024; GB/s is 1e9 bytes/s"
    yield ""
    yield from _devices(devices(bench), details=details)


def _versions(bench: BenchReport) -> list[tuple[str, str]]:
    return [(name, it) for name, it in (("torch", bench.torch_version), ("nccl", bench.nccl_version)) if it]


def _devices(ranks: Sequence[BenchRank], *, details: bool) -> Iterator[str]:
    if not ranks:
        return
    yield "Using devices"
    shown = ranks if details or len(ranks) <= ALL_SHOWN else ranks[:WORST_SHOWN]
    for rank in shown:
        number = "" if rank.device_index is None else f"{rank.device_index:2d} [{short_pci(rank.pci or '?')}] "
        where = f" Rank {rank.rank:2d} Group  0 Pid {rank.pid:6d} on {one_line(rank.host):>10} device "
        yield f"{where}{number}{one_line(rank.device)}"
    if len(shown) < len(ranks):
        yield f" ... {count(len(ranks) - len(shown), 'more rank')}"


def _part(page: Page, bench: BenchReport, part: Part) -> None:
    """One table, between nccl-tests' comments."""
    if page.tty:
        page.blank()
        page.write(one_line(part.name) + ("" if bench.complete else ", cut short"), style="bold")
    else:
        for text in ("", f"Collective test starting: {one_line(part.name)}", ""):
            _comment(page, text)
    for text in (*tables.HEADER, *map(tables.line, part.rows), *tables.footer(part, reaches(bench, (part,)))):
        page.verbatim(text)
    if not page.tty:
        _comment(page, "")
        _comment(page, f"Collective test {'concluded' if bench.complete else 'cut short'}: {one_line(part.name)}")


# What the rows mean --------------------------------------------------------------------------------------------------


# Of more series than this, a line each: all types and operations make dozens.
_SERIES_SHOWN = 4

# Collective, type, operation, root; and of one of them bus bandwidths by size and backend, one for each cycle.
_Kind = tuple[str, str, str, int]
_Sizes = dict[int, dict[str, list[float]]]


def _write_meaning(page: Page, bench: BenchReport, *, details: bool) -> None:
    """Everything between the tables of nccl-tests and the findings."""
    if bench.rows:
        page.blank()
    else:
        page.write("nothing was measured", style="bold")
    for note in bench.notes:
        page.write(one_line(note), lead="note: ")
    if bench.notes or not bench.rows:
        page.blank()
    # Where several backends did the same: their bus bandwidth by size, and the first one's over each other's.
    kinds: dict[_Kind, _Sizes] = {}
    for row in bench.rows:
        if (mode := row.natural()) is not None:
            sizes = kinds.setdefault((row.collective, row.dtype, row.op, row.root), {})
            sizes.setdefault(row.size_bytes, {}).setdefault(row.backend, []).append(mode.busbw_bytes_per_s)
    for kind, sizes in kinds.items():
        shared = {size: backends for size, backends in sorted(sizes.items()) if len(backends) > 1}
        if shared:
            page.write(f"busbw of {_named(*kind)}, in GB/s", style="bold")
            absent = ABSENT if page.color else "-"
            backends = tuple(dict.fromkeys(name for of in shared.values() for name in of))
            first, *others = backends
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
            for header in ("size (B)", *backends, *(f"{first}/{other}" for other in others)):
                table.add_column(Text(one_line(header)), justify="right")
            for size, of in shared.items():
                busbws = {name: fmean(values) for name, values in of.items()}
                rates = [f"{busbws[name] / 1e9:.2f}" if name in busbws else absent for name in backends]
                own = busbws.get(first)
                ratios = [figure(own / busbws[o]) if own is not None and busbws.get(o) else absent for o in others]
                table.add_row(*map(Text, (str(size), *rates, *ratios)))
            page.table(table)
            page.blank()
    _ranks(page, bench.ranks, details=details)
    _all_series(page, bench, details=details)


def _named(collective: str, dtype: str, op: str, root: int) -> str:
    """Such as "broadcast, float, root 0"."""
    return one_line(", ".join((collective, *traits(dtype, op, root))))


def _ranks(page: Page, lines: Sequence[BenchRank], *, details: bool) -> None:
    """A table for each collective and backend, and below it why some ranks are called slow."""
    tables: dict[tuple[str, str, int], list[BenchRank]] = {}
    for line in lines:
        tables.setdefault((line.collective, line.backend, line.size_bytes), []).append(line)
    for (collective, backend, size), of in tables.items():
        page.write(one_line(f"ranks of {collective} over {backend} at {byte_count(size)}"), style="bold")
        slow = dict.fromkeys((line.rank for line in of if line.slow), Severity.WARNING)
        # In a log, where scripts read the tables, all of it.
        rows = tuple(
            {
                "rank": line.rank,
                "local_rank": line.local_rank,
                "host": line.host,
                "gpu_uuid": line.gpu_uuid,
                "time_seconds": line.seconds,
                "algbw_bytes_per_s": line.algbw_bytes_per_s,
                "busbw_bytes_per_s": line.busbw_bytes_per_s,
                "spread_share": line.spread_share,
                "lag_seconds": line.lag_seconds,
                "copy_bytes_per_s": line.copy_bytes_per_s,
                "pair_bytes_per_s": line.pair_busbw_bytes_per_s,
            }
            for line in of
        )
        ranks = Ranks(rows, slow, details, brief=page.tty)
        write_hosts_rule(page, ranks.hosts.rule)
        for part in ranks.tables(color=page.color, width=page.width):
            page.table(part)
        if ranks.note:
            page.write(ranks.note, style="dim")
        # In a terminal, the findings below explain why a rank is slow, and what to do.
        reasons = [] if page.tty else [line for line in of if line.slow]
        shown = reasons if details else reasons[:LIST_SHOWN]
        for line in shown:
            lead = one_line(f"rank {line.rank} on {line.host}: ")
            page.write(one_line(line.slow), lead=lead, lead_style="bold yellow")
        if left := len(reasons) - len(shown):
            page.write(f"{count(left, 'more slow rank')}; the JSON report has all of them", style="dim")
        page.blank()


def _all_series(page: Page, bench: BenchReport, *, details: bool) -> None:
    """The result of each series; a line each where there are many."""
    brief = len(bench.series) > _SERIES_SHOWN and not details
    for series in bench.series:
        name = f"{_named(series.collective, series.dtype, series.op, series.root)}, over {series.backend}"
        if brief:
            page.write(_reached(series), lead=one_line(f"{name}: "), lead_style="bold")
            continue
        page.write(one_line(name), style="bold")
        if series.fit is not None:
            page.write(_fit(series.fit), indent=4, lead="fit: ", lead_style="bold")
        page.write(_reached(series), indent=4, lead="best: ", lead_style="bold")
        # What the sentence of the whole states is printed last, below.
        what = series.sentence.partition(f" over {series.backend} ")[2].partition(": ")[0]
        together = what and series.collective in bench.sentence and f"each {what}," in bench.sentence
        if series.sentence and series.sentence not in bench.sentence and not together:
            page.write(one_line(series.sentence), indent=4)
        page.blank()
    if brief:
        page.blank()


def _fit(fit: Fit) -> str:
    text = (
        f"latency {seconds(fit.latency_seconds)}, asymptotic busbw {bytes_per_s(fit.busbw_bytes_per_s)}, "
        f"half of it at {byte_count(fit.half_bytes)}"
    )
    if fit.residual_share is None:
        return text
    where = f" at {byte_count(fit.residual_bytes)}" if fit.residual_bytes is not None else ""
    return f"{text}, residual {'+' if fit.residual_share > 0 else ''}{percent(fit.residual_share)}{where}"


def _reached(series: Series) -> str:
    best = f"{bytes_per_s(series.peak_busbw_bytes_per_s)} busbw at {byte_count(series.best_bytes)}"
    if series.expectation is None:
        judged = series.bottleneck is not Bottleneck.NOT_JUDGED
        return f"{best}; what this hardware should reach is not known" if judged else best
    exceeded = is_exceeded(series.peak_busbw_bytes_per_s, series.expectation.busbw_bytes_per_s)
    reached = "more than the " if exceeded else f"{percent(series.share)} of "
    share = reached if series.share is not None else ""
    expected = bytes_per_s(series.expectation.busbw_bytes_per_s)
    return f"{best}: {share}{expected} expected ({one_line(series.expectation.source)})"
