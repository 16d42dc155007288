"""The options for the output files of `ddpdiag allreduce-bench`. Its other options are in `ddpdiag.model.bench`."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ddpdiag.cli.outputs import Outputs, as_json, file_option

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.model.news import Listener
    from ddpdiag.model.recording import Line


def _csv(report: "Report", _lines: "Iterable[Line]", _path: str) -> str:
    from ddpdiag.bench.rows import to_csv

    return to_csv(report)


@dataclass(frozen=True, kw_only=True)
class BenchOutputs(Outputs):
    """The paths of the files to write, each None if its option was not given."""

    json: str | None = file_option(as_json, "The JSON report ('-': standard output).", "-J", "--output-file")
    csv: str | None = file_option(_csv, "Write all rows as CSV.")

    @cached_property
    def _printed_lines(self) -> list[str]:
        """The lines that were printed while the benchmark ran."""
        return []

    def listener(self, display: "Listener") -> "Listener":
        """A listener that prints each row when it is measured, and passes other news on to `display`."""
        if self.quiet:
            return display
        from ddpdiag.bench.live import RowPrinter

        stream = sys.stderr if self.writes_to_stdout else sys.stdout
        return RowPrinter(display, stream, self._printed_lines, details=self.details)

    def page(self, report: "Report", *, color: bool, width: int) -> str:
        """The text for the terminal, without its first lines if these were printed while the benchmark ran."""
        text = super().page(report, color=color, width=width)
        printed = "".join(f"{line}\n" for line in self._printed_lines)
        if text.startswith(printed):
            return text.removeprefix(printed)
        return f"# \n# A rank ended without some of its results: all lines again, without these.\n{text}"

    def contents(self, report: "Report", lines: "Iterable[Line]") -> Iterator[tuple[str, Callable[[], str | bytes]]]:
        """Each path to write, with a function that makes the content. No CSV is written without a benchmark."""
        return (
            (path, content)
            for path, content in super().contents(report, lines)
            if report.bench is not None or path != self.csv
        )
