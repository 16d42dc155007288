"""The display of a run on a terminal."""

import contextlib
import errno
import io
import os
import pty
import re
import termios
import threading

import pytest

from ddpdiag.model.news import (
    CheckBegan,
    Gathered,
    Happened,
    Joined,
    News,
    Pending,
    Progressed,
    Seeking,
    StageBegan,
    StageEnded,
    Started,
    TrialBegan,
    Waiting,
)
from ddpdiag.render.progress import Lines, Progress, RunState, Silent, _rows, listener


class Terminal(io.StringIO):
    """A terminal; writing to it raises `error`, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def write(self, text: str) -> int:
        if self.error:
            raise self.error
        return super().write(text)


class Latin(Terminal):
    """A terminal that cannot show what is not in Latin-1."""

    encoding = "latin-1"


def ended(name: str, status: str = "done", seconds: float = 0.42, **more: object) -> StageEnded:
    return StageEnded(name=name, status=status, seconds=seconds, **more)  # type: ignore[arg-type]


RUN: tuple[News, ...] = (
    Started(budget_seconds=60.0),
    Gathered(ranks=4, hosts=2, missing=()),
    StageBegan(name="rendezvous"),
    CheckBegan(code="RDZ001", name="env [red]"),
    ended("rendezvous"),
    StageBegan(name="collective"),
    CheckBegan(code="COL001", name="all-reduce [red]"),
    TrialBegan(deadline_seconds=36.0),
)


TOLD = tuple((0.0, news) for news in RUN)


def run_through(progress: Progress | Silent) -> None:
    for news in RUN:
        progress.tell(news)
    progress.close()


def shown(*told: tuple[float, News], at: float) -> str:
    """What stands there at `at`, when these were told at their times."""
    state = RunState(began=0.0)
    for now, news in told:
        state = state.after(news, now)
    return "".join(f"{text}\n" for text, _style in _rows(state, at, "*"))


# Which of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "kind"),
    [({}, Progress), ({"CI": "true"}, Lines), ({"TERM": "dumb"}, Lines), ({"CI": "false", "TERM": "xterm"}, Progress)],
)
def test_a_terminal_has_a_display_unless_it_is_a_log_as_well(environ, kind):
    progress = listener(Terminal(), environ, color=True)
    progress.close()
    assert isinstance(progress, kind)


def test_a_log_gets_lines_and_what_is_closed_nothing():
    closed = io.StringIO()
    closed.close()
    assert isinstance(listener(io.StringIO(), {}, color=True), Lines)
    assert isinstance(listener(closed, {}, color=True), Silent)
    assert isinstance(listener(None, {}, color=True), Silent)


def test_silence_takes_every_call():
    run_through(silent := Silent())
    assert isinstance(silent, Silent)


# What stands there ---------------------------------------------------------------------------------------------------


def test_the_row_says_how_long_until_when_and_for_whom(golden):
    pending = Pending(ranks=4, done=3, awaited=(3,), hosts=("n1",))
    golden(shown(*TOLD, (2.0, Progressed(text="64 MiB")), (2.0, pending), at=12.3))


def test_whom_all_wait_for_is_left_out_where_that_is_everybody(golden):
    pending = Pending(ranks=4, done=0, awaited=(0, 1, 2, 3), hosts=("n0", "n1"))
    golden(shown(*TOLD, (1.0, pending), at=2.0))


def test_a_second_trial_moves_the_end_of_its_check(golden):
    golden(shown(*TOLD, (20.0, TrialBegan(deadline_seconds=5.0)), at=21.0))


def test_that_torch_is_imported_is_said_until_the_next_trial(golden):
    told = [(0.0, CheckBegan(code="LCH003", name="versions")), (0.0, TrialBegan(deadline_seconds=40.0, importing=True))]
    golden(shown(*told, at=3.0), shown(*told, (4.0, TrialBegan(deadline_seconds=5.0)), at=4.0))


def test_the_wait_for_ranks_counts_down_and_says_who_is_missing(golden):
    told = [(0.0, Started(budget_seconds=60.0)), (4.0, Waiting(came=1, missing=(1,), left_seconds=11.0))]
    assert shown(*told, at=2.0) == ""
    golden(shown(*told, at=6.0))
    assert shown(*told, (7.0, Gathered(ranks=1, hosts=1, missing=(1,))), at=8.0) == ""


def test_of_many_missing_ranks_a_few_are_named(golden):
    missing = tuple(range(1, 100, 2))
    golden(shown((4.0, Waiting(came=50, missing=missing, left_seconds=9.0)), at=4.0))


def test_a_rank_that_looks_for_rank_0_says_so_after_a_while(golden):
    told = (1.0, Seeking(rank=1, host="10.0.0.1", left_seconds=14.0))
    assert shown(told, at=2.9) == ""
    golden(shown(told, at=6.0))
    assert shown(told, (6.0, Joined(rank=1, host="10.0.0.1")), at=7.0) == ""


@pytest.mark.parametrize(
    "parts",
    [
        (ended("host", seconds=0.25), ended("host", seconds=1.5)),
        (ended("p2p", "skipped", 0.0),),
        (ended("host", "skipped", 0.0), ended("host")),
        (ended("host", more=True),),
        (ended("host", "failed", 1.0, failed=("HST001",), more=True),),
        (ended("host", "failed", 1.0, failed=("HST001",)), ended("host")),
    ],
    ids=["done-twice", "skipped", "skipped-and-done", "begun", "failed-and-more", "failed-and-done"],
)
def test_a_stage_stands_there_once_with_its_worst_part(golden, parts):
    golden(shown((0.0, Started(budget_seconds=60.0)), *((1.0, part) for part in parts), at=2.0))


def test_what_changes_the_course_of_the_run_stands_there():
    text = "rank 3 on n1 is lost: no message from it for 6 s"
    assert text in shown(*TOLD, (1.0, Happened(text=text)), at=2.0).splitlines()


# How it is drawn -----------------------------------------------------------------------------------------------------


def drawn(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> list[str]:
    """The last drawing of the run, line by line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    progress = Progress(terminal, color=True)
    for news in RUN:
        progress.tell(news)
    terminal.truncate(terminal.seek(0))
    progress.refresh()
    text = terminal.getvalue()
    progress.close()
    return text.rpartition("\x1b[2K")[2].split("\n")


def test_what_runs_is_drawn_even_where_there_is_room_for_little(monkeypatch):
    (row,) = drawn(Terminal(), monkeypatch, 80, 2)
    assert "COL001 all-reduce [red]" in row


@pytest.mark.parametrize(("columns", "most"), [(200, 60), (30, 29)])
def test_rows_are_narrow_and_not_padded(monkeypatch, columns, most):
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in drawn(Terminal(), monkeypatch, columns, 25)]
    assert len(lines) == 3
    assert max(map(len, lines)) <= most
    assert lines[0] == "0 s of 60 s"


def test_a_terminal_with_few_letters_gets_no_others(monkeypatch):
    assert all(line.isascii() for line in drawn(Latin(), monkeypatch, 80, 25))
    assert not all(line.isascii() for line in drawn(Terminal(), monkeypatch, 80, 25))


def test_without_colour_there_is_none():
    for color in (True, False):
        terminal = Terminal()
        progress = Progress(terminal, color=color)
        progress.tell(ended("host"))
        progress.refresh()
        progress.close()
        assert ("\x1b[32m" in terminal.getvalue()) is color


def test_the_cursor_is_never_hidden():
    terminal = Terminal()
    run_through(Progress(terminal, color=True))
    assert "\x1b[?25l" not in terminal.getvalue()


def test_who_joined_is_told_who_reports(golden):
    terminal = Terminal()
    progress = Progress(terminal, color=True)
    progress.tell(Seeking(rank=1, host="n0", left_seconds=9.0))
    progress.tell(Joined(rank=1, host="n0"))
    assert terminal.getvalue().endswith("\n")
    golden(terminal.getvalue().splitlines()[-1].rpartition("\x1b[2K")[2])


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("I/O operation on closed file")]
)
def test_a_terminal_that_goes_away_ends_the_display_only(error):
    terminal = Terminal()
    progress = Progress(terminal, color=True)
    progress.tell(StageBegan(name="rendezvous"))
    terminal.error = error
    progress.refresh()
    run_through(progress)
    assert terminal.error is error


def test_a_real_terminal_whose_other_end_closes():
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    progress = Progress(stream, color=True)
    progress.tell(StageBegan(name="rendezvous"))
    os.close(ours)
    progress.refresh()
    run_through(progress)
    with pytest.raises(OSError, match=f"Errno {errno.EIO}"):
        os.write(theirs, b"x")
    with contextlib.suppress(OSError):  # what was not written yet
        stream.close()


def test_a_stopped_terminal_holds_nobody_up():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(stream, color=True)
        termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
        run_through(progress)
        progress.tell(Joined(rank=1, host="n0"))
        termios.tcflow(theirs, termios.TCOON)
    os.close(ours)


def test_closing_twice_and_calls_after_it_do_nothing():
    terminal = Terminal()
    progress = Progress(terminal, color=True)
    progress.close()
    before = terminal.getvalue()
    progress.close()
    run_through(progress)
    assert terminal.getvalue() == before


def test_any_thread_may_call():
    terminal = Terminal()
    progress = Progress(terminal, color=True)
    progress.tell(Started(budget_seconds=60.0))
    threads = [threading.Thread(target=progress.tell, args=(ended(f"s{n}"),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.refresh()
    progress.close()
    assert all(f"s{number}" in terminal.getvalue() for number in range(8))
