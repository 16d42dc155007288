"""Pages as people see them: no request, no error, no barrier, at every width, in light and dark, with and without
script."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benches import bench, healthy
from pages import RECORDED, fleet, hostile, recorded
from test_render_train import report

from ddpdiag.cli.outputs import features_of
from ddpdiag.model.bench import COLLECTIVES
from ddpdiag.render import html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

HANG, LARGE = "hang-4-ranks", "16384-hosts"
REPORTS = {name: partial(recorded, name) for name in RECORDED} | {
    LARGE: lambda: fleet(16_384, ranks_per_host=1),
    "64-hosts": lambda: fleet(64, ranks_per_host=1),
    "hostile": hostile,
    "benchmark": lambda: healthy(bench("gloo", collectives=COLLECTIVES[:4])),
    "strategies": report,
}
# The page of a failing run and the strings of a stranger stand for the others.
NAMES = [name if name == HANG else pytest.param(name, marks=pytest.mark.deep) for name in REPORTS]
WIDTHS, SCHEMES = (360, 800, 1600), ("light", "dark")
# A4 within margins of 10 mm.
PAPER = {"width": 717, "height": 1000}
# Levels of axe's findings that keep somebody from reading.
GRAVE = ("serious", "critical")
WIDTH = "document.documentElement.scrollWidth"
UNFOLD = "for (const own of document.querySelectorAll('details')) own.open = true"
LETTERS = """() => [...document.querySelectorAll(".picture svg")].filter((own) => own.checkVisibility()).map(
    (own) => [...own.querySelectorAll("text")].map((text) => parseFloat(getComputedStyle(text).fontSize)
    * own.getBoundingClientRect().width / own.viewBox.baseVal.width)).flat()"""
# The shapes within pictures have nothing to say: a picture has its words beside it.
AXE = """axe.run({include: [["html"]], exclude: [["svg"]]}, {resultTypes: ["violations"]}).then(
    (found) => found.violations.map((own) => [own.id, own.impact, own.nodes[0].html]))"""


class Opened:
    """A page that was loaded, and what it did meanwhile."""

    def __init__(self, browser: "Browser", file: Path, **context: object) -> None:
        self._file = file
        self._context = browser.new_context(**context)
        self.page: Page = self._context.new_page()
        self.said: list[str] = []
        self._requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self._requests.append(request.url))
        self.page.goto(file.as_uri())

    @property
    def requests(self) -> list[str]:
        """What it asked for beside itself."""
        return [url for url in self._requests if url != self._file.as_uri() and not url.startswith("data:")]

    def width(self, width: int) -> int:
        """How wide the page is in a window of this width."""
        self.page.set_viewport_size({"width": width, "height": 900})
        return self.page.evaluate(WIDTH)

    def barriers(self) -> list[list[str]]:
        """What axe-core (https://github.com/dequelabs/axe-core) finds that is grave, in folded parts as well."""
        from axe_playwright_python.base import AXE_SCRIPT

        if self.page.evaluate("!window.axe"):
            self.page.evaluate(UNFOLD)
            self.page.evaluate(AXE_SCRIPT)
        return [own for own in self.page.evaluate(AXE) if own[1] in GRAVE]

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()


@pytest.fixture(scope="module")
def file(chromium, tmp_path_factory) -> Callable[[str], Path]:
    """file(name): that page, written as users get it; none where nobody can look at it."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def write(name: str) -> Path:
        path = folder / f"{name}.html"
        path.write_text(html.render(report := REPORTS[name](), features_of(report)))
        return path

    return write


@pytest.fixture
def opened(chromium, file) -> Iterator[Callable[..., Opened]]:
    """opened(name, viewport=...): that page in a window of its own."""
    with ExitStack() as stack:
        yield lambda name, **context: stack.enter_context(Opened(chromium, file(name), **context))


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_silent_and_fits_everywhere_and_keeps_nobody_from_reading(opened, name):
    own = opened(name)
    for scheme in SCHEMES:
        own.page.emulate_media(color_scheme=scheme)
        assert all(own.width(width) <= width for width in WIDTHS), scheme
    # At the narrowest in light, at the widest in dark, so that each rule sees both.
    for scheme, width in zip(SCHEMES, (360, 1600), strict=True):
        own.page.emulate_media(color_scheme=scheme)
        own.width(width)
        if width == 360:
            assert min(own.page.evaluate(LETTERS), default=10) >= 9.5
        assert own.barriers() == [], (scheme, width)
    assert (own.said, own.requests) == ([], [])
    assert "owned" not in own.page.title()
    assert own.page.locator("h1").count() == 1


@pytest.mark.deep
@pytest.mark.alone
def test_16384_hosts_open_in_two_seconds(opened, file):
    assert file(LARGE).stat().st_size < 2_000_000
    begin = time.monotonic()
    opened(LARGE)
    assert time.monotonic() - begin < 2.0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_the_paper(opened, name):
    """One wide table would shrink all letters of the print."""
    page = opened(name, viewport=PAPER, java_script_enabled=False).page
    page.emulate_media(media="print")
    assert page.evaluate(WIDTH) <= PAPER["width"]


def test_without_script_all_is_there_and_folded_parts_are_printed(opened):
    page = opened(HANG, viewport=PAPER, java_script_enabled=False).page
    assert page.get_by_role("heading", level=1).inner_text() == recorded(HANG).sentence
    assert page.get_by_role("button").count() == 0
    assert page.get_by_role("searchbox").count() == 0
    page.emulate_media(media="print")
    for section in ("environment", "checks"):
        assert all(table.is_visible() for table in page.locator(f"#{section} table").all()), section
    assert page.get_by_text("_forever (sitecustomize.py", exact=False).last.is_visible()


def test_variables_are_copied_and_no_backtick_is_left(opened):
    page = opened("p2p-broken-2-ranks", permissions=["clipboard-read", "clipboard-write"]).page
    page.locator("article button.copy").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("export NCCL_")
    assert "`" not in page.evaluate("document.querySelector('main').textContent")


# Wider tables (a matrix of 64 GPUs) scroll.
MOST_COLUMNS = 18
CUT_OFF = f"""() => [...document.querySelectorAll(".scroll")].filter((own) => own.scrollWidth > own.clientWidth
    && own.querySelectorAll("th").length <= {MOST_COLUMNS}).map((own) => own.getAttribute("aria-label"))"""


@pytest.mark.parametrize("name", [name for name in NAMES if getattr(name, "values", ()) != ("hostile",)])
def test_all_columns_are_visible_at_1280_pixels(opened, name):
    own = opened(name)
    own.width(1280)
    own.page.evaluate(UNFOLD)
    assert own.page.evaluate(CUT_OFF) == []


def test_ranks_are_sorted_and_filtered(opened):
    page = opened("64-hosts").page
    page.evaluate(UNFOLD)
    table = page.locator("#ranks table")
    head = table.get_by_role("button", name=re.compile("host busbw"))
    rates = "[...document.querySelectorAll('#ranks tbody tr:not([hidden])')].map(r => +r.cells[3].textContent)"
    head.click()
    rising = page.evaluate(rates)
    head.click()
    assert rising == sorted(rising)
    assert len(set(rising)) > 1
    assert page.evaluate(rates) == sorted(rising, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    page.locator("#ranks [data-filters]").fill("n0007")
    assert page.evaluate(f"{rates}.length") == 1


def test_it_prints_in_black_with_titles_beside_their_pictures_and_unfolded_for_as_long(opened):
    page = opened(HANG, viewport=PAPER).page
    folded = page.locator("details:not([open])")
    before = folded.count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert folded.count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert folded.count() == before > 3
    page.emulate_media(media="print", color_scheme="dark")
    style = "getComputedStyle(document.body)"
    assert page.evaluate(f"[{style}.color, {style}.backgroundColor]") == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    assert not page.locator("nav").is_visible()
    for title in ("#stages > h2", "#stages > .lead >> nth=0", "summary >> nth=0"):
        assert page.locator(title).evaluate("own => getComputedStyle(own).breakAfter") == "avoid", title
    assert len(page.pdf()) > 10_000
