"""Pages as people see them: no request, no error, no barrier, at every width, in light and dark, with and without
script."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benches import bench, healthy
from pages import RECORDED, fleet, hostile, recorded
from test_render_train import CURVES, report

from ddpdiag.model.bench import COLLECTIVES
from ddpdiag.render import html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

LARGE = "16384-hosts"
NAMES = (*RECORDED, LARGE, "hostile", "benchmark", "strategies")
WIDTHS, SCHEMES = (360, 800, 1600), ("light", "dark")
# Levels of axe's findings that keep somebody from reading.
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def files(chromium, tmp_path_factory) -> dict[str, Path]:
    """Every page, written as users get it; none where nobody can look at it."""
    folder = tmp_path_factory.mktemp("pages")
    reports = {name: recorded(name) for name in RECORDED}
    reports |= {LARGE: fleet(16_384, ranks_per_host=1), "hostile": hostile()}
    reports |= {"benchmark": healthy(bench("gloo", collectives=COLLECTIVES[:4])), "strategies": report(scaling=CURVES)}
    for name, own in reports.items():
        (folder / f"{name}.html").write_text(html.render(own))
    return {name: folder / f"{name}.html" for name in reports}


class Opened:
    """A page that was loaded, and what it did meanwhile."""

    def __init__(self, browser: "Browser", file: Path, **context: object) -> None:
        self.context = browser.new_context(**context)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        begin = time.monotonic()
        self.page.goto(file.as_uri())
        self.seconds = time.monotonic() - begin
        self.requests = [url for url in self.requests if url != file.as_uri() and not url.startswith("data:")]

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def violations(page: "Page") -> list[dict]:
    """What axe-core finds (https://github.com/dequelabs/axe-core)."""
    from axe_playwright_python.sync_playwright import Axe

    # The shapes within pictures have nothing to say: a picture has its words beside it.
    context = {"include": [["html"]], "exclude": [["svg"]]}
    return Axe().run(page, context=context, options={"resultTypes": ["violations"]}).response["violations"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_silent_and_fits_everywhere(chromium, files, name):
    for scheme in SCHEMES:
        with Opened(chromium, files[name], color_scheme=scheme) as opened:
            for width in WIDTHS:
                opened.page.set_viewport_size({"width": width, "height": 900})
                assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, (scheme, width)
            assert (opened.said, opened.requests) == ([], [])
            assert "owned" not in opened.page.title()
            assert opened.page.locator("h1").count() == 1


# At the narrowest in light, at the widest in dark, so that each rule sees both.
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1600)])
def test_axe_finds_nothing_serious(chromium, files, name, scheme, width):
    viewport = {"width": width, "height": 900}
    with Opened(chromium, files[name], color_scheme=scheme, viewport=viewport, bypass_csp=True) as opened:
        # Folded parts are read as well.
        opened.page.evaluate("for (const own of document.querySelectorAll('details')) own.open = true")
        found = violations(opened.page)
        grave = [(own["id"], own["nodes"][0]["html"]) for own in found if own["impact"] in GRAVE]
        assert grave == []


def test_axe_would_find_what_is_hard_to_read(chromium, files):
    with Opened(chromium, files["hang-4-ranks"], bypass_csp=True) as opened:
        opened.page.add_style_tag(content=".lead { color: #bbb !important }")
        found = {own["id"]: own["impact"] for own in violations(opened.page)}
        assert found["color-contrast"] in GRAVE


def test_16384_hosts_open_in_two_seconds(chromium, files):
    with Opened(chromium, files[LARGE]) as opened:
        assert opened.seconds < 2.0


def test_without_script_all_is_there(chromium, files):
    with Opened(chromium, files["hang-4-ranks"], java_script_enabled=False) as opened:
        assert opened.page.get_by_role("heading", level=1).inner_text().startswith("4 ranks on 2 hosts cannot train")
        assert opened.page.get_by_role("button").count() == 0
        assert opened.page.get_by_role("searchbox").count() == 0
        assert opened.page.locator("svg").count() > 1


def test_a_remedy_is_copied(chromium, files):
    with Opened(chromium, files["hang-4-ranks"], permissions=["clipboard-read", "clipboard-write"]) as opened:
        button = opened.page.locator("article button.copy").first
        button.click()
        opened.page.get_by_role("button", name="Copied").wait_for()
        assert opened.page.evaluate("navigator.clipboard.readText()").startswith("Look at rank 3 on h1 first")


def test_ranks_are_sorted_and_filtered(chromium, files):
    with Opened(chromium, files[LARGE]) as opened:
        page = opened.page
        page.evaluate("for (const own of document.querySelectorAll('details')) own.open = true")
        table = page.locator("#rank-table")
        head = table.get_by_role("button", name=re.compile("host busbw"))
        rates = "[...document.querySelectorAll('#rank-table tbody tr:not([hidden])')].map(r => +r.cells[3].textContent)"
        head.click()
        rising = page.evaluate(rates)
        head.click()
        assert rising == sorted(rising)
        assert page.evaluate(rates) == sorted(rising, reverse=True)
        assert table.locator("th[aria-sort=descending]").count() == 1
        page.locator("[data-filters=rank-table]").fill("n0007")
        assert page.evaluate(f"{rates}.length") == 1


def test_it_prints(chromium, files):
    with Opened(chromium, files["p2p-broken-2-ranks"]) as opened:
        opened.page.emulate_media(media="print", color_scheme="dark")
        ink, paper = (
            opened.page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        assert (ink, paper) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
        assert not opened.page.locator("nav").is_visible()
        assert len(opened.page.pdf()) > 10_000


# A4 within margins of 10 mm.
PAPER = {"width": 717, "height": 1000}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_the_paper(chromium, files, name):
    """One wide table would shrink all letters of the print."""
    with Opened(chromium, files[name], viewport=PAPER, java_script_enabled=False) as opened:
        opened.page.emulate_media(media="print")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= PAPER["width"]


def test_folded_parts_are_printed_without_script(chromium, files):
    with Opened(chromium, files["hang-4-ranks"], viewport=PAPER, java_script_enabled=False) as opened:
        opened.page.emulate_media(media="print")
        for table in ("alike", "check-table", "measurements"):
            assert opened.page.locator(f"#{table}").is_visible()
        assert opened.page.get_by_text("_forever (sitecustomize.py", exact=False).last.is_visible()


def test_a_title_is_printed_on_the_page_of_its_picture(chromium, files):
    with Opened(chromium, files["hang-4-ranks"], viewport=PAPER) as opened:
        opened.page.emulate_media(media="print")
        after = "own => getComputedStyle(own).breakAfter"
        for title in ("#timeline > h2", "#timeline > .lead", "#timeline figcaption", "summary >> nth=0"):
            assert opened.page.locator(title).evaluate(after) == "avoid", title


def test_what_was_unfolded_for_the_print_is_folded_again(chromium, files):
    with Opened(chromium, files["hang-4-ranks"]) as opened:
        folded = opened.page.locator("details:not([open])")
        before = folded.count()
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert folded.count() == 0
        opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert folded.count() == before > 3


def test_a_phone_and_a_screen_have_pictures_of_their_own(chromium, files):
    with Opened(chromium, files["hang-4-ranks"], viewport={"width": 360, "height": 900}) as opened:
        pictures = opened.page.locator("#timeline .picture")
        assert [pictures.nth(place).is_visible() for place in range(2)] == [False, True]
        opened.page.set_viewport_size({"width": 1600, "height": 900})
        assert [pictures.nth(place).is_visible() for place in range(2)] == [True, False]


@pytest.mark.parametrize("name", NAMES)
def test_letters_in_pictures_are_read_on_a_phone(chromium, files, name):
    letters = """() => [...document.querySelectorAll(".picture svg")].filter((own) => own.checkVisibility()).map(
        (own) => [...own.querySelectorAll("text")].map((text) => parseFloat(getComputedStyle(text).fontSize)
        * own.getBoundingClientRect().width / own.viewBox.baseVal.width)).flat()"""
    with Opened(chromium, files[name], viewport={"width": 360, "height": 900}) as opened:
        sizes = opened.page.evaluate(letters)
        assert min(sizes, default=10) >= 9.5
