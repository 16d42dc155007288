"""One figure of ranks or hosts as bars: who lies far from the others, who is blamed, who never came."""

from collections.abc import Collection, Sequence
from heapq import nlargest, nsmallest
from typing import NamedTuple

from ddpdiag.model import Scalar
from ddpdiag.render.html.page import Figure, words
from ddpdiag.render.plots.charts import OUTLIER, Bar, Bars, draw_bars
from ddpdiag.render.terminal.ranks import Row
from ddpdiag.stats import outliers, quantile
from ddpdiag.text import Unit, count, figure, fold_ranks

BARS_SHOWN = 24
# Ranks that come within a second come together, however little the others scatter: judgement/timeline.py.
_LEAST_AWAY = {"arrival_seconds": 1.0}


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
        return str(self.rows[place].get("node")) if self.noun == "host" else who_of(self.rows[place])

    @property
    def symbol(self) -> str:
        """The unit behind its numbers."""
        return "samples/s" if self.name == "samples_per_second" else self.unit.symbol

    @property
    def higher_is_better(self) -> bool:
        """Rates; of times less is better."""
        return self.name.endswith(("_per_s", "_per_second"))


def number_of(value: Scalar) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # What no device can mean would only stretch the axes.
    return float(value) if abs(value) < 1e30 else None


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
    far = _far(column, median)
    if judged:
        far = {n for n in far if column.rows[n].get("rank") in blamed}
    many = len(values) > BARS_SHOWN
    pick = nsmallest if column.higher_is_better else nlargest
    shown = pick(BARS_SHOWN, range(len(values)), key=values.__getitem__) if many else range(len(values))
    told = _telling(column, blamed)
    bars = [Bar(f"{rank}  {node}".strip(), 0.0, "never came") for rank, node in missing]
    for n in shown:
        is_told = column.rows[n].get("rank") in (blamed if n in far else told)
        bars.append(Bar(column.who(n), values[n] / size, word if is_told else OUTLIER if n in far else "", n in far))
    everybody = [value / size for value in values] if many else ()
    return Figure(
        title=words(title),
        svg=draw_bars(Bars(column.symbol, bars, median / size, everybody, f"{column.noun}s"), name),
        alt=words(_said(column, title, median, far, judged=judged)) + _who_missing(missing),
        sentence=f"All {len(values):,} {column.noun}s as a histogram; below, the {len(shown)} worst." if many else "",
    )


def _far(column: Figures, median: float) -> set[int]:
    """The places of outliers on the slow side: worse than the others is a matter, better is none."""
    values, least = column.values, _LEAST_AWAY.get(column.name, 0.0)
    return {
        n
        for n in outliers(values)
        if (values[n] < median) is column.higher_is_better and abs(values[n] - median) >= least
    }


def _telling(column: Figures, blamed: Collection[int]) -> frozenset[int]:
    """The blamed ranks; none where more than half are: what most bars say tells nobody apart."""
    found = [rank for row in column.rows if isinstance(rank := row.get("rank"), int) and rank in blamed]
    return frozenset(found) if 2 * len(found) <= len(column.rows) else frozenset()


def _said(column: Figures, title: str, median: float, far: set[int], *, judged: bool) -> str:
    """What the bars show: "busbw: 4 ranks, 0.21 to 1.07 GB/s, median 1.07 GB/s; far from it: rank 3"."""
    size, unit = column.unit.size, column.symbol
    low, high = figure(min(column.values) / size), figure(max(column.values) / size)
    named = ", ".join(column.who(n) for n in sorted(far)[:8]) + (" and others" if len(far) > 8 else "")
    rest = f"; far from it: {named}" if far else "" if judged else "; none is far from it"
    whole = f"{low} to {high} {unit}".rstrip()
    middle = f"{figure(median / size)} {unit}".rstrip()
    return f"{title}: {count(len(column.values), column.noun)}, {whole}, median {middle}{rest}."


def _who_missing(missing: Sequence[tuple[int, str]]) -> str:
    if not missing:
        return ""
    ranks = fold_ranks(rank for rank, _ in missing)
    return f" {'Rank' if len(missing) == 1 else 'Ranks'} {ranks} never came."


def who_of(row: Row) -> str:
    """Such as "3  n1"."""
    return f"{row.get('rank')}  {row.get('node')}"
