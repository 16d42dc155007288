"""Reports of `ddpdiag watch` on standard error."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ddpdiag.cli.options import DisplayOptions
from ddpdiag.cli.outputs import terminal
from ddpdiag.model import Finding
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.render import files
from ddpdiag.render.blocks import Block, Code, Items, Mark, Text
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.text import byte_count, percent
from ddpdiag.watch.judge import judge, notes
from ddpdiag.watch.look import Look

_SHOW_SECONDS = 2.0


class Reporter:
    """Shows looks on standard error, each with its new notes.

    Showing ends after 2 s at the latest, because the terminal or the file system may hang.
    """

    def __init__(self, how: DisplayOptions, show: Callable[[str], None] | None = None) -> None:
        self._how = how
        self._show = show or _show
        self._shown: set[str] = set()

    def report(self, look: Look) -> None:
        """Show a look. A note, such as on refused stacks, is shown once, and again in a look that was requested."""
        every = notes(look)
        new = [note for note in every if look.asked or note not in self._shown]
        self._shown.update(every)
        width, color = terminal(sys.stderr, self._how.color)
        # A progress bar leaves the cursor in the middle of its line.
        text = "\n" + render(look, judge(look), new, color=color, width=width, quiet=self._how.quiet)
        thread = threading.Thread(target=self._show, args=(text,), daemon=True)
        thread.start()
        thread.join(_SHOW_SECONDS)


def _show(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        files.show(text, sys.stderr)


def render(
    look: Look,
    finding: Finding,
    notes: Sequence[str],
    *,
    color: bool,
    width: int,
    quiet: bool = False,
) -> str:
    """The report as text of `width` columns; if `quiet`, without stacks and GPUs."""
    page = Page(color=color, width=width)
    paint(page, blocks(look, finding, notes, quiet=quiet), details=True)
    return page.text()


def blocks(look: Look, finding: Finding, notes: Sequence[str], *, quiet: bool) -> Iterator[Block]:
    """The blocks of a report: the finding, what each rank does, stacks of some ranks, GPUs, and notes."""
    when = time.strftime("%H:%M:%S", time.localtime(look.unix_seconds))
    head = f"{one_line(look.host)} {when}, {_reason(look)}: {finding.title}"
    yield Text(head, "ddpdiag watch", Mark.ERROR if finding.ranks else Mark.WARNING)
    yield Text(finding.message)
    if finding.fix:
        yield Text(finding.fix, "Fix")
    lists = {name: tuple(map(str, value)) for name, value in finding.evidence.items() if isinstance(value, list)}
    if groups := lists.pop("ranks", ()):
        yield Items(groups)
    if not quiet:
        for name, frames in lists.items():
            yield Code("\n".join(map(one_line, frames)), f"{name.replace('_', ' ')}, innermost first:")
        if gpus := ", ".join(map(_gpu, look.gpus)) or look.gpus_unseen:
            yield Text(gpus, "GPUs", Mark.DIM)
    if notes:
        yield Items(tuple(notes), "notes")


def _reason(look: Look) -> str:
    return "requested" if look.asked else f"nothing new for {look.silent_seconds:.0f} s"


def _gpu(use: GpuUse) -> str:
    watts = "" if use.power_watts is None else f" {use.power_watts:.0f} W"
    return f"{use.index}: {percent(use.busy_share)}{watts} {byte_count(use.memory_bytes)}"
