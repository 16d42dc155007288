"""The reason why a watched command failed, read from the end of what it wrote."""

import os
import subprocess
import threading
from pathlib import Path

import pytest
from test_watch_waiting import _soon

from ddpdiag.checks.known_errors import main_reason
from ddpdiag.explain.card import all_cards
from ddpdiag.watch.ends import EndOrder
from ddpdiag.watch.output import FileSink, Relay, TerminalSink, failure_text
from ddpdiag.watch.processes import read_process

LOGS = Path(__file__).parent.parent / "recordings" / "logs"
EXITED, KILLED = 1 << 8, 9
NO_FILES = b"[rank1]: OSError: [Errno 24] Too many open files\n"
CLOSED = b"[rank0]: RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.1]:8066. This is typically\n"
ROOT_CAUSE = b"""
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_05:49:35
  rank      : 2 (local_rank: 2)
  exitcode  : %s (pid: 25760)  (SIGINT)
"""
TERMINATED = b"E api.py:1002] failed (exitcode: -15) local_rank: 2 (pid: 7516) of binary: /venv/bin/python\n"
ABORTED = b"  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 7517)  (SIGABRT)\n"
BARRIER = b"[rank0]: RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 30000 ms\n"


ENDED_FIRST = [
    (b"-6", (2, 1, 0), "rank 2: a worker ended itself (SIGABRT)"),
    (b"-6", (1, 2), "rank 1: a worker ended itself (SIGABRT)"),
    (b"-6", (2,), "ranks 1-2: a worker ended itself (SIGABRT)"),  # when rank 1 ended was not seen
    (b"-15", (2, 1), "rank 2 failed first (SIGTERM)"),
    (b"-15", (1, 2), "rank 1: a worker ended itself (SIGABRT)"),  # torchrun ended rank 2
]


class Written:
    """A sink that holds these texts."""

    def __init__(self, *texts: bytes) -> None:
        self.tail = lambda: iter(texts)


@pytest.mark.parametrize(
    ("texts", "status", "words"),
    [
        ((CLOSED, NO_FILES, CLOSED), EXITED, ("(exit code 1): rank 1: ", "ulimit -n")),
        ((NO_FILES,), KILLED, ("(SIGKILL)",)),
        ((BARRIER,), EXITED, ("rank 0: ", "It waited for ranks 2-3.")),
        (((LOGS / "interface_is_missing.log").read_bytes(),), EXITED, ("GLOO_SOCKET_IFNAME",)),
        ((NO_FILES,), 0, None),
        ((), EXITED, None),
        ((CLOSED,), EXITED, None),
        ((b"ddpdiag watch: n0 12:33:01, nothing new for 60 s: rank 1 is stopped\n",), EXITED, None),
        ((CLOSED, ROOT_CAUSE % b"-2"), EXITED, ("(exit code 1): rank 2 failed first (SIGINT)",)),
        ((CLOSED, ROOT_CAUSE % b"7"), EXITED, ("rank 2 failed first (exit code 7)",)),
        ((CLOSED, ROOT_CAUSE % b"1"), EXITED, None),  # it may have raised because another rank closed the connection
        ((TERMINATED, ABORTED, ROOT_CAUSE % b"-15"), EXITED, ("rank 2 failed first (SIGTERM)",)),
        ((ABORTED, ROOT_CAUSE % b"-9"), EXITED, ("rank 2 failed first (SIGKILL)",)),
        ((b"ValueError: mine\n",), EXITED, None),
        (((LOGS / "rank_raises.log").read_bytes(),), EXITED, ("rank 1: ", "RuntimeError", "raised in", "line ")),
    ],
)
def test_a_known_cause_is_reported_with_its_fix(texts, status, words) -> None:
    text = failure_text([Written(*texts)], status)
    assert (words is not None) == bool(text)
    assert [word for word in words or () if word not in text] == []


@pytest.mark.parametrize(("code", "ended", "words"), ENDED_FIRST)
def test_of_ranks_that_died_at_once_the_first_is_named(code, ended, words) -> None:
    written = Written(b"Failures:\n", ABORTED, ROOT_CAUSE % code)
    assert words in failure_text([written], EXITED, ended)


def test_the_order_of_ends_is_that_of_the_kernel() -> None:
    order, processes = EndOrder(), [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
    order.follow({rank: read_process(process.pid) for rank, process in enumerate(processes)})
    for rank in (2, 0, 3):
        processes[rank].kill()
        processes[rank].wait()
    assert _soon(lambda: [*order.ends] == [2, 0, 3])
    processes[2] = subprocess.Popen(["sleep", "60"])  # a restart
    order.follow({2: read_process(processes[2].pid)})
    assert [*order.ends] == [0, 3]
    for process in (processes[1], processes[2]):
        process.kill()
        process.wait()
    assert _soon(lambda: sorted([*order.ends][2:]) == [1, 2] and order.all_ended)


def test_a_python_without_pidfds_tells_no_ends(monkeypatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    order = EndOrder()
    order.follow({0: read_process(os.getpid())})
    assert (order.are_missing, order.ends) == (True, {})


def test_a_card_that_knows_no_text_gives_no_reason() -> None:
    for card in all_cards():
        if card.meaning.startswith("No known text"):
            assert main_reason([card.example.encode()]) is None


def test_of_a_file_that_was_there_only_what_was_added_is_read(tmp_path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(NO_FILES)
    with log.open("ab") as file:
        sink = FileSink([file.fileno()])
        assert list(sink.tail()) == [b""]
        file.write(b"more\n")
        file.flush()
        assert list(sink.tail()) == [b"more\n"]
    log.write_bytes(CLOSED)
    pattern = FileSink([str(log)])
    log.write_bytes(b"new")
    assert list(pattern.tail()) == [b"new"], "it was written anew"


def test_of_a_pipe_the_end_is_kept_and_of_a_terminal_nothing() -> None:
    reader, outer = os.pipe()
    relay = Relay(outer)
    inner = os.dup(relay.descriptor)
    relay.start()
    drain = threading.Thread(target=lambda: list(iter(lambda: os.read(reader, 1 << 16), b"")), daemon=True)
    drain.start()
    for _ in range(40):
        os.write(inner, b"x" * (1 << 16))
    os.write(inner, NO_FILES)
    os.close(inner)
    assert _soon(lambda: b"".join(relay.tail()).endswith(NO_FILES))
    assert len(b"".join(relay.tail())) <= 1 << 20
    assert list(TerminalSink(reader).tail()) == []
    os.close(outer)
    drain.join(10)
    os.close(reader)
