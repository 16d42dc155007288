"""What the control channel costs rank 0 in a large world: 100 to 100,000 peers, with real connections.

    python tests/benchmarks/control_channel.py [--peers 100 1000 ...] [--helpers 16]

Rank 0 is the real one (ControlServer, Membership, Coordinator) in a process of its own. The peers are sockets of a few
other processes; each says what a supervisor says: it makes a plain connect, says hello, answers pings, and answers an
order with an outcome of 10 kB. Two trials run, one on every rank alone, and one of all ranks together with a barrier.

Each size is run three times: with one connection for each rank, without a secret and with one that all ranks share
(CURVE), and with one connection for each host of 8 ranks, with the secret, as worlds of more than 512 ranks do it.

Shown are the seconds in which all peers have arrived (until each has its welcome), have their first order, have the
acknowledgement of their outcome, and have passed the barrier of the second trial and been acknowledged again; `total`
is their sum. Since the peers compute on the same cores, the CPU time of rank 0 alone (all of its threads) is shown
beside: until all have arrived, are acknowledged, and in all. The bar at 10,000 peers, 1,250 connections and a secret:
3 s until the first outcome is acknowledged, and 2 s of rank 0's CPU.
"""

import argparse
import itertools
import multiprocessing
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import ModuleType

import msgspec
import zmq
from msgspec import structs

from ddpdiag.checks.api import Check, Scope, Stage
from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, Header, Outcome, Place, Recording, RunOptions, Status
from ddpdiag.model.news import CheckBegan, News
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.client import identity_of
from ddpdiag.runtime.control.messages import (
    Ack,
    BarrierOpen,
    BarrierReached,
    Hello,
    HelloAck,
    Ping,
    Pong,
    RunTrial,
    Shutdown,
)
from ddpdiag.runtime.control.server import ControlServer, raise_open_files_limit
from ddpdiag.runtime.control.wire import Batch, Wire, new_socket, unpack_batch
from ddpdiag.runtime.coordinator.coordinator import Coordinator

PEERS = (100, 1_000, 3_000, 10_000, 100_000)
RANKS_PER_HOST = 8
OUTCOME_BYTES = 10_000
WAIT_SECONDS = 20.0  # and as many for each 10,000 peers
RUN_ID = "benchmark"
SECRET = b"what all ranks share"
PAUSE_SECONDS = 0.01  # to look at a thousand sockets for each message would take the cores away from rank 0
HEAD = (
    "| peers | connections | secret | arrive | order | acknowledge | first three | barrier | total "
    "| rank 0: CPU to arrive | to acknowledge | in all |\n|" + "--:|" * 12
)


class Payload(msgspec.Struct, frozen=True):
    """What a peer measured."""

    text: str


# When the last peer of a helper had got so far, on the monotonic clock that all processes of a host share.
MOMENTS = ("welcome", "order", "noted", "noted_again")


# The peers ---------------------------------------------------------------------------------------------------------


def arrival_of(rank: int, size: int) -> Arrival:
    """A rank of a world with 8 ranks on each host."""
    node, local = divmod(rank, RANKS_PER_HOST)
    place = Place(
        rank=rank,
        world_size=size,
        host=f"n{node:05d}",
        launcher="slurm",
        local_rank=local,
        local_world_size=min(RANKS_PER_HOST, size - node * RANKS_PER_HOST),
        node_rank=node,
    )
    return Arrival(place=place, host_id=f"boot-{node}", pid=1000 + rank, address="127.0.0.1", nonce=f"{rank:08x}")


class Host:
    """Some ranks behind one connection, as `relay.HostRelay` passes them on; one alone sends its messages as they are.

    Messages that differ by rank are one text with another number, so that peers take little from the cores.
    """

    def __init__(self, ranks: range, size: int, wire: Wire, texts: Mapping[str, bytes]) -> None:
        self._wire, self._size, self._texts = wire, size, texts
        arrivals = [arrival_of(rank, size) for rank in ranks]
        self._ranks = {identity_of(arrival): b"%d" % arrival.place.rank for arrival in arrivals}
        self._hellos = [wire.encode(Hello(arrival)) for arrival in arrivals]
        self.socket = new_socket(zmq.DEALER)
        wire.lock_client(self.socket)
        self.socket.setsockopt(zmq.ROUTING_ID, next(iter(self._ranks)))
        self.last: dict[str, float] = {}
        self.leaving = 0
        self._obeyed: set[tuple[bytes, str]] = set()

    def start(self, source: str, port: int) -> None:
        """As `join`: a plain connect first, then the hello of local rank 0; the others', once that was answered."""
        socket.create_connection(("127.0.0.1", port), source_address=(source, 0)).close()
        self.socket.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        self.socket.send(self._hellos[0])

    def receive(self) -> None:
        """Answer what has come."""
        batch = Batch()
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            parcels = unpack_batch(frames[1]) if len(frames) == 2 else [([next(iter(self._ranks))], frames[0])]
            for identities, data in parcels:
                self._answer(identities, data, batch)
        for frames in batch.packed_messages():
            if len(self._ranks) > 1:
                self.socket.send_multipart(frames)
            else:
                for _identities, data in unpack_batch(frames[1]):
                    self.socket.send(data)

    def _answer(self, identities: Sequence[bytes], data: bytes, batch: Batch) -> None:
        if b'"type":"Start"' in data[:80]:
            self.last["welcome"] = time.monotonic()
            return
        message, answer = self._wire.decode_for_rank(data), b""
        match message:
            case HelloAck() if len(identities) == 1 and identities[0] == next(iter(self._ranks)):
                for identity, hello in list(zip(self._ranks, self._hellos, strict=True))[1:]:
                    batch.add(identity, hello)
            case Ping():
                answer = self._texts["pong"]
            case RunTrial(trial):
                identities = self._first_time(identities, "order" if trial.number == 1 else "order_again")
                answer = self._texts["first" if trial.number == 1 else "reached"]
            case BarrierOpen():
                identities = self._first_time(identities, "barrier")
                answer = self._texts["second"]
            case Ack(number):
                self._note("noted" if number == 1 else "noted_again")
            case Shutdown():
                self.leaving += len(identities)
                answer = self._texts["pong"]
            case _:
                pass
        for identity in identities if answer else ():
            batch.add(identity, answer.replace(RANK, self._ranks[identity]))

    def _first_time(self, identities: Sequence[bytes], moment: str) -> list[bytes]:
        """Those of the ranks that have not obeyed this yet: rank 0 repeats itself."""
        new = [identity for identity in identities if (identity, moment) not in self._obeyed]
        self._obeyed.update((identity, moment) for identity in new)
        if new:
            self._note(moment)
        return new

    def _note(self, moment: str) -> None:
        self.last[moment] = time.monotonic()


RANK = b"987654321"


def texts_of(wire: Wire) -> dict[str, bytes]:
    """What ranks send, each with the same number in place of its rank."""
    data = msgspec.Raw(msgspec.json.encode(Payload("x" * OUTCOME_BYTES)))
    codes = {"first": ONE_BY_ONE.code, "second": TOGETHER.code}
    outcomes = {
        name: wire.encode(Outcome(trial=number, code=code, rank=int(RANK), status=Status.DONE, data=data))
        for number, (name, code) in enumerate(codes.items(), 1)
    }
    return {"pong": wire.encode(Pong()), "reached": wire.encode(BarrierReached(2, RANK.decode())), **outcomes}


def serve_peers(ranks: range, size: int, together: int, port: int, secret: bytes, say: Connection) -> None:
    """One helper process: connect when told, serve until the farewell of all, and tell when what was over.

    It has an address of its own on loopback: one address has 28,000 ports.
    """
    raise_open_files_limit()
    zmq.Context.instance().set(zmq.MAX_SOCKETS, len(ranks) + 16)
    wire, source = Wire(RUN_ID, secret), f"127.0.1.{ranks.start * 200 // size + 1}"
    texts, ends = texts_of(wire), [*ranks[::together], ranks.stop]
    hosts = [Host(range(first, end), size, wire, texts) for first, end in itertools.pairwise(ends)]
    poller = zmq.Poller()
    say.send("ready")
    say.recv()
    by_socket = {host.socket: host for host in hosts}
    for number, host in enumerate(hosts):
        host.start(source, port)
        poller.register(host.socket, zmq.POLLIN)
        if number % 50 == 0:  # who came early must not fall silent meanwhile
            serve(poller, by_socket, 0)
    while sum(host.leaving for host in hosts) < len(ranks):
        serve(poller, by_socket, 1000)
        time.sleep(PAUSE_SECONDS)
    for host in hosts:
        host.socket.close(linger=500)
    say.send({name: max(host.last[name] for host in hosts) for name in MOMENTS})


def serve(poller: zmq.Poller, hosts: Mapping[object, Host], milliseconds: int) -> None:
    """Answer what has come to any host."""
    for ready, _event in poller.poll(milliseconds):
        hosts[ready].receive()


# Rank 0 ------------------------------------------------------------------------------------------------------------


def measure_nothing(_context: object) -> Payload:
    return Payload("")


def check_of(code: str, scope: Scope) -> Check[Payload]:
    """A check of one plain trial, whose module has what a real one has."""
    module = ModuleType(f"benchmark_{code}")
    vars(module).update(Data=Payload, measure=measure_nothing, judge=lambda _seen: iter(()))
    sys.modules[module.__name__] = module
    return Check(module.__name__, code, code.lower(), Stage.HOST, scope, deadline=30.0)


ONE_BY_ONE = check_of("HST901", Scope.RANK)
TOGETHER = check_of("HST902", Scope.WORLD)


class Clock:
    """The listener: rank 0's CPU time at the start of each check; the first one begins when all have come."""

    def __init__(self) -> None:
        self.cpu: list[float] = []

    def tell(self, news: News) -> None:
        if isinstance(news, CheckBegan):
            self.cpu.append(time.process_time())

    def close(self) -> None: ...


def lead(size: int, secret: bytes, together: int, say: Connection) -> None:
    """Rank 0: where it listens, or why it does not; and what it saw: is the recording whole?"""
    arrival = arrival_of(0, size)
    arrival = structs.replace(arrival, place=structs.replace(arrival.place, local_world_size=together))
    wait_seconds = WAIT_SECONDS * max(1.0, size / 10_000)
    header = Header(
        run_id=RUN_ID,
        world_size=size,
        launcher="slurm",
        options=RunOptions(budget_seconds=4 * wait_seconds),
        created="",
        version="0",
    )
    port = free_port("127.0.0.1")
    try:
        server = ControlServer([port], Wire(RUN_ID, secret), arrival, local_only=True)
    except UsageError as error:
        say.send(str(error))
        return
    clock = Clock()
    say.send(port)
    say.recv()
    before = time.process_time()
    coordinator = Coordinator(server, header, (ONE_BY_ONE, TOGETHER), clock, lambda: None)
    recording = coordinator.run(wait_seconds)
    conducted = time.process_time()
    coordinator.membership.shut_down(0, "over")
    first, second = (*clock.cpu, conducted, conducted)[:2]
    say.send(
        {
            "fault": fault_in(recording, size),
            "arrive": first - before,
            "noted": second - before,
            "all": conducted - before,
        }
    )


def fault_in(recording: Recording, size: int) -> str:
    """What is missing, or nothing."""
    done = sum(outcome.status is Status.DONE for outcome in recording.outcomes)
    if len(recording.arrivals) != size or done != 2 * size or recording.events:
        kinds = sorted({event.kind.value for event in recording.events})
        return f"{len(recording.arrivals)} of {size} came, {done} of {2 * size} outcomes done, events: {kinds}"
    return ""


# The table -----------------------------------------------------------------------------------------------------------


def measure(size: int, helpers: int, secret: bytes, together: int) -> str:
    """One size: a row of the table, or what went wrong."""
    fresh = multiprocessing.get_context("spawn")
    ours, theirs = fresh.Pipe()
    rank_0 = fresh.Process(target=lead, args=(size, secret, together, theirs), daemon=True)
    rank_0.start()
    port = ours.recv()
    head = f"| {size:,} | {-(-size // together):,} | {'yes' if secret else 'no'} |"
    if isinstance(port, str):
        return f"{head} {port} |"
    share = -(-size // helpers // together) * together
    links = []
    for first in range(0, size, share):
        client, end = fresh.Pipe()
        ranks = range(first, min(size, first + share))
        fresh.Process(target=serve_peers, args=(ranks, size, together, port, secret, end), daemon=True).start()
        links.append(client)
    for client in links:
        client.recv()
    begin = time.monotonic()
    for client in (ours, *links):
        client.send("go")
    seen = answer_of(ours, rank_0)
    if seen["fault"]:
        return f"{head} {seen['fault']} |"
    times = [client.recv() for client in links]
    return f"{head} {cells(begin, {name: max(one[name] for one in times) for name in MOMENTS}, seen)} |"


def answer_of(client: Connection, process: multiprocessing.process.BaseProcess) -> dict[str, float | str]:
    """What rank 0 says at its end."""
    while not client.poll(1.0):
        if process.exitcode is not None:
            return {"fault": f"rank 0 ended with {process.exitcode}"}
    answer: dict[str, float | str] = client.recv()
    return answer


def cells(begin: float, last: dict[str, float], seen: dict[str, float | str]) -> str:
    """Figures of a row."""
    welcome, order, noted, again = (last[name] for name in MOMENTS)
    seconds = (welcome - begin, order - welcome, noted - order, noted - begin, again - noted, again - begin)
    return " | ".join(f"{value:.2f} s" for value in (*seconds, seen["arrive"], seen["noted"], seen["all"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, help="sizes (default: 100 to 10000)")
    parser.add_argument("--helpers", type=int, default=16, help="processes that hold the peers (default: 16)")
    parser.add_argument(
        "--together", type=int, nargs="+", default=(1, RANKS_PER_HOST), help="ranks on a connection: 1, 8"
    )
    asked = parser.parse_args()
    if min(asked.peers) < 1 or asked.helpers < 1:
        parser.error("at least one peer and one helper")
    print(HEAD, flush=True)
    for size in asked.peers:
        for secret, together in ((b"", 1), (SECRET, 1), (SECRET, RANKS_PER_HOST)):
            if together in asked.together:
                print(measure(size, min(asked.helpers, size), secret, together), flush=True)


if __name__ == "__main__":
    main()
