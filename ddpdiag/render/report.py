"""Make the sections of every report as blocks: inventory, pairs, ranks, stages, topology, environment, checks.

Each format writes the verdict and the findings itself.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ddpdiag.model import CheckSummary, Finding, Matrix, Report, Scalar, Severity
from ddpdiag.model.report import INVENTORY, NONE, UNKNOWN
from ddpdiag.render import blocks
from ddpdiag.render.blocks import Block, Cell, Column, Fold, Mark, Section, Table, Text
from ddpdiag.render.findings import LIST_SHOWN, SEVERITIES
from ddpdiag.render.matrices import MatrixGroup, group_equal_matrices
from ddpdiag.render.page import one_line
from ddpdiag.render.ranks import Row, ranks_table
from ddpdiag.stats import quantile
from ddpdiag.text import bytes_per_s, count, fold_hosts, fold_ranks, is_number, label, quantity, seconds

_NAMES_SHOWN, _MATRICES_SHOWN, _WIDEST_MATRIX = 16, 12, 64
_MARKS = {Severity.ERROR: Mark.ERROR, Severity.WARNING: Mark.WARNING}
_FAILED_STATUSES = frozenset({"error", "hung", "died", "raised", "unheard"})


def sections(report: Report) -> Iterator[Section]:
    """Yield all sections that are not empty."""
    matrices = group_equal_matrices(report.matrices)
    rates = [group for group in matrices if group.matrix.unit]
    sections: tuple[tuple[str, str, Iterator[Block]], ...] = (
        ("inventory", "Inventory", _inventory_blocks(report)),
        ("pairs", "Bandwidth of pairs", _rate_matrices(rates, report.findings)),
        ("ranks", "Ranks", filter(None, (ranks_table(report),))),
        ("stages", "Stages", _stage_blocks(report)),
        ("topology", "Topology", _topology_blocks(report, [group for group in matrices if not group.matrix.unit])),
        ("environment", "Environment", _environment_blocks(report)),
        ("checks", "Checks", _check_blocks(report)),
    )
    for name, title, parts in sections:
        if shown := tuple(parts):
            yield Section(title, shown, name)


def _inventory_blocks(report: Report) -> Iterator[Block]:
    rows = []
    for kind in report.inventory:
        hosts = f"{len(kind.hosts):,} ({fold_hosts(kind.hosts, limit=_NAMES_SHOWN)})"
        rows.append((hosts, *(kind.parts.get(part, UNKNOWN) for part in INVENTORY)))
    if rows:
        yield Table(columns=tuple(map(Column, ("hosts", *INVENTORY))), rows=tuple(rows), noun="kind of host")


def kinds_of_hosts(report: Report) -> list[tuple[str, str]]:
    """Describe each kind of host: ("8 hosts", "8 x NVIDIA H100 ...; torch 2.13.0; ...; no RDMA")."""
    kinds = []
    for kind in report.inventory:
        names = "" if len(report.inventory) == 1 else f" ({one_line(fold_hosts(kind.hosts, limit=LIST_SHOWN))})"
        words = [
            text if part in ("GPU", "CPU") else f"{part} {text}"
            for part, text in kind.parts.items()
            if text not in (NONE, UNKNOWN)
        ]
        for lead, state in (("no", NONE), ("unknown:", UNKNOWN)):
            if parts := [part for part, text in kind.parts.items() if text == state]:
                words.append(f"{lead} {', '.join(parts)}")
        kinds.append((count(len(kind.hosts), "host") + names, one_line("; ".join(words))))
    return kinds


def _rate_matrices(matrices: Sequence[MatrixGroup], findings: Sequence[Finding]) -> Iterator[Block]:
    """Yield the matrices of rates, those of blamed hosts first. Hosts with equal matrices share one."""
    blamed = {host for finding in findings for host in finding.hosts}
    drawable = [group for group in matrices if _is_drawable(group.matrix)]
    shown = sorted(drawable, key=lambda group: bool(group.hosts) and blamed.isdisjoint(group.hosts))[:_MATRICES_SHOWN]
    if matrices:
        hidden = len(matrices) - len(shown)
        noun = "matrix" if hidden == 1 else "matrices"
        omitted = f" {hidden:,} more {noun} in the JSON report." if hidden else ""
        yield Text(f"From the row to the column.{omitted}")
    for group in shown:
        yield blocks.Matrix(group.title, group.matrix, _link_summary(group.matrix))


def _is_drawable(matrix: Matrix) -> bool:
    sizes = len(matrix.rows), len(matrix.columns)
    return min(sizes) > 0 and max(sizes) <= _WIDEST_MATRIX and any(rate for rate, _ in _measured_links(matrix))


def _measured_links(matrix: Matrix) -> Iterator[tuple[float, str]]:
    """Yield the rate and the name of each measured link. The rate of a failed link is 0."""
    for source, row in zip(matrix.rows, matrix.cells, strict=True):
        for target, cell in zip(matrix.columns, row, strict=True):
            if is_number(cell) and 0 <= cell < 1e18:
                yield float(cell), f"{source} to {target}"


def _link_summary(matrix: Matrix) -> str:
    """Describe the links of a matrix: the median of the links that work, the slowest, and the number that failed."""
    links = [*_measured_links(matrix)]
    working = [link for link in links if link[0]]
    failed = f"; {count(len(links) - len(working), 'link')} failed" if len(working) < len(links) else ""
    slowest, link = min(working)
    median = bytes_per_s(quantile(sorted(rate for rate, _ in working), 0.5))
    return f"{count(len(links), 'link')}, median {median}, slowest {link} at {bytes_per_s(slowest)}{failed}."


def _stage_blocks(report: Report) -> Iterator[Block]:
    """Yield the table of stages with their findings, and a sentence about the time."""
    rows = [_stage_row(stage.name, stage.status, stage.severity, stage.seconds, stage.codes) for stage in report.stages]
    known = {code for stage in report.stages for code in stage.codes}
    if others := [finding for finding in report.findings if finding.code not in known]:
        worst = min((finding.severity for finding in others), key=SEVERITIES.index)
        codes = tuple(dict.fromkeys(finding.code for finding in others))
        rows.append(_stage_row("run", "done" if worst is Severity.NOTE else worst.value, worst, None, codes))
    if rows:
        columns = (Column("stage"), Column("outcome"), Column("time", "stage_seconds", bar=True), Column("findings"))
        yield Table(columns=columns, rows=tuple(rows))
        if report.stages:
            yield Text(time_spent_sentence(report))


def _stage_row(
    name: str, status: str, severity: Severity | None, spent_seconds: float | None, codes: Sequence[str]
) -> tuple[Scalar | Cell, ...]:
    mark = Mark.WARNING if status in ("warning", "part", "interrupted") else Mark.NONE
    mark = Mark.ERROR if status in _FAILED_STATUSES or severity is Severity.ERROR else mark
    return name, Cell(status, mark), None if status == "skipped" else spent_seconds, ", ".join(codes) or None


def _check_blocks(report: Report) -> Iterator[Block]:
    rows = tuple(
        (
            check.code,
            check.name,
            check.stage,
            Cell(outcomes_text(check), Mark.WARNING if check.statuses.keys() - {"done", "skipped"} else Mark.NONE),
        )
        for check in report.checks
    )
    if rows:
        yield Text("What could not be checked is never reported as healthy; a skipped check had nothing to check.")
        columns = tuple(map(Column, ("code", "name", "stage", "outcomes")))
        yield Fold(count(len(rows), "check"), (Table(columns=columns, rows=rows, noun="check"),))


def outcomes_text(check: CheckSummary) -> str:
    """The outcomes of a check as text: "3 done, 1 hung", or the reason if there are none."""
    if check.skipped_because is not None:
        return f"skipped: {one_line(check.skipped_because)}"
    ran = ", ".join(f"{number:,} {one_line(status)}" for status, number in check.outcome_counts.items())
    return ran or ("not run" if check.measures else "judged from the data of other checks")


def count_equal(problems: Sequence[str]) -> list[str]:
    """Each problem once, with the number of times if it occurred several times: a thousand files can have the same."""
    counts = Counter(problems)
    return [text if times == 1 else f"{text} ({times:,} times)" for text, times in counts.items()]


def time_spent_sentence(report: Report) -> str:
    """A sentence with the seconds that the run spent in its stages and outside of them."""
    inside = sum(stage.seconds for stage in report.stages)
    outside = max(0.0, report.seconds - inside)
    return f"Stages: {seconds(inside)}; starting processes, planning and waiting between trials: {seconds(outside)}."


def _topology_blocks(report: Report, matrices: Sequence[MatrixGroup]) -> Iterator[Block]:
    """Yield the tables of hosts and leaf switches, and the matrices that show how GPUs are connected."""
    if report.ranks:
        yield _hosts_table(report)
    if leaves := report.world.hosts_by_leaf_switch:
        rows = tuple((leaf, len(hosts), fold_hosts(hosts, limit=_NAMES_SHOWN)) for leaf, hosts in leaves.items())
        columns = tuple(map(Column, ("leaf switch", "hosts", "names")))
        yield Fold("Leaf switches", (Table(columns=columns, rows=rows, noun="leaf"),))
    for group in matrices[:_MATRICES_SHOWN]:
        if group.matrix.rows and len(group.matrix.columns) <= _WIDEST_MATRIX:
            yield blocks.Matrix(group.title, group.matrix, _uuid_sentence(group))


def _hosts_table(report: Report) -> Table:
    rows: dict[str, list[Row]] = {}
    for row in report.ranks:
        rows.setdefault(str(row.get("host")), []).append(row)
    # The worst severity with which each host is blamed.
    worst: dict[str, Severity] = {}
    for severity in (Severity.WARNING, Severity.ERROR):
        findings = [finding for finding in report.findings if finding.severity is severity]
        worst |= {host: severity for finding in findings for host in finding.hosts}
    leaf_of = {host: leaf for leaf, hosts in report.world.hosts_by_leaf_switch.items() for host in hosts}
    ranking = [SEVERITIES.index(worst.get(host, Severity.NOTE)) for host in rows]
    return Table(
        columns=(
            *map(Column, ("host", "state", "ranks", "GPUs")),
            *([Column("leaf")] if leaf_of else []),
            Column("best pair", "host_busbw_bytes_per_s", bar=True),
        ),
        rows=tuple(
            (
                host,
                Cell(worst[host].value, _MARKS[worst[host]]) if host in worst else "not blamed",
                fold_ranks((rank for row in host_rows if isinstance(rank := row.get("rank"), int)), limit=_NAMES_SHOWN),
                len({uuid for row in host_rows if (uuid := row.get("gpu_uuid")) is not None}) or None,
                *([leaf_of.get(host)] if leaf_of else []),
                max((rate for row in host_rows if is_number(rate := row.get("host_busbw_bytes_per_s"))), default=None),
            )
            for host, host_rows in rows.items()
        ),
        noun="host",
        order=tuple(sorted(range(len(rows)), key=ranking.__getitem__)),
    )


def _uuid_sentence(group: MatrixGroup) -> str:
    """A sentence with the UUIDs of the GPUs, or an empty text if several hosts share the matrix."""
    gpus = "; ".join(f"{gpu}: {uuid}" for gpu, uuid in group.matrix.gpus.items()) if len(group.hosts) < 2 else ""
    return f"{gpus}." if gpus else ""


def _environment_blocks(report: Report) -> Iterator[Block]:
    """Yield the table of versions and variables, with all values that any rank has, and the figures of the run."""
    facts = report.snapshot.facts if report.snapshot is not None else {}
    if rows := tuple((kind, name, value) for kind, values in facts.items() for name, value in values.items()):
        columns = tuple(map(Column, ("kind", "name", "value")))
        yield Fold("Versions and variables", (Table(columns=columns, rows=rows, noun="value"),))
    if report.measurements:
        figures = tuple((label(name), quantity(name, value)) for name, value in report.measurements.items())
        columns = (Column("name"), Column("value"))
        yield Fold("Figures of the run", (Table(columns=columns, rows=figures, noun="figure"),))
