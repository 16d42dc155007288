"""Reports of `ddpdiag watch` on standard error."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ddpdiag.cli.options import DisplayOptions
from ddpdiag.cli.outputs import terminal
from ddpdiag.codec import readable
from ddpdiag.model import Finding
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.render import files
from ddpdiag.render.blocks import Block, Code, Items, Mark, Text
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.text import byte_count, percent
from ddpdiag.watch.bundle import Bundle
from ddpdiag.watch.judge import notes
from ddpdiag.watch.look import Look

_MOST_THREADS = 8
_SHOW_SECONDS = 2.0


class Reporter:
    """Shows looks, each with its new notes, and each sentence once.

    `show` gets a look, its finding and notes, `say` a sentence. Both get a short time: the terminal or the file system
    itself may hang.
    """

    def __init__(self, show: Callable[[Look, Finding, Sequence[str]], None], say: Callable[[str], None]) -> None:
        self._show = show
        self._say = say
        self._shown: set[str] = set()

    def report(self, look: Look, finding: Finding, why: str = "") -> None:
        """Show a look. A note, such as on refused stacks, is shown once, and again on request; `why` every time."""
        every = notes(look)
        new = [note for note in every if look.asked or note == why or note not in self._shown]
        self._shown.update(every)
        _briefly(lambda: self._show(look, finding, new))

    def say_once(self, sentence: str) -> None:
        """Show a sentence that is neither empty nor was shown before."""
        if sentence and sentence not in self._shown:
            self._shown.add(sentence)
            _briefly(lambda: self._say(sentence))


def _briefly(write: Callable[[], None]) -> None:
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SHOW_SECONDS)


def show(look: Look, finding: Finding, notes: Sequence[str], bundle: Bundle | None, how: DisplayOptions) -> None:
    """Write a look to standard error, and keep it."""
    width, color = terminal(sys.stderr, how.color)
    # A progress bar leaves the cursor in the middle of its line.
    text = "\n" + render(look, finding, notes, color=color, width=width, quiet=how.quiet)
    if bundle is not None:
        try:
            bundle.keep(look)
            text += f"all that was seen is saved in {readable(str(bundle.path))}\n"
        except OSError as error:
            text += f"not saved: {readable(str(bundle.path))}: {error.strerror or error}\n"
    try:
        files.show(text, sys.stderr)
    except (OSError, ValueError):
        return


def render(
    look: Look,
    finding: Finding,
    notes: Sequence[str],
    *,
    color: bool,
    width: int,
    quiet: bool = False,
) -> str:
    """The report as text of `width` columns; if `quiet`, without stacks, threads and GPUs."""
    page = Page(color=color, width=width)
    paint(page, blocks(look, finding, notes, quiet=quiet), details=True)
    return page.text()


def blocks(look: Look, finding: Finding, notes: Sequence[str], *, quiet: bool) -> Iterator[Block]:
    """The finding, what each rank does, stacks of some ranks, GPUs, and notes."""
    when = time.strftime("%H:%M:%S", time.localtime(look.unix_seconds))
    head = f"{one_line(look.host)} {when}, {_reason(look)}: {finding.title}"
    yield Text(head, "ddpdiag watch", Mark.ERROR if finding.ranks else Mark.WARNING)
    yield Text(finding.message)
    if finding.fix:
        yield Text(finding.fix, "Fix")
    lists = {name: tuple(map(str, value)) for name, value in finding.evidence.items() if isinstance(value, list)}
    if groups := lists.pop("ranks", ()):
        yield Items(groups)
    if not quiet and look.failure is None:
        for name, frames in lists.items():
            yield Code("\n".join(map(one_line, frames)), f"{name.replace('_', ' ')}, innermost first:")
        for seen in [seen for seen in look.ranks if seen.no_stack and seen.threads][:_MOST_THREADS]:
            yield Text(", ".join(seen.threads), f"threads of rank {seen.rank}", Mark.DIM)
        if gpus := ", ".join(map(_gpu, look.gpus)) or look.gpus_unseen:
            yield Text(gpus, "GPUs", Mark.DIM)
    if notes:
        yield Items(tuple(notes), "notes")


def _reason(look: Look) -> str:
    """The reason of a look."""
    if look.failure:
        return f"the command failed ({look.failure.ended})"
    if look.timed_out:
        return "a collective timed out"
    return "requested" if look.asked else f"nothing new for {look.silent_seconds:.0f} s"


def _gpu(use: GpuUse) -> str:
    watts = "" if use.power_watts is None else f" {use.power_watts:.0f} W"
    return f"{use.index}: {percent(use.busy_share)}{watts} {byte_count(use.memory_bytes)}"
