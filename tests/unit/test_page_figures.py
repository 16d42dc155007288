"""Units and words of every report's sections."""

import pytest
from pages import recorded
from reports import finding_of, fit
from test_page_blame import section, stages

from ddpdiag.model import Matrix
from ddpdiag.render.blocks import Matrix as Block
from ddpdiag.render.html.views import view_of


def pairs(*cells: tuple[float | None, ...], names: tuple[str, ...] = ("a", "b")) -> Matrix:
    """Hosts, and what each pair of them reached."""
    return Matrix(name="rdz.mesh", title="pairs", rows=names, columns=names, cells=cells, unit="bytes_per_s")


def matrix(report, name: str = "pairs", number: int = 0) -> Block:
    """A matrix of a section."""
    return [block for block in section(report, name).blocks if isinstance(block, Block)][number]


@pytest.mark.parametrize("name", ["hang-4-ranks", "failures/host_missing"])
def test_the_median_of_pairs_is_that_of_the_figures(name):
    own = next(
        block
        for block in section(recorded(name), "environment").blocks
        if getattr(block, "title", "") == "Figures of the run"
    )
    figures = dict(own.blocks[0].rows)
    assert f"median {figures['mesh.median']}" in matrix(recorded(name)).note


def test_links_that_failed_are_counted_and_nothing_else():
    note = matrix(fit(matrices=(pairs((None, 2e9), (0.0, None)),))).note
    assert note == "2 links, median 2 GB/s, slowest a to b at 2 GB/s; 1 link failed."


def test_slow_links_have_the_most_colour_and_failed_ones_say_so():
    view = view_of(
        matrix(fit(matrices=(pairs((None, 2e9, 1e9), (0.0, None, 2e9), (2e9, 2e9, None), names=tuple("abc")),)))
    )
    assert [(cell.text, cell.style) for cell in view.rows[0][1:]] == [
        ("–", ""),
        ("2.00", "--heat: 0%"),
        ("1.00", "--heat: 100%"),
    ]
    assert (view.rows[1][1].text, view.rows[1][1].classes) == ("failed", "bad")
    assert view.caption.endswith(", in GB/s")


def test_no_finding_of_the_run_is_lost_without_a_timeline():
    assert "run" in stages(fit(findings=(finding_of(code="RUN003.hung", evidence={"trial": 3}),)))
