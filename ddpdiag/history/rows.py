"""One run as the statistics need it: a few rows made of its report."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import IntEnum
from typing import NamedTuple

from ddpdiag.errors import UsageError
from ddpdiag.model import Report, Scalar, Severity
from ddpdiag.model.report import NONE, UNKNOWN
from ddpdiag.stats import quantile
from ddpdiag.text import is_number

# All ranks of a run have nearly the same values in these columns, because each waits for the slowest. They show the
# state of a host only if the run had no other host.
_SHARED_COLUMNS = frozenset({"busbw_bytes_per_s", "latency_seconds", "samples_per_second", "wait_seconds"})
# The start of a rank depends on its launcher.
_IGNORED_COLUMNS = frozenset({"arrival_seconds"})
_UNITS = ("_seconds", "_per_s", "_per_second")
ARROW = " -> "
DAY_SECONDS = 86_400.0
# In a database. A damaged report, or the counter of a broken driver, may have a larger one.
LARGEST_INTEGER = 2**63 - 1
# The parts of a host whose changes are shown beside findings.
_FACTS = ("kernel", "driver", "torch", "CUDA", "NCCL", "GPU")
# Links between hosts have figures of their own in runs of at most so many hosts. In larger jobs the same two hosts
# seldom meet again, and the links would be most of the index.
_MAX_HOSTS_WITH_LINKS = 16


class State(IntEnum):
    """The state of a host in a run. UNKNOWN: the run neither blames the host nor lists it as healthy."""

    UNKNOWN = 0
    HEALTHY = 1
    WARNED = 2
    FAILING = 3


class HostRow(NamedTuple):
    """A host in a run. `gpus` are the UUIDs of its GPUs, sorted, and `facts` its versions ("driver 570.1", ...)."""

    host: str
    state: State
    gpus: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


class Blame(NamedTuple):
    """An error or warning that blames hosts. With several hosts, or the ends of links, it may be any of them."""

    code: str
    title: str
    hosts: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    is_error: bool = True


class Figure(NamedTuple):
    """A figure of a host, or of a link ("n1 -> n2"), in a run. `name` ends with the unit."""

    subject: str
    name: str
    value: float


class Reading(NamedTuple):
    """The counters of a part of a host (a GPU, a port, TCP) at a time, in seconds since 1970. See `model.Counters`."""

    host: str
    part: str
    seconds: float
    totals: dict[str, int]


class Run(NamedTuple):
    """A run. `begin_seconds` is its start in seconds since 1970, `codes` are the checks that gave a result.

    `readings` is empty in runs from an index, which has readings by day.
    """

    run_id: str
    begin_seconds: float
    verdict: str
    sentence: str
    ranks: int
    codes: frozenset[str]
    hosts: tuple[HostRow, ...]
    blames: tuple[Blame, ...] = ()
    figures: tuple[Figure, ...] = ()
    readings: tuple[Reading, ...] = ()


def is_rate(name: str) -> bool:
    """Whether higher values of the figure are better."""
    return name.endswith(("_per_s", "_per_second"))


def row_of(report: Report) -> Run:
    """Make the rows of a report. UsageError if it has no time, and so no place in a history."""
    try:
        begin = datetime.fromisoformat(report.created)
        begin_seconds = (begin if begin.tzinfo else begin.replace(tzinfo=UTC)).timestamp()
        if not 1970 < begin.year < 9999:
            raise ValueError(report.created)
    except (ValueError, OverflowError):
        raise UsageError(f"the run has no start time: {report.created!r} (a simulated run has none)") from None
    host_of_gpu = {str(row["gpu_uuid"]): str(row["host"]) for row in report.ranks if row.get("gpu_uuid") is not None}
    blames = tuple(_blames(report, host_of_gpu))
    return Run(
        run_id=report.run_id,
        begin_seconds=begin_seconds,
        verdict=report.verdict.value,
        sentence=report.sentence,
        ranks=report.world.size,
        codes=frozenset(check.code for check in report.checks if check.statuses or not check.measures),
        hosts=tuple(_hosts(report, blames, host_of_gpu)),
        blames=blames,
        figures=tuple(_figures(report, host_of_gpu)),
        readings=tuple(
            Reading(
                row.host,
                row.part,
                begin_seconds,
                {name: min(total, LARGEST_INTEGER) for name, total in row.totals.items() if total > 0},
            )
            for row in report.counters
        ),
    )


def _blames(report: Report, host_of_gpu: dict[str, str]) -> Iterator[Blame]:
    for finding in report.findings:
        if finding.severity is Severity.NOTE or finding.is_about_run:
            continue
        hosts = [*finding.hosts, *(host_of_gpu[gpu] for gpu in finding.gpus if gpu in host_of_gpu)]
        ends = {end for link in finding.links for end in link.split(ARROW)}
        # Links of ranks ("rank 0 -> rank 1") have no hosts.
        if blamed := tuple(dict.fromkeys(filter(None, hosts or sorted(ends.intersection(report.world.hosts))))):
            yield Blame(finding.code, finding.title, blamed, finding.gpus, finding.severity is Severity.ERROR)


def _hosts(report: Report, blames: tuple[Blame, ...], host_of_gpu: dict[str, str]) -> Iterator[HostRow]:
    gpus: dict[str, list[str]] = {}
    for gpu, host in host_of_gpu.items():
        gpus.setdefault(host, []).append(gpu)
    facts = {host: _facts(kind.parts) for kind in report.inventory for host in kind.hosts}
    warned = {host for blame in blames for host in blame.hosts} | report.hosts.slow.keys()
    failing, healthy = frozenset(report.hosts.failing), frozenset(report.hosts.healthy)
    for host in dict.fromkeys((*report.world.hosts, *report.hosts.failing)):
        state = State.HEALTHY if host in healthy else State.UNKNOWN
        state = State.FAILING if host in failing else State.WARNED if host in warned else state
        yield HostRow(host, state, tuple(sorted(gpus.get(host, ()))), facts.get(host, ()))


def _facts(parts: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{name} {parts[name]}" for name in _FACTS if parts.get(name, UNKNOWN) not in (UNKNOWN, NONE))


def _figures(report: Report, host_of_gpu: Mapping[str, str]) -> Iterator[Figure]:
    """Yield the figures of links, and of hosts: of a host's ranks and GPUs the worst, because the slowest decides."""
    skipped = _IGNORED_COLUMNS if len(report.world.hosts) == 1 else _IGNORED_COLUMNS | _SHARED_COLUMNS
    worst: dict[tuple[str, str], float] = {}
    rank_figures = ((str(row.get("host")), *item) for row in report.ranks for item in row.items())
    for subject, name, value in (*rank_figures, *_links(report, host_of_gpu)):
        if name.endswith(_UNITS) and name not in skipped and is_number(value) and value > 0:
            best_first, number = min if is_rate(name) else max, float(value)
            worst[subject, name] = best_first(number, worst.get((subject, name), number))
    yield from (Figure(subject, name, value) for (subject, name), value in worst.items())


def _links(report: Report, host_of_gpu: Mapping[str, str]) -> Iterator[tuple[str, str, Scalar]]:
    """Yield the subject, the name and the value of links: those of GPUs are figures of their host."""
    is_small = len(report.world.hosts) <= _MAX_HOSTS_WITH_LINKS
    for matrix in report.matrices:
        name = f"{'.'.join(matrix.name.split('.')[:2])}_{matrix.unit}"  # without the host of "p2p.copy.n1"
        cells = {
            (row, column): value
            for row, values in zip(matrix.rows, matrix.cells, strict=False)
            for column, value in zip(matrix.columns, values, strict=False)
        }
        hosts = {host_of_gpu[gpu] for gpu in matrix.gpus.values() if gpu in host_of_gpu}
        if len(hosts) == 1:
            yield from ((next(iter(hosts)), name, value) for value in cells.values())
        elif is_small and {*matrix.rows, *matrix.columns} <= {*report.world.hosts}:
            yield from ((ARROW.join(link), name, value) for link, value in cells.items())
            for host in matrix.rows:
                # One slow link does not make its ends slow.
                own = sorted(value for link, value in cells.items() if host in link and is_number(value))
                if len(own) > 2:
                    yield host, name, quantile(own, 0.5)
