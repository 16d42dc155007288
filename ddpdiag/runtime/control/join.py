"""A supervisor's search for the control server of rank 0, and its hello."""

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

# Exit codes with which rank 0 refuses a process.
_REFUSALS = (ExitCode.USAGE, ExitCode.UNKNOWN, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True)
class Endpoint:
    """Address of rank 0's control server: its host, and the ports to try."""

    host: str
    ports: tuple[int, ...]
    wait_seconds: float
    greet_seconds: float = 2.0  # time in which a control server on a port must answer
    relayed_ranks: int = RELAYED_RANKS  # larger worlds have one connection for each host

    def patience(self, arrival: Arrival) -> float:
        """Seconds to wait on one port for rank 0's answer to a hello, so that time is left for the other ports."""
        return max(self.greet_seconds, min(self.wait_seconds / 3, answer_seconds(arrival.place.world_size)))


class Rank0Endpoint(NamedTuple):
    """The wire that authenticates rank 0, and the only port to try, or None if the rank must try all."""

    wire: Wire
    port: int | None = None


# Each sentence begins with the cause, because the ports fill a line on a terminal.
_SENTENCES = {
    Reach.ACCEPTED: "something accepts connections there ({ports}), but it is not rank 0 of this run",
    Reach.REFUSED: "no process listens there ({ports}: the connection is refused); is rank 0 started?",
    Reach.DROPPED: "no answer ({ports}): a firewall drops the packets, or the host is down",
    Reach.UNREACHABLE: "the host or network is unreachable ({ports})",
    Reach.UNKNOWN_NAME: "the name cannot be resolved",
    Reach.SLOW_NAME: "the name server does not answer",
}
SHARE_A_SECRET = "set DDPDIAG_TOKEN to one secret on all hosts"
# By whether this rank holds a secret, and by the mechanism of the ZeroMQ socket that refuses it.
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
    """Find the control server and say hello. RunLost after `endpoint.wait_seconds`, with the reason for each port.

    RunLost, too, if rank 0 refuses this process (its rank is taken), or after a signal to end. `stopped` returns the
    number of that signal, or None. The search goes on for a moment after it: a rank 0 without the signal waits for this
    rank, and would blame it. `secret` is called before each try; it returns None as long as there is no secret.
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
        # One look-up gets all the time that is left: a slow resolver must not be asked again and again. A name may be
        # registered late.
        addresses = resolve(endpoint.host, endpoint.ports[0], max(left, 0.1))
        reasons: dict[int, str] = {}
        rank_0 = secret()
        known = endpoint if rank_0 is None or rank_0.port is None else replace(endpoint, ports=(rank_0.port,))
        for address in addresses or ():
            client = _try_ports(known, address, rank_0 and rank_0.wire, arrival, min(patience, max(left, 0.1)), reasons)
            if client is not None:
                return client
        left = end - time.monotonic()
        if left <= 0 and signum is not None:
            sentence = f"rank {arrival.place.rank} got a signal to end before it reached rank 0"
            raise RunLost(sentence, ExitCode.of_signal(signum))
        if left <= 0:
            raise RunLost(_sentence(endpoint, arrival, addresses, reasons))
        time.sleep(min(pause, left))
        patience, pause = min(2 * patience, _MOST_SECONDS), min(2 * pause, _PAUSE_SECONDS[1])


def _try_ports(
    endpoint: Endpoint, address: str, wire: Wire | None, arrival: Arrival, seconds: float, reasons: dict[int, str]
) -> ControlClient | None:
    """Say hello to each port of one address; return the control server's client, or None. Sets `reasons` by port."""
    for port, reached in reach_any(address, endpoint.ports, seconds).items():
        reasons[port] = _SENTENCES[reached.reach]
        if reached.reach is not Reach.ACCEPTED:
            continue
        if wire is None:
            reasons[port] = _NO_SECRET_YET
            continue
        hello = structs.replace(arrival, address=reached.source or address)
        path = Path(_url(address, port), hello.address)
        try:
            client = _say_hello(ControlClient(connected(path.url, wire, hello), wire), hello, endpoint.patience(hello))
        except OtherRun:
            reasons[port] = _OTHER_RUN
            continue
        if client is not None:
            return _with_relay(client, wire, hello, path, endpoint.relayed_ranks)
        reasons[port] = _UNTRUSTED.get((wire.locked, mechanism((address, port))), reasons[port])
    return None


def _join_through_relay(
    endpoint: Endpoint,
    secret: Callable[[], Rank0Endpoint | None],
    arrival: Arrival,
    stopped: Callable[[], int | None],
    seeking: Callable[[float], None],
) -> ControlClient | None:
    """Connect to the control server through this host's relay; None if this rank must connect to rank 0 itself."""
    if not shares_connection(arrival.place, endpoint.relayed_ranks) or arrival.place.local_rank == 0:
        return None
    begin, client = time.monotonic(), None
    relay_end = begin + min(endpoint.wait_seconds / 2, relay_seconds(arrival.place.world_size))
    while stopped() is None and (now := time.monotonic()) < relay_end:
        seeking(begin + endpoint.wait_seconds - now)
        if client is not None:
            if client.is_answered(_FIRST_SECONDS):
                try:
                    return _say_hello(client, client.arrival, endpoint.patience(arrival))
                except OtherRun:  # `_say_hello` has closed the client; rank 0 of this run listens at another port
                    return None
            if client.is_declined:
                break
        elif (rank_0 := secret()) is None:
            time.sleep(_PAUSE_SECONDS[0])
        elif not rank_0.wire.locked:
            return None
        else:
            client = RelayedClient(rank_0.wire, arrival)
    if client is not None:
        client.close()
    return None


def _with_relay(client: ControlClient, wire: Wire, arrival: Arrival, path: Path, relayed_ranks: int) -> ControlClient:
    """The client; if this is local rank 0 of a large world, start a relay, and return a client that uses it."""
    if not wire.locked or arrival.place.local_rank != 0 or not shares_connection(arrival.place, relayed_ranks):
        return client
    try:
        relay = HostRelay(client.socket, wire, identity_of(arrival), path)
    except zmq.ZMQError:  # another container with the same network has a relay already
        return client
    return RelayedClient(wire, arrival, relay)


def _sentence(endpoint: Endpoint, arrival: Arrival, addresses: Sequence[str] | None, reasons: Mapping[int, str]) -> str:
    """The reason why a rank did not reach rank 0."""
    ports: dict[str, list[str]] = {}
    for port, reason in reasons.items():
        ports.setdefault(reason, []).append(str(port))
    if ports:
        texts = {reason: f"TCP port{'s' * (len(names) > 1)} {', '.join(names)}" for reason, names in ports.items()}
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
    """The mechanism by which a ZeroMQ socket authenticates peers (NULL, CURVE); empty for any other socket.

    A greeting has 64 bytes: signature, version, mechanism, role (rfc.zeromq.org/spec/23). Nothing else is read.
    """
    # Send only signature and version: libzmq closes a connection with another mechanism instead of naming its
    # mechanism.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    try:
        with sockets.create_connection(where, _FIRST_SECONDS) as connection:
            connection.sendall(greeting)
            answer, end = b"", time.monotonic() + _FIRST_SECONDS  # for all reads: a program may send one byte at a time
            while (
                len(answer) < _GREETING_BYTES
                and time.monotonic() < end
                and (more := connection.recv(_GREETING_BYTES - len(answer)))
            ):
                answer += more
    except OSError:
        return ""
    known = len(answer) == _GREETING_BYTES and answer[:1] == b"\xff" and answer[9:11] == b"\x7f\x03"
    return answer[12:32].rstrip(b"\0").decode("ascii", "replace") if known else ""


class OtherRun(Exception):
    """The control server that answered is of another run."""


def refusal(message: Refused) -> RunLost:
    """The error of a refused process; its exit code is never 0, as without a secret any process may have refused it."""
    return RunLost(message.sentence, message.exit_code if message.exit_code in _REFUSALS else ExitCode.UNKNOWN)


def join_here(url: str, port: int, wire: Wire, arrival: Arrival, seconds: float) -> ControlClient:
    """Connect the supervisor of rank 0 to the control server in its process at `url`, without network or secret.

    The ranks of its host may share this connection; `port` is where they connect to the server themselves. RunLost if
    the server does not answer in time.
    """
    hello = structs.replace(arrival, address=_LOOPBACK)
    client = _say_hello(ControlClient(connected(url, wire, hello), wire), hello, seconds)
    if client is None:
        raise RunLost(f"rank 0 did not answer its own supervisor within {seconds:g} s")
    return _with_relay(client, wire, hello, Path(_url(_LOOPBACK, port), _LOOPBACK), RELAYED_RANKS)


def greet(where: tuple[str, int], wire: Wire, arrival: Arrival, seconds: float) -> ControlClient | None:
    """Say hello to one port; None if no control server of this run answers within `seconds`."""
    try:
        return _say_hello(ControlClient(connected(_url(*where), wire, arrival), wire), arrival, seconds)
    except OtherRun:
        return None


def _url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _say_hello(client: ControlClient, arrival: Arrival, seconds: float) -> ControlClient | None:
    """Say hello; return the client once rank 0 has answered, or close it and return None if that takes too long."""
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
