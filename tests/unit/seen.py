"""Hand-made runs: what a check would see, without a launcher, a worker or torch."""

import sys
from collections.abc import Mapping
from itertools import count
from types import ModuleType
from typing import Any, TypeVar

from msgspec import Raw, Struct, structs

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage, new_trial
from ddpdiag.checks.world import World
from ddpdiag.codec import encode
from ddpdiag.model import Arrival, Event, Kind, Outcome, Place, Recording, RunOptions, Status
from ddpdiag.model.recording import Header

_numbers = count()

D = TypeVar("D", bound=Struct)
E = TypeVar("E", bound=Struct)


def arrival_of(rank: int, size: int, *, ranks_per_node: int = 2, gpus: int = 0) -> Arrival:
    """Rank `rank` of `size`, on hosts n0, n1, ... with `ranks_per_node` ranks each."""
    node, local_rank = divmod(rank, ranks_per_node)
    place = Place(
        rank=rank,
        world_size=size,
        host=f"n{node}",
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
    options: RunOptions | None = None,
    out: frozenset[int] = frozenset(),
) -> World:
    """A world of `size` ranks that all came."""
    arrivals = {rank: arrival_of(rank, size, ranks_per_node=ranks_per_node, gpus=gpus) for rank in range(size)}
    return World(size=size, launcher="hand", options=options or RunOptions(), arrivals=arrivals, inactive_ranks=out)


def unseen(check: Check[D], world: World) -> Seen[D]:
    """The begin of a run, before any trial."""
    header = Header(
        run_id="hand", world_size=world.size, launcher="hand", options=world.options, created="", version="0.1.0"
    )
    return Seen(world, check, Recording(header=header, arrivals=world.arrivals))


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
    options: RunOptions | None = None,
    fresh: bool = False,
) -> Seen[D]:
    """One trial of `check` that gave `rows`; ranks in `statuses` ended in another way than DONE."""
    others = dict(statuses or {})
    size = size if size is not None else max([*rows, *others], default=0) + 1
    world = world_of(size, ranks_per_node=ranks_per_node, gpus=gpus, options=options)
    empty = unseen(check, world)
    trial = new_trial(empty, params=params, env=env, fresh=fresh)
    done = [
        Outcome(trial=0, code=check.code, rank=rank, status=Status.DONE, data=Raw(encode(row)))
        for rank, row in rows.items()
    ]
    ended = [Outcome(trial=0, code=check.code, rank=rank, status=status) for rank, status in others.items()]
    outcomes = tuple(sorted([*done, *ended], key=lambda outcome: outcome.rank))
    return Seen(world, check, structs.replace(empty.recording, trials=(trial,), outcomes=outcomes))


def made_check(
    code: str, scope: Scope = Scope.RANK, kind: Kind = Kind.PLAIN, *, stage: Stage, **parts: object
) -> Check[Nothing]:
    """A check whose module has these parts, such as `plan` and `measure`; it finds nothing unless told to."""
    module = ModuleType(f"made_check_{code}_{next(_numbers)}")
    vars(module).update({"judge": lambda _: iter(()), **parts})
    sys.modules[module.__name__] = module
    return Check(module.__name__, code, code.lower(), stage, scope, kind)


def skip_text(check: Check[Any], known: Seen[Any] | World) -> str | None:
    """The reason for which a check is left out, or None."""
    seen = unseen(check, known) if isinstance(known, World) else known
    reason = check.skip(seen if seen.check is check else seen.of(check))
    return reason.text if reason is not None else None


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
