"""Matrices of pairs, one for all hosts that have the same, and those that a report on a terminal shows."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpdiag.model import Finding, Matrix, Severity
from ddpdiag.render import blocks
from ddpdiag.render.page import ALL_SHOWN
from ddpdiag.text import begun, count, fold_hosts

# So many different tables are always shown; more of them bury the findings.
FEW = 2
_NAMES_SHOWN = 16
# In the terminal only where something is wrong with them: the matrices of every run among hosts.
_QUIET = ("fab.pairs", "rdz.mesh")


class Alike(NamedTuple):
    """A matrix, and the hosts that have exactly this one; `what` is its name without the host."""

    what: str
    hosts: tuple[str, ...]
    matrix: Matrix

    @property
    def title(self) -> str:
        """The title with the hosts: "Paths between GPUs on n[0-3]"."""
        hosts = f" on {fold_hosts(self.hosts, limit=_NAMES_SHOWN)}" if self.hosts else ""
        return begun(f"{self.matrix.title}{hosts}")


def matrix_blocks(
    matrices: Sequence[Matrix], findings: Sequence[Finding], *, details: bool
) -> Iterator[blocks.Matrix | blocks.Text]:
    """The tables that are worth their room: with `details` all, else those of warned hosts, or all if they are few."""
    tables = alike(matrices)
    few = sum(own.what not in _QUIET for own in tables) <= FEW
    wanted = [own for own in tables if details or (few and own.what not in _QUIET) or _is_concerned(own, findings)]
    # A few of a thousand hosts show what it looks like, and a matrix of a thousand hosts is for scripts.
    small = [own for own in wanted if max(len(own.matrix.rows), len(own.matrix.columns)) <= ALL_SHOWN]
    shown = wanted if details else small[: 2 * FEW]
    yield from (blocks.Matrix(own.title, own.matrix) for own in shown)
    if hidden := len(tables) - len(shown):
        text = f"{count(hidden, 'more table')} of pairs: with --details, or in the JSON report"
        yield blocks.Text(text, mark=blocks.Mark.DIM)


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
