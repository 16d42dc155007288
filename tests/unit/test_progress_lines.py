"""What a log is told of a run, by a clock that the tests hold."""

import io
import os
import pty
import termios

from test_render_progress import RUN, Terminal, ended

from ddpdiag.model.news import Gathered, Happened, Joined, News, Pending, Progressed, Seeking, Started, Waiting
from ddpdiag.render.progress_lines import Counter, Lines
from ddpdiag.render.streams import Display, put

ONE_LATE = Pending(ranks=4, done=3, awaited=(3,), nodes=("n1",))


def said(*told: tuple[float, News]) -> list[str]:
    """The lines that come of news told at these times."""
    stream, now = io.StringIO(), [0.0]
    lines = Lines(stream, lambda: now[0])
    for seconds, news in told:
        now[0] = seconds
        lines.tell(news)
    return stream.getvalue().splitlines()


def test_a_run_says_who_came_and_what_came_to_an_end():
    assert said(*((0.4, news) for news in RUN), (12.0, ended("collective"))) == [
        "ddpdiag [0 s of 60 s] 4 ranks on 2 hosts",
        "ddpdiag [0 s of 60 s] rendezvous done",
        "ddpdiag [12 s of 60 s] collective done",
    ]


def test_a_long_check_says_every_30_s_who_is_waited_for():
    told = [(0.0, news) for news in RUN] + [(float(now), ONE_LATE) for now in range(1, 64)]
    line = "COL001 all-reduce [red]: {0}.0 s of 36 s, 3 of 4 ranks done, waiting for rank 3 on n1"
    assert said(*told)[2:] == [f"ddpdiag [{now} s of 60 s] {line.format(now)}" for now in (30, 60)]


def test_how_far_the_check_is_stands_in_its_line():
    told = [(0.0, news) for news in RUN]
    assert "s, 64 MiB, 3 of 4" in said(*told, (1.0, Progressed(text="64 MiB")), (31.0, ONE_LATE))[-1]


def test_a_wait_for_ranks_is_told_after_3_s():
    start = (0.0, Started(budget_seconds=60.0))
    waits = [(now / 2, Waiting(came=1, missing=(1,), left_seconds=15.0 - now / 2)) for now in range(29)]
    assert said(start, *waits, (15.0, Gathered(ranks=1, hosts=1, missing=(1,)))) == [
        "ddpdiag [3 s of 60 s] waiting for ranks, 12 s left, 1 of 2 came, 1 missing (rank 1)",
        "ddpdiag [15 s of 60 s] 1 rank on 1 host; rank 1 did not come",
    ]


def test_a_rank_that_looks_for_rank_0_says_so_once():
    seeks = [(float(now), Seeking(rank=1, host="n0", left_seconds=15.0 - now)) for now in range(15)]
    assert said(*seeks, (15.0, Joined(rank=1, host="n0"))) == ["ddpdiag [3 s] rank 1 looks for rank 0 at n0, 12 s left"]


def test_stages_that_were_skipped_or_go_on_are_not_worth_a_line_unless_they_failed():
    parts = (
        ended("p2p", "skipped"),
        ended("host", more=True),
        ended("gpu", "failed", failed=("GPU002", "GPU002"), more=True),
        ended("host", "skipped"),
    )
    assert said(*((1.0, part) for part in parts)) == ["ddpdiag [1 s] gpu failed in GPU002", "ddpdiag [1 s] host done"]


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


def test_a_counter_in_a_log_speaks_every_30_s_after_some_patience():
    told = [(float(now), f"{now} of 90 done") for now in range(90)]
    assert counted(io.StringIO(), Display.LINES, *told, patience=3.0).splitlines() == [
        "ddpdiag [3 s] 3 of 90 done",
        "ddpdiag [33 s] 33 of 90 done",
        "ddpdiag [63 s] 63 of 90 done",
    ]


def test_a_silent_counter_says_nothing():
    assert counted(io.StringIO(), Display.NONE, (5.0, "a")) == ""
