"""Rank 0's view of the hellos: who can take part, who cannot and why, and who is missing."""

from collections.abc import Mapping

from msgspec import structs

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.sanitize import printable
from ddpdiag.text import count


def settle(arrivals: Mapping[int, Arrival]) -> dict[int, Arrival]:
    """The arrivals by rank, with what launchers left open filled in.

    A local rank that no launcher gave is the order of ranks on one host (host name and boot id).
    """
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(arrivals):
        hosts.setdefault(arrivals[rank].host, []).append(rank)
    settled: dict[int, Arrival] = {}
    for number, ranks in enumerate(hosts.values()):
        for local, rank in enumerate(ranks):
            place = arrivals[rank].place
            known = {"local_rank": local, "local_world_size": len(ranks), "node_rank": number}
            missing = {name: value for name, value in known.items() if getattr(place, name) is None}
            settled[rank] = structs.replace(arrivals[rank], place=structs.replace(place, **missing))
    return dict(sorted(settled.items()))


def mismatch(new: Arrival, world_size: int) -> Event | None:
    """The event for a newcomer that was started with another world size than rank 0."""
    return None if new.place.world_size == world_size else _states(new)


def _states(new: Arrival) -> Event:
    place, size = new.place, str(new.place.world_size)
    return Event(kind=EventKind.MISMATCH, rank=place.rank, seconds=new.seconds, detail=size, host=place.host)


def fitted(new: Arrival, world_size: int) -> Arrival:
    """The newcomer in rank 0's world: it can take part all the same, so that only its world size is to blame."""
    return structs.replace(new, place=structs.replace(new.place, world_size=world_size))


def is_of_another_run(new: Arrival, own: Arrival) -> bool:
    """Whether a newcomer belongs to another job than rank 0 (`own`): of Slurm, or of another user of one host."""
    jobs = {arrival.slurm.partition(".")[0] for arrival in (new, own)}
    users = {new.user, own.user} if new.host_id == own.host_id else set()
    return (len(jobs) > 1 and "" not in jobs) or (len(users) > 1 and "" not in users)


def in_words(arrival: Arrival) -> str:
    """The process for people: "user ann, pid 17 on n1, started 12 s ago"."""
    parts = [f"user {arrival.user}" if arrival.user else "", f"pid {arrival.pid} on {arrival.place.host}"]
    parts += [f"job {arrival.slurm} of Slurm"] if arrival.slurm else []
    parts += [f"started {arrival.up_seconds:.0f} s before"] if arrival.up_seconds is not None else []
    return printable(", ".join(filter(None, parts)))


def objection(known: Arrival | None, new: Arrival, world_size: int) -> tuple[Event, str] | None:
    """Why a newcomer cannot take part: its rank is taken, or outside the world. The event, and the sentence for it."""
    place = new.place
    who = f"{place.host} (pid {new.pid})"
    if known is not None:
        first = f"{known.place.host} (pid {known.pid})"
        event = Event(kind=EventKind.DUPLICATE, rank=place.rank, seconds=new.seconds, detail=first, host=who)
        return event, (
            f"rank {place.rank} joined twice, from {first} and from {who}; each process needs its own rank, "
            "and each job on a host its own --master-port (or --run-id)"
        )
    if place.rank >= world_size:
        return _states(new), (
            f"rank {place.rank} on {who} expects {count(place.world_size, 'rank')}, but rank 0 expects {world_size}; "
            "start all ranks with one world size"
        )
    return None


def absent(arrivals: Mapping[int, Arrival], world_size: int, seconds: float) -> list[Event]:
    """An event for every rank that never joined."""
    missing = [rank for rank in range(world_size) if rank not in arrivals]
    return [Event(kind=EventKind.ABSENT, rank=rank, seconds=seconds) for rank in missing]
