"""Figures, units and words of the page: what is said beside each other is the same."""

import re

import pytest
from pages import fleet, recorded
from reports import finding_of, fit
from test_page_blame import built, figure, page, rows, table

from ddpdiag.model import Matrix
from ddpdiag.render.html.world import named


def pairs(*cells: tuple[float | None, ...]) -> Matrix:
    """Two hosts."""
    return Matrix(
        name="rdz.mesh",
        title="One TCP connection between two hosts",
        rows=("a", "b"),
        columns=("a", "b"),
        cells=cells,
        unit="bytes_per_s",
    )


def texts_of(svg: str) -> list[str]:
    """All texts of a picture, numbers too."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("name", ["hang-4-ranks", "failures/host_missing"])
def test_the_median_of_pairs_is_that_of_the_figures(name):
    own = page(name)
    alt = figure(own, "pairs", "One TCP").alt
    (median,) = re.findall(r"median ([\d.]+ .B/s)", alt)
    assert dict(rows(own, "measurements"))["mesh, median"] == median


def test_ways_that_failed_are_counted_and_nothing_else(golden):
    golden(figure(built(fit(matrices=(pairs((None, 2e9), (0.0, None)),))), "pairs", "One TCP").alt)


def test_a_table_has_the_unit_of_its_map(golden):
    own = page("eight-gpus")
    direct = table(own, "rates-0")
    golden(direct.caption)
    assert "MB/s" in texts_of(figure(own, "pairs", "Copies between GPUs (P2P").svg)
    assert direct.rows[0][2].text == "100"
    assert table(own, "rates-1").rows[0][2].text.startswith("40")


def test_next_to_nothing_has_room_in_its_cell():
    names = tuple("abcdef")
    cells = tuple(tuple(None if a == b else 2e9 if a < b else 2.51e6 for b in names) for a in names)
    matrix = Matrix(name="rdz.mesh", title="six", rows=names, columns=names, cells=cells, unit="bytes_per_s")
    found = texts_of(figure(built(fit(matrices=(matrix,))), "pairs", "Six").svg)
    assert found.count("&lt;0.01") == 15
    assert "0.00251" in texts_of(figure(built(fit(matrices=(pairs((None, 2e9), (2.51e6, None)),))), "pairs", "One").svg)


def test_ways_between_gpus_have_a_legend(golden):
    golden(table(page("eight-gpus"), "ways-0").note)


def test_other_words_have_no_legend():
    cells = (("yes", "no"), ("SYSTEM", None))
    matrix = Matrix(name="p2p.x", title="words", rows=("a", "b"), columns=("a", "b"), cells=cells)
    assert table(built(fit(matrices=(matrix,))), "ways-0").note == ""


def test_the_histogram_has_a_unit_and_names_its_scale(golden):
    found = texts_of(figure(built(fleet(1024)), "ranks", "All-reduce of each host").svg)
    golden("\n".join(text for text in found if "GB/s" in text or "hosts" in text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("all_reduce.gloo.bytes", "all reduce, gloo, size"),
        ("seconds.import", "time, import"),
        ("training.seconds", "training, time"),
        ("coordinator.my_host.example.com", "coordinator, my_host.example.com"),
        ("world", "world"),
    ],
)
def test_figures_of_the_run_are_named_in_words(name, text):
    assert named(name) == text


def test_figures_of_the_run_have_units():
    found = dict(rows(page("failures/loss_is_not_a_number"), "measurements"))
    assert found["all reduce, gloo, size"] == "4 MiB"
    assert found["training, accuracy"] == "10 %"
    assert found["training, time"].endswith(" s")
    assert all(found[name].endswith("s") for name in found if name.startswith("time, "))


def test_two_durations_say_what_they_count(golden):
    own = table(page("hang-4-ranks"), "seconds")
    golden(own.caption, own.note)
    assert table(page("healthy-2-ranks"), "seconds").note == ""


def test_what_was_expected_of_memory_stands_in_its_box():
    (box,) = [box for box in page("eight-gpus").findings if box.code == "HST002.short"]
    assert [(fact.name, fact.value) for fact in box.expected] == [("expected", "32 GiB")]


def test_the_sentence_has_the_unit_of_the_figure():
    for name in ("healthy-2-ranks", "p2p-broken-2-ranks"):
        facts = {fact.name: fact.value for fact in page(name).facts}
        assert "all-reduce" not in recorded(name).sentence or facts["all-reduce busbw, gloo"] in recorded(name).sentence


def test_letters_of_pictures_are_never_small():
    """On a phone of 360 pixels a figure has 302 of them, whatever its own width."""
    for name in ("eight-gpus", "hang-4-ranks", "slow-host-3-ranks"):
        for section in page(name).sections:
            for own in section.figures:
                svg = own.narrow or own.svg
                width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
                sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
                assert min(sizes) * 302 / width >= 10, (name, own.title)


def test_no_finding_of_the_run_is_lost_without_a_timeline():
    report = fit(findings=(finding_of(code="RUN003.hung", evidence={"trial": 3}),))
    assert rows(built(report), "stages")[-1][0] == "run"
