"""What a log is told of a run, by a clock that the tests hold."""

import io
import os
import pty
import termios

import pytest
from test_render_progress import RUN, Terminal, ended

from ddpdiag.model.news import Gathered, Happened, Joined, News, Pending, Progressed, Seeking, Started, Waiting
from ddpdiag.render.files import Display, put
from ddpdiag.render.progress import Counter, Lines

ONE_LATE = Pending(ranks=4, done=3, awaited=(3,), hosts=("n1",))


def said(*told: tuple[float, News]) -> list[str]:
    """The lines that come of news told at these times."""
    stream, now = io.StringIO(), [0.0]
    lines = Lines(stream, lambda: now[0])
    for seconds, news in told:
        now[0] = seconds
        lines.tell(news)
    return stream.getvalue().splitlines()


BEGUN = [(0.0, news) for news in RUN]
WAITS = [(now / 2, Waiting(came=1, missing=(1,), left_seconds=15.0 - now / 2)) for now in range(29)]
SEEKS = [(float(now), Seeking(rank=1, host="n0", left_seconds=15.0 - now)) for now in range(15)]
PARTS = [
    ended("p2p", "skipped"),
    ended("host", more=True),
    ended("gpu", "failed", failed=("GPU002", "GPU002"), more=True),
    ended("host", "skipped"),
]


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([*BEGUN, (12.0, ended("collective"))], id="who-came-and-what-came-to-an-end"),
        pytest.param(
            [*BEGUN, *((float(now), ONE_LATE) for now in range(1, 64))], id="every-30-s-who-a-long-check-waits-for"
        ),
        pytest.param([*BEGUN, (1.0, Progressed(text="64 MiB")), (31.0, ONE_LATE)], id="how-far-a-check-is"),
        pytest.param(
            [(0.0, Started(budget_seconds=60.0)), *WAITS, (15.0, Gathered(ranks=1, hosts=1, missing=(1,)))],
            id="after-3-s-that-ranks-are-waited-for",
        ),
        pytest.param([*SEEKS, (15.0, Joined(rank=1, host="n0"))], id="once-that-a-rank-looks-for-rank-0"),
        pytest.param([(1.0, part) for part in PARTS], id="stages-that-failed-but-no-skipped-or-unfinished-ones"),
    ],
)
def test_a_log_is_told(golden, told):
    golden("\n".join(said(*told)))


def test_a_stage_is_done_once_also_where_checks_look_once_more_at_the_end():
    told = [(1.0, ended("host", more=True)), (3.0, ended("host")), (9.0, ended("gpu")), (10.0, ended("host"))]
    assert said(*told) == ["ddpdiag [3 s] host done", "ddpdiag [9 s] gpu done"]


def test_what_comes_from_elsewhere_stays_in_one_line_of_bounded_length():
    (line,) = said((1.0, Happened(text="rank 3\n\x1b[31m" + "x" * 9000)))
    assert "\x1b" not in line
    assert line.endswith("...")
    assert len(line) < 600


def test_after_its_end_and_without_a_reader_nothing_is_said():
    stream = Terminal()
    lines = Lines(stream, lambda: 0.0)
    stream.error = BrokenPipeError()
    lines.tell(ended("host"))
    stream.error = None
    lines.tell(ended("gpu"))
    assert stream.getvalue() == ""
    other = Lines(stream, lambda: 0.0)
    other.close()
    other.tell(ended("host"))
    assert stream.getvalue() == ""


def test_a_pipe_that_nobody_empties_holds_nobody_up():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stream:
        assert put(stream, "nobody reads this\n")
        os.set_blocking(writing, False)
        os.close(reading)


def test_a_stopped_terminal_holds_nobody_up():
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
    with os.fdopen(theirs, "w") as stream:
        assert put(stream, "not now\n")
        termios.tcflow(theirs, termios.TCOON)
    os.close(ours)


# One line ------------------------------------------------------------------------------------------------------------


def counted(stream: io.StringIO, display: Display, *told: tuple[float, str], patience: float = 0.0) -> str:
    now = [0.0]
    counter = Counter(stream, display, patience, lambda: now[0])
    for seconds, text in told:
        now[0] = seconds
        counter.tell(text)
    counter.close()
    return stream.getvalue()


def test_a_counter_draws_one_line_again_and_takes_it_away():
    text = counted(Terminal(), Display.LIVE, (0.0, "a"), (0.1, "b"), (1.0, "c" * 200))
    assert text == "\r\x1b[Ka" + "\r\x1b[K" + "c" * 76 + "..." + "\r\x1b[K"


def test_a_counter_in_a_log_speaks_every_30_s_after_some_patience(golden):
    told = [(float(now), f"{now} of 90 done") for now in range(90)]
    golden(counted(io.StringIO(), Display.LINES, *told, patience=3.0))


def test_a_silent_counter_says_nothing():
    assert counted(io.StringIO(), Display.NONE, (5.0, "a")) == ""
