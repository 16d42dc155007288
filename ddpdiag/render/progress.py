"""Show the progress of a run on standard error, from the news that the run sends.

In a log there is a line when something has come to an end, and one every 30 s while nothing does. A job that is killed
in the middle leaves these lines and nothing else, so each says how far the run was:
`ddpdiag [12 s of 60 s] collective done`. On a terminal one line is drawn again twice a second, and only failures stay.

A line is written whole, by one process, and never waited for. A terminal that goes away (a closed window, a lost
connection) ends the display, not the run. The cursor is never hidden: a killed run could not bring it back.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TextIO

from msgspec import structs

from ddpdiag.model.news import (
    CheckBegan,
    Gathered,
    Happened,
    Joined,
    Listener,
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
from ddpdiag.render.files import Display, can_show, display_of, put, size
from ddpdiag.render.page import one_line
from ddpdiag.text import count, fold_hosts, ranks_text

# A wait for rank 0, or for other ranks, that is shorter than this is not shown.
PATIENCE_SECONDS = 3.0
EVERY_SECONDS = 30.0
_RANKS_SHOWN, _HOSTS_SHOWN = 4, 2
_LONGEST = 500  # letters; in UTF-8 less than what a pipe takes at once
# A terminal may be a log as well (script, docker -t).
_REFRESHES_PER_SECOND = 2
_DOTS, _ASCII = "\u280b\u2819\u2838\u2834\u2826\u2807", "|/-\\"
_CLEAR = "\r\x1b[K"


@dataclass(frozen=True)
class Doing:
    """The check that runs with its latest trial, or only the stage. Times are those of the clock of `Progress`."""

    title: str
    since: float
    ends: float | None = None
    progress: str = ""
    pending: Pending | None = None

    def after(self, news: News, now: float) -> "Doing":
        match news:
            case TrialBegan(deadline_seconds=seconds, importing=importing):
                progress = "its first step is the import of torch" if importing else ""
                return replace(self, ends=now + seconds, progress=progress, pending=None)
            case Pending():
                return replace(self, pending=news)
            case Progressed(text=text):
                return replace(self, progress=one_line(text))
        return self

    def words(self, now: float) -> str:
        """What runs: "COL001 all-reduce: 2.3 s of 36 s, 3 of 4 ranks done". Its trial ends after 36 s at the latest."""
        clock = f"{now - self.since:.1f} s" + ("" if self.ends is None else f" of {self.ends - self.since:.0f} s")
        pending = "" if self.pending is None else pending_words(self.pending)
        return ", ".join(filter(None, (f"{self.title}: {clock}", pending, self.progress)))


def pending_words(pending: Pending) -> str:
    """A trial's ranks: "3 of 4 ranks done, waiting for rank 3 on n1". No ranks are named if none is done."""
    text = f"{pending.done:,} of {count(pending.ranks, 'rank')} done"
    if not pending.awaited or len(pending.awaited) == pending.ranks:
        return text
    hosts = f" on {one_line(fold_hosts(pending.hosts, limit=_HOSTS_SHOWN))}" if pending.hosts else ""
    return f"{text}, waiting for {ranks_text(pending.awaited, limit=_RANKS_SHOWN)}{hosts}"


class Silent:
    """A listener that shows nothing."""

    def tell(self, news: News) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def listener(stream: TextIO | None, environ: Mapping[str, str]) -> Listener:
    """The listener that shows a run on this stream; `Silent` if the stream is closed."""
    display = display_of(stream, environ)
    return Silent() if stream is None or display is Display.NONE else Progress(stream, live=display is Display.LIVE)


class Progress:
    """Writes a line on each stage that ends; on a terminal only on failures, and a redrawn line shows what runs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, live: bool) -> None:
        self._stream, self._clock, self._live = stream, clock, live
        self._lock = threading.Lock()
        self._spinner = _DOTS if can_show(stream, _DOTS) else _ASCII
        self._began = clock()
        self._budget_seconds: float | None = None
        self._stages: dict[str, StageEnded] = {}
        self._stage_lines: dict[str, str] = {}  # by stage
        self._doing: Doing | None = None
        self._wait: tuple[Waiting | Seeking, float] | None = None  # and the time until which it waits
        self._due = 0.0  # when the next line on what runs may be written
        self._over = threading.Event()
        if live:
            threading.Thread(target=self._draw, name="progress", daemon=True).start()

    def tell(self, news: News) -> None:
        """Note an event, and write a line on it if it is important. On a terminal `Joined` ends the display."""
        with self._lock:
            if self._over.is_set():
                return
            now = self._clock()
            self._take(news, now)
            if text := self._line(news, now):
                self._due = now + EVERY_SECONDS
                self._put(f"ddpdiag {self._spent(now)} {clipped(text)}\n")
        if isinstance(news, Joined) and self._live:
            self.close()

    def close(self) -> None:
        """Erase the redrawn line, and show nothing more. A second call does nothing."""
        with self._lock:
            if not self._over.is_set():
                self._put("")
                self._over.set()

    def refresh(self) -> None:
        """Redraw the line on what runs now. On a terminal a thread does this twice a second."""
        with self._lock:
            now = self._clock()
            turning = self._spinner[int(now * _REFRESHES_PER_SECOND) % len(self._spinner)]
            if text := self._waiting(now) or ("" if self._doing is None else self._doing.words(now)):
                self._put(clipped(f"{turning} {self._spent(now)} {text}", size(self._stream)[0] - 1))

    def _draw(self) -> None:
        while not self._over.wait(1 / _REFRESHES_PER_SECOND):
            self.refresh()

    def _put(self, text: str) -> None:
        if self._over.is_set():
            return
        if not put(self._stream, _CLEAR + text if self._live else text):
            self._over.set()

    def _spent(self, now: float) -> str:
        """The time since the start, and the budget: "[12 s of 60 s]"."""
        limit = "" if self._budget_seconds is None else f" of {self._budget_seconds:.0f} s"
        return f"[{now - self._began:.0f} s{limit}]"

    def _take(self, news: News, now: float) -> None:
        match news:
            case Started(budget_seconds=budget):
                self._budget_seconds = budget
            case Waiting() | Seeking():
                self._wait = news, now + news.left_seconds
            case Gathered() | Joined():
                self._wait = None
            case StageBegan(name=name):
                self._doing = Doing(name, now)
            case StageEnded(name=name):
                self._doing = None
                self._stages[name] = _together(self._stages.get(name), news)
            case CheckBegan(code=code, name=name):
                self._doing = Doing(one_line(f"{code} {name}"), now)
            case _ if self._doing is not None:
                self._doing = self._doing.after(news, now)

    def _line(self, news: News, now: float) -> str:
        """The line about an event. Empty for most events."""
        match news:
            case Happened(text=text):
                return text
            case StageEnded() if news.status == "failed" or not self._live:
                return self._stage(news)
            case Joined(rank=rank, host=host) if self._live:
                return f"rank {rank} joined; rank 0 at {host} prints the report"
            case Gathered() if not self._live:
                text = f"{count(news.ranks, 'rank')} on {count(news.hosts, 'host')}"
                missing = ranks_text(news.missing, limit=_RANKS_SHOWN)
                return f"{text}; {missing} did not join" if news.missing else text
            case Waiting() | Seeking() if now >= self._due and not self._live:
                return self._waiting(now)
            case Pending() if now >= self._due and not self._live and self._doing is not None:
                return self._doing.words(now)
        return ""

    def _stage(self, news: StageEnded) -> str:
        """The line about the end of a stage, or of a part of it that failed. Empty if it was written before."""
        whole = self._stages[news.name]
        is_over = not news.more and whole.status != "skipped"
        codes = f" in {', '.join(dict.fromkeys(whole.failed))}" if whole.failed else ""
        text = f"{whole.name} {whole.status}{codes}" if is_over or news.status == "failed" else ""
        before, self._stage_lines[news.name] = self._stage_lines.get(news.name), text
        return text if text != before else ""

    def _waiting(self, now: float) -> str:
        """The line about ranks that are waited for, and the time left. Empty during the first seconds."""
        if now - self._began < PATIENCE_SECONDS or self._wait is None:
            return ""
        news, ends = self._wait
        left = f"{max(0.0, ends - now):.0f} s left"
        if isinstance(news, Seeking):
            return f"rank {news.rank} looks for rank 0 at {one_line(news.host)}, {left}"
        joined = f"{news.came:,} of {news.came + len(news.missing):,} joined"
        return f"waiting for {ranks_text(news.missing, limit=_RANKS_SHOWN)} ({joined}), {left}"


def _together(before: StageEnded | None, news: StageEnded) -> StageEnded:
    """Join two parts of a stage. The worse status of both counts, and a skipped part does not count."""
    if before is None:
        return news
    status = max(before.status, news.status, key=("skipped", "done", "cut short", "failed").index)
    return structs.replace(news, status=status, failed=(*before.failed, *news.failed))


class Counter:
    """Shows the progress of work without stages: one line, which is redrawn, on a terminal only."""

    def __init__(self, stream: TextIO | None, display: Display) -> None:
        self._stream = stream if display is Display.LIVE else None

    def tell(self, text: str) -> None:
        """Redraw the line with `text`."""
        if self._stream is not None and not put(self._stream, _CLEAR + clipped(text, size(self._stream)[0] - 1)):
            self._stream = None

    def close(self) -> None:
        """Erase the line, with the "^C" of a Ctrl-C in it, and show nothing more."""
        if self._stream is not None:
            put(self._stream, _CLEAR)
        self._stream = None


def clipped(text: str, letters: int = _LONGEST) -> str:
    """One line of at most so many letters."""
    line = one_line(text)
    return line if len(line) <= letters else line[: max(0, letters - 3)] + "..."
