"""Reports as text: for people (terminal), for scripts (JSON), where that text goes, and what features add to it.

Everything here turns a finished `Report` into characters. Nothing is judged, and nothing is measured.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.render.blocks import Section


class Sample(NamedTuple):
    """One number of the metric `name`, which what it `says` explains."""

    name: str
    says: str
    value: float
    labels: dict[str, str]


class Feature(Protocol):
    """A feature's module with its part of a report; it is asked only for reports that have such a part."""

    def blocks(self, report: "Report") -> Iterator["Section"]:
        """The sections that every format draws."""
