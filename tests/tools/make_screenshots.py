"""Draw the screenshots of the README from recordings, so that they show what the tool says today.

    python tests/tools/make_screenshots.py [FOLDER]

Writes SVG files to tests/screenshots; a test draws them again and compares.
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.render.terminal import render

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "screenshots"
COLUMNS = 88
# The recording of each picture.
SHOTS = {
    "fit": "healthy-2-ranks.jsonl",
    "hang": "failures/rank_stopped.jsonl",
    "slow-host": "failures/host_is_slow.jsonl",
    "wrong-values": "failures/values_corrupt.jsonl",
}
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
    """The report of one recording as a terminal shows it."""
    report = judge(read_recording([TESTS / "recordings" / SHOTS[name]]), all_checks())
    text = Text.from_ansi(render(report, color=True, width=COLUMNS))
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="standard")
        console.print(Text("$ ddpdiag check", style="bold"))
        console.print(text, soft_wrap=True)
    return console.export_svg(title="ddpdiag", code_format=_FORMAT, unique_id=name)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOTS:
        (folder / f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
