"""The world of a run: hosts and what hangs together, the rates of pairs, and what ranks run with."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddpdiag.model import Matrix, Report, Scalar, Severity
from ddpdiag.model.report import INVENTORY, UNKNOWN
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, columns, more, words
from ddpdiag.render.plots import draw_heat, scale_of
from ddpdiag.render.terminal.matrices import Alike, alike
from ddpdiag.render.terminal.ranks import Row
from ddpdiag.stats import quantile
from ddpdiag.text import (
    ABSENT,
    Unit,
    bytes_per_s,
    column_unit,
    count,
    figure,
    fold_hosts,
    fold_ranks,
    is_number,
    label,
    left_out,
    quantity,
)

_HOSTS_SHOWN, _LEAVES_SHOWN, _SETTINGS_SHOWN, _MEASUREMENTS_SHOWN = 64, 64, 200, 200
_NAMES_SHOWN, _OPEN_ROWS = 16, 16
# Different pictures, and different tables: of a thousand hosts most are alike, and alike is shown once.
_FIGURES_SHOWN, _TABLES_SHOWN = 12, 12
# Cells of a row that a table has room for; a heat map has more.
_MOST_COLUMNS, _MOST_CELLS = 16, 64
_HOSTS_NAMED = 12
# The legend of `nvidia-smi topo -m`, in the words of P2P001.
_LINK_NAMES = {
    "X": "the GPU itself",
    "NV#": "so many NVLinks",
    "PSB": "on one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge of a processor",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "another socket",
}
_NVLINKS = re.compile(r"^NV\d+$")
# Figures named by hosts, whose own names may hold dots and underscores.
_BY_HOST = ("coordinator", "interface")
_NOT_BLAMED = ("not blamed", "", 2)


def inventory_section(report: Report) -> Section:
    """The inventory, a line for each kind of host."""
    table = Table(
        name="inventory-table",
        caption=count(len(report.inventory), "kind") + " of hosts",
        columns=columns("hosts", *INVENTORY),
        rows=tuple(
            (
                Cell(words(f"{len(kind.hosts):,} ({fold_hosts(kind.hosts, limit=_NAMES_SHOWN)})")),
                *(Cell(words(kind.parts.get(part, UNKNOWN))) for part in INVENTORY),
            )
            for kind in report.inventory[:_HOSTS_SHOWN]
        ),
        note=more(len(report.inventory) - _HOSTS_SHOWN),
    )
    return Section(name="inventory", title="Inventory", tables=(table,) if report.inventory else ())


def topology_section(report: Report) -> Section:
    """Hosts with their ranks, leaf switches, and how the GPUs of each host are connected."""
    found = [own for own in alike(report.matrices) if not own.matrix.unit]
    links = (
        _table(own, f"ways-{number}", _title(own), _word)
        for number, own in enumerate(found[:_TABLES_SHOWN])
        if len(own.matrix.columns) <= _MOST_CELLS
    )
    return Section(
        name="topology",
        title="Topology",
        tables=tuple(own for own in (_hosts(report), _leaves(report.world.leaves), *links) if own.rows),
    )


def _hosts(report: Report) -> Table:
    rows: dict[str, list[Row]] = {}
    for row in report.ranks:
        rows.setdefault(str(row.get("node")), []).append(row)
    # The worst that each host is blamed for: a word, its mark, its place in the order.
    marks: dict[str, tuple[str, str, int]] = {}
    for severity, entry in ((Severity.WARNING, ("warning", "warn", 1)), (Severity.ERROR, ("error", "bad", 0))):
        for finding in report.findings:
            if finding.severity is severity:
                marks.update(dict.fromkeys(finding.nodes, entry))
    leaf_of = {host: leaf for leaf, hosts in report.world.leaves.items() for host in hosts}
    order = sorted(rows, key=lambda host: marks.get(host, _NOT_BLAMED)[2])
    shown = order[:_HOSTS_SHOWN] if len(order) > _HOSTS_SHOWN else list(rows)
    has_leaves, has_rates = bool(leaf_of), any("host_busbw_bytes_per_s" in row for row in report.ranks)
    left = len(order) - len(shown)
    heads = ("host", "state", "ranks", "GPUs", *["leaf"] * has_leaves, *["best pair"] * has_rates)
    return Table(
        name="hosts",
        caption=count(len(shown), "host") + (f" of {len(order):,}" if left else ""),
        columns=columns(*heads, right=(3, 4 + has_leaves)),
        rows=tuple(
            (
                *_host(host, rows[host], marks.get(host, _NOT_BLAMED)),
                *([Cell(words(leaf_of.get(host, ABSENT)))] * has_leaves),
                *([_best(rows[host])] * has_rates),
            )
            for host in shown
        ),
        note=f"Blamed hosts come first; {more(left)}" if left else "",
        sortable=True,
        folded=len(shown) > _OPEN_ROWS,
    )


def _host(host: str, rows: Sequence[Row], entry: tuple[str, str, int]) -> tuple[Cell, ...]:
    ranks = [rank for row in rows if isinstance(rank := row.get("rank"), int)]
    gpus = {uuid for row in rows if (uuid := row.get("gpu_uuid")) is not None}
    word, mark, _ = entry
    return (
        Cell(words(host), words(host)),
        Cell(word, word, mark),
        Cell(fold_ranks(ranks, limit=_NAMES_SHOWN), min(ranks, default=-1)),
        Cell(str(len(gpus)) if gpus else ABSENT, len(gpus)),
    )


def _best(rows: Sequence[Row]) -> Cell:
    rates = [rate for row in rows if isinstance(rate := row.get("host_busbw_bytes_per_s"), int | float)]
    return Cell(bytes_per_s(max(rates)), max(rates)) if rates else Cell(ABSENT)


def _leaves(leaves: Mapping[str, Sequence[str]]) -> Table:
    return Table(
        name="leaves",
        caption=count(len(leaves), "leaf switch").replace("switchs", "switches"),
        columns=columns("leaf", "hosts", "names", right=(1,)),
        rows=tuple(
            (Cell(words(leaf)), Cell(str(len(hosts))), Cell(words(fold_hosts(hosts, limit=_NAMES_SHOWN))))
            for leaf, hosts in list(leaves.items())[:_LEAVES_SHOWN]
        ),
        note=more(len(leaves) - _LEAVES_SHOWN),
        folded=True,
    )


def pairs_section(report: Report) -> Section:
    """Heat maps of what pairs reached, and their numbers."""
    found = [own for own in alike(report.matrices) if own.matrix.unit]
    blamed = {node for finding in report.findings for node in finding.nodes}
    drawable = [own for own in found if _is_drawable(own.matrix)]
    shown = sorted(drawable, key=lambda own: bool(own.hosts) and blamed.isdisjoint(own.hosts))[:_FIGURES_SHOWN]
    hidden = len(found) - len(shown)
    tables = []
    for number, own in enumerate(shown):
        if len(own.matrix.columns) <= _MOST_COLUMNS:
            # The numbers of a heat map, in its unit.
            unit = _unit(own, shown)
            caption = f"{_title(own)}, in {unit.symbol}" if unit.symbol else _title(own)
            tables.append(_table(own, f"rates-{number}", caption, partial(_rate, unit=unit)))
    return Section(
        name="pairs",
        title="Bandwidth of pairs",
        sentence="From the row to the column. A cross is a link that failed; an empty cell was not measured."
        + (f" {count(hidden, 'more matrix').replace('matrixs', 'matrices')} in the JSON report." if hidden else ""),
        figures=tuple(_heat(own, number, shown) for number, own in enumerate(shown)),
        tables=tuple(tables),
    )


def _is_drawable(matrix: Matrix) -> bool:
    sizes = len(matrix.rows), len(matrix.columns)
    return min(sizes) > 0 and max(sizes) <= _MOST_CELLS and any(_rates(matrix))


def _rates(matrix: Matrix) -> list[float]:
    return [rate for row in matrix.cells for cell in row if (rate := _number(cell)) is not None]


def _number(value: Scalar) -> float | None:
    """A rate that can be; what is no number is not known."""
    return float(value) if is_number(value) and 0 <= value < 1e18 else None


def _title(own: Alike) -> str:
    hosts = f" on {fold_hosts(own.hosts, limit=_HOSTS_NAMED)}" if own.hosts else ""
    # Beside those through the host's memory, which are titled "(P2P off)".
    path = " (P2P where CUDA allows it)" if own.what == "p2p.copy" else ""
    text = f"{own.matrix.title}{path}{hosts}"
    return words(text[:1].upper() + text[1:])


def _heat(own: Alike, number: int, shown: Sequence[Alike]) -> Figure:
    matrix, title = own.matrix, _title(own)
    beside, unit = _beside(own, shown), _unit(own, shown)
    scale = scale_of([rate / unit.size for rate in beside], unit.symbol)
    cells = [[None if (rate := _number(cell)) is None else rate / unit.size for cell in row] for row in matrix.cells]
    return Figure(
        title=title,
        svg=draw_heat(matrix.rows, matrix.columns, cells, scale, f"heat-{number}"),
        alt=words(_in_words(title, matrix)),
    )


def _beside(own: Alike, shown: Sequence[Alike]) -> list[float]:
    """Direct copies and those through the host share their colours and unit: what P2P brings is seen at once."""
    return [rate for other in shown if _subject(other) == _subject(own) for rate in _rates(other.matrix)]


def _unit(own: Alike, shown: Sequence[Alike]) -> Unit:
    return column_unit(own.matrix.unit, [max(_beside(own, shown))])


def _subject(own: Alike) -> object:
    return own.hosts if own.what in ("p2p.copy", "p2p.staged") else own


def _in_words(title: str, matrix: Matrix) -> str:
    """Where the slowest link is, the median of those that did not fail, and how many failed."""
    links = [
        (rate, f"{source} to {target}")
        for source, row in zip(matrix.rows, matrix.cells, strict=True)
        for target, cell in zip(matrix.columns, row, strict=True)
        if (rate := _number(cell)) is not None
    ]
    working = [own for own in links if own[0]]
    failed = len(links) - len(working)
    head, rest = f"{title}: {count(len(links), 'link')}", f"; {count(failed, 'link')} failed" if failed else ""
    if not working:
        return f"{head}{rest}."
    slowest, link = min(working)
    # As the figures of the run have it.
    median = bytes_per_s(quantile(sorted(rate for rate, _ in working), 0.5))
    return f"{head}, median {median}, slowest {link} at {bytes_per_s(slowest)}{rest}."


def _table(own: Alike, name: str, caption: str, cell: Callable[[Scalar], Cell]) -> Table:
    matrix, notes = own.matrix, []
    if not matrix.unit:
        # What the words in the cells mean, of `nvidia-smi topo -m`.
        found = {_NVLINKS.sub("NV", word) for row in matrix.cells for word in row if isinstance(word, str)}
        known = {word: says for word, says in _LINK_NAMES.items() if word.removesuffix("#") in found}
        notes.append("; ".join(f"{word}: {says}" for word, says in known.items()))
    if len(own.hosts) < 2:
        # Hosts that are alike have different GPUs.
        notes.append(words("; ".join(f"{gpu}: {uuid}" for gpu, uuid in matrix.gpus.items())))
    return Table(
        name=name,
        caption=caption,
        columns=(Column("from"), *(Column(words(column), right=bool(matrix.unit)) for column in matrix.columns)),
        rows=tuple(
            (Cell(words(source)), *map(cell, row)) for source, row in zip(matrix.rows, matrix.cells, strict=True)
        ),
        note=" ".join(f"{note}." for note in notes if note),
        folded=bool(matrix.unit),
    )


def _rate(value: Scalar, unit: Unit) -> Cell:
    rate = _number(value)
    if rate is None:
        return _word(value)
    return Cell(figure(rate / unit.size)) if rate else Cell("failed", mark="bad")


def _word(value: Scalar) -> Cell:
    return Cell(ABSENT if value is None else words(str(value)))


def environment_section(report: Report) -> Section:
    """Where ranks differ, then what all have alike, and the figures of the run."""
    differing = [setting for setting in report.settings if not setting.alike]
    alike = [setting for setting in report.settings if setting.alike]
    sentence = ""
    if report.settings:
        sentence = (
            f"{count(len(differing), 'setting')} of {len(report.settings):,} differ between ranks."
            if differing
            else f"All {len(report.settings):,} recorded versions, variables and lines of files are alike on all ranks."
        )
    differences = Table(
        name="differences",
        caption="What differs between ranks",
        columns=columns("kind", "name", "value", "ranks"),
        rows=tuple(
            (
                Cell(words(setting.kind)),
                Cell(words(setting.name)),
                Cell("not set" if own.value is None else words(own.value)),
                Cell(fold_ranks(own.ranks) + left_out(own.count, len(own.ranks))),
            )
            for setting in differing[:_SETTINGS_SHOWN]
            for own in setting.values
        ),
        note=more(len(differing) - _SETTINGS_SHOWN),
    )
    same = Table(
        name="alike",
        caption="Alike on all ranks",
        columns=columns("kind", "name", "value"),
        rows=tuple(
            tuple(Cell(words(text)) for text in (own.kind, own.name, own.values[0].value or ""))
            for own in alike[:_SETTINGS_SHOWN]
        ),
        note=more(len(alike) - _SETTINGS_SHOWN),
        folded=True,
    )
    tables = (differences, same, _measurements(report.measurements))
    return Section(
        name="environment", title="Environment", sentence=sentence, tables=tuple(own for own in tables if own.rows)
    )


def _measurements(measurements: Mapping[str, Scalar]) -> Table:
    shown = list(measurements.items())[:_MEASUREMENTS_SHOWN]
    return Table(
        name="measurements",
        caption="Figures of the run",
        columns=columns("name", "value", right=(1,)),
        rows=tuple((Cell(words(named(name))), Cell(words(quantity(name, value)))) for name, value in shown),
        folded=True,
    )


def named(name: str) -> str:
    """What a figure of the run is called: `all_reduce.gloo.bytes` is "all reduce, gloo, size"."""
    kind, dot, host = name.partition(".")
    return f"{kind}, {host}" if dot and kind in _BY_HOST else ", ".join(label(name).split("."))
