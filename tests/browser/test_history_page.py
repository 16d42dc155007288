"""The page of `ddpdiag history` in a browser, as tests/browser/test_pages.py looks at the others."""

from pathlib import Path

import pytest
from test_pages import SCHEMES, WIDTHS, Opened
from typer.testing import CliRunner

from ddpdiag.cli.app import app
from ddpdiag.codec import indented_json
from ddpdiag.simulate.months import FleetMonths, Plan

pytestmark = [pytest.mark.browser, pytest.mark.deep]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a month of 64 hosts with lemons, pairs and drifts."""
    folder = tmp_path_factory.mktemp("history")
    (folder / "reports").mkdir()
    plan = Plan(hosts=64, days=30, jobs_per_day=30, lemons=3, repaired=1, repair_day=9, pairs=2, drifting=2)
    for report in FleetMonths(plan._replace(drift_share_per_week=0.03), seed=3).reports():
        (folder / "reports" / f"{report.run_id}.json").write_text(indented_json(report))
    words = ["history", str(folder / "reports"), "--until", "2026-01-31", "--html", str(folder / "page.html")]
    assert CliRunner().invoke(app, words).exit_code == 1
    return folder / "page.html"


def test_it_is_silent_and_fits_and_has_no_barriers(chromium, page):
    with Opened(chromium, page) as own:
        for scheme in SCHEMES:
            own.page.emulate_media(color_scheme=scheme)
            assert all(own.width(width) <= width for width in WIDTHS), scheme
            assert own.barriers() == [], scheme
        assert own.requests == []
        assert own.said == []
        assert own.page.locator("h2").all_inner_texts()[0] == "Recurring hosts"
