"""Show the progress of a run on standard error, from the news (events) that the run sends.

In a log, a line is written when a stage ends, and every 30 s in between. If the job is killed, these lines are all that
remains, so each shows how far the run was: `ddpdiag [12 s of 60 s] collective done`. On a terminal, one line is redrawn
twice a second, and only lines about failures remain.

One process writes each line at once, and never waits for the reader. If the terminal disappears (a closed window, a
lost connection), the display ends, but not the run. The cursor is never hidden: a killed run could not restore it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TextIO

from msgspec import structs

from ddpdiag.model.news import (
    CheckBegan,
    CheckProgress,
    Joined,
    Listener,
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
from ddpdiag.render.files import Display, can_show, display_of, terminal_size, write_if_ready
from ddpdiag.render.page import clip_text, one_line
from ddpdiag.text import count, fold_hosts, ranks_text

# Shorter waits for rank 0 or for other ranks are not shown.
MIN_WAIT_SECONDS = 3.0
LINE_INTERVAL_SECONDS = 30.0
_RANKS_SHOWN, _HOSTS_SHOWN = 4, 2
_MAX_LETTERS = 500  # in UTF-8 fewer bytes than a pipe takes at once
# Not more often, because the output of a terminal may be kept as a log (script, docker -t).
_REFRESHES_PER_SECOND = 2
_DOT_SPINNER, _ASCII_SPINNER = "\u280b\u2819\u2838\u2834\u2826\u2807", "|/-\\"
_CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True)
class CurrentWork:
    """The check that runs, with its latest trial, or a stage before its first check. Times are of a monotonic clock."""

    title: str
    began: float
    deadline: float | None = None
    progress: str = ""
    pending: TrialPending | None = None

    def updated(self, news: News, now: float) -> "CurrentWork":
        match news:
            case TrialBegan(deadline_seconds=seconds, imports_torch=importing):
                progress = "its first step is the import of torch" if importing else ""
                return replace(self, deadline=now + seconds, progress=progress, pending=None)
            case TrialPending():
                return replace(self, pending=news)
            case CheckProgress(text=text):
                return replace(self, progress=one_line(text))
        return self

    def text(self, now: float) -> str:
        """Describe the work: "COL001 all-reduce: 2.3 s of 36 s, 3 of 4 ranks done". The trial's deadline is at 36 s."""
        limit = "" if self.deadline is None else f" of {self.deadline - self.began:.0f} s"
        clock = f"{now - self.began:.1f} s{limit}"
        pending = "" if self.pending is None else pending_text(self.pending)
        return ", ".join(filter(None, (f"{self.title}: {clock}", pending, self.progress)))


def pending_text(pending: TrialPending) -> str:
    """The state of a trial's ranks: "3 of 4 ranks done, waiting for rank 3 on n1", or "0 of 4 ranks done"."""
    text = f"{pending.done:,} of {count(pending.ranks, 'rank')} done"
    if not pending.awaited or len(pending.awaited) == pending.ranks:
        return text
    hosts = f" on {one_line(fold_hosts(pending.hosts, limit=_HOSTS_SHOWN))}" if pending.hosts else ""
    return f"{text}, waiting for {ranks_text(pending.awaited, limit=_RANKS_SHOWN)}{hosts}"


class SilentListener:
    """A listener that shows nothing."""

    def tell(self, news: News) -> None:
        """Do nothing."""

    @contextmanager
    def erased(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def close(self) -> None:
        """Do nothing."""


def listener(stream: TextIO | None, environ: Mapping[str, str]) -> Listener:
    """The listener that shows a run on `stream`, or a `SilentListener` if the stream is closed."""
    display = display_of(stream, environ)
    if stream is None or display is Display.NONE:
        return SilentListener()
    return Progress(stream, live=display is Display.LIVE)


class Progress:
    """Writes a line for each stage that ends. On a terminal (`live`), writes one line that is redrawn, and failures."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, live: bool) -> None:
        self._stream, self._clock, self._live = stream, clock, live
        self._lock = threading.Lock()
        self._spinner = _DOT_SPINNER if can_show(stream, _DOT_SPINNER) else _ASCII_SPINNER
        self._began = clock()
        self._budget_seconds: float | None = None
        self._ended_stages: dict[str, StageEnded] = {}
        self._stage_lines: dict[str, str] = {}  # by stage
        self._current: CurrentWork | None = None
        self._wait: tuple[WaitingForRanks | LookingForRank0, float] | None = None  # and the time at which the wait ends
        self._next_line_at = 0.0  # the time from which a line about the current work may be written
        self._is_closed = threading.Event()
        if live:
            threading.Thread(target=self._redraw_until_closed, name="progress", daemon=True).start()

    def tell(self, news: News) -> None:
        """Record an event, and write a line if it is important. On a terminal, `Joined` also ends the display."""
        with self._lock:
            if self._is_closed.is_set():
                return
            now = self._clock()
            self._update(news, now)
            if text := self._news_text(news, now):
                self._next_line_at = now + LINE_INTERVAL_SECONDS
                self._write(f"ddpdiag {self._elapsed_text(now)} {clip_text(text, _MAX_LETTERS)}\n")
        if isinstance(news, Joined) and self._live:
            self.close()

    @contextmanager
    def erased(self) -> Iterator[None]:
        """Context manager: the redrawn line is erased meanwhile, so that the caller can write to the same terminal."""
        with self._lock:
            if self._live:
                self._write("")
            yield

    def close(self) -> None:
        """Erase the redrawn line, and end the display. A second call has no effect."""
        with self._lock:
            if not self._is_closed.is_set():
                self._write("")
                self._is_closed.set()

    def refresh(self) -> None:
        """Redraw the line about the current work. On a terminal, a thread calls this twice a second."""
        with self._lock:
            now = self._clock()
            spinner = self._spinner[int(now * _REFRESHES_PER_SECOND) % len(self._spinner)]
            if text := self._waiting_text(now) or ("" if self._current is None else self._current.text(now)):
                width = terminal_size(self._stream)[0] - 1
                self._write(clip_text(f"{spinner} {self._elapsed_text(now)} {text}", width))

    def _redraw_until_closed(self) -> None:
        while not self._is_closed.wait(1 / _REFRESHES_PER_SECOND):
            self.refresh()

    def _write(self, text: str) -> None:
        if self._is_closed.is_set():
            return
        if not write_if_ready(self._stream, _CLEAR_LINE + text if self._live else text):
            self._is_closed.set()

    def _elapsed_text(self, now: float) -> str:
        """The time since the start, and the budget if it is known: "[12 s of 60 s]"."""
        limit = "" if self._budget_seconds is None else f" of {self._budget_seconds:.0f} s"
        return f"[{now - self._began:.0f} s{limit}]"

    def _update(self, news: News, now: float) -> None:
        match news:
            case RunStarted(budget_seconds=budget):
                self._budget_seconds = budget
            case WaitingForRanks() | LookingForRank0():
                self._wait = news, now + news.left_seconds
            case RanksGathered() | Joined():
                self._wait = None
            case StageBegan(name=name):
                self._current = CurrentWork(name, now)
            case StageEnded(name=name):
                self._current = None
                self._ended_stages[name] = _merge_stage_parts(self._ended_stages.get(name), news)
            case CheckBegan(code=code, name=name):
                self._current = CurrentWork(one_line(f"{code} {name}"), now)
            case _ if self._current is not None:
                self._current = self._current.updated(news, now)

    def _news_text(self, news: News, now: float) -> str:
        """The text of the line about an event. Empty for most events, which get no line."""
        match news:
            case RunEvent(text=text):
                return text
            case StageEnded() if news.status == "failed" or not self._live:
                return self._stage_text(news)
            case Joined(rank=rank, host=host) if self._live:
                return f"rank {rank} joined; rank 0 at {host} prints the report"
            case RanksGathered() if not self._live:
                text = f"{count(news.ranks, 'rank')} on {count(news.hosts, 'host')}"
                missing = ranks_text(news.missing, limit=_RANKS_SHOWN)
                return f"{text}; {missing} did not join" if news.missing else text
            case WaitingForRanks() | LookingForRank0() if now >= self._next_line_at and not self._live:
                return self._waiting_text(now)
            case TrialPending() if now >= self._next_line_at and not self._live and self._current is not None:
                return self._current.text(now)
        return ""

    def _stage_text(self, news: StageEnded) -> str:
        """The text about a stage that ended, or failed in one of its parts. Empty if it was written before."""
        stage = self._ended_stages[news.name]
        is_over = not news.will_continue and stage.status != "skipped"
        codes = f" in {', '.join(dict.fromkeys(stage.failed))}" if stage.failed else ""
        text = f"{stage.name} {stage.status}{codes}" if is_over or news.status == "failed" else ""
        before, self._stage_lines[news.name] = self._stage_lines.get(news.name), text
        return text if text != before else ""

    def _waiting_text(self, now: float) -> str:
        """Describe a wait for ranks, with the time left. Empty without a wait, and in the first seconds of a run."""
        if now - self._began < MIN_WAIT_SECONDS or self._wait is None:
            return ""
        news, deadline = self._wait
        time_left = f"{max(0.0, deadline - now):.0f} s left"
        if isinstance(news, LookingForRank0):
            return f"rank {news.rank} looks for rank 0 at {one_line(news.host)}, {time_left}"
        joined = f"{news.joined:,} of {news.joined + len(news.missing):,} joined"
        return f"waiting for {ranks_text(news.missing, limit=_RANKS_SHOWN)} ({joined}), {time_left}"


def _merge_stage_parts(before: StageEnded | None, news: StageEnded) -> StageEnded:
    """Merge two parts of a stage: the worse status counts, and a part that was skipped has no effect."""
    if before is None:
        return news
    status = max(before.status, news.status, key=("skipped", "done", "cut short", "failed").index)
    return structs.replace(news, status=status, failed=(*before.failed, *news.failed))


class ProgressLine:
    """Shows the progress of work without stages in one redrawn line. Shows nothing if `display` is not LIVE."""

    def __init__(self, stream: TextIO | None, display: Display) -> None:
        self._stream = stream if display is Display.LIVE else None

    def tell(self, text: str) -> None:
        if self._stream is not None:
            line = _CLEAR_LINE + clip_text(text, terminal_size(self._stream)[0] - 1)
            self._stream = self._stream if write_if_ready(self._stream, line) else None

    def close(self) -> None:
        """Erase the line, with the "^C" that a Ctrl-C leaves in it, and end the display."""
        if self._stream is not None:
            write_if_ready(self._stream, _CLEAR_LINE)
        self._stream = None
