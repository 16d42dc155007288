"""Where a run's seconds went: a row for each stage, a column for each kind, and for whom the others waited."""

from collections.abc import Mapping, Sequence

from ddpdiag.model import CheckLine, Report
from ddpdiag.model.timings import KINDS, Spent, Timings, Wait
from ddpdiag.render.hosts import fold_hosts, fold_ranks
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.tables import Column, draw, pieces
from ddpdiag.render.units import ABSENT, count, seconds

WAITS_SHOWN = 5
# Shorter waits are those of any healthy run.
_LEAST_SHARE = 0.02
# Two decimals are shown: what would read 0.00 is none.
_LEAST_SECONDS = 0.005
_MEANINGS = {
    "start": "until a process or a worker could begin",
    "import": "of torch, as far as it was waited for",
    "context": "the device",
    "group": "opening process groups, and connecting",
    "measure": "the rest of what checks did",
    "wait": "for ranks later than the one in the middle",
    "failed": "in trials that did not end well",
    "own": "orders, plans, gates, judgement",
    "unknown": "the recording does not say",
}


def write_timings(page: Page, report: Report, *, details: bool) -> None:
    """The table, and below it the ranks for which the others waited longest; nothing if the report has no timings."""
    timings = report.timings
    if timings is None or not timings.stages:
        return
    whole = seconds(timings.seconds)
    page.write(f"where {whole} went, from the start of rank 0's process to the verdict, in s", style="bold")
    kinds = _kinds(timings, details=details)
    rows = [row for row in timings.stages if details or row.seconds >= _LEAST_SECONDS]
    rows.append(Spent(stage="in all", seconds=timings.seconds, kinds=_sums(timings)))
    names, figures = _columns(rows, kinds, ABSENT if page.color else "-")
    gap = _gap(names, figures, page.width)
    for piece in pieces(names, figures, width=page.width, gap=gap):
        page.table(draw((*names, *piece), len(rows), gap))
    page.write("; ".join(f"{kind}: {_MEANINGS[kind]}" for kind in kinds if kind in _MEANINGS), style="dim")
    page.blank()
    _waits(page, timings, report.checks, details=details)


def _kinds(timings: Timings, *, details: bool) -> list[str]:
    """Those in which something was spent that can be seen."""
    return [kind for kind, spent in _sums(timings).items() if details or spent >= _LEAST_SECONDS]


def _sums(timings: Timings) -> dict[str, float]:
    """Seconds of each kind in the whole run."""
    kinds = dict.fromkeys((*KINDS, *(kind for row in timings.stages for kind in row.kinds)))
    return {kind: sum(row.kinds.get(kind, 0.0) for row in timings.stages) for kind in kinds}


def _columns(rows: Sequence[Spent], kinds: Sequence[str], absent: str) -> tuple[list[Column], list[Column]]:
    names = [
        Column("", tuple(one_line(row.stage) for row in rows), right=False),
        Column("in all", tuple(_cell(row.seconds, absent) for row in rows), right=True),
    ]
    return names, [
        Column(one_line(kind), tuple(_cell(row.kinds.get(kind, 0.0), absent) for row in rows), right=True)
        for kind in kinds
    ]


def _gap(names: Sequence[Column], figures: Sequence[Column], width: int) -> int:
    """Two spaces between columns, or one where all of them then fit."""
    columns = (*names, *figures)
    room = width - sum(column.width for column in columns)
    between = len(columns) - 1
    return 1 if between <= room < 2 * between else 2


def _cell(value: float, absent: str) -> str:
    return f"{value:,.2f}" if value >= _LEAST_SECONDS else absent


def _waits(page: Page, timings: Timings, checks: Sequence[CheckLine], *, details: bool) -> None:
    least = 0.0 if details else max(_LEAST_SECONDS, _LEAST_SHARE * timings.seconds)
    shown = [wait for wait in timings.waits if wait.seconds >= least][: None if details else WAITS_SHOWN]
    if not shown:
        return
    names = {check.code: check.name for check in checks}
    page.write("waited for (how much later than the rank in the middle)", style="bold")
    for wait in shown:
        page.write(_where(wait, names), indent=2, lead=f"{_who(wait)}: ")
    page.blank()


def _who(wait: Wait) -> str:
    if not wait.ranks:
        return "many ranks alike"
    word = "rank" if len(wait.ranks) == 1 else "ranks"
    hosts = f" on {one_line(fold_hosts(wait.nodes, limit=WAITS_SHOWN))}" if wait.nodes else ""
    return f"{word} {fold_ranks(wait.ranks, limit=WAITS_SHOWN)}{hosts}"


def _where(wait: Wait, names: Mapping[str, str]) -> str:
    """ "1.2 s, 3 times, longest in COL001 (all-reduce), by its import"."""
    check = f"{wait.code} ({names[wait.code]})" if wait.code in names else wait.code
    place = f"in {one_line(check)}" if check else "at the start"
    often = place if wait.times == 1 else f"{count(wait.times, 'time')}, longest {place}"
    why = f", by its {one_line(wait.why)}" if wait.why else ""
    old = "" if wait.up_seconds is None else f"; its process was {seconds(wait.up_seconds)} old when it came"
    return f"{seconds(wait.seconds)}, {often}{why}{old}"
