"""Reports as text: for people (terminal), for scripts (JSON), where that text goes, and what features add to it.

The modules of this package turn a finished `Report` into characters. They judge nothing, and measure nothing.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.render.blocks import Section


class Sample(NamedTuple):
    """One number of the Prometheus metric `name`, whose help text is `says`."""

    name: str
    says: str
    value: float
    labels: dict[str, str]


class Feature(Protocol):
    """A module that draws one part of a report (benchmark, training); called only if the report has this part."""

    def blocks(self, report: "Report") -> Iterator["Section"]:
        """The sections that every format draws."""
