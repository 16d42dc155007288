"""One namespace of each kind (network, host name, mounts, processes), held open by a process of ours.

Nothing here has a name that others could meet: no entry in /run/netns, no device in the machine's own network. All of
it, and every process that was started inside, goes when the holder ends, and the holder ends when the pipe to it
closes, that is also when the tests are killed.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 60.0
# As the first process of its PID namespace it inherits orphans; a kernel reaps them for whoever ignores SIGCHLD.
_HOLD = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('here', flush=True); sys.stdin.read()"
_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
_KINDS = ("net", "uts", "mnt")


class NetworkError(Exception):
    """A namespace, a device or a rule could not be made; the text says what the command answered."""


class Namespaces:
    """A network, a host name, a view of the file system and a process table of their own."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            [*_UNSHARE, sys.executable, "-I", "-S", "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests, which then close this in order
        )
        try:
            if self._holder.stdout.readline() != b"here\n":
                raise NetworkError(f"unshare: {self._holder.stderr.read().decode().strip()}")
            # Nobody else can get this number while we have not waited for it.
            proc = Path(f"/proc/{self._holder.pid}/ns")
            self.pid = self._holder.pid
            self._options = [f"--{'mount' if kind == 'mnt' else kind}={proc / kind}" for kind in _KINDS]
            # The holder is unshare's child: unshare itself is not in the PID namespace that it made.
            self._options.append(f"--pid={proc / 'pid_for_children'}")
        except BaseException:
            self.close()
            raise

    def enter(self, folder: Path) -> list[str]:
        """What to put before a command so that it runs inside, in `folder`."""
        return ["nsenter", *self._options, f"--wd={folder}", "--"]

    def call(self, *command: str | Path) -> str:
        """Run a command inside; its output, or a NetworkError with what it said."""
        return called([*self.enter(Path("/")), *map(str, command)])

    def cable(self, device: str, other: "Namespaces", other_device: str) -> None:
        """A pair of devices, one here and one there."""
        # In this network only: a process table of its own would not know the other holder's number.
        pair = ["ip", "link", "add", device, "type", "veth", "peer", "name", other_device, "netns", str(other.pid)]
        called(["nsenter", self._options[0], "--", *pair])

    def close(self) -> None:
        """End every process inside, and with the last one everything else."""
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.close()
        try:
            self._holder.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()  # --kill-child takes the namespace along
            self._holder.wait(_SECONDS)
        finally:
            self._holder.stdout.close()
            self._holder.stderr.close()


def called(command: Sequence[str]) -> str:
    """Output of a command of the machine; a NetworkError with what it said if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=_environ())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _environ() -> dict[str, str]:
    # ip, iptables and tc live where an ordinary user's path does not look.
    return {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "LC_ALL": "C"}
