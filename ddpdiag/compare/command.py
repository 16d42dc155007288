"""`ddpdiag compare`: two runs, each a recording or a JSON report; what changed, for people, as Markdown, as JSON."""

import sys
import textwrap

import msgspec

from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import is_one_file, show, terminal
from ddpdiag.codec import encode, readable
from ddpdiag.compare.reports import Comparison, compare
from ddpdiag.comparison.figures import Direction
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.judgement import read_report
from ddpdiag.render.files import check_writable, write
from ddpdiag.render.markup import folded, listed, name, said
from ddpdiag.render.page import LEAST_WIDTH, one_line


def run(old: str, new: str, *, json: str | None = None, markdown: str | None = None, color: Color = Color.AUTO) -> int:
    """0 no regression, 1 regression, 3 not known; UsageError (2) for what cannot be read. '-' is standard output."""
    wanted = {"--json": (json, as_json), "--markdown": (markdown, as_markdown)}
    files = {option: (path, content) for option, (path, content) in wanted.items() if path is not None}
    for option, (path, _) in files.items():
        if any(is_one_file(path, given) for given in (old, new)):
            raise UsageError(f"{option} {path} would overwrite an input of the comparison; give it another file")
        check_writable(path)
    if json is not None and json == markdown:
        raise UsageError("--json and --markdown name the same file; give each its own")
    found = compare(read_report(old), read_report(new), old_source=readable(old), new_source=readable(new))
    for path, content in files.values():
        write(path, content(found))
    stream = sys.stderr if "-" in (json, markdown) else sys.stdout
    width, has_color = terminal(stream, color)
    show(render(found, width=width, color=has_color), stream)
    return found.exit_code


_COLORS = {Direction.REGRESSION: "31", Direction.IMPROVEMENT: "32", Direction.NEUTRAL: "2", Direction.UNJUDGED: "33"}
_MARKS = {
    Direction.REGRESSION: "worse",
    Direction.IMPROVEMENT: "better",
    Direction.NEUTRAL: "other",
    Direction.UNJUDGED: "??",
}

_TITLES = {
    Direction.REGRESSION: "Regressions",
    Direction.IMPROVEMENT: "Improvements",
    Direction.UNJUDGED: "Not judged",
}


def as_json(comparison: Comparison) -> str:
    """`ddpdiag.comparison/1`, indented."""
    return msgspec.json.format(encode(comparison), indent=2).decode() + "\n"


def render(comparison: Comparison, *, width: int, color: bool) -> str:
    """Both runs, then a paragraph for each change, the worst first, and one sentence at the end."""
    width = max(width, LEAST_WIDTH)
    lines: list[str] = []
    for lead, side in (("old: ", comparison.old), ("new: ", comparison.new)):
        about = one_line(f"{side.source} (run {side.run_id}{f', {side.created}' if side.created else ''})")
        lines += _filled(lead, f"{about}: {side.verdict_text}: {side.sentence}", width)
    lines.append("")
    for change in comparison.changes:
        first, *rest = _filled(f"{_MARKS[change.direction]:<7}", one_line(change.text), width)
        mark = first[:7]
        painted = f"\x1b[{_COLORS[change.direction]}m{mark}\x1b[0m" if color else mark
        lines += [painted + first[7:], *rest]
    if comparison.changes:
        lines.append("")
    lines += _filled(f"{_word(comparison)}: ", comparison.sentence, width)
    return "\n".join(lines) + "\n"


def _word(comparison: Comparison) -> str:
    """A comparison without figures, or a new run that could not look, is never reported as healthy."""
    if comparison.exit_code == ExitCode.UNFIT:
        return "WORSE"
    if not comparison.compared:
        return "NOT COMPARED"
    return "UNKNOWN" if comparison.exit_code else "NO REGRESSION"


def _filled(lead: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        lead + one_line(text),
        width,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


# Of each kind of change in Markdown: lines, and bytes of them all, of one text and of one name.
_ROWS, _BYTES, _TEXT = 100, 16_000, 1_000


def as_markdown(comparison: Comparison) -> str:
    """For tickets and chat: the sentence first; changes that are neither worse nor better are folded away."""
    lines = [f"**{_word(comparison)}**: {said(comparison.sentence, _TEXT)}", ""]
    for lead, side in (("old", comparison.old), ("new", comparison.new)):
        about = f"{name(side.source)}, run {name(side.run_id)} {said(side.created, _TEXT)}".rstrip()
        lines.append(f"- **{lead}:** {about}: **{said(side.verdict_text, _TEXT)}**: {said(side.sentence, _TEXT)}")
    lines.append("")
    for direction, title in _TITLES.items():
        if found := _items(comparison, direction):
            lines += [f"### {title}", "", *found, ""]
    return "\n".join([*lines, *folded("Other changes", _items(comparison, Direction.NEUTRAL))]).rstrip() + "\n"


def _items(comparison: Comparison, direction: Direction) -> list[str]:
    found = [change for change in comparison.changes if change.direction is direction]
    lines = [f"- {name(change.name)} {said(change.text, _TEXT)}" for change in found[:_ROWS]]
    return listed(lines, "change", total=len(found), most=_BYTES)
