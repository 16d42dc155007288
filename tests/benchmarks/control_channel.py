"""What the control channel costs rank 0 in a large world: 100, 1,000, 3,000 and 10,000 peers, with real connections.

    python tests/benchmarks/control_channel.py [--peers 100 1000 ...] [--helpers 16]

Rank 0 is the real one (ControlServer, Membership, Coordinator) in a process of its own. The peers are sockets of a few
other processes; each says what a supervisor says: it connects, says hello, answers pings, and answers an
order with an outcome of 10 kB. Two trials run, one on every rank alone, and one of all ranks together with a gate.

Shown are the seconds in which all peers have arrived (until each has its welcome), have their first order, have the
acknowledgement of their outcome, and have passed the gate of the second trial and been acknowledged again; `total` is
their sum. Each size is run twice, with a secret that all ranks share (CURVE) and without. The bar is 5 s to the first
acknowledgement at 10,000 peers. Since the peers compute on the same cores, the CPU time of rank 0 alone (both of its
threads) is shown beside: until all have arrived, are acknowledged, and in all.
"""

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TypedDict

import msgspec
import zmq

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.model import Arrival, Finding, Header, Options, Outcome, Place, Recording, Status
from ddpdiag.model.news import CheckBegan, News
from ddpdiag.probes.net.tcp_connect import free_port, reach
from ddpdiag.runtime.control.client import ControlClient, new_socket
from ddpdiag.runtime.control.messages import (
    Ack,
    BarrierOpen,
    BarrierReached,
    Downward,
    Hello,
    Ping,
    Pong,
    RunTrial,
    Shutdown,
    Start,
    Upward,
)
from ddpdiag.runtime.control.server import ControlServer, raise_open_files
from ddpdiag.runtime.control.wire import Wire
from ddpdiag.runtime.coordinator.coordinator import Coordinator

PEERS = (100, 1_000, 3_000, 10_000)
RANKS_PER_HOST = 8
OUTCOME_BYTES = 10_000
WAIT_SECONDS = 20.0
RUN_ID = "benchmark"
SECRET = b"what all ranks share"
PAUSE_SECONDS = 0.01  # to look at a thousand sockets for each message would take the cores away from rank 0
HEAD = (
    "| peers | secret | arrive | order | acknowledge | gate | total | rank 0: CPU to arrive | to acknowledge | in all |"
    "\n|" + "--:|" * 10
)


class Payload(msgspec.Struct, frozen=True):
    """What a peer measured."""

    text: str


class Times(TypedDict):
    """When the last peer of a helper had got so far, on the monotonic clock that all processes of a host share."""

    welcome: float
    order: float
    noted: float
    barrier: float
    noted_again: float


# The peers ---------------------------------------------------------------------------------------------------------


def arrival_of(rank: int, size: int) -> Arrival:
    """A rank of a world with 8 ranks on each host."""
    node, local = divmod(rank, RANKS_PER_HOST)
    name = f"n{node:05d}"
    place = Place(rank=rank, world_size=size, node=name, launcher="slurm", local_rank=local)
    return Arrival(place=place, host_id=f"boot-{node}", pid=1000 + rank, address="127.0.0.1", nonce=f"{rank:08x}")


class Peers:
    """Some ranks, each with a connection of its own."""

    def __init__(self, ranks: range, size: int, port: int, secret: bytes) -> None:
        self._wire = Wire(RUN_ID, secret)
        self._size = size
        self._port = port
        self._links: dict[zmq.Socket[bytes], tuple[int, ControlClient]] = {}
        self._poller = zmq.Poller()
        self._leaving = 0
        self._data = msgspec.Raw(msgspec.json.encode(Payload("x" * OUTCOME_BYTES)))
        self._last: dict[str, float] = {}
        for rank in ranks:
            socket = new_socket(zmq.DEALER)
            self._wire.lock_client(socket)
            socket.setsockopt(zmq.ROUTING_ID, f"{rank}-{rank:08x}".encode())
            self._links[socket] = rank, ControlClient(socket, self._wire)
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> Times:
        """Come, and serve until the farewell of all.

        As runtime.control.client's `join`: a plain connect first, then hello; it does not wait for the answer here.
        """
        for socket, (rank, client) in self._links.items():
            reach("127.0.0.1", self._port, 2.0)
            socket.connect(f"tcp://127.0.0.1:{self._port}")
            client.send(Hello(arrival_of(rank, self._size)))
            if rank % 50 == 0:  # who came early must not fall silent meanwhile
                self.serve(0)
        while self._leaving < len(self._links):
            self.serve(1000)
            time.sleep(PAUSE_SECONDS)
        for socket in self._links:
            socket.close(linger=500)
        return Times(**{name: self._last[name] for name in Times.__annotations__})  # type: ignore[typeddict-item]

    def serve(self, milliseconds: int) -> None:
        """Answer what has come."""
        for socket, _event in self._poller.poll(milliseconds):
            rank, client = self._links[socket]
            for message in client.receive():
                for answer in self._answers(rank, message):
                    client.send(answer)

    def _answers(self, rank: int, message: Downward) -> Iterator[Upward]:
        now = time.monotonic()
        match message:
            case Start():
                self._last["welcome"] = now
            case Ping():
                yield Pong()
            case RunTrial(trial) if trial.number == 1:
                self._last["order"] = now
                yield self._result(rank, 1)
            case RunTrial(trial):
                yield BarrierReached(trial.number, f"{40_000 + rank % 20_000}")
            case BarrierOpen(number):
                self._last["barrier"] = now
                yield self._result(rank, number)
            case Ack(number):
                self._last["noted" if number == 1 else "noted_again"] = now
            case Shutdown():
                self._leaving += 1
                yield Pong()
            case _:
                pass

    def _result(self, rank: int, number: int) -> Outcome:
        code = ONE_BY_ONE.code if number == 1 else TOGETHER.code
        return Outcome(trial=number, code=code, rank=rank, status=Status.DONE, data=self._data)


def serve_peers(ranks: range, size: int, port: int, secret: bytes, say: Connection) -> None:
    """One helper process: connect when told, serve, and tell when what was over."""
    raise_open_files()
    zmq.Context.instance().set(zmq.MAX_SOCKETS, len(ranks) + 16)
    peers = Peers(ranks, size, port, secret)
    say.send("ready")
    say.recv()
    say.send(peers.run())


# Rank 0 ------------------------------------------------------------------------------------------------------------


def no_findings(_seen: Seen[Payload]) -> Iterator[Finding]:
    yield from ()


def measure_nothing(_context: object) -> Payload:
    return Payload("")


def check_of(code: str, scope: Scope) -> Check[Payload]:
    """A check of one plain trial."""
    return Check(
        code,
        code.lower(),
        Stage.HOST,
        scope,
        manual="",
        judge=no_findings,
        data=Payload,
        measure=measure_nothing,
        deadline=30.0,
    )


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


def lead(size: int, secret: bytes, say: Connection) -> None:
    """Rank 0, and what it saw: is the recording whole?"""
    header = Header(
        run_id=RUN_ID,
        world_size=size,
        launcher="slurm",
        options=Options(budget_seconds=4 * WAIT_SECONDS),
        created="",
        version="0",
    )
    port = free_port("127.0.0.1")
    server = ControlServer([port], Wire(RUN_ID, secret), arrival_of(0, size), local_only=True)
    clock = Clock()
    say.send(port)
    say.recv()
    before = time.process_time()
    coordinator = Coordinator(server, header, (ONE_BY_ONE, TOGETHER), clock, lambda: None)
    recording = coordinator.run(WAIT_SECONDS)
    conducted = time.process_time()
    coordinator.shut_down(0, "over")
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


def measure(size: int, helpers: int, secret: bytes) -> str:
    """One size: a row of the table, or what went wrong."""
    fresh = multiprocessing.get_context("spawn")
    ours, theirs = fresh.Pipe()
    rank_0 = fresh.Process(target=lead, args=(size, secret, theirs), daemon=True)
    rank_0.start()
    port = ours.recv()
    share = -(-size // helpers)
    links = []
    for first in range(0, size, share):
        client, end = fresh.Pipe()
        ranks = range(first, min(size, first + share))
        fresh.Process(target=serve_peers, args=(ranks, size, port, secret, end), daemon=True).start()
        links.append(client)
    for client in links:
        client.recv()
    begin = time.monotonic()
    for client in (ours, *links):
        client.send("go")
    seen = answer_of(ours, rank_0)
    if seen["fault"]:
        return f"{size} peers: {seen['fault']}"
    times = [client.recv() for client in links]
    return row(
        size, bool(secret), begin, {name: max(one[name] for one in times) for name in Times.__annotations__}, seen
    )


def answer_of(client: Connection, process: multiprocessing.process.BaseProcess) -> dict[str, float | str]:
    """What rank 0 says at its end."""
    while not client.poll(1.0):
        if process.exitcode is not None:
            return {"fault": f"rank 0 ended with {process.exitcode}"}
    answer: dict[str, float | str] = client.recv()
    return answer


def row(size: int, locked: bool, begin: float, last: dict[str, float], seen: dict[str, float | str]) -> str:
    """One line of the table."""
    moments = (begin, *(last[name] for name in ("welcome", "order", "noted", "noted_again")))
    steps = [late - early for early, late in itertools.pairwise(moments)]
    cells = " | ".join(f"{seconds:.2f} s" for seconds in (*steps, moments[-1] - begin))
    cpu = " | ".join(f"{seen[name]:.2f} s" for name in ("arrive", "noted", "all"))
    return f"| {size:,} | {'yes' if locked else 'no'} | {cells} | {cpu} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, help="sizes (default: 100 to 10000)")
    parser.add_argument("--helpers", type=int, default=16, help="processes that hold the peers (default: 16)")
    asked = parser.parse_args()
    if min(asked.peers) < 1 or asked.helpers < 1:
        parser.error("at least one peer and one helper")
    print(HEAD, flush=True)
    for size in asked.peers:
        for secret in (b"", SECRET):
            print(measure(size, min(asked.helpers, size), secret), flush=True)


if __name__ == "__main__":
    main()
