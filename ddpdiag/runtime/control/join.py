"""The way in which a supervisor joins a run: it searches for rank 0's control server and sends a hello."""

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
from ddpdiag.probes.net.tcp_connect import Reach, resolve, try_ports
from ddpdiag.runtime.control.client import ControlClient, RelayedClient, connect_socket, identity_of
from ddpdiag.runtime.control.messages import Hello, HelloAck, Refused, Start
from ddpdiag.runtime.control.relay import MAX_DIRECT_RANKS, HostRelay, Route, shares_connection
from ddpdiag.runtime.control.wire import Wire
from ddpdiag.runtime.deadlines import hello_answer_seconds, relay_seconds

# Exit codes with which rank 0 refuses a process.
_REFUSALS = (ExitCode.USAGE, ExitCode.UNKNOWN, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True)
class Endpoint:
    """The host and ports at which rank 0's control server may listen, and the time to search for it."""

    host: str
    ports: tuple[int, ...]
    wait_seconds: float
    min_hello_seconds: float = 2.0  # wait at least so long for the answer to a hello
    max_direct_ranks: int = MAX_DIRECT_RANKS  # a larger world has one connection per host

    def hello_seconds(self, arrival: Arrival) -> float:
        """Seconds to wait for the answer to a hello on one port, so that time is left for the other ports."""
        return max(self.min_hello_seconds, min(self.wait_seconds / 3, hello_answer_seconds(arrival.place.world_size)))


class Rank0Endpoint(NamedTuple):
    """The way to send messages to rank 0: `wire` encodes them with the run id and holds the keys of the run's secret.
    `port` is that of rank 0; None: all ports of the endpoint must be tried."""

    wire: Wire
    port: int | None = None


# Each sentence begins with the cause, because the ports fill a line on a terminal.
_REACH_SENTENCES = {
    Reach.ACCEPTED: "something accepts connections there ({ports}), but it is not rank 0 of this run",
    Reach.REFUSED: "no process listens there ({ports}: the connection is refused); is rank 0 started?",
    Reach.DROPPED: "no answer ({ports}): a firewall drops the packets, or the host is down",
    Reach.UNREACHABLE: "the host or network is unreachable ({ports})",
    Reach.UNKNOWN_NAME: "the name cannot be resolved",
    Reach.SLOW_NAME: "the name server does not answer",
}
SHARE_A_SECRET = "set DDPDIAG_TOKEN to one secret on all hosts"
# Keys: whether this rank holds a secret, and the authentication mechanism of the ZeroMQ socket that refuses it.
_SECRET_SENTENCES = {
    (True, "NULL"): "the process that listens there ({ports}) proves no secret, but this rank holds one",
    (True, "CURVE"): "the process that listens there ({ports}) holds another secret than this rank",
    (False, "CURVE"): "the process that listens there ({ports}) requires a secret, but this rank holds none",
}
_OTHER_RUN_SENTENCE = "another run of ddpdiag listens there ({ports})"
_GREETING_BYTES = 64
_NO_SECRET = "something accepts connections there ({ports}), but no process of this user offers the run's secret"
# A first try is answered within milliseconds or not at all. The kernel sends a lost packet again after 1 s.
_FIRST_TRY_SECONDS, _MAX_TRY_SECONDS = 0.5, 2.0
_PAUSE_SECONDS = (0.02, 0.25)
_LOOPBACK = "127.0.0.1"
# Open MPI sends SIGKILL 1 s after SIGTERM (odls_base_sigkill_timeout).
_LAST_TRY_SECONDS = 0.5


def join(
    endpoint: Endpoint,
    find_rank_0: Callable[[], Rank0Endpoint | None],
    arrival: Arrival,
    signal_received: Callable[[], int | None],
    report_search: Callable[[float], None] = lambda _left_seconds: None,
) -> ControlClient:
    """Find the control server, send a hello, and return the connection once rank 0 has accepted this process.

    RunLost, with the reason for each port, if rank 0 is not found within `endpoint.wait_seconds`. RunLost as well if
    rank 0 refuses this process (another process has its rank), or if this process receives a signal to end.
    `signal_received` returns the number of that signal, or None. The search goes on for 0.5 s after the signal, because
    a rank 0 that got no signal waits for this rank, and would blame it. Before each try, `find_rank_0` is called, which
    returns None as long as there is no secret, and `report_search` gets the seconds that are left.
    """
    end, signum = time.monotonic() + endpoint.wait_seconds, None
    try_seconds, pause_seconds = _FIRST_TRY_SECONDS, _PAUSE_SECONDS[0]
    if (client := _join_through_relay(endpoint, find_rank_0, arrival, signal_received, report_search)) is not None:
        return client
    while True:
        if signum is None and (signum := signal_received()) is not None:
            end = min(end, time.monotonic() + _LAST_TRY_SECONDS)
        left = end - time.monotonic()
        report_search(max(left, 0.0))
        # One look-up may take all the time that is left, so that a slow resolver is not asked again and again. The name
        # is resolved in each try, because it may be registered late.
        addresses = resolve(endpoint.host, endpoint.ports[0], max(left, 0.1))
        reasons: dict[int, str] = {}
        rank_0 = find_rank_0()
        target = endpoint if rank_0 is None or rank_0.port is None else replace(endpoint, ports=(rank_0.port,))
        for address in addresses or ():
            seconds = min(try_seconds, max(left, 0.1))
            client = _try_ports(target, address, rank_0 and rank_0.wire, arrival, seconds, reasons)
            if client is not None:
                return client
        left = end - time.monotonic()
        if left <= 0 and signum is not None:
            sentence = f"rank {arrival.place.rank} got a signal to end before it reached rank 0"
            raise RunLost(sentence, ExitCode.of_signal(signum))
        if left <= 0:
            raise RunLost(_failure(endpoint, arrival, addresses, reasons))
        time.sleep(min(pause_seconds, left))
        try_seconds, pause_seconds = min(2 * try_seconds, _MAX_TRY_SECONDS), min(2 * pause_seconds, _PAUSE_SECONDS[1])


def _try_ports(
    endpoint: Endpoint, address: str, wire: Wire | None, arrival: Arrival, seconds: float, reasons: dict[int, str]
) -> ControlClient | None:
    """Try each port of `address`. Returns the client that rank 0 accepted, or None. Sets `reasons` by port."""
    for port, reached in try_ports(address, endpoint.ports, seconds).items():
        reasons[port] = _REACH_SENTENCES[reached.reach]
        if reached.reach is not Reach.ACCEPTED:
            continue
        if wire is None:
            reasons[port] = _NO_SECRET
            continue
        hello = structs.replace(arrival, address=reached.source or address)
        route = Route(_url(address, port), hello.address)
        try:
            client = ControlClient(connect_socket(route.url, wire, hello), wire)
            joined = _say_hello(client, hello, endpoint.hello_seconds(hello))
        except OtherRun:
            reasons[port] = _OTHER_RUN_SENTENCE
            continue
        if joined is not None:
            return _start_relay(joined, wire, hello, route, endpoint.max_direct_ranks)
        mechanism = authentication_mechanism((address, port))
        reasons[port] = _SECRET_SENTENCES.get((wire.is_locked, mechanism), reasons[port])
    return None


def _join_through_relay(
    endpoint: Endpoint,
    find_rank_0: Callable[[], Rank0Endpoint | None],
    arrival: Arrival,
    signal_received: Callable[[], int | None],
    report_search: Callable[[float], None],
) -> ControlClient | None:
    """Join through this host's relay, and return the client, or None if this rank must connect to rank 0 itself."""
    if not shares_connection(arrival.place, endpoint.max_direct_ranks) or arrival.place.local_rank == 0:
        return None
    begin, client = time.monotonic(), None
    relay_end = begin + min(endpoint.wait_seconds / 2, relay_seconds(arrival.place.world_size))
    while signal_received() is None and (now := time.monotonic()) < relay_end:
        report_search(begin + endpoint.wait_seconds - now)
        if client is not None:
            if client.wait_for_answer(_FIRST_TRY_SECONDS):
                try:
                    return _say_hello(client, client.arrival, endpoint.hello_seconds(arrival))
                except OtherRun:  # `_say_hello` has closed the client, and rank 0 of this run listens at another port
                    return None
            if client.is_declined:
                break
        elif (rank_0 := find_rank_0()) is None:
            time.sleep(_PAUSE_SECONDS[0])
        elif not rank_0.wire.is_locked:
            return None
        else:
            client = RelayedClient(rank_0.wire, arrival)
    if client is not None:
        client.close()
    return None


def _start_relay(client: ControlClient, wire: Wire, arrival: Arrival, route: Route, max_direct: int) -> ControlClient:
    """Start a relay in local rank 0 of a large world with a secret. Returns a client of that relay, else `client`."""
    if not wire.is_locked or arrival.place.local_rank != 0 or not shares_connection(arrival.place, max_direct):
        return client
    try:
        relay = HostRelay(client.socket, wire, identity_of(arrival), route)
    except zmq.ZMQError:  # another container with the same network has a relay already
        return client
    return RelayedClient(wire, arrival, relay)


def _failure(endpoint: Endpoint, arrival: Arrival, addresses: Sequence[str] | None, reasons: Mapping[int, str]) -> str:
    """The sentence that says why a rank did not reach rank 0."""
    ports: dict[str, list[str]] = {}
    for port, reason in reasons.items():
        ports.setdefault(reason, []).append(str(port))
    if ports:
        texts = {reason: f"TCP port{'s' * (len(names) > 1)} {', '.join(names)}" for reason, names in ports.items()}
        why = "; ".join(reason.format(ports=text) for reason, text in texts.items())
        if _REACH_SENTENCES[Reach.DROPPED] in ports:
            why += "; open one of these ports, or name an open one with --control-port"
        if not ports.keys().isdisjoint({*_SECRET_SENTENCES.values(), _NO_SECRET}):
            why += f"; {SHARE_A_SECRET}"
    else:
        why = _REACH_SENTENCES[Reach.SLOW_NAME if addresses is None else Reach.UNKNOWN_NAME]
    return (
        f"rank {arrival.place.rank} on {arrival.place.host} did not reach rank 0 at {endpoint.host} "
        f"within {endpoint.wait_seconds:g} s: {why}"
    )


def authentication_mechanism(address: tuple[str, int]) -> str:
    """The mechanism by which a ZeroMQ socket authenticates peers (NULL, CURVE), or "" if it is no ZeroMQ socket.

    Connects, and reads the greeting of 64 bytes: signature, version, mechanism, role (rfc.zeromq.org/spec/23).
    """
    # Send only signature and version: if the mechanisms differ, libzmq closes the connection before it names its own.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    try:
        with sockets.create_connection(address, _FIRST_TRY_SECONDS) as connection:
            connection.sendall(greeting)
            answer, end = b"", time.monotonic() + _FIRST_TRY_SECONDS  # for all reads, which may get one byte each
            while (missing := _GREETING_BYTES - len(answer)) and time.monotonic() < end:
                if not (part := connection.recv(missing)):
                    break
                answer += part
    except OSError:
        return ""
    is_zeromq = len(answer) == _GREETING_BYTES and answer[:1] == b"\xff" and answer[9:11] == b"\x7f\x03"
    return answer[12:32].rstrip(b"\0").decode("ascii", "replace") if is_zeromq else ""


class OtherRun(Exception):
    """The control server that answered is of another run."""


def refusal_error(message: Refused) -> RunLost:
    """The error with which a refused process ends. An exit code that rank 0 never sends, such as 0, becomes UNKNOWN:
    without a secret any process may have sent the refusal."""
    return RunLost(message.sentence, message.exit_code if message.exit_code in _REFUSALS else ExitCode.UNKNOWN)


def join_in_process(url: str, port: int, wire: Wire, arrival: Arrival, seconds: float) -> ControlClient:
    """Connect rank 0's own supervisor to the control server in the same process, without network or secret.

    `url` is the server's address within the process. If this process runs a relay and the relay fails, the ranks of
    this host connect to `port`. RunLost if the server does not answer within `seconds`.
    """
    hello = structs.replace(arrival, address=_LOOPBACK)
    client = _say_hello(ControlClient(connect_socket(url, wire, hello), wire), hello, seconds)
    if client is None:
        raise RunLost(f"rank 0 did not answer its own supervisor within {seconds:g} s")
    return _start_relay(client, wire, hello, Route(_url(_LOOPBACK, port), _LOOPBACK), MAX_DIRECT_RANKS)


def runs_here(port: int, wire: Wire, arrival: Arrival) -> bool:
    """Whether a control server of this run answers a hello on this host's `port` within 1 s. RunLost if it refuses."""
    try:
        client = _say_hello(ControlClient(connect_socket(_url(_LOOPBACK, port), wire, arrival), wire), arrival, 1.0)
    except OtherRun:
        return False
    if client is not None:
        client.close()
    return client is not None


def _url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _say_hello(client: ControlClient, arrival: Arrival, seconds: float) -> ControlClient | None:
    """Send a hello, and return the client once rank 0 has accepted it. After `seconds`, close it and return None.

    RunLost if rank 0 refuses this process or has another version. OtherRun if the server is of another run.
    """
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
                    raise OtherRun if message.other_run else refusal_error(message)
                case _:
                    continue
    client.close()
    return None
