"""What a stranger on the same network, or with an account on the same host, can send to a run.

Each attack is a function of a `Target`, which it pesters until `over` is set. It knows the run id and the ports, and
not the secret.
"""

import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL").ljust(64, b"\0")
CURVE_GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE").ljust(64, b"\0")
PLACE = {"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 2, "host": "evil", "launcher": "hand"}
ARRIVAL = {"place": PLACE, "host_id": "x", "pid": 1, "address": "", "gpus": 0, "nonce": "beefbeef", "cpu_mask": "1"}


@dataclass
class Target:
    """A run: its id, and the ports at which its rank 0 may listen."""

    run_id: str
    ports: tuple[int, ...]
    version: str
    over: threading.Event = field(default_factory=threading.Event)

    def connections(self, pause: float = 0.01) -> Iterator[socket.socket]:
        """A connection to each port on which somebody listens, again and again until the run is over."""
        for port in itertools.cycle(self.ports):
            if self.over.wait(pause):
                return
            with contextlib.suppress(OSError):
                yield socket.create_connection(("127.0.0.1", port), 0.5)

    def framed(self, body: object) -> bytes:
        return json.dumps({"run_id": self.run_id, "body": body}).encode()

    def hello(self, rank: int = 1, **arrival: object) -> bytes:
        place = {**PLACE, "rank": rank}
        own = {**ARRIVAL, "place": place, **arrival}
        return self.framed({"type": "Hello", "arrival": own, "version": self.version})


# Plain TCP -----------------------------------------------------------------------------------------------------------


def sending(*parts: bytes) -> Callable[[Target], None]:
    """Send these, and hold the connection."""

    def attack(target: Target) -> None:
        held = []
        for connection in target.connections():
            held.append(connection)
            with contextlib.suppress(OSError):
                for part in parts:
                    connection.sendall(part)
            if len(held) > 50:
                held.pop(0).close()
        for connection in held:
            connection.close()

    return attack


def pouring(begin: bytes, part: bytes) -> Callable[[Target], None]:
    """Send without end."""

    def attack(target: Target) -> None:
        for connection in target.connections():
            with connection, contextlib.suppress(OSError):
                connection.sendall(begin)
                while not target.over.is_set():
                    connection.sendall(part)

    return attack


def hanging_up(target: Target) -> None:
    """Reset as soon as it is accepted."""
    for connection in target.connections(0.001):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def holding(target: Target) -> None:
    """Up to 400 silent connections."""
    held = list(itertools.islice(target.connections(0.001), 400))
    target.over.wait()
    for connection in held:
        connection.close()


def unfinished(size: int, begin: bytes) -> Callable[[Target], None]:
    """Up to 1,000 connections, each with a frame that lacks its last byte."""

    def attack(target: Target) -> None:
        frame = begin + struct.pack(">Q", size) + bytes(size - 1)
        held = []
        for connection in itertools.islice(target.connections(0.001), 1000):
            held.append(connection)
            connection.settimeout(0.5)
            with contextlib.suppress(OSError):
                connection.sendall(frame)
        target.over.wait()
        for connection in held:
            connection.close()

    return attack


# ZeroMQ --------------------------------------------------------------------------------------------------------------


def saying(
    *messages: Callable[[Target], bytes],
    identity: bytes = b"1-beefbeef",
    key: bytes | None = None,
    times: int = 1,
    pause: float = 0.02,
) -> Callable[[Target], None]:
    """Say these again and again; with CURVE where `key` is what it takes for rank 0's public key."""

    def attack(target: Target) -> None:
        context = zmq.Context()
        talking = context.socket(zmq.DEALER)
        talking.setsockopt(zmq.LINGER, 0)
        talking.setsockopt(zmq.ROUTING_ID, identity)
        if key is not None:
            talking.curve_serverkey = key
            talking.curve_publickey, talking.curve_secretkey = zmq.curve_keypair()
        for port in target.ports:
            talking.connect(f"tcp://127.0.0.1:{port}")
        while not target.over.wait(pause):
            for message in messages * times:
                with contextlib.suppress(zmq.Again):
                    talking.send(message(target), zmq.NOBLOCK)
        talking.close()
        context.term()

    return attack


def said(body: object) -> Callable[[Target], bytes]:
    return lambda target: target.framed(body)


def greeted(rank: int = 1, **arrival: object) -> Callable[[Target], bytes]:
    return lambda target: target.hello(rank, **arrival)


def _result(**outcome: object) -> Callable[[Target], bytes]:
    own = {"type": "outcome", "trial": 1, "rank": 1, "status": "done", "seconds": 1.0, "data": {}, **outcome}
    return said(own)


# Squatters -----------------------------------------------------------------------------------------------------------


def squatting(mechanism: str) -> Callable[[Target], None]:
    """Take the ports first, and play rank 0: seat who comes, have it run code of ours, and let it leave as FIT."""

    def attack(target: Target) -> None:
        context = zmq.Context()
        posing = context.socket(zmq.ROUTER)
        posing.setsockopt(zmq.LINGER, 0)
        if mechanism == "CURVE":
            posing.curve_server = True
            posing.curve_secretkey = zmq.curve_keypair()[1]
        for port in target.ports:
            with contextlib.suppress(zmq.ZMQError):
                posing.bind(f"tcp://*:{port}")
        trial = {"number": 1, "code": "LCH003", "groups": [], "env": {"PYTHONPATH": "/tmp/evil"}}
        orders = (
            {"type": "HelloAck", "version": target.version},
            {"type": "RunTrial", "trial": trial, "runs": [[1, 1]]},
            {"type": "Shutdown", "exit_code": 0, "sentence": "FIT: forged"},
            {"type": "Refused", "exit_code": 0, "sentence": "FIT: forged"},
        )
        while not target.over.is_set():
            if posing.poll(50):
                identity, *_rest = posing.recv_multipart()
                for order in orders:
                    posing.send_multipart([identity, target.framed(order)])
        posing.close()
        context.term()

    return attack


def _one_wrong_key() -> bytes:
    return zmq.curve_keypair()[0]


DEEP = b"[" * 50_000
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
PLAIN: dict[str, Callable[[Target], None]] = {
    "silent connections": holding,
    "connections that are reset": hanging_up,
    "noise": sending(bytes(range(256)) * 16),
    "noise without end": pouring(b"", bytes(range(256)) * 256),
    "half a greeting": sending(GREETING[:10]),
    "a greeting and silence": sending(GREETING),
    "a greeting of another version": sending(GREETING[:10] + b"\x09" + GREETING[11:]),
    "a greeting of CURVE and noise": sending(CURVE_GREETING, b"\x04\xc8\x05HELLO" + bytes(194)),
    "commands without end": pouring(GREETING, b"\x04\x05\x04PING"),
    "frames without end": pouring(GREETING + READY, b"\x01\x01x" * 999),
    "a frame of 2^63 bytes": sending(GREETING, b"\x02\x7f" + b"\xff" * 7),
    "commands of 4 MiB but for a byte": unfinished(4 << 20, GREETING + b"\x06"),
    "commands of 63 KiB but for a byte": unfinished(63 << 10, CURVE_GREETING + b"\x06"),
    "messages of 63 KiB but for a byte": unfinished(63 << 10, GREETING + READY + b"\x02"),
    "a request of a browser": sending(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "TLS": sending(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
}
TALKING: dict[str, Callable[[Target], None]] = {
    "hello as rank 1": saying(greeted(1)),
    "hello as rank 0": saying(greeted(0), identity=b"0-beefbeef"),
    "hello as rank -1": saying(greeted(-1), identity=b"-1-beefbeef"),
    "hello as rank 2^31": saying(greeted(1 << 31), identity=b"9-beefbeef"),
    "hellos as everybody": saying(*(greeted(rank, nonce=f"{rank:08x}") for rank in range(200))),
    "the same hello without end": saying(greeted(0, nonce="feedfeed"), times=2000),
    "a hello with odd cores": saying(greeted(1, cpu_mask="no number")),
    "a hello with numbers out of range": saying(greeted(1, pid=-(1 << 62), gpus=1 << 62)),
    "a hello of another version": saying(said({"type": "Hello", "version": "9\x1b[31m", "arrival": {}})),
    "leaving, under a known name": saying(greeted(1), said({"type": "Leaving", "signal": 15})),
    "a result that nobody asked for": saying(greeted(1), _result()),
    "a result of another form": saying(greeted(1), _result(data=[1, 2, 3], seconds=1e308)),
    "a signature that is no ASCII": saying(lambda t: t.framed({"type": "Pong"})[:-1] + ',"mac":"é"}'.encode()),
    "JSON that is too deep": saying(lambda t: b'{"run_id":"' + t.run_id.encode() + b'","body":' + DEEP),
    "messages of 3 MB": saying(said({"type": "Partial", "trial": 1, "data": "x" * 3_000_000, "text": ""}), pause=0.2),
    "a wrong key": saying(greeted(1), key=_one_wrong_key()),
}
SQUATTING: dict[str, Callable[[Target], None]] = {
    "somebody who plays rank 0": squatting("NULL"),
    "somebody who plays rank 0 with a key": squatting("CURVE"),
}


@contextlib.contextmanager
def under(attack: Callable[[Target], None], target: Target) -> Iterator[None]:
    """Something is done meanwhile."""
    thread = threading.Thread(target=attack, args=(target,), daemon=True)
    thread.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        target.over.set()
        thread.join(10)
