"""What is going on, while it goes on: a few lines at the bottom of the terminal that vanish at the end.

They are written to standard error. Where that is a log, lines that stay are written instead (see `progress`). A
terminal that goes away (a closed window, a lost connection) ends the display, not the run.
"""

import io
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, TextIO, cast

from ddpdiag.model.news import Joined, Listener, News, StageEnded
from ddpdiag.render.files import Display, can_show, display_of, put, takes
from ddpdiag.render.page import one_line
from ddpdiag.render.terminal.progress import Lines, RunState, clipped, pending_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

# A terminal may be a log as well (script, docker -t): each drawing costs it half a kilobyte.
_REFRESHES_PER_SECOND = 2
_DOTS, _ASCII = "\u280b\u2819\u2838\u2834\u2826\u2807", "|/-\\"
# A terminal that is made narrower breaks longer lines in two, and what is drawn next leaves half of them standing.
_WIDEST = 60
Styled = tuple[str, str]
_STYLES = {"done": "green", "failed": "red", "cut short": "yellow", "skipped": "dim"}


class Silent:
    """Says nothing."""

    def tell(self, news: News) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""


class _Leaky(io.TextIOBase):
    """A stream that lets everything drop once its reader is gone, and a drawing while the terminal is stopped (Ctrl-S).

    rich draws from a thread of its own, where an exception could be caught by nobody; and its own answer to a
    broken pipe is to leave the process. Who takes the display away waits for that thread.
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
                if takes(self._stream):
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
    """The stages so far, and what is being done now, for how long, until when, and for whom."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, color: bool) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._state = RunState(began=clock())
        self._spinner = _DOTS if can_show(stream, _DOTS) else _ASCII
        self._console = _console(_Leaky(stream), color=color)
        self._live: Live | None = _live(self._console, self._draw)
        self._live.start()

    def tell(self, news: News) -> None:
        """Take it into the state, which is drawn twice a second."""
        with self._lock:
            self._state = self._state.after(news, self._clock())
        if isinstance(news, Joined):
            self.close()
            put(self._stream, f"ddpdiag: rank {news.rank} joined; rank 0 at {one_line(news.host)} prints the report\n")

    def refresh(self) -> None:
        """Draw now; it happens by itself twice a second."""
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

    def _draw(self) -> "Text":
        from rich.text import Text

        with self._lock:
            state = self._state
        width, height = self._console.size
        letters = min(width - 1, _WIDEST)
        rows = _rows(state, self._clock(), self._spinner)
        # What runs stands below: where there is too little room, what is over gives way.
        shown = [Text(clipped(text, letters), style) for text, style in rows[-max(1, height - 1) :]]
        return Text("\n").join(shown)


def _rows(state: RunState, now: float, spinner: str) -> list[Styled]:
    """Lines and their styles, from what is over to what runs."""
    turning = spinner[int(now * _REFRESHES_PER_SECOND) % len(spinner)]
    wait = list(state.wait(now))
    rows: list[Styled] = []
    if state.budget_seconds is not None and (state.stages or state.doing or wait):
        rows.append((state.clock(now), "dim"))
    rows += [_stage_row(stage) for stage in state.stages.values()]
    rows += [(text, "yellow") for text in state.happened]
    rows += [(f"{'  ' if number else turning + ' '}{text}", "") for number, text in enumerate(wait)]
    if doing := state.doing:
        rows.append((f"{turning} {doing.title}  {doing.clock(now)}", ""))
        rows += [(f"  {text}", "dim") for text in (doing.progress,) if text]
        rows += [(f"  {pending_words(pending)}", "") for pending in (doing.pending,) if pending]
    return rows


def _stage_row(stage: StageEnded) -> Styled:
    """In columns as wide as the longest words that may come: they do not move."""
    status = "begun" if stage.more and stage.status in ("done", "skipped") else stage.status
    codes = f"  {', '.join(dict.fromkeys(stage.failed))}" if stage.failed else ""
    return f"  {one_line(stage.name):<11} {status:<9} {stage.seconds:6.1f} s{codes}", _STYLES.get(status, "")


def _console(file: _Leaky, *, color: bool) -> "Console":
    from rich.console import Console

    class Unhidden(Console):
        """Never hides the cursor: a killed run could not bring it back."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    # TextIOBase is all that rich uses of IO[str].
    stream = cast("IO[str]", file)
    return Unhidden(file=stream, force_terminal=True, no_color=not color, highlight=False, markup=False, emoji=False)


def _live(console: "Console", draw: "Callable[[], Text]") -> "Live":
    from rich.live import Live

    return Live(
        console=console,
        get_renderable=draw,
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def listener(stream: TextIO | None, environ: Mapping[str, str], *, color: bool) -> Listener:
    """The display for a terminal, lines for a log, silence where nobody could read anything."""
    display = display_of(stream, environ)
    if stream is None or display is Display.NONE:
        return Silent()
    return Progress(stream, color=color) if display is Display.LIVE else Lines(stream)
