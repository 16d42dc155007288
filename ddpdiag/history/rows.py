"""One run as the statistics need it: a few rows made of its report."""

from collections.abc import Iterator
from datetime import UTC, datetime
from enum import IntEnum
from typing import NamedTuple

from ddpdiag.errors import UsageError
from ddpdiag.model import Report, Scalar, Severity
from ddpdiag.model.report import NONE, UNKNOWN
from ddpdiag.text import is_number

# All ranks of a run have nearly the same values in these columns, because each waits for the slowest. They show the
# state of a host only if the run had no other host.
_SHARED_COLUMNS = frozenset({"busbw_bytes_per_s", "latency_seconds", "samples_per_second", "wait_seconds"})
# The start of a rank depends on its launcher.
_IGNORED_COLUMNS = frozenset({"arrival_seconds"})
_UNITS = ("_seconds", "_per_s", "_per_second")
_ARROW = " -> "
# The parts of a host whose changes are shown beside findings.
_FACTS = ("driver", "torch", "CUDA", "NCCL", "GPU")


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


class Figure(NamedTuple):
    """A figure of a host in a run. `name` ends with the unit; it is a rate if it ends with "_per_s" or "_second"."""

    host: str
    name: str
    value: float


class Run(NamedTuple):
    """A run. `begin_seconds` is its start in seconds since 1970, `codes` are the checks that gave a result."""

    run_id: str
    begin_seconds: float
    verdict: str
    sentence: str
    ranks: int
    codes: frozenset[str]
    hosts: tuple[HostRow, ...]
    blames: tuple[Blame, ...] = ()
    figures: tuple[Figure, ...] = ()


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
        figures=tuple(_figures(report)),
    )


def _blames(report: Report, host_of_gpu: dict[str, str]) -> Iterator[Blame]:
    for finding in report.findings:
        if finding.severity is Severity.NOTE or finding.is_about_run:
            continue
        hosts = [*finding.hosts, *(host_of_gpu[gpu] for gpu in finding.gpus if gpu in host_of_gpu)]
        ends = {end for link in finding.links for end in link.split(_ARROW)}
        # Links of ranks ("rank 0 -> rank 1") have no hosts.
        if blamed := tuple(dict.fromkeys(filter(None, hosts or sorted(ends.intersection(report.world.hosts))))):
            yield Blame(finding.code, finding.title, blamed, finding.gpus)


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


def _figures(report: Report) -> Iterator[Figure]:
    """Yield the figures of each host: of its ranks the worst, because the slowest GPU of a host decides."""
    skipped = _IGNORED_COLUMNS if len(report.world.hosts) == 1 else _IGNORED_COLUMNS | _SHARED_COLUMNS
    worst: dict[tuple[str, str], float] = {}
    for row in report.ranks:
        host = str(row.get("host"))
        for name, value in row.items():
            if name.endswith(_UNITS) and name not in skipped and _is_positive(value):
                number, key = float(value or 0.0), (host, name)
                best_first = min if is_rate(name) else max
                worst[key] = best_first(number, worst.get(key, number))
    yield from (Figure(host, name, value) for (host, name), value in worst.items())


def _is_positive(value: Scalar) -> bool:
    return is_number(value) and value > 0
