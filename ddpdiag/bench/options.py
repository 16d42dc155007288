"""The options for the output files of `ddpdiag allreduce-bench`. Its other options are in `ddpdiag.model.bench`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdiag.cli.outputs import Outputs, as_json, file_option

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.model.recording import Line


def _csv(report: "Report", _lines: "Iterable[Line]", _path: str) -> str:
    from ddpdiag.bench.rows import to_csv

    return to_csv(report)


@dataclass(frozen=True, kw_only=True)
class BenchOutputs(Outputs):
    """The paths of the files to write, each None if its option was not given."""

    json: str | None = file_option(as_json, "The JSON report ('-': standard output).", "-J", "--output-file")
    csv: str | None = file_option(_csv, "Write all rows as CSV.")

    def contents(self, report: "Report", lines: "Iterable[Line]") -> Iterator[tuple[str, Callable[[], str | bytes]]]:
        """Each path to write, with a function that makes the content. No CSV is written without a benchmark."""
        return (
            (path, content)
            for path, content in super().contents(report, lines)
            if report.bench is not None or path != self.csv
        )
