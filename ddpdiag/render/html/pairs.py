"""Pairs of hosts and GPUs: rates as heat maps, words (how GPUs are connected) as tables."""

from collections.abc import Sequence

from ddpdiag.model import Matrix, Report, Scalar
from ddpdiag.render.hosts import fold_hosts
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.matrices import Alike, alike
from ddpdiag.render.plots.heat import draw_heat, scale_of
from ddpdiag.render.units import ABSENT, bytes_per_s, column_unit, count, figure

# Different pictures, and different tables: of a thousand hosts most are alike, and alike is shown once.
FIGURES_SHOWN, TABLES_SHOWN = 12, 12
# Cells of a row that a table has room for; a heat map has more.
_MOST_COLUMNS, _MOST_CELLS = 16, 64
_NAMES_SHOWN = 12


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
            _numbers(own, number) for number, own in enumerate(shown) if len(own.matrix.columns) <= _MOST_COLUMNS
        ),
    )


def way_tables(report: Report) -> tuple[Table, ...]:
    """How the GPUs of each host are connected, and other words about pairs."""
    found = [own for own in alike(report.matrices) if not own.matrix.unit]
    return tuple(
        _table(own, f"ways-{number}", folded=False)
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
    return words(f"{own.matrix.title}{hosts}")


def _heat(own: Alike, number: int, shown: Sequence[Alike]) -> Figure:
    matrix, rates = own.matrix, sorted(_rates(own.matrix))
    # Direct copies and those through the host share their colours: what P2P brings is seen at once.
    beside = [rate for other in shown if _subject(other) == _subject(own) for rate in _rates(other.matrix)]
    unit = column_unit(matrix.unit, [max(beside)])
    scale = scale_of([rate / unit.size for rate in beside], unit.symbol)
    cells = [[None if (rate := _number(cell)) is None else rate / unit.size for cell in row] for row in matrix.cells]
    return Figure(
        title=_title(own),
        svg=draw_heat(matrix.rows, matrix.columns, cells, scale, f"heat-{number}"),
        alt=words(f"{_title(own)}: {_said(matrix, rates)}"),
    )


def _subject(own: Alike) -> object:
    return own.hosts if own.what in ("p2p.copy", "p2p.staged") else own


def _said(matrix: Matrix, rates: Sequence[float]) -> str:
    """Where the slowest way is, what most reach, and how many failed."""
    ways = [
        (rate, f"{source} to {target}")
        for source, row in zip(matrix.rows, matrix.cells, strict=True)
        for target, cell in zip(matrix.columns, row, strict=True)
        if (rate := _number(cell)) is not None
    ]
    slowest, way = min(ways)
    failed = sum(rate == 0 for rate in rates)
    usual = bytes_per_s(rates[len(rates) // 2])
    rest = f"; {count(failed, 'way')} failed" if failed else ""
    return f"{count(len(ways), 'way')}, usually {usual}, slowest {way} at {bytes_per_s(slowest)}{rest}."


def _numbers(own: Alike, number: int) -> Table:
    return _table(own, f"rates-{number}", folded=True)


def _table(own: Alike, name: str, *, folded: bool) -> Table:
    matrix = own.matrix
    unit = " (GB/s)" if matrix.unit == "bytes_per_s" else ""
    return Table(
        name=name,
        caption=f"{_title(own)}{unit}",
        columns=(Column("from"), *(Column(words(column), right=bool(unit)) for column in matrix.columns)),
        rows=tuple(
            (Cell(words(source)), *(_cell(cell, matrix.unit) for cell in row))
            for source, row in zip(matrix.rows, matrix.cells, strict=True)
        ),
        folded=folded,
    )


def _cell(value: Scalar, unit: str) -> Cell:
    if value is None:
        return Cell(ABSENT)
    rate = _number(value)
    if unit == "bytes_per_s" and rate is not None:
        return Cell(figure(rate / 1e9)) if rate else Cell("failed", mark="bad")
    return Cell(words(str(value)))
