"""Collectives over NCCL that are far below what its path can do: measured once more with NCCL's log, and judged."""

from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.bandwidth import factor
from ddpdiag.bench.data import AGAIN, Data
from ddpdiag.bench.series import hosts_of_ranks
from ddpdiag.checks.api import Seen, new_trial
from ddpdiag.checks.gpu.free import used_meanwhile
from ddpdiag.checks.p2p.speed.path import Cause, Path, Timed, causes_text, doubts_of, doubts_text, limited_by, path_of
from ddpdiag.checks.p2p.transport.check import LOG_ENV
from ddpdiag.model import Finding, Severity, Trial
from ddpdiag.model.bench import Bench, Bottleneck, Series
from ddpdiag.text import rate_text, reached_text, share_text, size_text

# Sentences of series that name their bottleneck.
_TELLING = (Bottleneck.MISSING_PART, Bottleneck.SLOW_RANK)
_COMPARE = (
    "Run `ddpdiag check` on these hosts while nothing else runs there: it measures each link, and shows what slows "
    "GPUs down; compare with nccl-tests on another host."
)


def suspects(seen: Seen[Data], found: Sequence[Series], far_ratio: float) -> Iterator[Series]:
    """Of each collective over NCCL the first series that is far below what is expected."""
    named: set[str] = set()
    for one in found:
        expected = one.expectation
        if one.backend != "nccl" or one.collective in named or expected is None:
            continue
        if _first(seen, one).is_far_below(expected.busbw_bytes_per_s, far_ratio):
            named.add(one.collective)
            yield one


def second_trial(seen: Seen[Data], one: Series) -> Trial:
    """The same collective at its best size once more, in a worker that writes NCCL's log."""
    params: dict[str, str | int | float | bool] = {
        "backend": one.backend,
        "collective": one.collective,
        AGAIN: one.best_bytes,
        "dtype": one.dtype,
        "op": one.op,
        "root": one.root,
    }
    return new_trial(seen, params=params, env=LOG_ENV, fresh=True)


def second_bench(trial: Trial) -> Bench:
    """What such a trial measures."""
    size, op, root = int(trial.params[AGAIN]), str(trial.params["op"]), int(trial.params["root"])
    return Bench(
        min_bytes=size,
        max_bytes=size,
        iterations=5,
        warmup=1,
        checks=0,
        dtypes=(str(trial.params["dtype"]),),
        ops=("sum" if op == "none" else op,),
        roots=(max(0, root),),
    )


def far_below(seen: Seen[Data], found: Sequence[Series], far_ratio: float) -> Iterator[Finding]:
    """One for each collective, unless no rate is expected of its path (TCP sockets)."""
    for one in suspects(seen, found, far_ratio):
        trials = (trial for trial in seen.trials if AGAIN in trial.params)
        own = next((trial for trial in trials if trial.params["collective"] == one.collective), None)
        rows = {row.place.rank: row.data for row in seen.rows if row.trial is own}
        hosts = hosts_of_ranks(seen, seen.world.living)
        paths = {rank: row.path for rank, row in rows.items() if row.path is not None}
        path = path_of(one.collective, paths, hosts)
        # A network card's nominal speed is no expectation where NCCL's log does not show that it is used.
        if len(hosts) > 1 and not isinstance(path, Path):
            continue
        expectation, name = one.expectation, f"{one.collective} over {one.backend}"
        expected = expectation.busbw_bytes_per_s if expectation is not None else 0.0
        first = _first(seen, one)
        # The shortest call of the slowest rank; None where a rank has none.
        cells = [line.in_place or line.out_of_place for row in rows.values() for line in row.lines]
        seconds = [cell.seconds.min for cell in cells if cell is not None]
        again = None
        if len(seconds) >= first.ranks:
            latency = min(first.latency_seconds, max(seconds) / 2)
            again = first._replace(seconds=max(seconds), latency_seconds=latency)
        doubts = [*_doubts(first, again, path, rows, far_ratio)]
        causes = [*limited_by(paths)]
        if isinstance(path, Path) and path.transports:
            causes.insert(0, Cause(f"NCCL's log shows {path.transports}"))
        if one.bottleneck in _TELLING:
            causes.append(Cause(one.sentence.removesuffix(".")))
        rate = one.peak_busbw_bytes_per_s
        second = f" ({rate_text(again.busbw_bytes_per_s)} when measured again)" if again else ""
        yield seen.finding(
            "far-below",
            f"{name} is far below what this hardware should reach: {rate_text(rate)}",
            f"{name} reaches {rate_text(rate)} busbw at {size_text(one.best_bytes)}{second}, "
            f"{reached_text(rate, expected)} ({expectation.source if expectation else ''}); at least "
            f"{share_text(far_ratio)} expected. {causes_text(causes)}{doubts_text(doubts)}",
            severity=Severity.WARNING if doubts else Severity.ERROR,
            nodes=seen.world.nodes_of(seen.world.living) if len(seen.world.hosts) == 1 else (),
            evidence={
                "busbw_bytes_per_s": rate,
                "second_busbw_bytes_per_s": again.busbw_bytes_per_s if again else None,
                "expected_bytes_per_s": expected,
                "transports": path.transports if isinstance(path, Path) else path,
                "causes": [cause.text for cause in causes],
                "doubts": [*doubts],
            },
            fix=next((cause.fix for cause in causes if cause.fix), _COMPARE),
        )


def _first(seen: Seen[Data], one: Series) -> Timed:
    ranks = len(seen.world.arrivals)
    seconds = one.best_bytes * factor(one.collective, ranks) / max(one.peak_busbw_bytes_per_s, 1e-9)
    latency = one.fit.latency_seconds if one.fit is not None else 0.0
    return Timed(one.collective, one.best_bytes, ranks, seconds, min(latency, seconds / 2))


def _doubts(
    first: Timed, again: Timed | None, path: Path | str, rows: Mapping[int, Data], ratio: float
) -> Iterator[str]:
    """Reasons for a warning instead of an error."""
    if again is None:
        yield "it was measured once only"
    elif isinstance(path, str):
        yield path
    elif not first.is_far_below(path.busbw_bytes_per_s, ratio):
        yield f"the path that NCCL takes ({path.transports}) can do {rate_text(path.busbw_bytes_per_s)} only"
    else:
        yield from doubts_of(path, again, ratio)
    uses = [(f"the GPU of rank {rank}", row.before) for rank, row in rows.items() if row.before is not None]
    yield from used_meanwhile(uses)
