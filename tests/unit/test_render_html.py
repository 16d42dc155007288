"""The report as a page: what it says, what it escapes, how large it is."""

import math
import re
from functools import lru_cache

import pytest
from benches import bench, healthy
from pages import CLOSE, IMAGE, RECORDED, SCRIPT, Reader, fleet, hostile, recorded
from reports import SLOW, fit, rank_row, unfit, unknown

from ddpdiag.cli.outputs import features_of
from ddpdiag.errors import UsageError
from ddpdiag.model import Matrix, WorldSummary
from ddpdiag.model.options import Snapshot
from ddpdiag.render import html


def read(report) -> Reader:
    return Reader(html.render(report, features_of(report)))


def part(page: str, name: str) -> str:
    """A part of the page, without its pictures."""
    return re.sub(r"<svg.*?</svg>", "", re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)[0])


def labels(page: str) -> str:
    """Headings, what can be folded out, and the sentences below pictures."""
    return "\n".join(re.findall(r'<(?:h\d|summary|p class="said")[^>]*>(.*?)</', page))


@lru_cache(maxsize=16)
def page_of(name: str) -> str:
    """The page of a recording, or of the report full of hostile strings."""
    report = hostile() if name == "hostile" else recorded(name)
    return html.render(report, features_of(report))


@pytest.mark.parametrize("name", RECORDED)
def test_every_recording_is_a_whole_page(name):
    report = recorded(name)
    page = Reader(page_of(name))
    assert report.sentence in page.text
    assert all(finding.title in page.text for finding in report.findings)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {attributes["href"][1:] for attributes in page.of("a")}
    assert wanted <= set(ids)


@pytest.mark.parametrize(
    "report",
    [fit(), unfit(), unknown(), healthy(), healthy(bench("gloo", "nccl")), fit(ranks=())],
    ids=["fit", "unfit", "unknown", "bench", "two-backends", "nobody"],
)
def test_any_report_is_a_page(report):
    assert report.sentence in read(report).text


@pytest.mark.parametrize("report", [unfit(findings=(SLOW,)), unknown()], ids=["a rank", "nobody"])
def test_a_finding_has_who_evidence_expectation_and_remedy(golden, report):
    texts = Reader(part(html.render(report), "findings")).texts
    golden("\n".join(text.strip() for text in texts if text.strip()))


def test_hostile_strings_come_out_escaped():
    page = page_of("hostile")
    for words in (SCRIPT, IMAGE, CLOSE, "<img", "\x00", "\x1b", "\u202e"):
        assert words not in page
    assert "&lt;script&gt;document.title" in page
    reader = Reader(page)
    assert SCRIPT in reader.text
    assert "{{ 7 * 7 }}{% raw %}" in reader.text
    assert len(reader.of("script")) == 1
    assert reader.of("img") == reader.of("iframe") == []
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("name", [*RECORDED, "hostile"])
def test_nothing_is_fetched_and_no_other_script_runs(name):
    page = page_of(name)
    reader = Reader(page)
    assert {attributes.get("src") for attributes in reader.of("script")} == {None}
    links = [value for _, attributes in reader.elements for key, value in attributes.items() if key.endswith("href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"url\((?!#)|@import", page)
    (policy,) = [own["content"] for own in reader.of("meta") if own.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_an_endless_text_is_cut(golden):
    report = unfit(sentence="x" * 100_000, recording_problems=tuple(f"note {number}" for number in range(1000)))
    page = html.render(report)
    assert len(page) < 300_000
    golden(*re.findall(r"\b(?:96,000|960) [^<]*", page))


ODD_VALUES = (math.nan, -math.inf, -1.0, 1e308, 0.0, True, "text", None)


@pytest.mark.parametrize("values", [ODD_VALUES, (math.nan,) * 4, (1e308,) * 4], ids=["all", "nan", "huge"])
def test_odd_values_are_no_reason_to_fail(values):
    ranks = tuple(rank_row(n, busbw_bytes_per_s=value, data_seconds=value) for n, value in enumerate(values))
    value, cells = values[0], (values[:2], values[2:4])
    matrix = Matrix(
        name="fab.pairs", title="pairs", rows=("a", "b"), columns=("a", "b"), cells=cells, unit="bytes_per_s"
    )
    report = fit(ranks=ranks, matrices=(matrix,), measurements={"training.samples_per_second": value})
    assert report.sentence in read(report).text


ODD_MATRICES = tuple(
    Matrix(name=name, title="odd", rows=rows, columns=columns, cells=cells, unit=unit)
    for name, rows, columns, cells, unit in (
        ("fab.pairs", (), (), (), "bytes_per_s"),
        ("fab.pairs", ("a",), ("b",), ((None,),), "bytes_per_s"),
        ("p2p.host.n0", ("a",), ("b",) * 64, ((1.0,) * 64,), "bytes_per_s"),
        ("p2p.host.n1", ("a",), ("b", "c"), ((0, 0),), "bytes_per_s"),
        ("p2p.x", ("a",), ("b",), (("PIX",),), ""),
    )
)


@pytest.mark.parametrize(
    "fields",
    [
        {"matrices": ODD_MATRICES},
        {"ranks": ({}, {"rank": 1, "busbw_bytes_per_s": 1.0}, {"rank": "x", "busbw_bytes_per_s": 2.0})},
        {
            "stages": (),
            "checks": (),
            "measurements": {},
            "created": "",
            "world": WorldSummary(size=0, hosts=(), launcher="", backend=""),
        },
    ],
    ids=["matrices", "rows", "empty"],
)
def test_an_odd_report_is_a_page(fields):
    assert fit().sentence in read(fit(**fields)).text


def test_pictures_have_words_and_follow_the_page():
    report = healthy(bench("gloo", "nccl"))
    page = html.render(report, features_of(report))
    reader = Reader(page)
    pictures = [own for tag, own in reader.elements if "picture" in own.get("class", "").split()]
    assert len(pictures) == len(reader.of("svg")) >= 1
    assert all(own["role"] == "img" and len(own["aria-label"]) > 20 for own in pictures)
    assert "currentColor" in page
    assert "var(--s1)" in page


def test_p2p_on_and_off_stand_side_by_side(golden):
    pairs, ways = (part(page_of("eight-gpus"), name) for name in ("pairs", "topology"))
    assert "NV18" in ways
    golden(labels(pairs), labels(ways))


def test_the_environment_names_versions_and_variables(golden):
    facts = {"versions": {"torch": "2.13"}, "variables": {"NCCL_SOCKET_IFNAME": "eth0 and eth1"}}
    report = fit(snapshot=Snapshot(created="", shape={}, facts=facts, figures=()))
    golden(Reader(part(html.render(report), "environment")).text)


def test_a_benchmark_shows_curves_expectation_and_ranks(golden):
    report = healthy(bench("gloo", "nccl"))
    golden(labels(part(html.render(report, features_of(report)), "benchmark")))


@pytest.fixture(scope="module")
def large() -> str:
    return html.render(fleet(2_048, ranks_per_host=1))


# Of 16,384 hosts: tests/browser.
def test_thousands_of_hosts_are_a_small_page(large):
    assert len(large.encode()) < 500_000


def test_what_is_left_out_is_said(golden, large):
    golden(*(labels(part(large, name)) for name in ("pairs", "ranks", "stages", "topology")))


def test_without_jinja2_the_page_is_refused_in_one_sentence(golden, monkeypatch):
    monkeypatch.setattr(html, "find_spec", lambda _: None)
    with pytest.raises(UsageError) as caught:
        html.check_available()
    golden(str(caught.value))
