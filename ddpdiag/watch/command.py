"""`ddpdiag watch`: options into data, looks onto standard error and into a bundle."""

import io
import math
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import show, terminal
from ddpdiag.codec import decode, encode, read_bytes, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.render import files
from ddpdiag.watch import render
from ddpdiag.watch.child import Wrapped, leave_as
from ddpdiag.watch.flight_dump import BUFFER_NAMES, FILE_NAMES, PIPE_NAME
from ddpdiag.watch.judge import judged
from ddpdiag.watch.loop import Wanted, Watch
from ddpdiag.watch.merge import merged
from ddpdiag.watch.model import Judged, Stall
from ddpdiag.watch.output import open_outlets
from ddpdiag.watch.peers import Fellows, job_name, who_we_are
from ddpdiag.watch.remote_launchers import in_script, is_far, is_near
from ddpdiag.watch.reporter import Mouth

_LEAST_STALL = 1.0
# Entries that NCCL's flight recorder keeps; torch's tutorials use it.
_BUFFER_ENTRIES = "2000"
_SHOW_SECONDS = 2.0
_LARGEST_SCRIPT = 1 << 20
_INLINE = re.compile("-[a-z]*c")  # a shell's option, as -c and -lc
_DEAF = (
    "Standard output and error go where nothing shows that they are written to (/dev/null), and no --output names "
    "another file."
)


def run(
    command: Sequence[str],
    *,
    stall: float,
    kill: bool,
    output: Sequence[str],
    bundle: str | None,
    flight_recorder: bool,
    alone: bool,
) -> int:
    """Start the command, watch it, and leave as it does."""
    if not command[0]:
        raise UsageError("the command to watch is empty: expected it after --, such as torchrun train.py")
    refuse_far(command, flight_recorder=flight_recorder)
    if not math.isfinite(stall) or stall < _LEAST_STALL:
        raise UsageError(f"--stall {stall:g}: expected {_LEAST_STALL:g} s or more")
    keeper = None if bundle is None else Bundle(bundle)
    outlets = open_outlets(output)
    if kill and outlets.deaf and not flight_recorder:
        raise UsageError(
            f"--kill: {_DEAF} Give --output FILE, or --flight-recorder: else a healthy job would be killed"
        )
    folder = tempfile.mkdtemp(prefix="ddpdiag-watch-") if flight_recorder else None
    try:
        env = os.environ | (recorder_variables(folder) if folder is not None else {})
        wrapped = Wrapped(command, env, {number: relay.descriptor for number, relay in outlets.relays.items()})
        for relay in dict.fromkeys(outlets.relays.values()):
            relay.start()
        wanted = Wanted(command, stall, kill, (_DEAF,) if outlets.deaf else (), output, flight_recorder)
        fellows = Fellows(None if alone else job_name(os.environ), who_we_are(os.environ, kill=kill))
        mouth = Mouth(lambda s, j: _briefly(lambda: _told(s, j, keeper)), lambda said: _briefly(lambda: complain(said)))
        watching = Watch(wanted, wrapped, outlets, fellows, mouth)
        watching.run()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if watching.bug is not None:
        complain("a bug in ddpdiag ended the watching, not the command; please report what follows:\n" + watching.bug)
    if watching.killed is not None:
        return watching.killed
    return 0 if wrapped.status is None else leave_as(wrapped.status)


def read(paths: Sequence[str]) -> int:
    """Judge what --bundle kept, of all hosts that looked at the newest silence; 1 if a rank is named, else 3."""
    if not all(paths):
        raise UsageError("--read: the name of a file is empty")
    stall = merged([stall for path in paths for stall in _kept(path)])
    verdict = judged(stall)
    width, color = terminal(sys.stdout)
    show(render.render(stall, verdict, color=color, width=width, stacks=True), sys.stdout)
    return ExitCode.UNFIT if verdict.named else ExitCode.UNKNOWN


def _kept(path: str) -> list[Stall]:
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
        raise UsageError(f"{where}: no file that --bundle of `ddpdiag watch` kept: {reason}")
    return looks


def refuse_far(command: Sequence[str], *, flight_recorder: bool) -> None:
    """UsageError where the ranks start on other hosts: NCCL ends a rank that cannot make its pipe in our directory.

    A script is searched for launchers by name. What a program starts by itself shows only once it runs.
    """
    found = _far(command) if flight_recorder else None
    if found is not None:
        where, launcher = found
        raise UsageError(
            f"--flight-recorder: {where}{launcher} starts ranks on other hosts, where its files are not: start us on "
            f"each, as `{launcher} ddpdiag watch --flight-recorder -- COMMAND`"
        )


def _far(command: Sequence[str]) -> tuple[str, str] | None:
    """Which far launcher a command line names, or the script that it starts; and where that is, with ": ".

    Words behind a script, or behind the program that trains, are arguments of it.
    """
    for before, word in pairwise(("", *command)):
        inline = _INLINE.fullmatch(before) is not None
        text = word if inline else _script(word)
        if is_near(word) or (text is not None and "python" in text.partition("\n")[0]):
            return None
        if is_far(word):
            return "", os.path.basename(word)
        if text is not None:
            found = in_script(text)
            return None if found is None else (f"{readable(word)}:{found[0]}: " if not inline else "", found[1])
    return None


def _script(word: str) -> str | None:
    """The text of a file of the command's that is one."""
    try:
        with open(word, "rb") as file:
            data = file.read(_LARGEST_SCRIPT) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"\0"
    except (OSError, ValueError):
        return None
    return None if b"\0" in data else data.decode(errors="replace")


def recorder_variables(folder: str) -> dict[str, str]:
    """What lets an outsider ask NCCL for its flight recorder; what the user has set stays."""
    pipe, file = f"{folder}/ask-", f"{folder}/rank-"
    wanted = dict.fromkeys(BUFFER_NAMES, _BUFFER_ENTRIES) | {PIPE_NAME: pipe} | dict.fromkeys(FILE_NAMES, file)
    wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


class Bundle:
    """A file of its own in a directory that is there: every look is one line."""

    def __init__(self, folder: str) -> None:
        where = readable(folder)
        if not Path(folder).is_dir():
            raise UsageError(f"--bundle {where}: no such directory on {socket.gethostname()}")
        self.path = Path(folder) / f"watch-{readable(socket.gethostname())}-{os.getpid()}.jsonl"
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--bundle {where}: the directory is not writable")

    def keep(self, stall: Stall) -> None:
        """Add a look."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(stall) + b"\n")


def _briefly(write: Callable[[], None]) -> None:
    """For so long only: the terminal or the file system may be what hangs."""
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SHOW_SECONDS)


def _told(stall: Stall, verdict: Judged, keeper: Bundle | None) -> None:
    """Show and keep a look."""
    width, color = terminal(sys.stderr)
    # A progress bar leaves the cursor in the middle of its line.
    text = "\n" + render.render(stall, verdict, color=color, width=width)
    if keeper is not None:
        try:
            keeper.keep(stall)
            text += f"    all that was seen is in {readable(str(keeper.path))}\n"
        except OSError as error:
            text += f"    not kept: {readable(str(keeper.path))}: {error.strerror or error}\n"
    try:
        files.show(text, sys.stderr)
    except (OSError, ValueError):
        return
