"""Pairs of hosts and GPUs: rates as heat maps, words (how GPUs are connected) as tables."""

import re
from collections.abc import Callable, Sequence

from ddpdiag.model import Matrix, Report, Scalar
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.plots.charts import draw_heat, scale_of
from ddpdiag.render.terminal.matrices import Alike, alike
from ddpdiag.stats import quantile
from ddpdiag.text import ABSENT, Unit, bytes_per_s, column_unit, count, figure, fold_hosts

# Different pictures, and different tables: of a thousand hosts most are alike, and alike is shown once.
FIGURES_SHOWN, TABLES_SHOWN = 12, 12
# Cells of a row that a table has room for; a heat map has more.
_MOST_COLUMNS, _MOST_CELLS = 16, 64
_NAMES_SHOWN = 12
# The legend of `nvidia-smi topo -m`, in the words of P2P001.
_WAYS = {
    "X": "the GPU itself",
    "NV#": "so many NVLinks",
    "PSB": "on one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge of a processor",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "another socket",
}
_LINKS = re.compile(r"^NV\d+$")


def pairs_section(report: Report) -> Section:
    """Heat maps of what pairs reached, and their numbers."""
    found = [own for own in alike(report.matrices) if own.matrix.unit]
    blamed = {node for finding in report.findings for node in finding.nodes}
    drawable = sorted(
        (own for own in found if _is_drawable(own.matrix)),
        key=lambda own: bool(own.hosts) and blamed.isdisjoint(own.hosts),
    )
    shown = drawable[:FIGURES_SHOWN]
    hidden = len(found) - len(shown)
    return Section(
        name="pairs",
        title="Bandwidth of pairs",
        sentence="From the row to the column. A cross is a way that failed; an empty cell was not measured."
        + (f" {count(hidden, 'more matrix').replace('matrixs', 'matrices')} in the JSON report." if hidden else ""),
        figures=tuple(_heat(own, number, shown) for number, own in enumerate(shown)),
        tables=tuple(
            _numbers(own, number, shown) for number, own in enumerate(shown) if len(own.matrix.columns) <= _MOST_COLUMNS
        ),
    )


def way_tables(report: Report) -> tuple[Table, ...]:
    """How the GPUs of each host are connected, and other words about pairs."""
    found = [own for own in alike(report.matrices) if not own.matrix.unit]
    return tuple(
        _table(own, f"ways-{number}", _title(own), _word)
        for number, own in enumerate(found[:TABLES_SHOWN])
        if len(own.matrix.columns) <= _MOST_CELLS
    )


def _is_drawable(matrix: Matrix) -> bool:
    sizes = len(matrix.rows), len(matrix.columns)
    return min(sizes) > 0 and max(sizes) <= _MOST_CELLS and any(_rates(matrix))


def _rates(matrix: Matrix) -> list[float]:
    return [rate for row in matrix.cells for cell in row if (rate := _number(cell)) is not None]


def _number(value: Scalar) -> float | None:
    """A rate that can be; what is no number is not known."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e18 else None


def _title(own: Alike) -> str:
    hosts = f" on {fold_hosts(own.hosts, limit=_NAMES_SHOWN)}" if own.hosts else ""
    # Beside those through the host's memory, which are titled "(P2P off)".
    way = " (P2P where CUDA allows it)" if own.what == "p2p.copy" else ""
    text = f"{own.matrix.title}{way}{hosts}"
    return words(text[:1].upper() + text[1:])


def _heat(own: Alike, number: int, shown: Sequence[Alike]) -> Figure:
    matrix, title = own.matrix, _title(own)
    beside, unit = _beside(own, shown), _unit(own, shown)
    scale = scale_of([rate / unit.size for rate in beside], unit.symbol)
    cells = [[None if (rate := _number(cell)) is None else rate / unit.size for cell in row] for row in matrix.cells]
    return Figure(
        title=title,
        svg=draw_heat(matrix.rows, matrix.columns, cells, scale, f"heat-{number}"),
        alt=words(_said(title, matrix, sorted(_rates(matrix)))),
    )


def _beside(own: Alike, shown: Sequence[Alike]) -> list[float]:
    """Direct copies and those through the host share their colours and unit: what P2P brings is seen at once."""
    return [rate for other in shown if _subject(other) == _subject(own) for rate in _rates(other.matrix)]


def _unit(own: Alike, shown: Sequence[Alike]) -> Unit:
    return column_unit(own.matrix.unit, [max(_beside(own, shown))])


def _subject(own: Alike) -> object:
    return own.hosts if own.what in ("p2p.copy", "p2p.staged") else own


def _said(title: str, matrix: Matrix, rates: Sequence[float]) -> str:
    """Where the slowest way is, the median of those that did not fail, and how many failed."""
    ways = [
        (rate, f"{source} to {target}")
        for source, row in zip(matrix.rows, matrix.cells, strict=True)
        for target, cell in zip(matrix.columns, row, strict=True)
        if (rate := _number(cell)) is not None
    ]
    slowest, way = min([own for own in ways if own[0]], default=(0.0, ""))
    failed = sum(rate == 0 for rate in rates)
    rest = f"; {count(failed, 'way')} failed" if failed else ""
    if failed == len(rates):
        return f"{title}: {count(len(ways), 'way')}{rest}."
    # As the figures of the run have it.
    median = bytes_per_s(quantile([rate for rate in rates if rate], 0.5))
    return f"{title}: {count(len(ways), 'way')}, median {median}, slowest {way} at {bytes_per_s(slowest)}{rest}."


def _numbers(own: Alike, number: int, shown: Sequence[Alike]) -> Table:
    """The numbers of a heat map, in its unit."""
    unit = _unit(own, shown)
    caption = f"{_title(own)}, in {unit.symbol}" if unit.symbol else _title(own)
    return _table(own, f"rates-{number}", caption, lambda value: _rate(value, unit))


def _table(own: Alike, name: str, caption: str, cell: Callable[[Scalar], Cell]) -> Table:
    matrix = own.matrix
    return Table(
        name=name,
        caption=caption,
        columns=(Column("from"), *(Column(words(column), right=bool(matrix.unit)) for column in matrix.columns)),
        rows=tuple(
            (Cell(words(source)), *map(cell, row)) for source, row in zip(matrix.rows, matrix.cells, strict=True)
        ),
        note=_legend(matrix),
        folded=bool(matrix.unit),
    )


def _rate(value: Scalar, unit: Unit) -> Cell:
    rate = _number(value)
    if rate is None:
        return _word(value)
    return Cell(figure(rate / unit.size)) if rate else Cell("failed", mark="bad")


def _word(value: Scalar) -> Cell:
    return Cell(ABSENT if value is None else words(str(value)))


def _legend(matrix: Matrix) -> str:
    """What the words in the cells mean, of `nvidia-smi topo -m`; nothing for rates and other words."""
    if matrix.unit:
        return ""
    found = {_LINKS.sub("NV", cell) for row in matrix.cells for cell in row if isinstance(cell, str)}
    told = "; ".join(f"{name}: {meaning}" for name, meaning in _WAYS.items() if name.removesuffix("#") in found)
    return f"{told}." if told else ""
