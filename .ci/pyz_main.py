"""The start of ddpdiag.pyz: unpack its packages once for each user, and run the command line of ddpdiag from there.

Python cannot import compiled modules from an archive. They are unpacked to $XDG_CACHE_HOME/ddpdiag (~/.cache/ddpdiag),
in a folder with the name of the build. A folder is used only if no other user can change it or a folder above it,
because its files are executed. If there is no such folder, a temporary one is used, and removed at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

ARCHIVE = os.path.dirname(os.path.abspath(__file__))
SITE = "site"
USAGE = 2
NEED_TORCH = ("check", "allreduce-bench", "bench", "train", "host --torch")
TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")  # as typer reads variables
# Signals that end or notify a command. The kernel sends those of a terminal (Ctrl-C) to all processes of the command.
SENT_BY_KERNEL = 0x80  # SI_KERNEL in asm-generic/siginfo.h
FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def refuse(sentence: str) -> NoReturn:
    sys.stderr.write(f"ddpdiag: {sentence}\n")
    raise SystemExit(USAGE)


def is_private(folder: str, *, is_above: bool = False) -> bool:
    """Whether only this user and root can change `folder`, and replace it or a folder above it.

    In a sticky folder such as /tmp, others cannot replace a folder of this user. What is below a folder that others may
    not enter is out of their reach, whatever its mode. With `is_above`, `folder` is only a folder above the one to use.
    """
    is_out_of_reach = False
    for each in (*reversed(Path(folder).parents), folder):
        status = os.lstat(each)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            return False
        is_out_of_reach |= not status.st_mode & 0o011
        is_protected = (is_above or each != folder) and status.st_mode & stat.S_ISVTX
        if status.st_mode & 0o022 and not is_protected and not is_out_of_reach:
            return False
    return True


def refuse_shared(folder: str, *, is_above: bool = False) -> None:
    if not is_private(folder, is_above=is_above):
        raise PermissionError(f"{folder} or a folder above it may be changed by other users")


def runs_no_programs(folder: str) -> bool:
    """Whether compiled modules cannot be loaded from this folder."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def cache_folder() -> str:
    """The folder for unpacked builds, made if it is missing. Raises OSError if this user can have none.

    With the HOME of another user, as under `sudo -E`, nothing is made: root would own that user's ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # As the XDG specification demands, a relative path is ignored.
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise FileNotFoundError("this user has no home directory")
    folder = os.path.join(os.path.realpath(base), "ddpdiag")
    above = next(each for each in (folder, *map(str, Path(folder).parents)) if os.path.lexists(each))
    refuse_shared(above, is_above=True)
    if runs_no_programs(above):
        raise PermissionError(f"{above} is mounted with noexec")
    mask = os.umask(0o077)
    try:
        os.makedirs(folder, exist_ok=True)
    finally:
        os.umask(mask)
    return folder


def unpack(archive: zipfile.ZipFile, folder: str) -> None:
    archive.extractall(folder, [name for name in archive.namelist() if name.startswith(f"{SITE}/")])


def unpack_once(archive: zipfile.ZipFile, build: str) -> str:
    """The folder with this build, unpacked if it is missing. Raises OSError if it cannot be written or is not safe."""
    cache = cache_folder()
    folder = os.path.join(cache, build)
    # Before anything is written, too: where others can swap folders, root would write wherever a link of theirs leads.
    refuse_shared(cache)
    if not os.path.lexists(folder):
        # Several processes may start at once: each unpacks to a folder of its own, and one of them is renamed.
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as unfinished:
            unpack(archive, unfinished)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(unfinished, folder)
    refuse_shared(folder)
    return folder


def unpack_to_remove(archive: zipfile.ZipFile) -> str:
    """A new temporary folder with the packages. Ends the program with a sentence if there can be none."""
    try:
        parent = os.stat(tempfile.gettempdir()).st_mode
        if parent & 0o022 and not parent & stat.S_ISVTX:
            refuse(f"every user may replace files in {tempfile.gettempdir()}; set TMPDIR to a folder of your own")
        if runs_no_programs(tempfile.gettempdir()):
            refuse(f"{tempfile.gettempdir()} is mounted with noexec; set TMPDIR or XDG_CACHE_HOME to another folder")
        folder = tempfile.mkdtemp(prefix="ddpdiag-")
    except OSError as error:
        refuse(f"cannot unpack {ARCHIVE}: {error}; set TMPDIR or XDG_CACHE_HOME to a folder that you may write to")
    try:
        unpack(archive, folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        refuse(f"cannot unpack {ARCHIVE} to {folder}: {error}")
    return folder


def unblock(mask: "set[int]") -> None:
    """Receive the signals that were blocked: one that ends this process does so without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, handler)


def remove_after_child(folder: str, mask: "set[int]") -> None:
    """Fork. The child returns. The parent forwards signals to it, removes `folder` afterwards, and ends as it did."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    earlier = signal.sigpending()
    child = os.fork()
    if child == 0:
        unblock(mask)
        return
    ended = 0
    while not ended:
        received = signal.sigwaitinfo({signal.SIGCHLD, *FORWARDED})
        if received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
        elif received.si_code != SENT_BY_KERNEL or received.si_signo in earlier:
            os.kill(child, received.si_signo)
    shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def main() -> None:
    # A signal waits until it is known what must be removed.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with zipfile.ZipFile(ARCHIVE) as archive:
        build = json.loads(archive.read("build.json"))
        this = [sys.implementation.cache_tag, os.uname().machine]
        if this != build["python"]:
            refuse(f"{ARCHIVE} is built for {' on '.join(build['python'])}, and this Python is {' on '.join(this)}")
        try:
            folder, is_temporary = unpack_once(archive, build["name"]), False
        except OSError:
            folder, is_temporary = unpack_to_remove(archive), True
    if is_temporary:
        remove_after_child(folder, mask)
    else:
        unblock(mask)
    # In place of the archive: packages of this file are imported before those of the environment.
    sys.path[0] = os.path.join(folder, SITE)
    words = sys.argv[1:]
    command = next((word for word in words if not word.startswith("-")), "").replace("_", "-")
    # Without torch, `host --torch` would find every host UNFIT.
    wants_torch = "--torch" in words or os.environ.get("DDPDIAG_TORCH", "").lower() in TRUE_WORDS
    command = "host --torch" if command == "host" and wants_torch else command
    if command in NEED_TORCH and not {"-h", "--help"}.intersection(words) and find_spec("torch") is None:
        refuse(
            f"{command} needs torch, which {sys.executable} cannot import; run `pip install ddpdiag` in the "
            "environment of the training, and start that ddpdiag"
        )
    from ddpdiag.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
