"""Show looks, with their findings, on standard error."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from ddpdiag.cli.options import DisplayArgs
from ddpdiag.cli.outputs import terminal_style
from ddpdiag.model import Finding
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.render import files
from ddpdiag.render.blocks import Block, Code, Items, Mark, Text
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.text import byte_count, percent
from ddpdiag.watch.judge import judge, missing_evidence
from ddpdiag.watch.look import Look

_SHOW_SECONDS = 2.0


class Reporter:
    """Shows looks, by default on standard error, for at most 2 s each, because the terminal or file system may hang."""

    def __init__(
        self, options: DisplayArgs, show: Callable[[str], None] | None = None, *, stream: TextIO | None = None
    ) -> None:
        self._options = options
        self._stream = stream or sys.stderr
        self._show = show or self._show_on_stream
        self._shown_sentences: set[str] = set()

    def report(self, look: Look) -> None:
        """Judge and show a look. A requested look shows all sentences on missing evidence, even if shown before."""
        missing = missing_evidence(look)
        new = [note for note in missing if look.is_requested or note not in self._shown_sentences]
        self._shown_sentences.update(missing)
        width, color = terminal_style(self._stream, self._options.color)
        # A progress bar of the command leaves the cursor in the middle of its line.
        text = "\n" * (self._stream is sys.stderr) + render(
            look, judge(look), new, color=color, width=width, quiet=self._options.quiet
        )
        thread = threading.Thread(target=self._show, args=(text,), daemon=True)
        thread.start()
        thread.join(_SHOW_SECONDS)

    def _show_on_stream(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            files.show(text, self._stream)


def render(
    look: Look,
    findings: Sequence[Finding],
    missing_evidence: Sequence[str],
    *,
    color: bool,
    width: int,
    quiet: bool = False,
) -> str:
    """The report of a look as text of `width` columns; if `quiet`, without stacks and GPUs."""
    page = Page(color=color, width=width)
    paint(page, blocks(look, findings, missing_evidence, quiet=quiet), details=True)
    return page.text()


def blocks(look: Look, findings: Sequence[Finding], missing_evidence: Sequence[str], *, quiet: bool) -> Iterator[Block]:
    """Yield the blocks of a report: the findings, what each rank does, stacks of some ranks, GPUs, missing evidence."""
    time_text = time.strftime("%H:%M:%S", time.localtime(look.unix_seconds))
    reason = "requested" if look.is_requested else f"nothing new for {look.silent_seconds:.0f} s"
    lead, *others = findings
    yield from _finding_blocks(lead, f"{one_line(look.host)} {time_text}, {reason}: {lead.title}", "ddpdiag watch")
    for finding in others:
        yield from _finding_blocks(finding, finding.title, "Also")
    lists = {name: tuple(map(str, value)) for name, value in lead.evidence.items() if isinstance(value, list)}
    if rank_groups := lists.pop("ranks", ()):
        yield Items(rank_groups)
    if not quiet:
        for name, frames in lists.items():
            yield Code("\n".join(map(one_line, frames)), f"{name.replace('_', ' ')}, innermost first:")
        if gpus := ", ".join(map(_gpu_text, look.gpus)) or look.why_no_gpus:
            yield Text(gpus, "GPUs", Mark.DIM)
    if missing_evidence:
        yield Items(tuple(missing_evidence), "notes")


def _finding_blocks(finding: Finding, title: str, label: str) -> Iterator[Block]:
    yield Text(one_line(title), label, Mark.ERROR if finding.ranks else Mark.WARNING)
    yield Text(one_line(finding.message))
    if finding.fix:
        yield Text(one_line(finding.fix), "Fix")


def _gpu_text(use: GpuUse) -> str:
    watts = "" if use.power_watts is None else f" {use.power_watts:.0f} W"
    return f"{use.index}: {percent(use.busy_share)}{watts} {byte_count(use.memory_bytes)}"
