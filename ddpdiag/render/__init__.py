"""Reports as text: for people (terminal), for scripts (JSON), where that text goes, and what features add to it.

Everything here turns a finished `Report` into characters. Nothing is judged, and nothing is measured.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.render.blocks import Section as Blocks
    from ddpdiag.render.html.page import Section
    from ddpdiag.render.markup import Piece


class Sample(NamedTuple):
    """One number of the metric `name`, which what it `says` explains."""

    name: str
    says: str
    value: float
    labels: dict[str, str]


@runtime_checkable
class Feature(Protocol):
    """A feature's module with its part of a report; it is asked only for reports that have such a part."""

    def blocks(self, report: "Report") -> Iterator["Blocks"]:
        """The sections that every format draws."""

    def samples(self, report: "Report") -> Iterator[Sample]:
        """The metrics for Prometheus."""


class Sections(Protocol):
    """The functions of a feature's module; they are asked of reports only in which the feature has something to say."""

    def render(
        self, report: "Report", *, tty: bool, color: bool, width: int, details: bool = False, timings: bool = False
    ) -> str:
        """The whole report for people, in a terminal (`tty`) or a log."""

    def section(self, report: "Report") -> "Section":
        """For the HTML page; it is drawn within `page_style`."""

    def pieces(self, report: "Report") -> Iterator["Piece"]:
        """For Markdown."""

    def samples(self, report: "Report") -> Iterator[Sample]:
        """For Prometheus."""
