"""Put equal matrices of pairs of several hosts together, and choose those that a terminal shows."""

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
# Matrices that every run of several hosts has: a terminal shows them only if something is wrong with them.
_QUIET = ("fab.pairs", "rdz.mesh")


class Alike(NamedTuple):
    """A matrix, and all hosts that have exactly this matrix. `what` is its name without the host."""

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
    """The matrices that a terminal shows: all with `details`, else those of hosts with findings, or all if few."""
    tables = alike(matrices)
    few = sum(one.what not in _QUIET for one in tables) <= FEW
    wanted = [one for one in tables if details or (few and one.what not in _QUIET) or _is_concerned(one, findings)]
    # Of a thousand hosts a few matrices are enough, and a matrix of a thousand hosts is for scripts.
    small = [one for one in wanted if max(len(one.matrix.rows), len(one.matrix.columns)) <= ALL_SHOWN]
    shown = wanted if details else small[: 2 * FEW]
    yield from (blocks.Matrix(one.title, one.matrix) for one in shown)
    if hidden := len(tables) - len(shown):
        text = f"{count(hidden, 'more table')} of pairs: with --details, or in the JSON report"
        yield blocks.Text(text, mark=blocks.Mark.DIM)


def alike(matrices: Sequence[Matrix]) -> list[Alike]:
    """Matrices in order, those that differ in nothing but the host in their name ("p2p.topology.HOST") put together."""
    groups: dict[tuple[object, ...], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        groups[_what(matrix), matrix.title, matrix.rows, matrix.columns, matrix.cells, matrix.unit].append(matrix)
    return [
        Alike(_what(equal[0]), tuple(host for matrix in equal if (host := _host(matrix))), equal[0])
        for equal in groups.values()
    ]


def _what(matrix: Matrix) -> str:
    return ".".join(matrix.name.split(".")[:2])


def _host(matrix: Matrix) -> str:
    """The host in a matrix's name ("p2p.topology.HOST"); it may contain dots."""
    return ".".join(matrix.name.split(".")[2:])


def _is_concerned(one: Alike, findings: Sequence[Finding]) -> bool:
    """Whether a warning or error of the same family of checks blames one of these hosts, or none."""
    family = one.what.partition(".")[0].upper()
    return any(
        finding.severity is not Severity.NOTE
        and finding.code.startswith(family)
        and (not finding.hosts or not one.hosts or not {*finding.hosts}.isdisjoint(one.hosts))
        for finding in findings
    )
