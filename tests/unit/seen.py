"""Hand-made runs: what a check would see, without a launcher, a worker or torch."""

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Raw, Struct, structs

from ddpdiag.checks.api import Check, Seen, new_trial
from ddpdiag.checks.world import World
from ddpdiag.codec import encode
from ddpdiag.model import Arrival, Event, Options, Outcome, Place, Recording, Status
from ddpdiag.model.recording import Header

D = TypeVar("D", bound=Struct)
E = TypeVar("E", bound=Struct)


def arrival_of(rank: int, size: int, *, ranks_per_node: int = 2, gpus: int = 0) -> Arrival:
    """Rank `rank` of `size`, on hosts n0, n1, ... with `ranks_per_node` ranks each."""
    node, local_rank = divmod(rank, ranks_per_node)
    place = Place(
        rank=rank,
        world_size=size,
        node=f"n{node}",
        launcher="hand",
        local_rank=local_rank,
        local_world_size=ranks_per_node,
        node_rank=node,
    )
    return Arrival(place=place, host_id=f"boot-{node}", pid=1000 + rank, address=f"10.0.0.{node % 250 + 1}", gpus=gpus)


def world_of(
    size: int,
    *,
    ranks_per_node: int = 2,
    gpus: int = 0,
    options: Options | None = None,
    out: frozenset[int] = frozenset(),
) -> World:
    """A world of `size` ranks that all came."""
    arrivals = {rank: arrival_of(rank, size, ranks_per_node=ranks_per_node, gpus=gpus) for rank in range(size)}
    return World(size=size, launcher="hand", options=options or Options(), arrivals=arrivals, out=out)


def seen_of(
    check: Check[D],
    rows: Mapping[int, D],
    *,
    statuses: Mapping[int, Status] | None = None,
    params: Mapping[str, str | int | float | bool] | None = None,
    env: Mapping[str, str | None] | None = None,
    size: int | None = None,
    ranks_per_node: int = 2,
    gpus: int = 0,
    options: Options | None = None,
    fresh: bool | None = None,
) -> Seen[D]:
    """One trial of `check` that gave `rows`; ranks in `statuses` ended in another way than DONE."""
    others = dict(statuses or {})
    size = size if size is not None else max([*rows, *others], default=0) + 1
    world = world_of(size, ranks_per_node=ranks_per_node, gpus=gpus, options=options)
    header = Header(run_id="hand", world_size=size, launcher="hand", options=world.options, created="", version="0.1.0")
    empty = Seen(world, check, Recording(header=header, arrivals=world.arrivals))
    trial = new_trial(empty, params=params, env=env, fresh=fresh)
    done = [
        Outcome(trial=0, code=check.code, rank=rank, status=Status.DONE, data=Raw(encode(row)))
        for rank, row in rows.items()
    ]
    ended = [Outcome(trial=0, code=check.code, rank=rank, status=status) for rank, status in others.items()]
    outcomes = tuple(sorted([*done, *ended], key=lambda outcome: outcome.rank))
    recording = Recording(header=header, arrivals=world.arrivals, trials=(trial,), outcomes=outcomes)
    return Seen(world, check, recording)


def with_events(seen: Seen[D], *events: Event) -> Seen[D]:
    """The same run, in which this happened as well."""
    return Seen(seen.world, seen.check, structs.replace(seen.recording, events=(*seen.recording.events, *events)))


def with_arrivals(seen: Seen[D], arrivals: Mapping[int, Arrival]) -> Seen[D]:
    """The same run, in which these ranks, and no others, came."""
    world = structs.replace(seen.world, arrivals=dict(arrivals))
    return Seen(world, seen.check, structs.replace(seen.recording, arrivals=dict(arrivals)))


def together(seen: Seen[D], other: Seen[E]) -> Seen[D]:
    """The same run, in which another check's only trial was done as well."""
    number = len(seen.recording.trials)
    trials = (*seen.recording.trials, *(structs.replace(trial, number=number) for trial in other.trials))
    outcomes = (*seen.recording.outcomes, *(structs.replace(outcome, trial=number) for outcome in other.outcomes))
    return Seen(seen.world, seen.check, structs.replace(seen.recording, trials=trials, outcomes=outcomes))
