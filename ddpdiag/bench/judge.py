"""What is wrong in a benchmark: findings of COL002."""

from collections.abc import Iterator

from ddpdiag.bench.aggregate import sweeps
from ddpdiag.bench.data import Data
from ddpdiag.bench.report import bench_of, is_whole, slow_by_backend
from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.comparison.benchmarks import find, missing, slower, worse
from ddpdiag.model import Finding, Scalar
from ddpdiag.model.bench import BaselineSeries, BenchReport, BenchRow, Measured
from ddpdiag.text import rate_text, share_text, size_text, time_text

_SHOWN = 16


def findings(seen: Seen[Data]) -> Iterator[Finding]:
    """All of them; nothing where no benchmark was run."""
    if not seen.trials:
        return
    report = bench_of(seen)
    yield from _unsupported(seen)
    yield from _unmeasured(seen, report)
    yield from _wrong(seen, report)
    yield from _slow(seen, report)
    yield from _below(seen, report)
    yield from _compared(seen, report)


def _unsupported(seen: Seen[Data]) -> Iterator[Finding]:
    missing = tuple(dict.fromkeys(text for row in seen.rows for text in row.data.unsupported))
    if missing:
        yield seen.finding(
            "unsupported",
            missing[0],
            f"{'; '.join(missing)}.",
            evidence={"unsupported": list(missing)},
            fix="Leave it out, or name another backend.",
            of_the_run=True,
        )


def _unmeasured(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """Sweeps that went well and have no row: nothing is known, which is never healthy."""
    measured = {(row.backend, row.collective) for row in report.rows}
    for sweep in sweeps(seen):
        excused = any(data.unsupported for data in sweep.ranks.values())
        if (sweep.backend, sweep.collective) in measured or excused or not seen.went_well(sweep.trial):
            continue
        notes = "; ".join(dict.fromkeys(text for data in sweep.ranks.values() for text in data.notes))
        yield seen.finding(
            "unmeasured",
            f"nothing was measured of {sweep.collective} over {sweep.backend}",
            f"No size of {sweep.collective} over {sweep.backend} was measured{': ' + notes if notes else ''}.",
            fix="Ask for smaller sizes (-b, -e), or for more time (-T).",
            of_the_run=True,
        )


def _wrong(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """One finding for each backend; whose values were wrong is COL001's question."""
    by_backend: dict[str, list[tuple[BenchRow, Measured]]] = {}
    for row in report.rows:
        for mode in row.modes().values():
            if mode.wrong:
                by_backend.setdefault(row.backend, []).append((row, mode))
    for backend, bad in by_backend.items():
        got = sorted({own.rank for _, mode in bad for own in mode.ranks if own.wrong})
        total = sum(mode.wrong or 0 for _, mode in bad)
        row = bad[0][0]
        rows: list[Scalar] = [f"{each.collective} {size_text(each.size_bytes)}: {mode.wrong}" for each, mode in bad]
        yield seen.finding(
            "wrong",
            f"wrong values from {backend}",
            f"{total} {'element is' if total == 1 else 'elements are'} not what {row.collective} over {backend} must "
            f"give, first at {size_text(row.size_bytes)}; they arrived at {ranks_text(got)}. Where they come from is "
            "not told by a sum.",
            evidence={"wrong": total, "arrived_at": [*got[:_SHOWN]], "rows": rows[:_SHOWN]},
            fix="Do not train here. `ddpdiag check --select COL001` says whose values are wrong; on GPUs run again "
            "with NCCL_P2P_DISABLE=1, and check ACS and IOMMU.",
        )


def _slow(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    for backend, slow in slow_by_backend(report).items():
        for rank, why in slow.items():
            node = seen.world.node_of(rank)
            yield seen.finding(
                "slow-rank",
                f"rank {rank} on {node} holds the others back over {backend}",
                f"Rank {rank} on {node} {why}.",
                ranks=[rank],
                evidence=_own(report, backend, rank),
                fix=f"Compare {node} with another host: what else runs there, clocks, throttling, its network card.",
            )


def _own(report: BenchReport, backend: str, rank: int) -> dict[str, Scalar | list[Scalar]]:
    line = next(line for line in report.ranks if (line.backend, line.rank) == (backend, rank))
    return {"copy_bytes_per_s": line.copy_bytes_per_s, "pair_busbw_bytes_per_s": line.pair_busbw_bytes_per_s}


def _below(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """What does not reach `--min-busbw`; of a sweep that was cut short that is not known."""
    least = report.asked.min_busbw_bytes_per_s
    if least is None:
        return
    whole = {(sweep.backend, sweep.collective) for sweep in sweeps(seen) if is_whole(seen, sweep)}
    for one in report.series:
        if one.peak_busbw_bytes_per_s >= least:
            continue
        if (one.backend, one.collective) not in whole:
            yield seen.finding(
                "unmeasured",
                f"whether {one.collective} over {one.backend} reaches {rate_text(least)} is not known",
                f"It was cut short after {rate_text(one.peak_busbw_bytes_per_s)} busbw at {size_text(one.best_bytes)}.",
                fix="Give it more time (-T), or ask for fewer sizes (-b, -e) and calls (-n).",
                of_the_run=True,
            )
            continue
        yield seen.finding(
            "below",
            f"{one.collective} over {one.backend} does not reach {rate_text(least)}",
            f"Its best is {rate_text(one.peak_busbw_bytes_per_s)} busbw, at {size_text(one.best_bytes)}; "
            f"--min-busbw asks for {rate_text(least)}. {one.sentence}",
            evidence={
                "busbw_bytes_per_s": one.peak_busbw_bytes_per_s,
                "min_busbw_bytes_per_s": least,
                "size_bytes": one.best_bytes,
            },
            fix="Look at the sentence above for the bottleneck, and at the table of ranks for a slow one.",
        )


def _compared(seen: Seen[Data], report: BenchReport) -> Iterator[Finding]:
    """This run and its baseline."""
    if report.asked.baseline is None:
        return
    for new in report.saved:
        old = find(report.asked.baseline, new)
        if isinstance(old, str):
            yield _incomparable(seen, new, old)
        elif lost := missing(old, new):
            sizes = " to ".join(dict.fromkeys(size_text(size) for size in (lost[0], lost[-1])))
            yield _incomparable(seen, new, f"of the sizes that tell of its bandwidth ({sizes}) none was measured now")
        else:
            yield from _worse(seen, old, new)


def _incomparable(seen: Seen[Data], new: BaselineSeries, why: str) -> Finding:
    return seen.finding(
        "incomparable",
        f"{new.collective} over {new.backend} cannot be compared with the baseline",
        f"Nothing was compared: {why}.",
        fix="Measure the same sizes in the same world, or make a baseline of these with --save-baseline.",
    )


def _worse(seen: Seen[Data], old: BaselineSeries, new: BaselineSeries) -> Iterator[Finding]:
    ranks = next((sweep.size for sweep in sweeps(seen)), 2)
    if lost := worse(old, new):
        most = max(lost, key=lambda each: each.share)
        rows: list[Scalar] = [
            f"{size_text(each.size_bytes)}: {rate_text(each.old_bytes_per_s)} -> {rate_text(each.new_bytes_per_s)}"
            for each in lost
        ]
        yield seen.finding(
            "worse",
            f"{new.collective} over {new.backend} is {share_text(most.share)} slower than its baseline",
            f"At {size_text(most.size_bytes)} it reaches {rate_text(most.new_bytes_per_s)} busbw; the baseline of "
            f"{old.created} reached {rate_text(most.old_bytes_per_s)}. That is more than 5 %, and more than the calls "
            "of either run spread.",
            evidence={"sizes": rows[:_SHOWN]},
            fix="Look at what has changed since: driver, firmware, cables, neighbours on the network.",
        )
    elif late := slower(old, new, ranks):
        yield seen.finding(
            "worse",
            f"small messages of {new.collective} over {new.backend} take {share_text(late.share)} longer than before",
            f"At {size_text(late.size_bytes)} a call takes {time_text(late.new_seconds)}; in the baseline of "
            f"{old.created} it took {time_text(late.old_seconds)}.",
            fix="Look at what has changed since: driver, clocks, power saving, other load on the hosts.",
        )
