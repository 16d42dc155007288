"""Who is to blame, as the page's pictures, tables and findings show it."""

import re
from collections import Counter
from functools import lru_cache

import pytest
from pages import Reader, fleet, recorded, timeline
from reports import finding_of, fit, rank_row, unfit

from ddpdiag.cli.outputs import features_of
from ddpdiag.model import Report, Severity, WorldLine
from ddpdiag.render import html
from ddpdiag.render.html import page_of
from ddpdiag.render.html.page import Page, Table
from ddpdiag.render.plots import OUTLIER, page_style


def built(report: Report) -> Page:
    """The page as data."""
    with page_style():
        return page_of(report, features_of(report))


@lru_cache(maxsize=8)
def page(name: str) -> Page:
    """That of a recording."""
    return built(recorded(name))


def table(of: Page, name: str) -> Table:
    """The table of this name."""
    return next(own for section in of.sections for own in section.tables if own.name == name)


def figure(of: Page, section: str, title: str):
    """The first figure of a section whose title begins so."""
    own = next(own for own in of.sections if own.name == section)
    return next(figure for figure in own.figures if figure.title.startswith(title))


def rows(of: Page, name: str) -> list[tuple[str, ...]]:
    """The texts of a table."""
    return [tuple(cell.text for cell in row) for row in table(of, name).rows]


def words_of(svg: str) -> str:
    """The texts of a picture, each once, without the numbers of its axes."""
    texts = re.findall(r"<text[^>]*>([^<]*[a-z][^<]*)</text>", svg)
    return "\n".join(text.strip() + f", {count} times" * (count > 1) for text, count in Counter(texts).items())


# Timeline -------------------------------------------------------------------------------------------------------------


def test_the_lane_of_the_culprit_is_red_and_says_so_and_comes_first_in_words(golden):
    drawn = figure(page("hang-4-ranks"), "timeline", "Ranks over")
    for svg in (drawn.svg, drawn.narrow):
        # Tick, edge and hatch of one rank, and the legend.
        assert "var(--bad)" in svg
        golden(words_of(svg))
    golden(drawn.alt)


def test_where_nobody_is_blamed_no_lane_says_so(golden):
    golden(words_of(figure(built(fit(timeline=timeline())), "timeline", "Ranks over").svg))


def test_errors_outweigh_warnings_on_the_timeline(golden):
    warned = finding_of(Severity.WARNING, ranks=(0,))
    own = built(fit(timeline=timeline(), findings=(warned, finding_of(ranks=(3,)))))
    golden(figure(own, "timeline", "Ranks").alt)


# Stages ---------------------------------------------------------------------------------------------------------------


def test_a_hang_stands_at_the_stage_whose_trial_hung():
    (collective,) = [row for row in rows(page("hang-4-ranks"), "stages") if row[0] == "collective"]
    assert collective[1::2] == ("hung", "RUN003.hung")


def test_who_never_came_stands_at_the_launch():
    (launch,) = [row for row in rows(page("failures/host_missing"), "stages") if row[0] == "launch"]
    assert launch[1::2] == ("error", "RUN001.absent")


def test_what_belongs_to_no_stage_is_a_row_of_the_run():
    found = finding_of(code="RUN004.budget")
    assert rows(built(fit(findings=(found,))), "stages")[-1] == ("run", "error", "–", "RUN004.budget")


def test_every_finding_stands_at_some_stage():
    for name in ("hang-4-ranks", "slow-host-3-ranks", "failures/rank_segfaults"):
        told = {code for row in rows(page(name), "stages") for code in row[3].split(", ")}
        assert {finding.code for finding in recorded(name).findings} <= told


# Bars -----------------------------------------------------------------------------------------------------------------


def test_milliseconds_apart_at_the_start_are_no_outlier(golden):
    assert OUTLIER not in html.render(recorded("failures/loss_is_not_a_number"))
    golden(words_of(figure(page("failures/loss_is_not_a_number"), "ranks", "Arrival").svg))


def late() -> Page:
    """Who came seconds later."""
    return built(fit(ranks=tuple(rank_row(rank, arrival_seconds=(0.1, 0.11, 0.12, 9.0)[rank]) for rank in range(4))))


def boastful() -> Page:
    """A header may claim any number of ranks."""
    world = WorldLine(size=10**12, nodes=("n0",), launcher="torchrun", backend="gloo")
    ranks = tuple(rank_row(rank, arrival_seconds=0.1) for rank in range(2))
    return built(fit(ranks=ranks, world=world, timeline=timeline()))


@pytest.mark.parametrize("make", [late, lambda: page("failures/host_missing"), boastful], ids=["late", "never", "many"])
def test_who_came_late_is_an_outlier_and_who_never_came_a_row_without_a_bar(golden, make):
    drawn = figure(make(), "ranks", "Arrival")
    golden(words_of(drawn.svg), drawn.alt)


def test_what_most_ranks_are_blamed_for_marks_nobody(golden):
    for found in (finding_of(Severity.WARNING, ranks=(0, 1, 2)), finding_of(ranks=(1,))):
        golden(words_of(figure(built(fit(findings=(found,))), "ranks", "Training").svg))


def test_the_page_says_that_the_job_is_degraded():
    page = built(fit(degraded=True))
    assert (page.verdict, page.verdict_text) == ("fit", "FIT, degraded")
    assert page.head.startswith("FIT, degraded: ")


def test_the_table_of_ranks_shows_a_step_and_explains_its_columns():
    rows = tuple(rank_row(rank, forward_seconds=0.01, wait_seconds=0.01) for rank in range(4))
    page = built(fit(ranks=rows))
    table = next(table for section in page.sections for table in section.tables if table.name == "rank-table")
    at = [column.title for column in table.columns].index("forward ms")
    assert {row[at].text for row in table.rows} == {"10.0"}
    assert "one training step; wait: time in its all-reduce" in table.note


def test_figures_of_ranks_say_of_what(golden):
    # By hand there is no figure of the run that it could be.
    for own in (page("p2p-broken-2-ranks"), built(fit())):
        titles = [figure.title for section in own.sections if section.name == "ranks" for figure in section.figures]
        golden("\n".join(titles))


# Findings -------------------------------------------------------------------------------------------------------------


def test_what_has_no_box_stands_below_its_code(golden):
    own = built(fleet(1024))
    (box,) = [box for box in own.findings if box.rest is not None]
    assert box.code == "FAB001.node"
    assert (len(box.rest.rows), box.rest.folded) == (6, False)
    text, after = Reader(html.render(fleet(1024))).text, own.findings[own.findings.index(box) + 1]
    assert text.index(box.rest.caption) < text.index(after.title)
    golden(box.rest.caption)


def test_many_without_a_box_are_folded():
    many = tuple(finding_of(ranks=(rank,)) for rank in range(40))
    (rest,) = [box.rest for box in built(unfit(findings=many)).findings if box.rest is not None]
    assert (len(rest.rows), rest.folded) == (36, True)


def test_a_remedy_leads_to_the_finding_that_it_names(golden):
    reader = Reader(html.render(recorded("p2p-broken-2-ranks")))
    (target,) = [own["href"][1:] for own in reader.of("a") if own["href"].startswith("#box-")]
    (box,) = [own for own in reader.of("article") if own["id"] == target]
    assert box["class"] == "finding error"
    golden(*re.findall(r"Fix See [^.]*\.[^.]*\.", reader.text))
    # The remedy of the first, and its variables, and those at the top.
    assert len([own for own in reader.of("button") if own.get("class") == "copy"]) == 3


@pytest.mark.parametrize("fix", ["See COL001.slow.", "See RUN999.gone.", "GPU003 (or GPU007) tells."])
def test_a_remedy_leads_nowhere_else(fix):
    report = unfit(findings=(finding_of(fix=fix),))
    assert [text.text for text in built(report).findings[0].fix] == [fix]


def test_a_link_stays_a_link_within_a_longer_remedy():
    first = finding_of(code="RDZ004.slow", fix="")
    second = finding_of(fix="Mend RDZ004.slow first.")
    _, box = built(unfit(findings=(first, second))).findings
    assert [(text.text, text.target) for text in box.fix] == [
        ("Mend ", ""),
        ("RDZ004.slow", "box-1"),
        (" first.", ""),
    ]
