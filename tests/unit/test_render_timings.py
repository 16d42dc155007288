"""Where a run's seconds went, as a table for people."""

import pytest
from benches import healthy
from msgspec import structs
from reports import check, fit

from ddpdiag.bench import blocks as bench
from ddpdiag.model.report import KINDS, Spent, Timings, Wait
from ddpdiag.render import terminal

WAIT = Wait(ranks=(1,), hosts=("n0",), seconds=3.7, times=2, code="COL001", why="import")
TIMINGS = Timings(
    seconds=8.0,
    stages=(
        Spent(stage="start", seconds=1.5, kinds={"start": 0.5, "wait": 1.0}),
        Spent(stage="collective", seconds=6.498, kinds={"import": 2.0, "measure": 1.798, "wait": 2.7}),
        Spent(stage="judgement", seconds=0.002, kinds={"own": 0.002}),
    ),
    waits=(WAIT,),
)
ALL_KINDS = Timings(
    seconds=9_000.0,
    stages=(Spent(stage="collective", seconds=9_000.0, kinds=dict.fromkeys(KINDS, 1_000.0)),),
    waits=(
        Wait(
            ranks=tuple(range(16)), hosts=tuple(f"host{n}" for n in range(0, 32, 2)), seconds=900.0, times=7, code="X1"
        ),
        Wait(ranks=(), hosts=(), seconds=800.0, times=1, code="COL001"),
        Wait(ranks=(3,), hosts=("n1",), seconds=700.0, times=1, up_seconds=0.3),
    ),
)
SHORT = structs.replace(TIMINGS, waits=(structs.replace(WAIT, seconds=0.1),))
REPORT = fit(checks=(check("COL001", "all-reduce", "collective"),))


def shown(timings: Timings | None, *, details: bool = False, width: int = 80) -> str:
    report = structs.replace(REPORT, timings=timings)
    return terminal.render(report, color=False, width=width, details=details, timings=True)


def told(timings: Timings, **options) -> str:
    """What they add to the report."""
    usual = shown(None, **options).split("\n\n")
    return "\n\n".join(part for part in shown(timings, **options).split("\n\n") if part not in usual)


@pytest.mark.parametrize(
    ("timings", "details"),
    [(TIMINGS, False), (SHORT, False), (SHORT, True), (ALL_KINDS, False)],
    ids=["rows and columns in which something can be seen", "without a short wait", "all details", "all kinds"],
)
def test_where_the_seconds_went(golden, timings, details):
    golden(told(timings, details=details, width=120))


@pytest.mark.parametrize("width", [60, 80])
def test_all_kinds_stay_within_the_page_in_ascii(width):
    text = shown(ALL_KINDS, details=True, width=width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width
    assert "device context" in " ".join(text.split())


def test_nothing_without_timings_and_nothing_unless_asked_for():
    assert shown(None) == terminal.render(structs.replace(REPORT, timings=TIMINGS), color=False, width=80)


def test_in_a_benchmark_it_is_a_comment(golden):
    asked, usual = (
        bench.render(healthy(timings=TIMINGS), tty=False, color=False, width=80, timings=timings).splitlines()
        for timings in (True, False)
    )
    added = [line for line in asked if line not in usual]
    assert all(line.startswith("#") for line in added)
    golden("\n".join(added))
