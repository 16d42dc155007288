"""The hello: what a process says of itself, and what rank 0 makes of all of them before the first trial."""

import os
import secrets
from collections.abc import Mapping

from msgspec import structs

from ddpdiag.model import Arrival, Event, EventKind, Place
from ddpdiag.probes.gpu.visibility import pci_gpus, visible_gpus
from ddpdiag.probes.host.kernel import boot_id, proc_root, sys_root


def own_arrival(place: Place) -> Arrival:
    """This process's arrival, as far as it knows itself; whoever leads the run adds when it came, and from where."""
    return Arrival(
        place=place,
        host_id=boot_id(),
        pid=os.getpid(),
        address="",
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        pci_gpus=pci_gpus(sys_root(os.environ)),
        nonce=secrets.token_hex(4),
        cpus=f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
    )


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
            place = _filled(arrivals[rank].place, local, len(ranks), number)
            settled[rank] = structs.replace(arrivals[rank], place=place)
    return dict(sorted(settled.items()))


def _filled(place: Place, local: int, here: int, node: int) -> Place:
    return structs.replace(
        place,
        local_rank=local if place.local_rank is None else place.local_rank,
        local_world_size=here if place.local_world_size is None else place.local_world_size,
        node_rank=node if place.node_rank is None else place.node_rank,
    )


def mismatch(new: Arrival, world_size: int) -> Event | None:
    """What is to be told of a newcomer that was started with another world size than rank 0."""
    return None if new.place.world_size == world_size else _states(new)


def _states(new: Arrival) -> Event:
    place, size = new.place, str(new.place.world_size)
    return Event(kind=EventKind.MISMATCH, rank=place.rank, seconds=new.seconds, detail=size, node=place.node)


def fitted(new: Arrival, world_size: int) -> Arrival:
    """The newcomer in rank 0's world: it can take part all the same, so that only its world size is to blame."""
    return structs.replace(new, place=structs.replace(new.place, world_size=world_size))


def objection(known: Arrival | None, new: Arrival, world_size: int) -> tuple[Event, str] | None:
    """Why a newcomer cannot take part: its rank is taken, or outside the world. The event, and the sentence for it."""
    place = new.place
    who = f"{place.node} (pid {new.pid})"
    if known is not None:
        first = f"{known.place.node} (pid {known.pid})"
        event = Event(kind=EventKind.DUPLICATE, rank=place.rank, seconds=new.seconds, detail=first, node=who)
        return event, (
            f"rank {place.rank} came twice, from {first} and from {who}; each process needs its own rank, "
            "and each job on a host its own --master-port (or --run-id)"
        )
    if place.rank >= world_size:
        return _states(new), (
            f"rank {place.rank} on {who} expects {place.world_size} ranks, rank 0 expects {world_size}; "
            "start all ranks with one world size"
        )
    return None


def absent(arrivals: Mapping[int, Arrival], world_size: int, seconds: float) -> list[Event]:
    """An event for every rank that never came."""
    missing = [rank for rank in range(world_size) if rank not in arrivals]
    return [Event(kind=EventKind.ABSENT, rank=rank, seconds=seconds) for rank in missing]
