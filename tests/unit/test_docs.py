"""README, docs and recipes: links that lead somewhere, a README of one page."""

import re
from pathlib import Path

import pytest
from make_screenshots import SHOTS

from ddpdiag.codec import read_recording

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def links(page: Path) -> list[str]:
    """Where a page's relative links lead."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    assert dead == []


def test_links_are_found():
    assert "docs/check.md#one-host-in-a-second" in links(ROOT / "README.md")


def test_the_sentence_above_the_picture_is_about_the_run_in_it():
    before, _, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("](tests/screenshots/hang.svg)")
    run = read_recording([ROOT / "tests" / "recordings" / SHOTS["hang"]])
    numbers = {2: "two", 3: "three", 4: "four"}
    hosts = {arrival.place.host for arrival in run.arrivals.values()}
    said = f"One of {numbers[run.header.world_size]} ranks on {numbers[len(hosts)]} hosts was stopped"
    assert before.rpartition("![")[0].rstrip().rpartition("\n")[2].startswith(said)


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
