"""Hand-made benchmarks: what COL002 would have seen of ranks whose times are known."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Raw, structs
from seen import world_of

from ddpdiag.bandwidth import rounded_size
from ddpdiag.bench import check as col002
from ddpdiag.bench.data import Data, rank_row
from ddpdiag.checks.api import Seen, new_trial
from ddpdiag.codec import encode
from ddpdiag.model import Outcome, Recording, RunOptions, Status
from ddpdiag.model.bench import BenchRequest, Limits
from ddpdiag.model.options import Snapshot
from ddpdiag.model.recording import Header

# Seconds of each call of a size on a rank.
Clock = Callable[[int, int], Sequence[float]]
SIZES = tuple(8 * 4**power for power in range(12))
FAST = Limits(copy_bytes_per_s=10e9, loopback_bytes_per_s=2e9, cores=64)


def steady(latency: float = 100e-6, bytes_per_s: float = 1e9) -> Clock:
    """The same latency and bandwidth on every rank."""
    return lambda _rank, size: [latency + size / bytes_per_s] * 5


def data_of(
    rank: int,
    ranks: int,
    clock: Clock,
    *,
    sizes: Sequence[int] = SIZES,
    collective: str = "all_reduce",
    wrong: Mapping[int, int] | None = None,
    limits: Limits = FAST,
    copies: Sequence[float] = (10e9,) * 5,
    **more: object,
) -> Data:
    """What a rank gives; `wrong` is by size."""
    rows = []
    for size in sizes:
        calls = [*zip(*(clock(other, size) for other in range(ranks)), strict=True)]
        extremes = [min(call) for call in calls], [max(call) for call in calls]
        exact = rounded_size(collective, size, 4, ranks)
        rows.append(rank_row(exact, "float", clock(rank, size), (wrong or {}).get(size, 0), extremes))
    facts = {"backend": "gloo", "collective": collective, "rank_count": ranks, "pid": 100 + rank, "device": "CPU"}
    values = facts | more
    return Data(rows=tuple(rows), limits=limits, copy_rates=tuple(copies), **values)  # type: ignore[arg-type]


def benched(
    rows: Mapping[int, Data],
    *,
    bench: BenchRequest | None = None,
    statuses: Mapping[int, Status] | None = None,
    ranks_per_node: int = 8,
    size: int | None = None,
    baseline: Snapshot | None = None,
) -> Seen[Data]:
    """One sweep; the row of a rank in `statuses` is its last report before it ended so."""
    size = size or len(rows)
    options = RunOptions(bench=bench or BenchRequest(), select=("COL002",), baseline=baseline)
    world = world_of(size, ranks_per_node=ranks_per_node, options=options)
    header = Header(run_id="hand", world_size=size, launcher="hand", options=options, created="today", version="0")
    empty = Seen(world, col002.CHECK, Recording(header=header, arrivals=world.arrivals))
    first = next(iter(rows.values()))
    params = {"backend": first.backend, "collective": first.collective}
    trial = structs.replace(new_trial(empty, params=params), number=0)
    outcomes = tuple(_outcome(rank, data, (statuses or {}).get(rank, Status.DONE)) for rank, data in rows.items())
    recording = structs.replace(empty.recording, trials=(trial,), outcomes=outcomes)
    return Seen(world, col002.CHECK, recording)


def _outcome(rank: int, data: Data, status: Status) -> Outcome:
    raw = Raw(encode(data))
    if status is Status.DONE:
        return Outcome(trial=0, code="COL002", rank=rank, status=status, data=raw)
    return Outcome(trial=0, code="COL002", rank=rank, status=status, partial_data=raw)
