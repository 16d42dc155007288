"""The progress of a run on standard error, from the news so far: on a terminal a few lines that vanish, else a log.

A terminal that goes away (a closed window, a lost connection) ends the display, not the run.

In a log there is a line when something has come to an end, and one every 30 s while nothing does. A job that is killed
in the middle leaves these lines and nothing else, so each says how far the run was:
`ddpdiag [12 s of 60 s] collective done`. A line is written whole, by one process, and never waited for.
"""

import shutil
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

# Who finds rank 0, or is found, sooner than this need not be talked about.
PATIENCE_SECONDS = 3.0
_RANKS_SHOWN, _HOSTS_SHOWN = 4, 2


@dataclass(frozen=True)
class Doing:
    """The running check with its latest trial, or only a stage. Times are those of the holder's clock."""

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
    """The state of the run. `waiting` and `seeking` have the time until which it waits."""

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
                return replace(self, waiting=(news, now + news.left_seconds))
            case Gathered():
                return replace(self, waiting=None)
            case StageEnded():
                return replace(self, doing=None, stages={**self.stages, news.name: _together(self.stages, news)})
            case Happened(text=text):
                return replace(self, happened=(*self.happened, one_line(text)))
            case Seeking():
                return replace(self, seeking=(news, now + news.left_seconds))
            case Joined():
                return replace(self, seeking=None)
            case StageBegan(name=name):
                return replace(self, doing=Doing(name, now))
        return replace(self, doing=_doing_after(self.doing, news, now))

    def clock(self, now: float) -> str:
        """ "12 s of 60 s"."""
        spent = f"{now - self.began:.0f} s"
        return spent if self.budget_seconds is None else f"{spent} of {self.budget_seconds:.0f} s"

    def wait(self, now: float) -> Iterator[str]:
        """The ranks that are waited for, and the time left: a few short lines; none during the first seconds."""
        if now - self.began < PATIENCE_SECONDS:
            return
        if self.waiting is not None:
            news, ends = self.waiting
            yield f"waiting for ranks, {max(0.0, ends - now):.0f} s left"
            came = f"{news.came:,} of {news.came + len(news.missing):,} joined"
            yield f"{came}, {len(news.missing):,} missing ({ranks_text(news.missing, limit=_RANKS_SHOWN)})"
        if self.seeking is not None:
            seek, ends = self.seeking
            yield f"rank {seek.rank} looks for rank 0 at {one_line(seek.host)}, {max(0.0, ends - now):.0f} s left"


def _together(stages: Mapping[str, StageEnded], news: StageEnded) -> StageEnded:
    """A stage that ran in two parts is shown once, with the worse status; a skipped part does not count."""
    before = stages.get(news.name)
    if before is None:
        return news
    status = max(before.status, news.status, key=("skipped", "done", "cut short", "failed").index)
    seconds = before.seconds + news.seconds
    return structs.replace(news, status=status, seconds=seconds, failed=(*before.failed, *news.failed))


def _doing_after(doing: Doing | None, news: News, now: float) -> Doing | None:
    match news:
        case CheckBegan(code=code, name=name):
            return Doing(one_line(f"{code} {name}"), now)
        case TrialBegan(deadline_seconds=seconds, importing=importing) if doing is not None:
            progress = "its first step is the import of torch" if importing else ""
            return replace(doing, ends=now + seconds, progress=progress, pending=None)
        case Pending() if doing is not None:
            return replace(doing, pending=news)
        case Progressed(text=text) if doing is not None:
            return replace(doing, progress=one_line(text))
    return doing


def pending_words(pending: Pending) -> str:
    """ "3 of 4 ranks done, waiting for rank 3 on n1"; the ranks are omitted where all are waited for."""
    text = f"{pending.done:,} of {count(pending.ranks, 'rank')} done"
    if not pending.awaited or len(pending.awaited) == pending.ranks:
        return text
    hosts = f" on {one_line(fold_hosts(pending.hosts, limit=_HOSTS_SHOWN))}" if pending.hosts else ""
    return f"{text}, waiting for {ranks_text(pending.awaited, limit=_RANKS_SHOWN)}{hosts}"


class Silent:
    """Says nothing."""

    def tell(self, news: News) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""


def listener(stream: TextIO | None, environ: Mapping[str, str], *, color: bool) -> Listener:
    """The display for a terminal, lines for a log, nothing where no reader could see it."""
    display = display_of(stream, environ)
    if stream is None or display is Display.NONE:
        return Silent()
    return Progress(stream, color=color) if display is Display.LIVE else Lines(stream)


# On a terminal --------------------------------------------------------------------------------------------------------

# A terminal may be a log as well (script, docker -t): each drawing costs it half a kilobyte.
_REFRESHES_PER_SECOND = 2
_DOTS, _ASCII = "\u280b\u2819\u2838\u2834\u2826\u2807", "|/-\\"
# A terminal that is made narrower breaks longer lines in two, and what is drawn next leaves half of them standing.
_WIDEST = 60
_CLEAR, _CLEAR_ABOVE = "\r\x1b[2K", "\x1b[1A\x1b[2K"
_PLAIN, _COLORS = "\x1b[0m", {"": "", "dim": "\x1b[2m", "red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m"}
_STYLES = {"done": "green", "failed": "red", "cut short": "yellow", "skipped": "dim"}


class Progress:
    """The stages so far, and what is being done now, for how long, until when, and for whom.

    The cursor is never hidden: a killed run could not bring it back.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, color: bool) -> None:
        self._stream = stream
        self._clock, self._color = clock, color
        self._lock = threading.Lock()
        self._state = RunState(began=clock())
        self._spinner = _DOTS if can_show(stream, _DOTS) else _ASCII
        self._drawn = 1
        self._over = threading.Event()
        threading.Thread(target=self._draw, name="progress", daemon=True).start()

    def tell(self, news: News) -> None:
        """Take it into the state, which is drawn twice a second."""
        with self._lock:
            self._state = self._state.after(news, self._clock())
        if isinstance(news, Joined):
            self.close()
            put(self._stream, f"ddpdiag: rank {news.rank} joined; rank 0 at {one_line(news.host)} prints the report\n")

    def _draw(self) -> None:
        while not self._over.wait(1 / _REFRESHES_PER_SECOND):
            self.refresh()

    def refresh(self) -> None:
        """Draw now; it happens by itself twice a second."""
        with self._lock:
            if self._over.is_set():
                return
            width, height = shutil.get_terminal_size(size(self._stream))
            # What runs stands below: where there is too little room, what is over gives way.
            rows = _rows(self._state, self._clock(), self._spinner)[-max(1, height - 1) :]
            letters = min(width - 1, _WIDEST)
            drawn = ((clipped(text, letters), _COLORS[style] if self._color else "") for text, style in rows)
            self._put("\n".join(f"{color}{text}{color and _PLAIN}" for text, color in drawn))
            self._drawn = max(1, len(rows))

    def _put(self, text: str) -> None:
        """In the place of what was drawn before."""
        if not put(self._stream, _CLEAR + _CLEAR_ABOVE * (self._drawn - 1) + text):
            self._over.set()

    def close(self) -> None:
        """Take the display away; calling it again does nothing."""
        with self._lock:
            if not self._over.is_set():
                self._put("")
                self._over.set()


def _rows(state: RunState, now: float, spinner: str) -> list[tuple[str, str]]:
    """Lines and their styles, from what is over to what runs."""
    turning = spinner[int(now * _REFRESHES_PER_SECOND) % len(spinner)]
    wait = list(state.wait(now))
    rows: list[tuple[str, str]] = []
    if state.budget_seconds is not None and (state.stages or state.doing or wait):
        rows.append((state.clock(now), "dim"))
    for stage in state.stages.values():
        status = "begun" if stage.more and stage.status in ("done", "skipped") else stage.status
        codes = f"  {', '.join(dict.fromkeys(stage.failed))}" if stage.failed else ""
        # In columns as wide as the longest words that may come: they do not move.
        row = f"  {one_line(stage.name):<11} {status:<9} {stage.seconds:6.1f} s{codes}"
        rows.append((row, _STYLES.get(status, "")))
    rows += [(text, "yellow") for text in state.happened]
    rows += [(f"{'  ' if number else turning + ' '}{text}", "") for number, text in enumerate(wait)]
    if doing := state.doing:
        rows.append((f"{turning} {doing.title}  {doing.clock(now)}", ""))
        rows += [(f"  {text}", "dim") for text in (doing.progress,) if text]
        rows += [(f"  {pending_words(pending)}", "") for pending in (doing.pending,) if pending]
    return rows


# In a log -------------------------------------------------------------------------------------------------------------

EVERY_SECONDS, _DRAWN_AFTER_SECONDS = 30.0, 0.25
_LONGEST = 500  # letters; in UTF-8 less than what a pipe takes at once
_BACK_AND_CLEAR = "\r\x1b[K"


class Lines:
    """Says what came to an end, and every 30 s what runs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._state = RunState(began=clock())
        self._due = 0.0  # for a line on what goes on
        self._over: dict[str, str] = {}  # what was said of each stage
        self._open = True

    def tell(self, news: News) -> None:
        """Take it in; say it, if it is worth a line."""
        with self._lock:
            now = self._clock()
            if not self._open or isinstance(news, Joined):
                return
            self._state = self._state.after(news, now)
            if text := self._worth(news, now):
                self._due = now + EVERY_SECONDS
                self._open = put(self._stream, f"ddpdiag [{self._state.clock(now)}] {clipped(text)}\n")

    def close(self) -> None:
        """Say nothing more."""
        with self._lock:
            self._open = False

    def _worth(self, news: News, now: float) -> str:
        """The line about an event; mostly empty."""
        match news:
            case Gathered():
                text = f"{count(news.ranks, 'rank')} on {count(news.hosts, 'host')}"
                missing = ranks_text(news.missing, limit=_RANKS_SHOWN)
                return f"{text}; {missing} did not join" if news.missing else text
            case StageEnded():
                whole = self._state.stages[news.name]
                is_over = not news.more and whole.status != "skipped"
                codes = f" in {', '.join(dict.fromkeys(whole.failed))}" if whole.failed else ""
                text = f"{whole.name} {whole.status}{codes}" if is_over or news.status == "failed" else ""
                before, self._over[news.name] = self._over.get(news.name), text
                return text if text != before else ""
            case Happened(text=text):
                return text
            case Waiting() | Seeking() if now >= self._due:
                return ", ".join(self._state.wait(now))
            case Pending() if now >= self._due and (doing := self._state.doing) is not None:
                parts = (f"{doing.title}: {doing.clock(now)}", doing.progress, pending_words(news))
                return ", ".join(filter(None, parts))
        return ""


class Counter:
    """The progress of work without stages, in one line: redrawn on a terminal, now and then in a log.

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
            line = _BACK_AND_CLEAR + clipped(text, size(self._stream)[0] - 1)
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
