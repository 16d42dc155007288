"""`ddpdiag compare`: the changes between two runs, each a recording or a JSON report, as text, Markdown or JSON."""

import sys
from collections.abc import Iterator

import msgspec

from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import check_output_files, show, terminal_style
from ddpdiag.codec import encode, readable
from ddpdiag.compare.reports import Comparison, compare
from ddpdiag.comparison import Direction
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.reading import read_report
from ddpdiag.render.blocks import Block, Fold, Items, Mark, Text
from ddpdiag.render.files import write
from ddpdiag.render.markup import draw_pieces, fit_pieces
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint


def run(old: str, new: str, *, json: str | None = None, markdown: str | None = None, color: Color = Color.AUTO) -> int:
    """Compare the files `old` and `new`, write the files that options name, and show the changes.

    `json` and `markdown` are paths to write to ('-' is standard output). UsageError if a file cannot be read or
    written. Returns the exit code: 0 for no regression, 1 for a regression, 3 for an unknown result.
    """
    outputs = {"--json": (json, as_json), "--markdown": (markdown, as_markdown)}
    files = {option: (path, content) for option, (path, content) in outputs.items() if path is not None}
    check_output_files({option: path for option, (path, _) in files.items()}, (old, new))
    comparison = compare(read_report(old), read_report(new), old_source=readable(old), new_source=readable(new))
    for path, content in files.values():
        write(path, content(comparison))
    stream = sys.stderr if "-" in (json, markdown) else sys.stdout
    width, has_color = terminal_style(stream, color)
    show(render(comparison, width=width, color=has_color), stream)
    return comparison.exit_code


_MARKS = {
    ExitCode.FIT: ("NO REGRESSION", Mark.GOOD),
    ExitCode.UNFIT: ("WORSE", Mark.ERROR),
    ExitCode.UNKNOWN: ("UNKNOWN", Mark.WARNING),
}
_TITLES = {
    Direction.REGRESSION: "Regressions",
    Direction.IMPROVEMENT: "Improvements",
    Direction.UNJUDGED: "Not judged",
    Direction.NEUTRAL: "Other changes",
}


def as_json(comparison: Comparison) -> str:
    """The comparison as indented JSON (schema `ddpdiag.comparison/1`)."""
    return msgspec.json.format(encode(comparison), indent=2).decode() + "\n"


def render(comparison: Comparison, *, width: int, color: bool) -> str:
    """The comparison as text for a terminal. The verdict is at the end, so that it stays visible."""
    page = Page(color=color, width=width)
    paint(page, (*_runs(comparison), *_changes(comparison), _verdict(comparison)), details=True)
    return page.text().rstrip() + "\n"


def as_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown for tickets and chat, with the verdict first."""
    blocks = (_verdict(comparison), *_runs(comparison), *_changes(comparison))
    return "\n".join(fit_pieces(draw_pieces(blocks))).rstrip() + "\n"


def _verdict(comparison: Comparison) -> Text:
    word, mark = _MARKS[ExitCode(comparison.exit_code)]
    if not comparison.compared and comparison.exit_code != ExitCode.UNFIT:
        word = "NOT COMPARED"
    return Text(comparison.sentence, word, mark)


def _runs(comparison: Comparison) -> Iterator[Block]:
    for label, side in (("old", comparison.old), ("new", comparison.new)):
        run = f"{side.source} (run {side.run_id}{f', {side.created}' if side.created else ''})"
        yield Text(f"{run}: {side.verdict_text}: {side.sentence}", label)


def _changes(comparison: Comparison) -> Iterator[Block]:
    """One list of changes for each direction; the list of neutral changes can be folded in Markdown."""
    for direction, title in _TITLES.items():
        texts = tuple(change.text for change in comparison.changes if change.direction is direction)
        if texts and direction is Direction.NEUTRAL:
            yield Fold(title, (Items(texts),))
        elif texts:
            yield Items(texts, title)
