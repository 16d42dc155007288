"""What is going on, while it goes on: a few lines at the bottom of the terminal that vanish at the end.

They are written to standard error, and only to a terminal; a log file gets the report alone. A terminal that goes away
(a closed window, a lost connection) ends the display, not the run.
"""

import io
import threading
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Protocol, TextIO, cast

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_REFRESHES_PER_SECOND = 8


class Listener(Protocol):
    """Who is told how the run goes on; calls may come from any thread, and none of them raises."""

    def stage_started(self, name: str) -> None:
        """A stage begins."""

    def check_started(self, code: str, name: str) -> None:
        """A check of the stage begins."""

    def progressed(self, text: str) -> None:
        """The check is so far."""

    def stage_ended(self, name: str, status: str, seconds: float) -> None:
        """The stage is over; `status` is the worst of its checks."""

    def close(self) -> None:
        """Nothing more will come; what was drawn is taken away."""


class Silent:
    """Says nothing: for log files and pipes."""

    def stage_started(self, name: str) -> None:
        """Say nothing."""

    def check_started(self, code: str, name: str) -> None:
        """Say nothing."""

    def progressed(self, text: str) -> None:
        """Say nothing."""

    def stage_ended(self, name: str, status: str, seconds: float) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""


class _Leaky(io.TextIOBase):
    """A stream that lets everything drop once its reader is gone.

    rich draws from a thread of its own, where an exception could be caught by nobody; and its own answer to a
    broken pipe is to leave the process.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        # UnicodeEncodeError is a ValueError: a terminal that cannot show a character is not worth a failed run.
        if not self._gone:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True


class Progress:
    """The stages so far, and what is being done now, for how long."""

    def __init__(self, stream: TextIO) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, tuple[str, float]] = {}
        self._now = ""
        self._far = ""
        self._since = time.monotonic()
        self._live: Live | None = _live(_Leaky(stream), self._draw)
        self._live.start()

    def stage_started(self, name: str) -> None:
        """Show the stage as the one that runs."""
        with self._lock:
            self._now = name
            self._since = time.monotonic()

    def check_started(self, code: str, name: str) -> None:
        """Show the check as the one that runs."""
        with self._lock:
            self._now, self._far = f"{code} {name}", ""
            self._since = time.monotonic()

    def progressed(self, text: str) -> None:
        """Show how far the check is."""
        with self._lock:
            self._far = text

    def stage_ended(self, name: str, status: str, seconds: float) -> None:
        """Put the stage on the list of those that are over; one that ran in two parts stands there once."""
        with self._lock:
            before_status, before = self._ended.get(name, ("done", 0.0))
            self._ended[name] = (status if before_status == "done" else before_status, before + seconds)
            self._now = ""

    def refresh(self) -> None:
        """Draw now; it happens by itself eight times a second."""
        with self._lock:
            live = self._live
        if live is not None:
            live.refresh()

    def close(self) -> None:
        """Take the display away; calling it again does nothing."""
        with self._lock:
            live, self._live = self._live, None
        # Outside our lock: stopping takes rich's lock, and its drawing thread takes ours while it holds that.
        if live is not None:
            live.stop()

    def _draw(self) -> "Table":
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            ended, now, far, since = dict(self._ended), self._now, self._far, self._since
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, (status, seconds) in ended.items():
            table.add_row(Text(name), Text(status, "green" if status == "done" else "yellow"), Text(f"{seconds:.1f} s"))
        if now:
            elapsed = time.monotonic() - since
            # The spinner starts anew with every drawing, so it is told how far it is.
            spinner = Spinner("dots", text=Text(now))
            spinner.start_time = 0.0
            table.add_row(spinner.render(time.monotonic()), Text(far), Text(f"{elapsed:.1f} s", "dim"))
        return table


def _live(file: _Leaky, draw: Callable[[], "Table"]) -> "Live":
    from rich.console import Console
    from rich.live import Live

    class Unhidden(Console):
        """Never hides the cursor: a killed run could not bring it back."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    # TextIOBase is all that rich uses of IO[str].
    stream = cast("IO[str]", file)
    console = Unhidden(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
    return Live(
        console=console,
        get_renderable=draw,
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def listener(stream: TextIO | None) -> Listener:
    """The display for a terminal, silence for anything else."""
    try:
        return Progress(stream) if stream is not None and stream.isatty() else Silent()
    except ValueError:  # closed before we came
        return Silent()
