"""Matrices of pairs as tables: one cell for each link, from the row to the column.

Hosts whose matrices are all alike are shown once. A table that is wider than the page has numbers of rows for columns,
and if that is not enough it goes on below itself. Rates are in GB/s, in the title.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ddpdiag.model import Finding, Matrix, Scalar, Severity
from ddpdiag.render.page import ALL_SHOWN, Column, Page, fitted, one_line
from ddpdiag.text import ABSENT, count, figure, fold_hosts

# So many different tables are always shown; more of them bury the findings.
FEW = 2
# Names in one line.
LIST_SHOWN = 8
# In the terminal only where something is wrong with them: the matrices of every run among hosts, and staged copies.
_QUIET = ("fab.pairs", "rdz.mesh")
_GB = 1e9
# CUDA_VISIBLE_DEVICES takes a UUID cut to its beginning, so a beginning is a name.
_SHORT_UUID = 12


class Alike(NamedTuple):
    """A matrix, and the hosts that have exactly this one; `what` is its name without the host."""

    what: str
    hosts: tuple[str, ...]
    matrix: Matrix

    @property
    def title(self) -> str:
        """The title with the hosts: "Paths between GPUs on n[0-3]"."""
        unit = " (GB/s, from row to column)" if self.matrix.unit == "bytes_per_s" else ""
        hosts = f" on {one_line(fold_hosts(self.hosts, limit=LIST_SHOWN))}" if self.hosts else ""
        return f"{one_line(self.matrix.title)}{hosts}{unit}"


def write_matrices(
    page: Page, matrices: Sequence[Matrix], findings: Sequence[Finding] = (), *, details: bool = False
) -> None:
    """The tables that are worth their room: with `details` all, else those of warned hosts, or all if they are few."""
    tables = alike(matrices)
    few = sum(own.what not in _QUIET for own in tables) <= FEW
    wanted = [own for own in tables if details or (few and own.what not in _QUIET) or _is_concerned(own, findings)]
    # A few of a thousand hosts show what it looks like, and a matrix of a thousand hosts is for scripts.
    small = [own for own in wanted if max(len(own.matrix.rows), len(own.matrix.columns)) <= ALL_SHOWN]
    shown = wanted if details else small[: 2 * FEW]
    told = ""
    for own in shown:
        write_matrix(page, own.title, own.matrix)
        # Hosts that are alike have different GPUs; tables of one host follow each other.
        uuids = own.matrix.gpus.items() if len(own.hosts) < 2 else ()
        gpus = ", ".join(one_line(f"{name}: {uuid if details else uuid[:_SHORT_UUID]}") for name, uuid in uuids)
        if gpus and gpus != told:
            page.write(gpus, style="dim")
            told = gpus
        page.blank()
    if hidden := len(tables) - len(shown):
        shows = f"{count(hidden, 'more table')} of pairs: with --details, or in the JSON report"
        page.write(shows, style="dim")
        page.blank()


def write_matrix(page: Page, title: str, matrix: Matrix, note: str = "") -> None:
    """Write a matrix below its title."""
    page.write(title, style="bold")
    _table(page, matrix)
    if note:
        page.write(note, style="dim")


def alike(matrices: Sequence[Matrix]) -> list[Alike]:
    """Matrices in order, those that differ in nothing but the host in their name ("p2p.topology.HOST") put together."""
    groups: dict[tuple[object, ...], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        groups[_what(matrix), matrix.title, matrix.rows, matrix.columns, matrix.cells, matrix.unit].append(matrix)
    return [
        Alike(_what(own[0]), tuple(host for matrix in own if (host := _host(matrix))), own[0])
        for own in groups.values()
    ]


def _what(matrix: Matrix) -> str:
    return ".".join(matrix.name.split(".")[:2])


def _host(matrix: Matrix) -> str:
    """A host's name may hold dots."""
    return ".".join(matrix.name.split(".")[2:])


def _is_concerned(own: Alike, findings: Sequence[Finding]) -> bool:
    """Whether a warning or error of the same family of checks blames one of these hosts, or none."""
    family = own.what.partition(".")[0].upper()
    return any(
        finding.severity is not Severity.NOTE
        and finding.code.startswith(family)
        and (not finding.hosts or not own.hosts or not {*finding.hosts}.isdisjoint(own.hosts))
        for finding in findings
    )


def _table(page: Page, matrix: Matrix) -> None:
    """Draw it with the names of its columns, or, where these are too wide, with the numbers of its rows."""
    rows, columns = tuple(map(one_line, matrix.rows)), tuple(map(one_line, matrix.columns))
    absent = ABSENT if page.color else "-"
    cells = [tuple(_cell(row[n], matrix.unit, absent) for row in matrix.cells) for n in range(len(columns))]

    def drawn(rows: Sequence[str], columns: Sequence[str]) -> tuple[Column, list[Column]]:
        figures = [Column(name, column, right=True) for name, column in zip(columns, cells, strict=True)]
        return Column("", tuple(rows), right=False, whole=True), figures

    names, figures = drawn(rows, columns)
    if rows == columns and names.width + sum(2 + column.width for column in figures) > page.width:
        wide = len(str(len(rows) - 1))
        numbered = [f"{number:>{wide}}  {name}" for number, name in enumerate(rows)]
        names, figures = drawn(numbered, list(map(str, range(len(rows)))))
    for table in fitted((names,), figures, len(rows), width=page.width):
        page.table(table)


def _cell(value: Scalar, unit: str, absent: str) -> str:
    if value is None:
        return absent
    if unit == "bytes_per_s" and isinstance(value, int | float):
        rate = value / _GB
        return f"{rate:.3f}" if 0 < rate < 1 else figure(rate)
    return one_line(figure(value) if isinstance(value, float) else str(value))
