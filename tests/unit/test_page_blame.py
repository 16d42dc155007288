"""Who is to blame, as the page's tables and findings show it."""

from functools import lru_cache

import pytest
from pages import recorded
from reports import finding_of, fit, rank_row, unfit

from ddpdiag.cli.outputs import features_of
from ddpdiag.model import Report, Severity, WorldSummary
from ddpdiag.render import blocks as blocks_module
from ddpdiag.render.blocks import Fold, Section, value_of
from ddpdiag.render.html import Page, page_of
from ddpdiag.render.report import sections


def built(report: Report) -> Page:
    """The page as data."""
    return page_of(report, features_of(report))


@lru_cache(maxsize=8)
def page(name: str) -> Page:
    """That of a recording."""
    return built(recorded(name))


def section(report: Report, name: str) -> Section:
    """A section of any report."""
    return next(own for own in sections(report) if own.name == name)


def rows_of(report: Report, name: str, title: str = "") -> list[tuple[object, ...]]:
    """The values of the table with this title in a section, also where it is folded."""
    blocks = section(report, name).blocks
    blocks = [inner for block in blocks for inner in (block.blocks if isinstance(block, Fold) else (block,))]
    table = next(own for own in blocks if isinstance(own, blocks_module.Table) and own.title == title)
    return [tuple(map(value_of, row)) for row in table.rows]


def stages(report: Report) -> dict[str, tuple[object, object]]:
    """Outcome and findings of each stage."""
    return {row[0]: (row[1], row[3]) for row in rows_of(report, "stages")}


@pytest.mark.parametrize(
    ("name", "stage", "row"),
    [
        ("hang-4-ranks", "collective", ("hung", "RUN003.hung")),
        ("failures/host_missing", "launch", ("error", "RUN001.absent")),
    ],
)
def test_a_finding_stands_at_its_stage(name, stage, row):
    assert stages(recorded(name))[stage] == row


def test_what_belongs_to_no_stage_is_a_row_of_the_run():
    found = finding_of(code="RUN004.budget")
    assert stages(fit(findings=(found,)))["run"] == ("error", "RUN004.budget")


def states(report: Report) -> dict[object, object]:
    """The state of each rank in the table of ranks."""
    return {row[0]: row[1] for row in rows_of(report, "ranks")}


def test_a_rank_that_joined_late_is_an_outlier():
    ranks = tuple(rank_row(rank, arrival_seconds=(0.1, 0.11, 0.12, 9.0)[rank]) for rank in range(4))
    assert states(fit(ranks=ranks))[3] == "outlier"


def test_a_rank_that_never_joined_is_a_row():
    world = WorldSummary(
        size=10**12, hosts=("n0",), launcher="torchrun", backend="gloo"
    )  # a header may claim any number
    ranks = tuple(rank_row(rank, arrival_seconds=0.1) for rank in range(2))
    assert states(fit(ranks=ranks, world=world))[2] == "never joined"


def test_blamed_ranks_say_so_and_come_first():
    found = (finding_of(Severity.WARNING, ranks=(0, 2)), finding_of(ranks=(1,)))
    report = fit(ranks=tuple(map(rank_row, range(4))), findings=found)
    assert states(report) == {0: "warn", 1: "FAIL", 2: "warn", 3: None}
    (table,) = section(report, "ranks").blocks
    assert table.order[0] == 1


def test_of_many_findings_of_one_code_the_last_box_counts_the_others():
    boxes = built(unfit(findings=tuple(finding_of(ranks=(rank,)) for rank in range(40)))).findings
    assert [box.blocks[-1].text for box in boxes if getattr(box.blocks[-1], "text", "").startswith("37 more")] == [
        "37 more like these, in all: ranks 0-39."
    ]
