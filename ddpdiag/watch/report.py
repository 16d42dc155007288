"""Reports of `ddpdiag watch` on standard error."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ddpdiag.cli.options import DisplayOptions
from ddpdiag.cli.outputs import terminal
from ddpdiag.codec import readable
from ddpdiag.model import Finding, Scalar
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.render import files
from ddpdiag.render.page import Page, one_line
from ddpdiag.text import byte_count, count, percent
from ddpdiag.watch.bundle import Bundle
from ddpdiag.watch.judge import notes
from ddpdiag.watch.look import Look

_MOST_LINES = 24
_MOST_FRAMES = 24
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
    stacks = look.looks <= 1 or look.asked
    # A progress bar leaves the cursor in the middle of its line.
    text = "\n" + render(look, finding, notes, color=color, width=width, stacks=stacks, quiet=how.quiet)
    if bundle is not None:
        try:
            bundle.keep(look)
            text += f"    all that was seen is saved in {readable(str(bundle.path))}\n"
        except OSError as error:
            text += f"    not saved: {readable(str(bundle.path))}: {error.strerror or error}\n"
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
    stacks: bool = True,
    quiet: bool = False,
) -> str:
    """The finding, what each rank does, and notes, as text of `width` columns; if `quiet`, without stacks and GPUs."""
    page = Page(color=color, width=width)
    when = time.strftime("%H:%M:%S", time.localtime(look.unix_seconds))
    head = f"{one_line(look.host)} {when}, {_reason(look)}: {one_line(finding.title)}"
    page.write(head, lead="ddpdiag watch: ", lead_style="bold red" if finding.ranks else "bold yellow")
    page.write(one_line(finding.message), indent=4)
    if finding.fix:
        page.write(one_line(finding.fix), indent=4, lead="Fix: ", lead_style="bold")
    lists = {name: value for name, value in finding.evidence.items() if isinstance(value, list)}
    groups = lists.pop("ranks", [])
    for group in groups[:_MOST_LINES]:
        lead, _, text = str(group).partition(": ")
        page.write(one_line(text), indent=4, lead=f"{lead}: ")
    if len(groups) > _MOST_LINES:
        page.write(f"and {count(len(groups) - _MOST_LINES, 'more group')} of ranks", indent=4)
    if not quiet and look.failure is None:
        if stacks:
            _stacks(page, look, lists)
        elif lists:
            page.write("stacks: shown at the first look; SIGUSR1 shows them again", indent=4, style="dim")
        if text := ", ".join(map(_gpu, look.gpus)) or one_line(look.gpus_unseen):
            page.write(text, indent=4, lead="GPUs: ", style="dim")
    for note in notes:
        page.write(one_line(note), indent=4, lead="note: ")
    return page.text()


def _reason(look: Look) -> str:
    """Why there is a look."""
    if look.failure:
        return f"the command failed ({look.failure.ended})"
    if look.timed_out:
        return "a collective timed out"
    return "requested" if look.asked else f"nothing new for {look.silent_seconds:.0f} s"


def _stacks(page: Page, look: Look, stacks: Mapping[str, Sequence[Scalar]]) -> None:
    """Stacks of some ranks, and the threads of ranks without a stack."""
    for name, frames in stacks.items():
        page.write(f"{name.replace('_', ' ')}, innermost first:", indent=4, style="dim")
        for frame in frames[:_MOST_FRAMES]:
            page.write(one_line(str(frame)), indent=6, style="dim")
        if len(frames) > _MOST_FRAMES:
            page.write(f"... and {len(frames) - _MOST_FRAMES} more frames", indent=6, style="dim")
    for seen in [seen for seen in look.ranks if seen.no_stack and seen.threads][:_MOST_THREADS]:
        page.write(", ".join(map(one_line, seen.threads)), indent=4, lead=f"threads of rank {seen.rank}: ", style="dim")


def _gpu(use: GpuUse) -> str:
    watts = "" if use.power_watts is None else f" {use.power_watts:.0f} W"
    return f"{use.index}: {percent(use.busy_share)}{watts} {byte_count(use.memory_bytes)}"
