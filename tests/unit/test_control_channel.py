"""The control channel: real sockets on loopback, and what strangers may say to it."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from secrets import token_hex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import arrival_of

from ddpdiag.errors import RunLost, UsageError
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.client import ControlClient
from ddpdiag.runtime.control.join import Endpoint, Rank0Endpoint, join, refusal_error
from ddpdiag.runtime.control.messages import Hello, HelloAck, Leaving, OtherVersionHello, Ping, Pong, Refused
from ddpdiag.runtime.control.server import ControlServer, control_ports
from ddpdiag.runtime.control.wire import Wire

WIRE = Wire("run-1")
ME = arrival_of(0, 2)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer([free_port("127.0.0.1")], WIRE, structs.replace(ME, nonce=token_hex(4)), local_only=True)
    yield server
    server.close()


def test_a_message_is_read_back_by_the_same_run() -> None:
    assert WIRE.decode_for_rank_0(WIRE.encode(Leaving(15))) == Leaving(15)
    assert WIRE.decode_for_rank(WIRE.encode(Ping())) == Ping()


def test_another_run_is_not_heard() -> None:
    assert Wire("run-2").decode_for_rank_0(WIRE.encode(Pong())) is None


def test_a_signature_of_an_older_version_ends_nothing() -> None:
    data = '{"run_id":"run-1","body":{"type":"Pong"},"mac":"\u00e9"}'.encode()
    assert WIRE.decode_for_rank_0(data) == Pong()


def test_of_another_version_the_version_is_read() -> None:
    data = b'{"run_id":"run-1","body":{"type":"Hello","arrival":{"place":7},"version":"9.9"}}'
    assert WIRE.decode_for_rank_0(data) == OtherVersionHello("9.9")
    assert WIRE.decode_for_rank_0(data.replace(b',"version":"9.9"', b"")) == OtherVersionHello("")


@pytest.mark.parametrize(("code", "left"), [(0, 3), (1, 3), (2, 2), (3, 3), (143, 143)])
def test_nobody_is_refused_into_a_healthy_run(code: int, left: int) -> None:
    assert refusal_error(Refused("no", code)).exit_code == left


@given(st.binary(max_size=200))
def test_noise_is_ignored(noise: bytes) -> None:
    assert WIRE.decode_for_rank_0(noise) is None
    assert WIRE.decode_for_rank(noise) is None


def test_ports_are_the_same_on_every_rank_and_outside_the_ephemeral_range() -> None:
    ports = control_ports("run", 29500, None)
    assert ports == control_ports("run", 29500, None)
    assert ports != control_ports("other", 29500, None)
    assert all(20_000 <= port < 32_768 for port in ports)
    assert control_ports("run", 29500, 4711) == (4711,)


def test_a_supervisor_finds_the_server_behind_a_stranger(server: ControlServer) -> None:
    stranger = socket.create_server(("127.0.0.1", 0))
    client = _join(server, (stranger.getsockname()[1], server.port))
    assert isinstance(client, ControlClient)
    stranger.close()
    client.close()


def _join(
    server: ControlServer, ports: tuple[int, ...], answer: object = None, signum: int | None = None
) -> ControlClient | Exception:
    """Join while a stand-in for the coordinator answers every hello."""
    result: list[ControlClient | Exception] = []
    endpoint = Endpoint("127.0.0.1", ports, 10.0, min_hello_seconds=0.2)

    def run() -> None:
        try:
            result.append(join(endpoint, lambda: Rank0Endpoint(WIRE), arrival_of(1, 2), lambda: signum))
        except RunLost as lost:
            result.append(lost)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        for identity, message in server.receive(0.01):
            assert isinstance(message, Hello)
            assert message.arrival.address == "127.0.0.1"
            server.send(identity, answer or HelloAck())  # type: ignore[arg-type]
    return result[0]


def test_who_is_refused_leaves_with_the_sentence(server: ControlServer) -> None:
    lost = _join(server, (server.port,), Refused("rank 1 came twice", 2))
    assert isinstance(lost, RunLost)
    assert (str(lost), lost.exit_code) == ("rank 1 came twice", 2)


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_who_does_not_reach_rank_0_is_told_why(golden, address: str) -> None:
    port = free_port("127.0.0.1")
    with pytest.raises(RunLost) as lost:
        join(Endpoint(address, (port,), 0.2), lambda: Rank0Endpoint(WIRE), ME, lambda: None)
    assert lost.value.exit_code == 3
    golden(str(lost.value).replace(str(port), "PORT"))


def test_a_signal_ends_the_search() -> None:
    with pytest.raises(RunLost) as lost:
        join(Endpoint("127.0.0.1", (1,), 60.0), lambda: Rank0Endpoint(WIRE), ME, lambda: 15)
    assert lost.value.exit_code == 143


def test_a_rank_that_gets_a_signal_while_it_joins_still_tells_rank_0(server: ControlServer) -> None:
    client = _join(server, (server.port,), signum=15)
    assert isinstance(client, ControlClient)
    client.close()


def test_taken_ports_are_named_with_their_holder(golden) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            ControlServer([port], WIRE, structs.replace(ME, nonce=token_hex(4)), local_only=True)
    golden(re.sub(r"\(.*\)", "(HOLDER)", str(caught.value).replace(str(port), "PORT").replace(str(os.getpid()), "PID")))


def test_a_rank_that_looks_for_rank_0_says_how_long_it_still_does() -> None:
    left: list[float] = []
    nowhere = Endpoint("127.0.0.1", (free_port("127.0.0.1"),), 0.2)
    with pytest.raises(RunLost):
        join(nowhere, lambda: Rank0Endpoint(WIRE), ME, lambda: None, left.append)
    assert 0.1 < left[0] <= 0.2
    assert left == sorted(left, reverse=True)
