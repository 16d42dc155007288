"""What `ddpdiag watch` reports on standard error, and keeps in a bundle."""

import io
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import structs

from ddpdiag.cli.options import DisplayOptions
from ddpdiag.cli.outputs import terminal
from ddpdiag.codec import decode, encode, read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.render import files
from ddpdiag.render.page import Page, one_line
from ddpdiag.text import byte_count, count, fold_ranks, percent
from ddpdiag.watch.model import Judged, Stall

_MOST_LINES = 24
_MOST_FRAMES = 24
_MOST_THREADS = 8
_SHOW_SECONDS = 2.0


class Bundle:
    """A new file in a directory that is there: every look is one line."""

    def __init__(self, folder: str) -> None:
        where = readable(folder)
        if not Path(folder).is_dir():
            raise UsageError(f"--bundle {where}: no such directory on {socket.gethostname()}")
        self.path = Path(folder) / f"watch-{readable(socket.gethostname())}-{os.getpid()}.jsonl"
        self._descriptor: int | None = None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--bundle {where}: the directory is not writable")

    def keep(self, stall: Stall) -> None:
        """Add a look."""
        if self._descriptor is None:
            self._descriptor = self._created()
        with os.fdopen(os.dup(self._descriptor), "wb") as file:
            file.write(encode(stall) + b"\n")

    def _created(self) -> int:
        """A file of this name that is there may be a pipe, or another user's: the new one then has a random suffix."""
        try:
            return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            descriptor, name = tempfile.mkstemp(".jsonl", f"{self.path.stem}-", self.path.parent)
            self.path = Path(name)
            return descriptor


def read_bundle(path: str) -> list[Stall]:
    """The looks in a file, the last of which may be cut off."""
    where = readable(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}") from error
    looks: list[Stall] = []
    reason = "it is empty"
    for number, row in enumerate(io.BytesIO(data), 1):
        if row == b"\n":
            continue
        try:
            looks.append(decode(row, Stall))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"line {number}: {error}"
            break
    if not looks:
        raise UsageError(f"{where}: not a file that ddpdiag watch saved with --bundle: {reason}")
    return looks


class Reporter:
    """What is reported: looks, each with its new notes, and sentences once.

    `show` gets a look, `say` a sentence. Both get a short time: the terminal or the file system itself may hang.
    """

    def __init__(self, show: Callable[[Stall, Judged], None], say: Callable[[str], None]) -> None:
        self._show = show
        self._say = say
        self._told: set[str] = set()

    def tell(self, stall: Stall, verdict: Judged, why: str = "") -> None:
        """A look. A note, such as on refused stacks, is shown once, and again on request; `why` every time."""
        new = tuple(note for note in verdict.notes if stall.asked or note == why or note not in self._told)
        self._told |= set(verdict.notes)
        _briefly(lambda: self._show(stall, structs.replace(verdict, notes=new)))

    def say_once(self, sentence: str) -> None:
        """Nothing where it is empty, or was said before."""
        if sentence and sentence not in self._told:
            self._told.add(sentence)
            _briefly(lambda: self._say(sentence))


def _briefly(write: Callable[[], None]) -> None:
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SHOW_SECONDS)


def show(stall: Stall, verdict: Judged, bundle: Bundle | None, how: DisplayOptions) -> None:
    """Write a look to standard error, and keep it."""
    width, color = terminal(sys.stderr, how.color)
    # A progress bar leaves the cursor in the middle of its line.
    text = "\n" + render(stall, verdict, color=color, width=width, quiet=how.quiet)
    if bundle is not None:
        try:
            bundle.keep(stall)
            text += f"    all that was seen is saved in {readable(str(bundle.path))}\n"
        except OSError as error:
            text += f"    not saved: {readable(str(bundle.path))}: {error.strerror or error}\n"
    try:
        files.show(text, sys.stderr)
    except (OSError, ValueError):
        return


def render(stall: Stall, judged: Judged, *, color: bool, width: int, stacks: bool = False, quiet: bool = False) -> str:
    """What each rank does, for which rank the others wait, and the fix, as text of `width` columns.

    Stacks are shown at the first look at a silence, on request, and if `stacks` is set; never if `quiet` is.
    """
    page = Page(color=color, width=width)
    when = time.strftime("%H:%M:%S", time.localtime(stall.unix_seconds))
    head = f"{one_line(stall.host)} {when}, {_why(stall)}: {one_line(judged.title)}"
    page.write(head, lead="ddpdiag watch: ", lead_style="bold red" if judged.named else "bold yellow")
    page.write(one_line(judged.message), indent=4)
    if judged.fix:
        page.write(one_line(judged.fix), indent=4, lead="Fix: ", lead_style="bold")
    for group in judged.groups[:_MOST_LINES]:
        word = "rank" if len(group.ranks) == 1 else "ranks"
        page.write(one_line(group.text), indent=4, lead=f"{word} {fold_ranks(group.ranks, limit=8)}: ")
    if len(judged.groups) > _MOST_LINES:
        page.write(f"and {count(len(judged.groups) - _MOST_LINES, 'more group')} of ranks", indent=4)
    if quiet:
        _notes(page, judged)
        return page.text()
    if stall.looks <= 1 or stall.asked or stacks:
        _stacks(page, judged)
        for seen in [seen for seen in stall.ranks if seen.no_stack and seen.threads][:_MOST_THREADS]:
            page.write(
                ", ".join(map(one_line, seen.threads)), indent=4, lead=f"threads of rank {seen.rank}: ", style="dim"
            )
    elif judged.stacks:
        page.write("stacks: shown at the first look; SIGUSR1 shows them again", indent=4, style="dim")
    if text := ", ".join(map(_gpu, stall.gpus)) or one_line(stall.gpus_unseen):
        page.write(text, indent=4, lead="GPUs: ", style="dim")
    _notes(page, judged)
    return page.text()


def _notes(page: Page, judged: Judged) -> None:
    for note in judged.notes:
        page.write(one_line(note), indent=4, lead="note: ")


def _why(stall: Stall) -> str:
    """Why there is a look."""
    if stall.failure:
        return f"the command failed ({stall.failure.ended})"
    if stall.timed_out:
        return "a collective timed out"
    return "requested" if stall.asked else f"nothing new for {stall.silent_seconds:.0f} s"


def _stacks(page: Page, judged: Judged) -> None:
    for who, frames in judged.stacks.items():
        page.write(f"stack of {who}, innermost first:", indent=4, style="dim")
        for frame in frames[:_MOST_FRAMES]:
            page.write(one_line(frame), indent=6, style="dim")
        if len(frames) > _MOST_FRAMES:
            page.write(f"... and {len(frames) - _MOST_FRAMES} more frames", indent=6, style="dim")


def _gpu(use: GpuUse) -> str:
    watts = "" if use.power_watts is None else f" {use.power_watts:.0f} W"
    return f"{use.index}: {percent(use.busy_share)}{watts} {byte_count(use.memory_bytes)}"
