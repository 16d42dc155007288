"""The display of a run."""

import contextlib
import errno
import io
import os
import pty
import threading

import pytest

from ddpdiag.render.progress import Progress, Silent, listener


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


def run_through(progress) -> None:
    progress.stage_started("rendezvous")
    progress.check_started("RDZ001", "env [red]")
    progress.stage_ended("rendezvous", "done", 0.42)
    progress.stage_started("collective")
    progress.close()


def test_only_a_terminal_gets_a_display():
    progress = listener(Terminal())
    progress.close()
    assert isinstance(progress, Progress)
    assert isinstance(listener(io.StringIO()), Silent)
    assert isinstance(listener(None), Silent)


def test_a_stage_that_runs_in_two_parts_stands_there_once():
    terminal = Terminal()
    progress = Progress(terminal)
    for seconds in (0.25, 1.5):
        progress.stage_ended("launch", "done", seconds)
    progress.refresh()
    progress.close()
    assert "1.8 s" in terminal.getvalue()
    assert terminal.getvalue().rpartition("1.8 s")[0].rpartition("\r")[2].count("launch") == 1


def test_a_closed_stream_gets_none():
    stream = io.StringIO()
    stream.close()
    assert isinstance(listener(stream), Silent)


def test_silence_takes_every_call():
    run_through(silent := Silent())
    assert isinstance(silent, Silent)


def test_what_was_done_and_what_runs_is_drawn():
    terminal = Terminal()
    progress = Progress(terminal)
    progress.stage_started("rendezvous")
    progress.stage_ended("rendezvous", "done", 0.42)
    progress.check_started("COL001", "all-reduce [red]")
    progress.refresh()
    progress.close()
    text = terminal.getvalue()
    assert "rendezvous" in text
    assert "0.4 s" in text
    assert "COL001 all-reduce [red]" in text


def test_the_cursor_is_never_hidden():
    terminal = Terminal()
    run_through(Progress(terminal))
    assert "\x1b[?25l" not in terminal.getvalue()


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("I/O operation on closed file")]
)
def test_a_terminal_that_goes_away_ends_the_display_only(error):
    terminal = Terminal()
    progress = Progress(terminal)
    progress.stage_started("rendezvous")
    terminal.error = error
    progress.refresh()
    run_through(progress)
    assert terminal.error is error


def test_a_real_terminal_whose_other_end_closes():
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    progress = Progress(stream)
    progress.stage_started("rendezvous")
    os.close(ours)
    progress.refresh()
    run_through(progress)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(theirs, b"x")
    with contextlib.suppress(OSError):  # what was not written yet
        stream.close()


def test_closing_twice_and_calls_after_it_do_nothing():
    terminal = Terminal()
    progress = Progress(terminal)
    progress.close()
    before = terminal.getvalue()
    progress.close()
    run_through(progress)
    assert terminal.getvalue() == before


def test_any_thread_may_call():
    terminal = Terminal()
    progress = Progress(terminal)
    threads = [threading.Thread(target=progress.stage_ended, args=(f"s{n}", "done", 0.1)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.refresh()
    progress.close()
    assert all(f"s{number}" in terminal.getvalue() for number in range(8))
