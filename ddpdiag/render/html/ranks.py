"""Ranks: bars with outliers, the parts of a step, and a table to sort.

A figure of ranks or hosts as bars shows which are far from the others, which are blamed, and which never joined.
"""

from collections.abc import Collection, Sequence
from heapq import nlargest, nsmallest
from typing import NamedTuple

from ddpdiag.model import Scalar, Severity
from ddpdiag.render.html.page import Figure, words
from ddpdiag.render.plots import OUTLIER, Bar, Bars, draw_bars
from ddpdiag.render.ranks import Row
from ddpdiag.stats import outliers, quantile
from ddpdiag.text import Unit, count, figure, is_number, ranks_text

_ARRIVAL = "arrival_seconds"
_BARS_SHOWN = 24
# Ranks that come within a second come together, however little the others scatter: judgement/timings.py.
_LEAST_AWAY = {_ARRIVAL: 1.0}
_ROWS_SHOWN = 128
# In this order; others follow, as far as there is room.
_FIRST = ("busbw_bytes_per_s", "host_busbw_bytes_per_s", "samples_per_second", "latency_seconds", _ARRIVAL)
_MOST_FIGURES = 6
# A longer table is folded: the bars say first what there is to see.
_OPEN_ROWS = 16
_TITLES = {
    _ARRIVAL: "Arrival after rank 0 began to wait",
    "samples_per_second": "Training, samples per second",
    "host_busbw_bytes_per_s": "All-reduce of each host's best pair, busbw",
}
_WORDS = {Severity.ERROR: ("error", "bad"), Severity.WARNING: ("warning", "warn")}


class Figures(NamedTuple):
    """A column of the report: the finite values, each with its row."""

    name: str
    unit: Unit
    rows: Sequence[Row]
    values: Sequence[float]

    @property
    def noun(self) -> str:
        """What each value is of."""
        return "host" if self.name.startswith("host_") else "rank"

    def who(self, place: int) -> str:
        """Such as "3  n1", or a host alone."""
        return str(self.rows[place].get("host")) if self.noun == "host" else _who(self.rows[place])

    @property
    def symbol(self) -> str:
        """The unit behind its numbers."""
        return "samples/s" if self.name == "samples_per_second" else self.unit.symbol

    @property
    def higher_is_better(self) -> bool:
        """Rates; of times less is better."""
        return self.name.endswith(("_per_s", "_per_second"))


def _number(value: Scalar) -> float | None:
    """A number that can be drawn, or None: what no device can mean would only stretch the axes."""
    return float(value) if is_number(value) and abs(value) < 1e30 else None


def bar_figure(
    column: Figures,
    title: str,
    blamed: Collection[int],
    name: str,
    *,
    missing: Sequence[tuple[int, str]] = (),
    word: str = "blamed",
    judged: bool = False,
) -> Figure | None:
    """The figure of at least one value; for ranks that are `blamed`, and those, with hosts, that are `missing`.

    `judged`: who is slow is known, so that nobody else is called an outlier.
    """
    values, size = column.values, column.unit.size
    if max(values) <= 0:
        return None
    median = quantile(sorted(values), 0.5)
    slow = _outliers(column, median)
    if judged:
        slow = {n for n in slow if column.rows[n].get("rank") in blamed}
    many = len(values) > _BARS_SHOWN
    pick = nsmallest if column.higher_is_better else nlargest
    shown = pick(_BARS_SHOWN, range(len(values)), key=values.__getitem__) if many else range(len(values))
    # Where more than half are blamed, what most bars say tells nobody apart.
    found = [rank for row in column.rows if isinstance(rank := row.get("rank"), int) and rank in blamed]
    told = frozenset(found) if 2 * len(found) <= len(column.rows) else frozenset()
    bars = [Bar(f"{rank}  {node}".strip(), 0.0, "never joined") for rank, node in missing]
    for n in shown:
        is_told = column.rows[n].get("rank") in (blamed if n in slow else told)
        bars.append(Bar(column.who(n), values[n] / size, word if is_told else OUTLIER if n in slow else "", n in slow))
    all_values = [value / size for value in values] if many else ()
    absent = f" {ranks_text(rank for rank, _ in missing).capitalize()} never joined." if missing else ""
    return Figure(
        title=words(title),
        svg=draw_bars(Bars(column.symbol, bars, median / size, all_values, f"{column.noun}s"), name),
        alt=words(_in_words(column, title, median, slow, judged=judged)) + absent,
        sentence=f"All {len(values):,} {column.noun}s as a histogram; below, the {len(shown)} worst." if many else "",
    )


def _outliers(column: Figures, median: float) -> set[int]:
    """The places of outliers on the slow side: worse than the others is a matter, better is none."""
    values, least = column.values, _LEAST_AWAY.get(column.name, 0.0)
    return {
        n
        for n in outliers(values)
        if (values[n] < median) is column.higher_is_better and abs(values[n] - median) >= least
    }


def _in_words(column: Figures, title: str, median: float, slow: set[int], *, judged: bool) -> str:
    """What the bars show: "busbw: 4 ranks, 0.21 to 1.07 GB/s, median 1.07 GB/s; far from it: rank 3"."""
    size, unit = column.unit.size, column.symbol
    low, high = figure(min(column.values) / size), figure(max(column.values) / size)
    named = ", ".join(column.who(n) for n in sorted(slow)[:8]) + (" and others" if len(slow) > 8 else "")
    rest = f"; far from it: {named}" if slow else "" if judged else "; none is far from it"
    whole = f"{low} to {high} {unit}".rstrip()
    middle = f"{figure(median / size)} {unit}".rstrip()
    return f"{title}: {count(len(column.values), column.noun)}, {whole}, median {middle}{rest}."


def _who(row: Row) -> str:
    """Such as "3  n1"."""
    return f"{row.get('rank')}  {row.get('host')}"
