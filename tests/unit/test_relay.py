"""One connection for the ranks of a host: who shares it, and what becomes of them when it is gone."""

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from secrets import token_hex

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs
from seen import arrival_of

from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, Place
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control import client as control_client
from ddpdiag.runtime.control.client import ControlClient, RelayedClient, connect_socket, identity_of
from ddpdiag.runtime.control.join import Endpoint, Rank0Endpoint, join
from ddpdiag.runtime.control.messages import (
    Hello,
    HelloAck,
    Leaving,
    MessageToRank0,
    OtherVersionHello,
    PartialData,
    Ping,
    Pong,
)
from ddpdiag.runtime.control.relay import Route, shares_connection
from ddpdiag.runtime.control.server import ControlServer, raise_open_files_limit
from ddpdiag.runtime.control.wire import Batch, Wire, new_router, unpack_batch
from ddpdiag.runtime.deadlines import DEADLINES

SIZE = 6
SECONDS = 10.0
Said = tuple[bytes, MessageToRank0 | OtherVersionHello]


def rank(number: int) -> Arrival:
    """Ranks 0 and 1 are on one host, ranks 2 and 3 on the next."""
    return arrival_of(number, SIZE)


def rank_0() -> Arrival:
    """Another one each time: ZeroMQ frees the name of a server's own socket only after a while."""
    return structs.replace(rank(0), nonce=token_hex(4))


def named(number: int) -> bytes:
    return identity_of(rank(number))


@pytest.fixture
def wire() -> Wire:
    return Wire(f"run-{time.monotonic_ns()}", b"secret")


@pytest.fixture
def server(wire: Wire) -> Iterator[ControlServer]:
    server = ControlServer([free_port("127.0.0.1")], wire, rank_0(), local_only=True)
    yield server
    server.close()


def received(server: ControlServer) -> list[Said]:
    """What has arrived at rank 0, which answers hellos."""
    messages = list(server.receive(0.01))
    for identity, message in messages:
        if isinstance(message, Hello):
            server.send(identity, HelloAck())
    return messages


def wait_for(server: ControlServer, *wanted: Said, tending: RelayedClient | None = None) -> list[Said]:
    """What rank 0 receives until all of these are among it; meanwhile a supervisor looks at its messages."""
    messages: list[Said] = []
    end = time.monotonic() + SECONDS
    while not all(one in messages for one in wanted) and time.monotonic() < end:
        messages += received(server)
        if tending is not None:
            list(tending.receive())
    return messages


def joined(server: ControlServer, wire: Wire, *numbers: int, ports: tuple[int, ...] = ()) -> list[ControlClient]:
    """These ranks, once rank 0 has answered them."""
    clients: dict[int, ControlClient] = {}
    endpoint = Endpoint("127.0.0.1", ports or (server.port,), 2 * SECONDS, max_direct_ranks=1)

    def run(number: int) -> None:
        clients[number] = join(endpoint, lambda: Rank0Endpoint(wire), rank(number), lambda: None)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        received(server)
    return [clients[number] for number in numbers]


def reaches(server: ControlServer, number: int, client: ControlClient) -> bool:
    """Does a message of rank 0 reach this rank?"""
    end = time.monotonic() + SECONDS
    server.send(named(number), Ping())
    while time.monotonic() < end:
        received(server)
        if Ping() in list(client.receive()):
            return True
    return False


def is_relayed(client: ControlClient) -> bool:
    return client.socket.getsockopt_string(zmq.LAST_ENDPOINT).startswith("ipc:")


def test_the_ranks_of_a_host_share_a_connection_and_each_gets_its_messages(server: ControlServer, wire: Wire) -> None:
    clients = joined(server, wire, 2, 3)
    assert [is_relayed(client) for client in clients] == [True, True]
    said: list[Said] = []
    for number, client in zip((2, 3), clients, strict=True):
        message = PartialData(number, Raw(b"{}"))
        client.send(message)
        said.append((named(number), message))
    assert sorted(wait_for(server, *said), key=str) == said
    assert [reaches(server, number, client) for number, client in zip((2, 3), clients, strict=True)] == [True, True]
    for client in reversed(clients):
        client.close()


def test_a_relay_is_of_one_run_with_one_secret() -> None:
    wires = Wire("a", b"secret"), Wire("b", b"secret"), Wire("a", b"another")
    assert len({wire.relay_address for wire in wires}) == 3


def test_a_rank_whose_relay_closes_connects_to_rank_0_itself(server: ControlServer, wire: Wire) -> None:
    first, second = joined(server, wire, 2, 3)
    assert isinstance(second, RelayedClient)
    first.close()
    wait_for(server, (named(3), Hello(structs.replace(rank(3), address="127.0.0.1"))), tending=second)
    assert not is_relayed(second)
    assert reaches(server, 3, second)
    second.close()


@pytest.fixture
def silent(server: ControlServer, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayedClient]:
    """Rank 3 behind a relay that has answered once, and never does again."""
    quick = replace(DEADLINES, ask_relay=0.01, relay_answer=0.05, relay_answer_leaving=0.02)
    monkeypatch.setattr(control_client, "DEADLINES", quick)
    relay = new_router(wire)
    relay.bind(wire.relay_address)
    client = RelayedClient(wire, rank(3))
    identity, *_asked = relay.recv_multipart()
    relay.send_multipart([identity, *Route(f"tcp://127.0.0.1:{server.port}", "127.0.0.1").frames()])
    assert client.wait_for_answer(SECONDS)
    yield client
    client.close()
    relay.close()


def test_a_rank_whose_relay_is_silent_reaches_rank_0_itself(server: ControlServer, silent: RelayedClient) -> None:
    hello = named(3), Hello(structs.replace(rank(3), address="127.0.0.1"))
    assert hello in wait_for(server, hello, tending=silent)
    assert reaches(server, 3, silent)


def test_why_a_rank_is_leaving_reaches_rank_0_past_a_silent_relay(server: ControlServer, silent: RelayedClient) -> None:
    silent.send(Leaving(15))
    assert (named(3), Leaving(15)) in wait_for(server, (named(3), Leaving(15)), tending=silent)


def test_what_a_relay_passes_on_late_does_not_take_a_rank_back(server: ControlServer, wire: Wire) -> None:
    (client,) = joined(server, wire, 4)
    other = connect_socket(f"tcp://127.0.0.1:{server.port}", wire, rank(2))
    batch = Batch()
    batch.add(named(4), wire.encode(Pong()))
    for frames in batch.packed_messages():
        other.send_multipart(frames)
    wait_for(server, (named(4), Pong()))
    assert reaches(server, 4, client)
    other.close()
    client.close()


def test_without_a_secret_no_process_speaks_for_others() -> None:
    wire = Wire("run")
    server = ControlServer([free_port("127.0.0.1")], wire, rank_0(), local_only=True)
    stranger = connect_socket(f"tcp://127.0.0.1:{server.port}", wire, rank(1))
    batch = Batch()
    batch.add(named(4), wire.encode(Pong()))
    for frames in (*batch.packed_messages(), [wire.encode(Leaving(15))]):
        stranger.send_multipart(frames)
    assert wait_for(server, (named(1), Leaving(15))) == [(named(1), Leaving(15))]
    stranger.close()
    server.close()


def test_connections_are_shared_in_large_worlds_whose_launcher_says_how_many_ranks_a_host_has() -> None:
    place = Place(rank=9, world_size=1000, host="n1", launcher="slurm", local_rank=1, local_world_size=8)
    assert shares_connection(place, 512)
    assert not shares_connection(place, 1000)
    assert not shares_connection(structs.replace(place, local_world_size=1), 512)
    assert not shares_connection(structs.replace(place, local_world_size=None), 512)
    assert not shares_connection(structs.replace(place, local_rank=None), 512)


@given(st.lists(st.tuples(st.binary(max_size=3), st.sampled_from([b"", b"x", b"y" * 700_000])), max_size=8))
def test_a_batch_keeps_the_order_and_stays_small(messages: list[tuple[bytes, bytes]]) -> None:
    batch = Batch()
    for identity, data in messages:
        batch.add(identity, data)
    packed = [b"".join(frames) for frames in batch.packed_messages()]
    assert all(len(frame) < 64 << 10 for frames in batch.packed_messages() for frame in frames)
    parcels = [parcel for data in packed for parcel in unpack_batch(data)]
    assert [(identity, data) for identities, data in parcels for identity in identities] == messages
    assert all(len(data) < 1_800_000 for data in packed)


def test_equal_messages_that_follow_each_other_are_sent_once() -> None:
    batch = Batch()
    for number in range(8):
        batch.add(b"%d" % number, b"x" * 1000)
    ((_empty, data),) = batch.packed_messages()
    assert len(data) < 1100


@given(st.binary(max_size=50))
def test_noise_is_no_batch_and_no_path(noise: bytes) -> None:
    assert isinstance(unpack_batch(noise), list)
    assert Route.from_frames([noise]) is None
    assert Route.from_frames([b"", b"\x01" + noise]) is None


def test_too_few_open_files_for_all_connections_are_a_sentence(golden) -> None:
    with pytest.raises(UsageError) as caught:
        raise_open_files_limit(10**9)
    golden(re.sub(r"may open \d+", "may open N", str(caught.value)))
