"""Draw the screenshots of the README from recordings and a simulated fleet: they show what the tool says today.

    python tests/tools/make_screenshots.py [FOLDER]

Writes SVG files to tests/screenshots; a test draws them again and compares.
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.history.answers import answer
from ddpdiag.history.blocks import sections, verdict_of
from ddpdiag.history.rows import DAY_SECONDS, row_of
from ddpdiag.judgement import judge
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.render.terminal import render
from ddpdiag.simulate.months import BEGIN, FleetMonths, Plan

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "screenshots"
COLUMNS = 88
# The recording of each picture; none for the history of a fleet.
SHOTS = {
    "fit": "healthy-2-ranks.jsonl",
    "hang": "failures/rank_stopped.jsonl",
    "slow-host": "failures/host_is_slow.jsonl",
    "wrong-values": "failures/values_corrupt.jsonl",
    "history": "",
}
FLEET = Plan(
    hosts=200, days=60, jobs_per_day=30, lemons=3, repaired=1, repair_day=30, pairs=1, drifting=1, failing_cables=1
)
# rich's own, without the fonts that it fetches from the network.
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(name: str) -> str:
    """The report of one recording, or the history of the fleet, as a terminal shows it."""
    if recording := SHOTS[name]:
        command = "ddpdiag check"
        shown = render(
            judge(read_recording([TESTS / "recordings" / recording]), all_checks()), color=True, width=COLUMNS
        )
    else:
        command, shown = "ddpdiag history reports/ --days 60", history_text()
    text = Text.from_ansi(shown)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="standard")
        console.print(Text(f"$ {command}", style="bold"))
        console.print(text, soft_wrap=True)
    return console.export_svg(title="ddpdiag", code_format=_FORMAT, unique_id=name)


def history_text() -> str:
    """The history of the 60 days of `FLEET` as a terminal shows it."""
    runs = [row_of(report) for report in FleetMonths(FLEET, seed=3).reports()]
    begin = BEGIN.timestamp()
    last = {(row.seconds // DAY_SECONDS, row.host, row.part): row for run in runs for row in run.readings}
    end = begin + FLEET.days * DAY_SECONDS
    history = answer(runs, list(last.values()), since_seconds=begin, until_seconds=end)
    page = Page(color=True, width=COLUMNS)
    paint(page, (*sections(history), verdict_of(history.sentence, history.exit_code)), details=False)
    return page.text().rstrip() + "\n"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOTS:
        (folder / f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
