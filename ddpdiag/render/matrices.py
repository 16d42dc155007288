"""Group equal matrices of several hosts, and choose the matrices that a terminal shows."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpdiag.model import Finding, Matrix, Severity
from ddpdiag.render import blocks
from ddpdiag.render.page import ROWS_SHOWN
from ddpdiag.text import begun, count, fold_hosts

# So many different matrices are always shown. More would hide the findings.
FEW_MATRICES = 2
_NAMES_SHOWN = 16
# Matrices of every run with several hosts. A terminal shows them only with a finding about them.
_ROUTINE_MATRICES = ("fab.pairs", "rdz.mesh")


class MatrixGroup(NamedTuple):
    """A matrix, and all hosts that have an equal matrix. `name` is the matrix's name without the host."""

    name: str
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
    """Yield the matrices that a terminal shows, and a text about the others. Without `details`, it shows the first
    small matrices with findings, and also those that are not routine, if they are at most `FEW_MATRICES`."""
    groups = group_equal_matrices(matrices)
    special = [group for group in groups if group.name not in _ROUTINE_MATRICES]
    shown_anyway = special if len(special) <= FEW_MATRICES else []
    wanted = [group for group in groups if details or group in shown_anyway or _is_concerned(group, findings)]
    # A terminal shows neither many matrices nor a large group; scripts can read them in the JSON report.
    small = [group for group in wanted if max(len(group.matrix.rows), len(group.matrix.columns)) <= ROWS_SHOWN]
    shown = wanted if details else small[: 2 * FEW_MATRICES]
    yield from (blocks.Matrix(group.title, group.matrix) for group in shown)
    if hidden := len(groups) - len(shown):
        text = f"{count(hidden, 'more table')} of pairs: with --details, or in the JSON report"
        yield blocks.Text(text, mark=blocks.Mark.DIM)


def group_equal_matrices(matrices: Sequence[Matrix]) -> list[MatrixGroup]:
    """Group matrices that are equal except for the host in their name, such as "p2p.topology.HOST"."""
    groups: dict[tuple[object, ...], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        shown = matrix.title, matrix.rows, matrix.columns, matrix.cells, matrix.unit
        groups[_name_without_host(matrix), *shown].append(matrix)
    return [
        MatrixGroup(_name_without_host(equal[0]), tuple(host for matrix in equal if (host := _host(matrix))), equal[0])
        for equal in groups.values()
    ]


def _name_without_host(matrix: Matrix) -> str:
    return ".".join(matrix.name.split(".")[:2])


def _host(matrix: Matrix) -> str:
    """The host in a matrix's name ("p2p.topology.HOST"). A host may contain dots."""
    return ".".join(matrix.name.split(".")[2:])


def _is_concerned(group: MatrixGroup, findings: Sequence[Finding]) -> bool:
    """Whether a warning or error of the same checks (such as P2P) blames a host of the group, or no host at all."""
    family = group.name.partition(".")[0].upper()
    return any(
        finding.severity is not Severity.NOTE
        and finding.code.startswith(family)
        and (not finding.hosts or not group.hosts or not {*finding.hosts}.isdisjoint(group.hosts))
        for finding in findings
    )
