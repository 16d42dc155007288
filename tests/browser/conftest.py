"""Pages in a real browser: the system's Chromium, without a network."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _missing(reason: str) -> None:
    if os.environ.get("DDPDIAG_REQUIRE_BROWSER") == "1":
        pytest.fail(f"DDPDIAG_REQUIRE_BROWSER=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> "Iterator[Browser]":
    """The browser; skips where there is none, or fails where there must be one."""
    for module in ("playwright", "axe_playwright_python"):
        if find_spec(module) is None:
            _missing(f"{module} is not installed: pip install -e '.[test]'")
    from playwright.sync_api import Error, sync_playwright

    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing(f"there is no {' or '.join(NAMES)}")
    with sync_playwright() as playwright:
        # Root has no sandbox in containers; what is shown is of our own making.
        flags = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
        try:
            browser = playwright.chromium.launch(executable_path=path, args=flags)
        except Error as error:
            _missing(f"{path} does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()
