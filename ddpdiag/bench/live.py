"""Print the rows of a benchmark while it runs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TextIO

from ddpdiag.bench.blocks import table_lines
from ddpdiag.bench.check import CHECK
from ddpdiag.judgement import judge
from ddpdiag.model.news import Listener, News, PartialResults
from ddpdiag.render.files import is_ready, show
from ddpdiag.render.page import Page


class RowPrinter:
    """A listener that prints a row of the table as soon as all ranks have measured it.

    The lines are those with which the final text begins. They are added to `printed_lines`. If the reader of `stream`
    is slow, lines are left to the next message or to the final text. Other news goes to `display`.
    """

    def __init__(self, display: Listener, stream: TextIO | None, printed_lines: list[str], *, details: bool) -> None:
        self._display, self._stream, self._printed_lines, self._details = display, stream, printed_lines, details

    def tell(self, news: News) -> None:
        if not isinstance(news, PartialResults):
            self._display.tell(news)
            return
        report = judge(news.recording, (CHECK,))
        if report.bench is not None and report.bench.rows:
            page = Page(color=False, width=80)
            for line in table_lines(report, details=self._details, is_running=True):
                page.write_verbatim(line)
            self._print(page.text().rstrip("\n").split("\n"))

    def _print(self, lines: Sequence[str]) -> None:
        done = len(self._printed_lines)
        if lines[:done] != self._printed_lines:
            return
        with self._display.erased():
            for line in lines[done:]:
                try:
                    if self._stream is None or not is_ready(self._stream):
                        return
                    show(f"{line}\n", self._stream)
                except (OSError, ValueError):
                    self._stream = None  # the reader is gone; the final text reports that
                    return
                self._printed_lines.append(line)

    def erased(self) -> AbstractContextManager[None]:
        return self._display.erased()

    def close(self) -> None:
        self._display.close()
