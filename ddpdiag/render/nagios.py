"""The report as a Nagios plug-in says it: one line, and an exit code of its own.

    DDPDIAG WARNING - 4 ranks on 2 hosts can train ...; 1 warning. | seconds=7.912s;;120 errors=0;;0 warnings=1;0 ...

Monitoring Plugins Development Guidelines (https://www.monitoring-plugins.org/doc/guidelines.html): exit codes 0 OK,
1 WARNING, 2 CRITICAL, 3 UNKNOWN, which also stands for wrong usage and for failures of the plug-in itself; behind a
"|" performance data as 'label'=value[unit];[warn];[crit], where a value has digits, a sign and a point only.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum

from ddpdiag.model import Report, Severity, Verdict
from ddpdiag.render.page import ascii_line
from ddpdiag.text import is_number

# NRPE 2 cuts off what is longer (MAX_PACKETBUFFER_LENGTH 1024); half of it is for the text.
_MOST_BYTES = 1000
_MOST_TEXT = 500


class State(IntEnum):
    """The exit codes of a plug-in."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


def state_of(report: Report) -> State:
    """FIT is OK, or WARNING where there are warnings, which --strict makes CRITICAL; UNFIT is CRITICAL."""
    match report.verdict:
        case Verdict.UNFIT:
            return State.CRITICAL
        case Verdict.UNKNOWN:
            return State.UNKNOWN
        case Verdict.FIT if report.exit_code != 0:
            return State.CRITICAL
    return State.WARNING if _count(report, Severity.WARNING) else State.OK


def render(report: Report) -> str:
    """The plug-in's line, with its newline."""
    text = line(state_of(report), report.sentence).rstrip("\n")
    return f"{text} | {_within(_MOST_BYTES - len(text), _data(report))}\n"


def line(state: State, sentence: str) -> str:
    """The line without performance data; what would end or bend it is spelled out. ASCII only."""
    text = ascii_line(sentence).replace("|", "/")
    text = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 4]} ..."
    return f"DDPDIAG {state.name} - {text}\n"


def _count(report: Report, severity: Severity) -> int:
    return sum(finding.severity is severity for finding in report.findings)


def _data(report: Report) -> Iterator[str]:
    """The performance data: those of every run, then the measurements that are known."""
    yield f"seconds={_number(report.seconds)}s;;{_number(report.budget_seconds)}"
    yield f"errors={_count(report, Severity.ERROR)};;0"
    yield f"warnings={_count(report, Severity.WARNING)};0"
    yield f"ranks={len(report.ranks)};;;0;{report.world.size}"
    yield f"failing_hosts={len(report.hosts.failing)};;;0"
    for name, value in report.measurements.items():
        if is_number(value):
            plain = ascii_line(name).replace("|", "/").replace("=", "_")
            label = plain if plain.replace("_", "").replace(".", "").isalnum() else "'" + plain.replace("'", "''") + "'"
            # Of the guidelines' units those that our names end in.
            unit = "s" if name.endswith("seconds") else "B" if name.endswith("bytes") else ""
            yield f"{label}={_number(float(value))}{unit}"


def _number(value: float) -> str:
    """No exponent; nanoseconds are kept."""
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _within(room: int, items: Iterable[str]) -> str:
    """As many items as there is room for; none is cut in half."""
    taken = ""
    for item in items:
        if len(taken) + len(item) + len(" |  ") > room:
            break
        taken += f" {item}" if taken else item
    return taken
