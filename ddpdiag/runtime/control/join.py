"""The search of a supervisor for the control server, and its hello."""

import socket as sockets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import zmq
from msgspec import structs

from ddpdiag import __version__
from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import Arrival
from ddpdiag.probes.net.tcp_connect import Reach, reach_any, resolve
from ddpdiag.runtime.control.client import ControlClient, RelayedClient, connected, identity_of
from ddpdiag.runtime.control.messages import Hello, HelloAck, Refused, Start
from ddpdiag.runtime.control.relay import RELAYED_RANKS, HostRelay, Path, shares_connection
from ddpdiag.runtime.control.wire import Wire
from ddpdiag.runtime.deadlines import answer_seconds, relay_seconds

# With these exit codes rank 0 refuses a process.
_REFUSALS = (ExitCode.USAGE, ExitCode.UNKNOWN, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True)
class Endpoint:
    """Address of rank 0's control server: its host, and the ports to try."""

    host: str
    ports: tuple[int, ...]
    wait_seconds: float
    greet_seconds: float = 2.0  # how long one port may take to prove that it is rank 0
    relayed_ranks: int = RELAYED_RANKS  # worlds of more ranks have one connection for each host

    def patience(self, arrival: Arrival) -> float:
        """Seconds in which rank 0 answers a hello; a stranger's port must leave time for the others."""
        return max(self.greet_seconds, min(self.wait_seconds / 3, answer_seconds(arrival.place.world_size)))


class Rank0Endpoint(NamedTuple):
    """The means to trust rank 0, and the only port to try, where a rank knows that."""

    wire: Wire
    port: int | None = None


# The cause first: on a terminal the ports fill a line.
_SENTENCES = {
    Reach.ACCEPTED: "something accepts connections there ({ports}), but it is not rank 0 of this run",
    Reach.REFUSED: "no process listens there ({ports}: the connection is refused); is rank 0 started?",
    Reach.DROPPED: "no answer ({ports}): a firewall drops the packets, or the host is down",
    Reach.UNREACHABLE: "the host or network is unreachable ({ports})",
    Reach.UNKNOWN_NAME: "the name cannot be resolved",
    Reach.SLOW_NAME: "the name server does not answer",
}
SHARE_A_SECRET = "set DDPDIAG_TOKEN to one secret on all hosts"
# By whether this rank holds a secret, and the mechanism of the ZeroMQ socket that does not take it.
_UNTRUSTED = {
    (True, "NULL"): "the process that listens there ({ports}) proves no secret, but this rank holds one",
    (True, "CURVE"): "the process that listens there ({ports}) holds another secret than this rank",
    (False, "CURVE"): "the process that listens there ({ports}) requires a secret, but this rank holds none",
}
_OTHER_RUN = "another run of ddpdiag listens there ({ports})"
_GREETING_BYTES = 64
_NO_SECRET_YET = "something accepts connections there ({ports}), but no process of this user offers the run's secret"
# A first try is answered in a few milliseconds or not at all; a lost packet is sent again after 1 s.
_FIRST_SECONDS, _MOST_SECONDS = 0.5, 2.0
_PAUSE_SECONDS = (0.02, 0.25)
_LOOPBACK = "127.0.0.1"
# Open MPI sends SIGKILL 1 s after SIGTERM (odls_base_sigkill_timeout).
_LAST_TRY_SECONDS = 0.5


def join(
    endpoint: Endpoint,
    secret: Callable[[], Rank0Endpoint | None],
    arrival: Arrival,
    stopped: Callable[[], int | None],
    seeking: Callable[[float], None] = lambda _left_seconds: None,
) -> ControlClient:
    """Find the control server and say hello; RunLost after `endpoint.wait_seconds`, with the result of a plain connect.

    RunLost, too, when rank 0 refuses this process (its rank is taken), or a signal came (`stopped` gives its number).
    `secret` returns the run's secret before each try: None as long as there is none.
    After a signal it goes on for a moment: a rank 0 that does not know of it waits for this rank, and blames it.
    `seeking` gets the seconds that are left before each try.
    """
    end, signum = time.monotonic() + endpoint.wait_seconds, None
    patience, pause = _FIRST_SECONDS, _PAUSE_SECONDS[0]
    if (client := _join_through_relay(endpoint, secret, arrival, stopped, seeking)) is not None:
        return client
    while True:
        if signum is None and (signum := stopped()) is not None:
            end = min(end, time.monotonic() + _LAST_TRY_SECONDS)
        left = end - time.monotonic()
        seeking(max(left, 0.0))
        # All that is left for one look-up: a slow resolver must not be asked again and again. A name may come up late.
        addresses = resolve(endpoint.host, endpoint.ports[0], max(left, 0.1))
        met: dict[int, str] = {}
        found = secret()
        own = endpoint if found is None or found.port is None else replace(endpoint, ports=(found.port,))
        for address in addresses or ():
            client = _try_ports(own, address, found and found.wire, arrival, min(patience, max(left, 0.1)), met)
            if client is not None:
                return client
        left = end - time.monotonic()
        if left <= 0 and signum is not None:
            sentence = f"rank {arrival.place.rank} got a signal to end before it reached rank 0"
            raise RunLost(sentence, ExitCode.of_signal(signum))
        if left <= 0:
            raise RunLost(_sentence(endpoint, arrival, addresses, met))
        time.sleep(min(pause, left))
        patience, pause = min(2 * patience, _MOST_SECONDS), min(2 * pause, _PAUSE_SECONDS[1])


def _try_ports(
    endpoint: Endpoint, address: str, wire: Wire | None, arrival: Arrival, seconds: float, met: dict[int, str]
) -> ControlClient | None:
    """The control server at one address, if it is there; `met` notes a sentence on each port."""
    for port, reached in reach_any(address, endpoint.ports, seconds).items():
        met[port] = _SENTENCES[reached.reach]
        if reached.reach is not Reach.ACCEPTED:
            continue
        if wire is None:
            met[port] = _NO_SECRET_YET
            continue
        own = structs.replace(arrival, address=reached.source or address)
        path = Path(_url(address, port), own.address)
        try:
            client = _greeted(ControlClient(connected(path.url, wire, own), wire), own, endpoint.patience(own))
        except OtherRun:
            met[port] = _OTHER_RUN
            continue
        if client is not None:
            return _as_relay(client, wire, own, path, endpoint.relayed_ranks)
        met[port] = _UNTRUSTED.get((wire.locked, mechanism((address, port))), met[port])
    return None


def _join_through_relay(
    endpoint: Endpoint,
    secret: Callable[[], Rank0Endpoint | None],
    arrival: Arrival,
    stopped: Callable[[], int | None],
    seeking: Callable[[float], None],
) -> ControlClient | None:
    """The control server through this host's relay; None if this rank connects by itself."""
    if not shares_connection(arrival.place, endpoint.relayed_ranks) or arrival.place.local_rank == 0:
        return None
    begin, client = time.monotonic(), None
    alone = begin + min(endpoint.wait_seconds / 2, relay_seconds(arrival.place.world_size))
    while stopped() is None and (now := time.monotonic()) < alone:
        seeking(begin + endpoint.wait_seconds - now)
        if client is not None:
            if client.is_answered(_FIRST_SECONDS):
                try:
                    return _greeted(client, client.arrival, endpoint.patience(arrival))
                except OtherRun:  # which closed the client; this run's own rank 0 listens at another port
                    return None
            if client.is_declined:
                break
        elif (found := secret()) is None:
            time.sleep(_PAUSE_SECONDS[0])
        elif not found.wire.locked:
            return None
        else:
            client = RelayedClient(found.wire, arrival)
    if client is not None:
        client.close()
    return None


def _as_relay(client: ControlClient, wire: Wire, arrival: Arrival, path: Path, relayed_ranks: int) -> ControlClient:
    """The same connection for all ranks of this host, if this is local rank 0 of a large world."""
    if not wire.locked or arrival.place.local_rank != 0 or not shares_connection(arrival.place, relayed_ranks):
        return client
    try:
        relay = HostRelay(client.socket, wire, identity_of(arrival), path)
    except zmq.ZMQError:  # containers with one network have a relay already
        return client
    return RelayedClient(wire, arrival, relay)


def _sentence(endpoint: Endpoint, arrival: Arrival, addresses: Sequence[str] | None, met: Mapping[int, str]) -> str:
    """Why a rank did not reach rank 0."""
    ports: dict[str, list[str]] = {}
    for port, reason in met.items():
        ports.setdefault(reason, []).append(str(port))
    if ports:
        texts = {reason: f"TCP port{'s' * (len(own) > 1)} {', '.join(own)}" for reason, own in ports.items()}
        why = "; ".join(reason.format(ports=text) for reason, text in texts.items())
        if _SENTENCES[Reach.DROPPED] in ports:
            why += "; open one of these ports, or name an open one with --control-port"
        if not ports.keys().isdisjoint({*_UNTRUSTED.values(), _NO_SECRET_YET}):
            why += f"; {SHARE_A_SECRET}"
    else:
        why = _SENTENCES[Reach.SLOW_NAME if addresses is None else Reach.UNKNOWN_NAME]
    return (
        f"rank {arrival.place.rank} on {arrival.place.host} did not reach rank 0 at {endpoint.host} "
        f"within {endpoint.wait_seconds:g} s: {why}"
    )


def mechanism(where: tuple[str, int]) -> str:
    """The mechanism by which the ZeroMQ socket there authenticates peers (NULL, CURVE); empty if it is none.

    A greeting has 64 bytes: signature, version, mechanism, role (rfc.zeromq.org/spec/23). Nothing else is read.
    """
    # Only signature and version: libzmq closes the connection for another mechanism instead of sending its own.
    begun = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    try:
        with sockets.create_connection(where, _FIRST_SECONDS) as asking:
            asking.sendall(begun)
            answer, end = b"", time.monotonic() + _FIRST_SECONDS  # of all: a stranger may send one byte at a time
            while (
                len(answer) < _GREETING_BYTES
                and time.monotonic() < end
                and (more := asking.recv(_GREETING_BYTES - len(answer)))
            ):
                answer += more
    except OSError:
        return ""
    known = len(answer) == _GREETING_BYTES and answer[:1] == b"\xff" and answer[9:11] == b"\x7f\x03"
    return answer[12:32].rstrip(b"\0").decode("ascii", "replace") if known else ""


class OtherRun(Exception):
    """The control server that answered is that of another run."""


def refusal(message: Refused) -> RunLost:
    """The end of a refused process. Without a secret another process may have answered: it must not exit with 0."""
    return RunLost(message.sentence, message.exit_code if message.exit_code in _REFUSALS else ExitCode.UNKNOWN)


def join_here(url: str, port: int, wire: Wire, arrival: Arrival, seconds: float) -> ControlClient:
    """Rank 0's own client: it reaches the control server of its process at `url`, without network or secret.

    The ranks of its host may share this connection; `port` is where they reach the server by themselves.
    """
    own = structs.replace(arrival, address=_LOOPBACK)
    client = _greeted(ControlClient(connected(url, wire, own), wire), own, seconds)
    if client is None:
        raise RunLost(f"rank 0 did not answer its own supervisor within {seconds:g} s")
    return _as_relay(client, wire, own, Path(_url(_LOOPBACK, port), _LOOPBACK), RELAYED_RANKS)


def greet(where: tuple[str, int], wire: Wire, arrival: Arrival, seconds: float) -> ControlClient | None:
    """Say hello to one port; None where no control server of this run answers within `seconds`."""
    try:
        return _greeted(ControlClient(connected(_url(*where), wire, arrival), wire), arrival, seconds)
    except OtherRun:
        return None


def _url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _greeted(client: ControlClient, arrival: Arrival, seconds: float) -> ControlClient | None:
    """The client, once rank 0 has answered its hello; None, and the client is closed, if that takes too long."""
    client.send(Hello(arrival))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not client.socket.poll(100):
            continue
        for message in client.receive():
            match message:
                case HelloAck(version) if version != __version__:
                    client.close()
                    raise RunLost(
                        f"rank 0 runs ddpdiag {version or 'of an older version'}, but rank {arrival.place.rank} on "
                        f"{arrival.place.host} runs {__version__}; install one version on all hosts"
                    )
                case HelloAck() | Start():
                    return client
                case Refused() as message:
                    client.close()
                    raise OtherRun if message.other_run else refusal(message)
                case _:
                    continue
    client.close()
    return None
