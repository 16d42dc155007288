"""The progress of a run in a log and on a terminal, by a clock that the tests hold."""

import contextlib
import errno
import io
import os
import pty
import termios

import pytest

from ddpdiag.model.news import (
    CheckBegan,
    CheckProgress,
    Joined,
    LookingForRank0,
    News,
    RanksGathered,
    RunEvent,
    RunStarted,
    StageBegan,
    StageEnded,
    TrialBegan,
    TrialPending,
    WaitingForRanks,
)
from ddpdiag.render.files import Display, write_if_ready
from ddpdiag.render.progress import Progress, ProgressLine, SilentListener, listener


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
    RunStarted(budget_seconds=60.0),
    RanksGathered(ranks=4, hosts=2, missing=()),
    StageBegan(name="rendezvous"),
    CheckBegan(code="RDZ001", name="env [red]"),
    ended("rendezvous"),
    StageBegan(name="collective"),
    CheckBegan(code="COL001", name="all-reduce [red]"),
    TrialBegan(deadline_seconds=36.0),
)
ONE_LATE = TrialPending(ranks=4, done=3, awaited=(3,), hosts=("n1",))
BEGUN = [(0.0, news) for news in RUN]
WAITS = [(now / 2, WaitingForRanks(joined=1, missing=(1,), left_seconds=15.0 - now / 2)) for now in range(29)]
SEEKS = [(float(now), LookingForRank0(rank=1, host="n0", left_seconds=15.0 - now)) for now in range(15)]
PARTS = [
    ended("p2p", "skipped"),
    ended("host", will_continue=True),
    ended("gpu", "failed", failed=("GPU002", "GPU002"), will_continue=True),
    ended("host", "skipped"),
]


def written(*told: tuple[float, News], live: bool, at: float | None = None) -> str:
    """The text after news at these times; `at`: what is drawn then."""
    stream, now = Latin() if live else io.StringIO(), [0.0]
    progress = Progress(stream, lambda: now[0], live=live)
    for seconds, news in told:
        now[0] = seconds
        progress.tell(news)
    if at is not None:
        now[0] = at
        progress.refresh()
    text = stream.getvalue()
    progress.close()
    return text


def said(*told: tuple[float, News]) -> list[str]:
    return written(*told, live=False).splitlines()


def drawn(*told: tuple[float, News], at: float) -> str:
    return written(*told, live=True, at=at).rpartition("\r\x1b[K")[2]


@pytest.mark.parametrize(
    ("environ", "live"),
    [({}, True), ({"CI": "true"}, False), ({"TERM": "dumb"}, False), ({"CI": "false", "TERM": "xterm"}, True)],
)
def test_a_terminal_has_a_display_unless_it_is_a_log_as_well(environ, live):
    progress = listener(terminal := Terminal(), environ)
    progress.tell(ended("host"))
    progress.close()
    assert ("host done" in terminal.getvalue()) is not live


def test_a_log_gets_lines_and_a_closed_stream_nothing():
    closed = io.StringIO()
    closed.close()
    assert isinstance(listener(io.StringIO(), {}), Progress)
    assert isinstance(listener(closed, {}), SilentListener)
    assert isinstance(listener(None, {}), SilentListener)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([*BEGUN, (12.0, ended("collective"))], id="who-came-and-what-came-to-an-end"),
        pytest.param(
            [*BEGUN, *((float(now), ONE_LATE) for now in range(1, 64))], id="every-30-s-who-a-long-check-waits-for"
        ),
        pytest.param([*BEGUN, (1.0, CheckProgress(text="64 MiB")), (31.0, ONE_LATE)], id="how-far-a-check-is"),
        pytest.param(
            [(0.0, RunStarted(budget_seconds=60.0)), *WAITS, (15.0, RanksGathered(ranks=1, hosts=1, missing=(1,)))],
            id="after-3-s-that-ranks-are-waited-for",
        ),
        pytest.param([*SEEKS, (15.0, Joined(rank=1, host="n0"))], id="once-that-a-rank-looks-for-rank-0"),
        pytest.param([(1.0, part) for part in PARTS], id="stages-that-failed-but-no-skipped-or-unfinished-ones"),
    ],
)
def test_a_log_is_told(golden, told):
    golden("\n".join(said(*told)))


def test_a_stage_is_done_once_also_where_checks_run_again_at_the_end():
    told = [(1.0, ended("host", will_continue=True)), (3.0, ended("host")), (9.0, ended("gpu")), (10.0, ended("host"))]
    assert said(*told) == ["ddpdiag [3 s] host done", "ddpdiag [9 s] gpu done"]


IMPORTS = [
    (0.0, CheckBegan(code="LCH003", name="versions")),
    (0.0, TrialBegan(deadline_seconds=40.0, imports_torch=True)),
]
ALL_LATE = TrialPending(ranks=4, done=0, awaited=(0, 1, 2, 3), hosts=("n0", "n1"))


@pytest.mark.parametrize(
    ("told", "at"),
    [
        pytest.param(
            [*BEGUN, (2.0, CheckProgress(text="64 MiB")), (2.0, ONE_LATE)], 12.3, id="until-when-and-for-whom"
        ),
        pytest.param([*BEGUN, (1.0, ALL_LATE)], 2.0, id="all-are-waited-for"),
        pytest.param([*BEGUN, (20.0, TrialBegan(deadline_seconds=5.0))], 21.0, id="a-second-trial-moves-the-end"),
        pytest.param(IMPORTS, 3.0, id="torch-is-imported"),
        pytest.param([*IMPORTS, (4.0, TrialBegan(deadline_seconds=5.0))], 4.0, id="until-the-next-trial"),
        pytest.param([(0.0, RunStarted(budget_seconds=60.0)), *WAITS[:9]], 6.0, id="the-wait-counts-down"),
        pytest.param(
            [(4.0, WaitingForRanks(joined=50, missing=tuple(range(1, 100, 2)), left_seconds=9.0))],
            4.0,
            id="of-many-a-few",
        ),
        pytest.param(SEEKS[:2], 6.0, id="rank-0-is-looked-for"),
    ],
)
def test_a_terminal_shows(golden, told, at):
    golden(drawn(*told, at=at))


def test_nothing_is_drawn_before_and_after_a_wait():
    assert drawn(WAITS[1], at=2.0) == ""
    assert drawn(WAITS[1], (7.0, RanksGathered(ranks=1, hosts=1, missing=(1,))), at=8.0) == ""
    assert drawn(SEEKS[1], at=2.9) == ""


def test_on_a_terminal_failures_and_events_stay_as_lines():
    text = "rank 3 on n1 is lost: no message from it for 6 s"
    lines = written((1.0, ended("host")), (1.0, PARTS[2]), (2.0, RunEvent(text=text)), live=True)
    assert lines == f"\r\x1b[Kddpdiag [1 s] gpu failed in GPU002\n\r\x1b[Kddpdiag [2 s] {text}\n"


def test_a_rank_that_joined_names_the_host_that_reports():
    text = written(SEEKS[1], (2.0, Joined(rank=1, host="n0")), live=True)
    assert "ddpdiag [2 s] rank 1 joined; rank 0 at n0 prints the report\n" in text


def test_text_from_other_hosts_stays_in_one_line_of_bounded_length():
    (line,) = said((1.0, RunEvent(text="rank 3\n\x1b[31m" + "x" * 9000)))
    assert "\x1b" not in line
    assert line.endswith("...")
    assert len(line) < 600


def test_a_terminal_with_few_letters_gets_no_others():
    for kind in (Latin, Terminal):
        progress = Progress(terminal := kind(), live=True)
        progress.tell(RUN[2])
        progress.refresh()
        progress.close()
        assert terminal.getvalue().isascii() is (kind is Latin)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("I/O operation on closed file")]
)
def test_a_reader_that_goes_away_ends_the_display_only(error, live):
    progress = Progress(stream := Terminal(), live=live)
    stream.error = error
    progress.tell(PARTS[2])
    progress.refresh()
    stream.error = None
    progress.tell(ended("gpu", "failed"))
    progress.close()
    assert stream.getvalue() == ""


def test_a_real_terminal_whose_other_end_closes():
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    progress = Progress(stream, live=True)
    progress.tell(StageBegan(name="rendezvous"))
    os.close(ours)
    progress.refresh()
    progress.close()
    with pytest.raises(OSError, match=f"Errno {errno.EIO}"):
        os.write(theirs, b"x")
    with contextlib.suppress(OSError):  # what was not written yet
        stream.close()


def test_a_stopped_terminal_holds_no_writer_up():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(stream, live=True)
        termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
        for news in RUN:
            progress.tell(news)
        assert write_if_ready(stream, "not now\n")
        progress.tell(Joined(rank=1, host="n0"))
        termios.tcflow(theirs, termios.TCOON)
    os.close(ours)


def test_a_full_pipe_holds_no_writer_up():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stream:
        assert write_if_ready(stream, "not read\n")
        os.set_blocking(writing, False)
        os.close(reading)


def test_closing_twice_and_calls_after_it_do_nothing():
    progress = Progress(terminal := Terminal(), live=True)
    progress.close()
    before = terminal.getvalue()
    progress.close()
    progress.tell(PARTS[2])
    assert terminal.getvalue() == before


def test_a_counter_draws_one_line_again_and_takes_it_away():
    for display, expected in (
        (Display.LIVE, "\r\x1b[Ka\r\x1b[K" + "c" * 76 + "...\r\x1b[K"),
        (Display.LINES, ""),
        (Display.NONE, ""),
    ):
        counter = ProgressLine(stream := Terminal(), display)
        counter.tell("a")
        counter.tell("c" * 200)
        counter.close()
        assert stream.getvalue() == expected
