"""Why a watched command failed: the known cause in what it wrote comes first, and no rank that waited is named."""

import os
import threading
from pathlib import Path

import pytest
from msgspec import structs
from test_watch_judged import COMPUTES, WAITS, seen, stalled
from test_watch_waiting import _soon

from ddpdiag.checks.known_errors import first_reason
from ddpdiag.explain.card import all_cards
from ddpdiag.model import Finding
from ddpdiag.watch.bundle import Bundle, merged, read_bundle
from ddpdiag.watch.command import failed_look
from ddpdiag.watch.judge import judge
from ddpdiag.watch.look import Failure, Look
from ddpdiag.watch.output import FileSink, Relay, TerminalSink, failure_of, read_failure
from ddpdiag.watch.report import render

LOGS = Path(__file__).parent.parent / "recordings" / "logs"
EXITED, KILLED = 1 << 8, 9
NO_FILES = b"[rank1]: OSError: [Errno 24] Too many open files\n"
CLOSED = b"[rank0]: RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.1]:8066. This is typically\n"
BARRIER = b"[rank0]: RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 30000 ms\n"


def judged_failure(failure: Failure) -> Finding:
    return judge(structs.replace(stalled(), failure=failure))


# The page of the card that explains each log, and the ranks that are named; no card knows the script's own error.
EXPECTED = {
    "debug_level_refused": ("LCH002.debug-level", ()),
    "import_of_torch_fails": ("RUN003.raised", ()),
    "interface_is_missing": ("RDZ003.missing", ()),
    "master_port_taken": ("RDZ005.taken", ()),
    "own_name_is_loopback": ("RDZ002.own", ()),
    "rank_killed_by_the_memory_limit": ("RUN003.died", (1,)),
    "rank_missing": ("RUN001.absent", ()),
    "rank_raises": None,
    "rank_segfaults": ("RUN003.died", (2,)),
    "shared_directory_is_full": ("RDZ006.full", ()),
}
PAGES = {card.name: card.code for card in all_cards()}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_log_of_a_job_gives_the_cause_if_it_is_known(name) -> None:
    failure = failure_of([(LOGS / f"{name}.log").read_bytes()], EXITED)
    assert (failure and (PAGES[failure.known.name], judged_failure(failure).ranks)) == EXPECTED[name]


def test_title_meaning_text_and_fix_are_shown(golden) -> None:
    failure = failure_of([(LOGS / "interface_is_missing.log").read_bytes()], EXITED)
    text = render(structs.replace(stalled(), failure=failure), judged_failure(failure), (), color=False, width=80)
    golden(text[text.index("the command failed") :])


def test_a_card_that_knows_no_text_gives_no_reason() -> None:
    for card in all_cards():
        if card.meaning.startswith("No known text"):
            assert first_reason([card.example.encode()]) is None


def test_the_cause_comes_before_echoes_and_names_its_rank() -> None:
    failure = failure_of([CLOSED, NO_FILES, CLOSED], EXITED)
    assert failure is not None
    assert (judged_failure(failure).ranks, failure.ended, failure_of([NO_FILES], KILLED).ended) == (
        (1,),
        "exit code 1",
        "SIGKILL",
    )


def test_a_rank_that_waited_is_not_named_but_those_for_which_it_did() -> None:
    failure = failure_of([BARRIER], EXITED)
    assert (failure.ranks, judged_failure(failure).ranks) == ((0,), (2, 3))


TIMED_OUT = (
    b"[rank0]: RuntimeError: [/x/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete\n"
)


def look_before(**more) -> Look:
    ranks = (seen(0, WAITS), seen(1, COMPUTES, "R", cores=1.0))
    return structs.replace(stalled(*ranks, **more), unix_seconds=900.0, silent_seconds=300.0)


@pytest.mark.parametrize(
    ("log", "ranks"),
    [
        pytest.param(TIMED_OUT, (1,), id="a wait without a name"),
        pytest.param(BARRIER, (2, 3), id="a wait that names ranks"),
        pytest.param(NO_FILES.replace(b"rank1", b"rank0"), (0,), id="a cause of its own"),
    ],
)
def test_the_last_report_keeps_the_rank_of_the_look(golden, log, ranks, tmp_path) -> None:
    failure = failure_of([log], EXITED)
    look = failed_look(structs.replace(stalled(), unix_seconds=1000.0), failure, [look_before()])
    assert judge(look).ranks == ranks
    golden(judge(look).message)
    bundle = Bundle(str(tmp_path))
    for each in (look_before(), look):
        bundle.keep(each)
    assert judge(merged(read_bundle(str(bundle.path)))) == judge(look)


def test_a_look_that_no_longer_names_the_rank_says_that_one_did(golden) -> None:
    looks = [look_before(), structs.replace(stalled(seen(0, WAITS), seen(1, WAITS)), unix_seconds=950.0)]
    look = failed_look(structs.replace(stalled(), unix_seconds=1000.0), failure_of([TIMED_OUT], EXITED), looks)
    assert judge(look).ranks == ()
    golden(*look.notes)
    assert failed_look(stalled(), failure_of([TIMED_OUT], EXITED), ()).ranks == ()


def test_echoes_and_the_scripts_own_errors_give_no_reason() -> None:
    for log in ([], [CLOSED], [b"ValueError: mine\n"], [b"epoch 1\n"]):
        assert first_reason(log) is None
        assert failure_of(log, EXITED) is None


def test_a_command_that_went_well_is_not_explained(tmp_path) -> None:
    (tmp_path / "a.log").write_bytes(b"")
    sink = FileSink([str(tmp_path / "*.log")])
    (tmp_path / "a.log").write_bytes(NO_FILES)
    assert read_failure([sink], 0) is None
    assert read_failure([sink], EXITED).ranks == (1,)


def test_of_a_file_that_was_there_only_what_was_added_is_read(tmp_path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(NO_FILES)
    with log.open("ab") as file:
        sink = FileSink([file.fileno()])
        assert list(sink.written()) == [b""]
        file.write(b"more\n")
        file.flush()
        assert list(sink.written()) == [b"more\n"]
    log.write_bytes(CLOSED)
    pattern = FileSink([str(log)])
    log.write_bytes(b"new")
    assert list(pattern.written()) == [b"new"], "it was written anew"


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
    assert _soon(lambda: b"".join(relay.written()).endswith(NO_FILES))
    assert len(b"".join(relay.written())) <= 1 << 20
    assert list(TerminalSink(reader).written()) == []
    os.close(outer)
    drain.join(10)
    os.close(reader)


def test_a_bundle_keeps_the_cause(tmp_path) -> None:
    failure = failure_of([NO_FILES], EXITED)
    bundle = Bundle(str(tmp_path))
    bundle.keep(structs.replace(stalled(), failure=failure))
    (look,) = read_bundle(str(bundle.path))
    assert (look.failure, judge(look).title) == (failure, judged_failure(failure).title)


def test_of_several_hosts_the_first_with_a_reason_of_its_own_is_shown() -> None:
    texts = {"n0": BARRIER, "n1": NO_FILES, "n2": b"RuntimeError: can't start new thread\n"}
    looks = [
        structs.replace(
            stalled(), host=host, unix_seconds=10.0 + number, silent_seconds=0.0, failure=failure_of([text], EXITED)
        )
        for number, (host, text) in enumerate(texts.items())
    ]
    assert merged(looks).failure == looks[1].failure
