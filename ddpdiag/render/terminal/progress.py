"""The progress of a run, from the news so far: in words, and as lines for logs.

In a log there is a line when something has come to an end, and one every 30 s while nothing does. A job that is killed
in the middle leaves these lines and nothing else, so each says how far the run was:
`ddpdiag [12 s of 60 s] collective done`. A line is written whole, by one process, and never waited for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TextIO

from msgspec import structs

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
from ddpdiag.render.files import Display, columns, put
from ddpdiag.render.page import one_line
from ddpdiag.text import count, fold_hosts, ranks_text

# Who finds rank 0, or is found, sooner than this need not be talked about.
PATIENCE_SECONDS = 3.0
_RANKS_SHOWN = 4
_HOSTS_SHOWN = 2
_IMPORT = "its first step is the import of torch"


@dataclass(frozen=True)
class Doing:
    """What runs now: a check with its latest trial, or only a stage. Times are those of the holder's clock."""

    title: str
    since: float
    ends: float | None = None
    progress: str = ""
    pending: Pending | None = None

    def clock(self, now: float) -> str:
        """ "2.3 s of 36 s": how long it has run, and when its trial ends at the latest."""
        spent = f"{now - self.since:.1f} s"
        return spent if self.ends is None else f"{spent} of {self.ends - self.since:.0f} s"


@dataclass(frozen=True)
class RunState:
    """Where the run stands. `waiting` and `seeking` stand with the time at which they were told."""

    began: float
    budget_seconds: float | None = None
    stages: Mapping[str, StageEnded] = field(default_factory=dict)
    doing: Doing | None = None
    waiting: tuple[Waiting, float] | None = None
    seeking: tuple[Seeking, float] | None = None
    happened: tuple[str, ...] = ()

    def after(self, news: News, now: float) -> "RunState":
        """The state after this news."""
        match news:
            case Started(budget_seconds=budget):
                return replace(self, budget_seconds=budget)
            case Waiting():
                return replace(self, waiting=(news, now))
            case Gathered():
                return replace(self, waiting=None)
            case StageEnded():
                return replace(self, doing=None, stages={**self.stages, news.name: _together(self.stages, news)})
            case Happened(text=text):
                return replace(self, happened=(*self.happened, one_line(text)))
            case Seeking():
                return replace(self, seeking=(news, now))
            case Joined():
                return replace(self, seeking=None)
            case _:
                return replace(self, doing=_done_now(self.doing, news, now))

    def clock(self, now: float) -> str:
        """ "12 s of 60 s"."""
        spent = f"{now - self.began:.0f} s"
        return spent if self.budget_seconds is None else f"{spent} of {self.budget_seconds:.0f} s"

    def wait(self, now: float) -> Iterator[str]:
        """Which ranks are waited for, and how long: a few short lines; none during the first seconds."""
        if now - self.began < PATIENCE_SECONDS:
            return
        if self.waiting is not None:
            news, told = self.waiting
            yield f"waiting for ranks, {_left(news.left_seconds, told, now)}"
            came = f"{news.came:,} of {news.came + len(news.missing):,} joined"
            yield f"{came}, {len(news.missing):,} missing ({ranks_text(news.missing, limit=_RANKS_SHOWN)})"
        if self.seeking is not None:
            seek, told = self.seeking
            yield f"rank {seek.rank} looks for rank 0 at {one_line(seek.host)}, {_left(seek.left_seconds, told, now)}"


def _together(stages: Mapping[str, StageEnded], news: StageEnded) -> StageEnded:
    """A stage that ran in two parts is shown once, with the worse status; a skipped part does not count."""
    before = stages.get(news.name)
    if before is None:
        return news
    status = max(before.status, news.status, key=("skipped", "done", "cut short", "failed").index)
    failed = (*before.failed, *news.failed)
    return structs.replace(news, status=status, seconds=before.seconds + news.seconds, failed=failed)


def _done_now(doing: Doing | None, news: News, now: float) -> Doing | None:
    match news:
        case StageBegan(name=name):
            return Doing(name, now)
        case CheckBegan(code=code, name=name):
            return Doing(one_line(f"{code} {name}"), now)
        case TrialBegan(deadline_seconds=seconds, importing=importing) if doing is not None:
            return replace(doing, ends=now + seconds, progress=_IMPORT if importing else "", pending=None)
        case Pending() if doing is not None:
            return replace(doing, pending=news)
        case Progressed(text=text) if doing is not None:
            return replace(doing, progress=one_line(text))
        case _:
            return doing


def pending_words(pending: Pending) -> str:
    """ "3 of 4 ranks done, waiting for rank 3 on n1"; the ranks are omitted where all are waited for."""
    text = f"{pending.done:,} of {count(pending.ranks, 'rank')} done"
    if not pending.awaited or len(pending.awaited) == pending.ranks:
        return text
    hosts = f" on {one_line(fold_hosts(pending.nodes, limit=_HOSTS_SHOWN))}" if pending.nodes else ""
    return f"{text}, waiting for {ranks_text(pending.awaited, limit=_RANKS_SHOWN)}{hosts}"


def _left(seconds: float, told: float, now: float) -> str:
    return f"{max(0.0, seconds - (now - told)):.0f} s left"


EVERY_SECONDS = 30.0
_DRAWN_AFTER_SECONDS = 0.25
_LONGEST = 500  # letters; in UTF-8 less than what a pipe takes at once
_BACK_AND_CLEAR = "\r\x1b[K"


class Lines:
    """Says what came to an end, and every 30 s what runs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._state = RunState(began=clock())
        self._said: float | None = None
        self._open = True

    def tell(self, news: News) -> None:
        """Take it in; say it, if it is worth a line."""
        with self._lock:
            now = self._clock()
            if not self._open or isinstance(news, Joined):
                return
            self._state = self._state.after(news, now)
            if text := self._worth(news, now):
                self._said = now
                self._open = put(self._stream, f"ddpdiag [{self._state.clock(now)}] {clipped(text)}\n")

    def close(self) -> None:
        """Say nothing more."""
        with self._lock:
            self._open = False

    def _worth(self, news: News, now: float) -> str:
        """What is said of it; nothing, mostly."""
        match news:
            case Gathered():
                text = f"{count(news.ranks, 'rank')} on {count(news.hosts, 'host')}"
                missing = ranks_text(news.missing, limit=_RANKS_SHOWN)
                return f"{text}; {missing} did not join" if news.missing else text
            case StageEnded():
                whole = self._state.stages[news.name]
                is_over = not news.more and whole.status != "skipped"
                codes = f" in {', '.join(dict.fromkeys(whole.failed))}" if whole.failed else ""
                return f"{whole.name} {whole.status}{codes}" if is_over or news.status == "failed" else ""
            case Happened(text=text):
                return text
            case Waiting() | Seeking() if self._is_time(now):
                return ", ".join(self._state.wait(now))
            case Pending() if self._is_time(now):
                return self._doing(news, now)
            case _:
                return ""

    def _is_time(self, now: float) -> bool:
        """Nothing was said for long; of a wait nothing at all."""
        return self._said is None or now - self._said >= EVERY_SECONDS

    def _doing(self, pending: Pending, now: float) -> str:
        doing = self._state.doing
        if doing is None:
            return ""
        return ", ".join(filter(None, (f"{doing.title}: {doing.clock(now)}", doing.progress, pending_words(pending))))


class Counter:
    """How far something is that has no stages, in one line: drawn again on a terminal, now and then in a log.

    What is over within `patience_seconds` leaves nothing in a log.
    """

    def __init__(
        self,
        stream: TextIO | None,
        display: Display,
        patience_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if display is not Display.NONE else None
        self._live = display is Display.LIVE
        self._clock = clock
        self._began = clock()
        self._next = self._began if self._live else self._began + patience_seconds

    def tell(self, text: str) -> None:
        """It is so far."""
        now = self._clock()
        if self._stream is None or now < self._next:
            return
        if self._live:
            self._next = now + _DRAWN_AFTER_SECONDS
            line = _BACK_AND_CLEAR + clipped(text, columns(self._stream) - 1)
        else:
            self._next = now + EVERY_SECONDS
            line = f"ddpdiag [{now - self._began:.0f} s] {clipped(text)}\n"
        if not put(self._stream, line):
            self._stream = None

    def close(self) -> None:
        """Leave no trace on a terminal, nor that of a Ctrl-C."""
        if self._stream is not None and self._live:
            put(self._stream, _BACK_AND_CLEAR)
        self._stream = None


def clipped(text: str, letters: int = _LONGEST) -> str:
    """One line of at most so many letters."""
    line = one_line(text)
    return line if len(line) <= letters else line[: max(0, letters - 3)] + "..."
