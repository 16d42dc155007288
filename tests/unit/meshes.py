"""Hand-made meshes: what RDZ004 would have seen between hosts n0, n1, ... of one rank each."""

from collections.abc import Mapping

from msgspec import Raw, structs
from seen import world_of

from ddpdiag.checks.api import Seen, new_trial
from ddpdiag.checks.rendezvous import mesh
from ddpdiag.checks.rendezvous.links import AT_END
from ddpdiag.codec import encode
from ddpdiag.model import Arrival, Outcome, Recording, RunOptions, Status
from ddpdiag.model.recording import Header
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.probes.net.mesh_listener import KIB, LARGE_SIZE
from ddpdiag.probes.net.tcp_connect import Reach

Link = tuple[int, int]

DROPPED: dict[str, object] = {"reach": Reach.DROPPED}
REFUSED: dict[str, object] = {"reach": Reach.REFUSED}
UNREACHABLE: dict[str, object] = {"reach": Reach.UNREACHABLE}
SILENT: dict[str, object] = {"stalled_bytes": 0, "passed_bytes": 0, "bytes_per_s": None}
STUCK: dict[str, object] = {"stalled_bytes": 64 * KIB, "passed_bytes": KIB, "bytes_per_s": None}


def slow(bytes_per_s: float) -> dict[str, object]:
    return {"bytes_per_s": bytes_per_s}


def losing(share: float) -> dict[str, object]:
    return {"segments": 10_000, "retransmitted": round(10_000 * share)}


def cell(peer: int, **more: object) -> Cell:
    """A fine way to a host, at 1 GB/s, unless said otherwise."""
    if more.get("reach", Reach.ACCEPTED) is not Reach.ACCEPTED:
        return Cell(peer=peer, address=f"10.0.0.{peer + 1}", **more)  # type: ignore[arg-type]
    usual = {
        "reach": Reach.ACCEPTED,
        "address": f"10.0.0.{peer + 1}",
        "passed_bytes": LARGE_SIZE,
        "bytes_per_s": 1e9,
        "segments": 10_000,
        "retransmitted": 0,
    }
    return Cell(peer=peer, **(usual | more))  # type: ignore[arg-type]


def row(size: int, rank: int, faults: Mapping[Link, Mapping[str, object]], nominal: float | None = None) -> mesh.Data:
    cells = [cell(peer, **faults.get((rank, peer), {})) for peer in range(size) if peer != rank]
    return mesh.Data(
        offered_address=f"10.0.0.{rank + 1}",
        listener_port=40_000 + rank,
        interfaces=(Interface(name="eth0", addresses=(f"10.0.0.{rank + 1}",), mtu=1500, bytes_per_s=nominal),),
        ephemeral_ports=(32768, 60999),
        cells=tuple(cells),
    )


def meshed(
    size: int,
    *trials: Mapping[Link, Mapping[str, object]],
    settings: Mapping[str, str] | None = None,
    nominal: float | None = None,
    ended: Mapping[int, Status] | None = None,
    arrivals: Mapping[int, Arrival] | None = None,
    at_end: bool = False,
) -> Seen[mesh.Data]:
    """Trials of RDZ004 over `size` hosts, each with its bad ways; ranks in `ended` gave no answer.

    `at_end`: the last one was at the end of the run.
    """
    world = world_of(size, ranks_per_node=1, options=RunOptions(settings=dict(settings or {})))
    world = structs.replace(world, arrivals=dict(arrivals)) if arrivals else world
    header = Header(run_id="hand", world_size=size, launcher="hand", options=world.options, created="", version="0")
    empty = Seen(world, mesh.CHECK, Recording(header=header, arrivals=world.arrivals))
    planned = [
        structs.replace(
            new_trial(empty, groups=(tuple(range(size)),)),
            number=number,
            params={AT_END: True} if at_end and number + 1 == len(trials) else {},
        )
        for number, _ in enumerate(trials)
    ]
    outcomes = [
        Outcome(trial=n, code="RDZ004", rank=rank, status=Status.DONE, data=Raw(encode(row(size, rank, bad, nominal))))
        if rank not in (ended or {})
        else Outcome(trial=n, code="RDZ004", rank=rank, status=(ended or {})[rank])
        for n, bad in enumerate(trials)
        for rank in range(size)
    ]
    recording = structs.replace(empty.recording, trials=tuple(planned), outcomes=tuple(outcomes))
    return Seen(world, mesh.CHECK, recording)


def every(size: int, fault: Mapping[str, object], *, sender: int | None = None, receiver: int | None = None) -> dict:
    """The same fault on all ways from `sender`, to `receiver`, both, or (neither given) everywhere."""
    ways = [(a, b) for a in range(size) for b in range(size) if a != b]
    everywhere = sender is None and receiver is None
    return {(a, b): fault for a, b in ways if everywhere or a == sender or b == receiver}
