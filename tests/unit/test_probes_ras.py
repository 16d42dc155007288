"""NCCL's RAS service is asked over a real socket, and never waited for beyond the time given."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from ras_server import REPORT, RasServer

from ddpdiag.probes.collectives import MOST_RAS_BYTES, RAS_CUT, RasAddress, ras_report, ras_service
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.hang_evidence import RecorderReader, ask_for_collectives, asks_nccl, wait_for_answer
from ddpdiag.runtime.supervisor.ipc import PostedCollectives, RasReport

Serve = Callable[..., RasServer]
SECONDS = 0.6


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[RasServer] = []

    def start(act: str, **options: object) -> RasServer:
        servers.append(RasServer(act=act, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def said(server: RasServer, seconds: float = SECONDS) -> tuple[str, float]:
    begin = time.monotonic()
    text = ras_report(RasAddress(socket.AF_INET, "127.0.0.1", server.port), begin + seconds, seconds)
    return text, time.monotonic() - begin


def test_the_whole_report_is_read(serve: Serve) -> None:
    server = serve("answer")
    text, _ = said(server, 5)
    assert text == REPORT.strip()
    assert server.heard == ["CLIENT PROTOCOL 2", "TIMEOUT 1", "VERBOSE STATUS"]


def test_of_a_report_that_is_not_finished_the_start_is_kept(serve: Serve) -> None:
    text, seconds = said(serve("cut"))
    assert text.startswith("NCCL version 2.27.7")
    assert text.endswith(RAS_CUT)
    assert seconds < SECONDS + 0.3


def test_a_huge_report_is_cut(serve: Serve) -> None:
    text, _ = said(serve("answer", report="x" * 5 * MOST_RAS_BYTES), 5)
    assert len(text) == MOST_RAS_BYTES + 1 + len(RAS_CUT)


@pytest.mark.parametrize("act", ["silent", "close", "stranger"])
def test_who_does_not_speak_the_protocol_costs_no_more_than_the_time_given(serve: Serve, act: str) -> None:
    text, seconds = said(serve(act))
    assert text == ""
    assert seconds < SECONDS + 0.3


def test_another_process_behind_the_same_port_may_answer(serve: Serve) -> None:
    text, _ = said(serve("late"), 5)
    assert text == REPORT.strip()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ras_report(RasAddress(socket.AF_INET, "127.0.0.1", port), time.monotonic() + 0.2, 0.2) == ""


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6"))]
)
def test_our_own_service_is_found_where_it_listens(serve: Serve, host: str) -> None:
    try:
        server = serve("answer", host=host)
    except OSError:
        pytest.skip(f"no {host} here")
    found = ras_service({"NCCL_RAS_ADDR": f"{host}:{server.port}"})
    assert found is not None
    assert (found.host, found.port) == (host, server.port)
    assert ras_report(found, time.monotonic() + 5, 5) == REPORT.strip()


def test_the_service_of_another_process_is_left_alone() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert ras_service({"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}) is None
        other.communicate()


@pytest.mark.parametrize("address", ["localhost", "localhost:", "localhost:x", "h:99999", "h:0", "h:²"])
def test_an_address_without_a_port_is_none(address: str) -> None:
    assert ras_service({"NCCL_RAS_ADDR": address}) is None


@pytest.fixture
def link() -> Iterator[socket.socket]:
    """The supervisor's end of a recorder reader's channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    RecorderReader(theirs).start_trial()
    yield ours
    ours.close()
    theirs.close()


def heard(link: socket.socket, seconds: float = 5.0) -> PostedCollectives | RasReport | None:
    return wait_for_answer(link, time.monotonic() + seconds, lambda: True)


def test_a_recorder_reader_answers_for_itself_first_and_then_for_nccl(
    serve: Serve, link: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "NCCL_RAS_ADDR", f"localhost:{serve('answer').port}")
    ask_for_collectives(link, nccl=True)
    assert isinstance(heard(link), PostedCollectives)
    assert heard(link) == RasReport(REPORT.strip())
    ask_for_collectives(link)
    assert isinstance(heard(link), PostedCollectives)
    assert heard(link, 0.1) is None, "NCCL was not asked for"


def test_what_nccl_says_after_its_time_out_is_waited_for(
    serve: Serve, link: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "NCCL_RAS_ADDR", f"localhost:{serve('waits').port}")
    begin = time.monotonic()
    ask_for_collectives(link, nccl=True)
    assert isinstance(heard(link), PostedCollectives)
    assert wait_for_answer(link, begin + DEADLINES.ras, lambda: True) == RasReport(REPORT.strip())


def test_a_silent_service_does_not_keep_the_reader_from_answering(
    serve: Serve, link: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "NCCL_RAS_ADDR", f"localhost:{serve('silent').port}")
    ask_for_collectives(link, nccl=True)
    assert isinstance(heard(link), PostedCollectives)
    assert heard(link) == RasReport("")


def test_without_a_service_that_is_said_at_once(link: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "NCCL_RAS_ADDR", "localhost:1")
    ask_for_collectives(link, nccl=True)
    assert isinstance(heard(link), PostedCollectives)
    assert heard(link, 0.5) == RasReport("")


def test_looking_for_the_service_keeps_nobody_waiting(link: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = threading.Event()
    monkeypatch.setattr("ddpdiag.runtime.supervisor.hang_evidence._service", lambda: looking.wait(10) and None)
    ask_for_collectives(link, nccl=True)
    assert isinstance(heard(link), PostedCollectives)
    looking.set()
    assert heard(link) == RasReport("")


def test_two_ranks_of_some_hosts_ask() -> None:
    from seen import arrival_of

    asking = [rank for rank in range(64) if asks_nccl(arrival_of(rank, 64, ranks_per_node=8).place)]
    assert asking == [0, 1, 8, 9, 16, 17, 24, 25]
