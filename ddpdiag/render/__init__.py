"""Turn a finished `Report` into text: for people (terminal, Markdown, HTML) and for scripts (Prometheus, shell).

The modules of this package neither measure nor judge. A `Feature` adds sections to a report.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.render.blocks import Section


class Sample(NamedTuple):
    """One value of the Prometheus metric `name`, with the help text and the labels of the metric."""

    name: str
    help_text: str
    value: float
    labels: dict[str, str]


class Feature(Protocol):
    """A module that shows one part of a report, such as a benchmark. It is used only if the report has that part."""

    def blocks(self, report: "Report") -> Iterator["Section"]:
        """Yield the sections of this part, which every format draws."""
