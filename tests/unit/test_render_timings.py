"""Where a run's seconds went, as a table for people."""

import re

import pytest
from benches import healthy
from msgspec import structs
from reports import check, fit

from ddpdiag.model import Report
from ddpdiag.model.timings import KINDS, Spent, Timings, Wait
from ddpdiag.render import bench, terminal

WAIT = Wait(ranks=(1,), nodes=("n0",), seconds=3.7, times=2, code="COL001", why="import")
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
            ranks=tuple(range(16)), nodes=tuple(f"host{n}" for n in range(0, 32, 2)), seconds=900.0, times=7, code="X1"
        ),
        Wait(ranks=(), nodes=(), seconds=800.0, times=1, code="COL001"),
        Wait(ranks=(3,), nodes=("n1",), seconds=700.0, times=1, up_seconds=0.3),
    ),
)


def shown(timings: Timings | None, *, details: bool = False, width: int = 80) -> str:
    report = fit(timings=timings, checks=(check("COL001", "all-reduce", "collective"),))
    return terminal.render(report, color=False, width=width, details=details, timings=True)


def table(text: str) -> list[list[str]]:
    """The rows below the heading, as words."""
    lines = text.partition("where ")[2].splitlines()[1:]
    return [re.split(r" +", line.strip()) for line in lines[: lines.index("")] if not line.endswith(";")]


def test_rows_and_columns_in_which_something_can_be_seen():
    rows = table(shown(TIMINGS))[:4]
    assert rows == [
        ["in", "all", "start", "import", "measure", "wait"],
        ["start", "1.50", "0.50", "-", "-", "1.00"],
        ["collective", "6.50", "-", "2.00", "1.80", "2.70"],
        ["in", "all", "8.00", "0.50", "2.00", "1.80", "3.70"],
    ]


def test_who_was_waited_for_is_told_with_the_place_and_the_reason():
    assert "rank 1 on n0: 3.7 s, 2 times, longest in COL001 (all-reduce), by its import\n" in shown(TIMINGS, width=120)


def test_short_waits_are_left_out_unless_details_are_asked_for():
    short = structs.replace(TIMINGS, waits=(structs.replace(WAIT, seconds=0.1),))
    assert "waited for (" not in shown(short)
    assert "rank 1 on n0: 100 ms" in shown(short, details=True)
    assert "judgement" in shown(TIMINGS, details=True)


def test_ranks_at_the_start_and_ranks_that_are_too_many():
    text = shown(ALL_KINDS, width=120)
    assert "rank 3 on n1: 700 s, at the start; its process was 300 ms old when it came" in text
    assert "many ranks alike: 800 s, in COL001 (all-reduce)" in text
    assert "ranks 0-15 on host[0,2,4,6,8] +11 more: 900 s, 7 times, longest in X1" in text


@pytest.mark.parametrize("width", [60, 80])
def test_all_kinds_stay_within_the_page_in_ascii(width):
    text = shown(ALL_KINDS, details=True, width=width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width
    assert all(kind in text for kind in KINDS)


def test_nothing_without_timings_and_nothing_unless_asked_for():
    assert "where " not in shown(None)
    assert "where 8 s" not in terminal.render(fit(timings=TIMINGS), color=False, width=80)


def test_in_a_benchmark_it_is_a_comment():
    report: Report = healthy(timings=TIMINGS)
    lines = bench.render(report, tty=False, color=False, width=80, timings=True).splitlines()
    first = lines.index("# where 8 s went, from the start of rank 0's process to the verdict, in s")
    assert all(line.startswith("#") for line in lines[first : lines.index("", first)])
    assert len(lines[first : lines.index("", first)]) > 5
    assert "where 8 s" not in bench.render(report, tty=False, color=False, width=80)
