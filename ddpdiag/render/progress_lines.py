"""What is going on, for logs: a line when something has come to an end, and one every 30 s while nothing does.

A job that is killed in the middle leaves these lines and nothing else, so each says how far the run was:
`ddpdiag [12 s of 60 s] collective done`. A line is written whole, by one process, and never waited for.
"""

import threading
import time
from collections.abc import Callable
from typing import TextIO

from ddpdiag.model.news import Gathered, Happened, Joined, News, Pending, Seeking, StageEnded, Waiting
from ddpdiag.render.page import one_line
from ddpdiag.render.picture import Picture, gathered_words, pending_words, stage_words
from ddpdiag.render.streams import Display, columns, put

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
        self._picture = Picture(began=clock())
        self._said: float | None = None
        self._open = True

    def tell(self, news: News) -> None:
        """Take it in; say it, if it is worth a line."""
        with self._lock:
            now = self._clock()
            if not self._open or isinstance(news, Joined):
                return
            self._picture = self._picture.after(news, now)
            if text := self._worth(news, now):
                self._said = now
                self._open = put(self._stream, f"ddpdiag [{self._picture.clock(now)}] {_short(text)}\n")

    def close(self) -> None:
        """Say nothing more."""
        with self._lock:
            self._open = False

    def _worth(self, news: News, now: float) -> str:
        """What is said of it; nothing, mostly."""
        match news:
            case Gathered():
                return gathered_words(news)
            case StageEnded():
                whole = self._picture.stages[news.name]
                over = not news.more and whole.status != "skipped"
                return stage_words(whole) if over or news.status == "failed" else ""
            case Happened(text=text):
                return text
            case Waiting() | Seeking() if self._is_time(now):
                return ", ".join(self._picture.wait(now))
            case Pending() if self._is_time(now):
                return self._doing(news, now)
            case _:
                return ""

    def _is_time(self, now: float) -> bool:
        """Nothing was said for long; of a wait nothing at all."""
        return self._said is None or now - self._said >= EVERY_SECONDS

    def _doing(self, pending: Pending, now: float) -> str:
        doing = self._picture.doing
        if doing is None:
            return ""
        return ", ".join(filter(None, (f"{doing.title}: {doing.clock(now)}", doing.far, pending_words(pending))))


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
            line = _BACK_AND_CLEAR + _short(text, columns(self._stream) - 1)
        else:
            self._next = now + EVERY_SECONDS
            line = f"ddpdiag [{now - self._began:.0f} s] {_short(text)}\n"
        if not put(self._stream, line):
            self._stream = None

    def close(self) -> None:
        """Leave no trace on a terminal, nor that of a Ctrl-C."""
        if self._stream is not None and self._live:
            put(self._stream, _BACK_AND_CLEAR)
        self._stream = None


def _short(text: str, letters: int = _LONGEST) -> str:
    line = one_line(text)
    return line if len(line) <= letters else line[: max(0, letters - 3)] + "..."
