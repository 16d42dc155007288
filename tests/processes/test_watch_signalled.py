"""`ddpdiag watch`: a signal reaches the command once, whoever sends it, and whomever it is sent to."""

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator

import pytest

WATCH = (sys.executable, "-m", "ddpdiag", "watch", "-q", "--")
# Blocked, two that come one after the other are seen as two.
COUNTS = """
import signal
wanted = signal.SIGTERM, signal.SIGHUP
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("up", flush=True)
count = 0
while signal.sigtimedwait(wanted, 0.5 if count else 60.0):
    count += 1
print(count, flush=True)
"""
PYTHON = (sys.executable, "-c", COUNTS)


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen]]:
    """started(words...): a process of a group of its own, whose command is up."""
    with contextlib.ExitStack() as stack:

        def start(*words: str, **settings) -> subprocess.Popen:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
            own = subprocess.Popen(words, start_new_session=True, **pipes)
            stack.enter_context(own)
            stack.callback(own.kill)
            assert own.stdout.readline() == "up\n"
            return own

        yield start


def test_a_signal_to_the_group_reaches_the_command_once(started):
    own = started(*WATCH, *PYTHON)
    os.killpg(own.pid, signal.SIGTERM)
    assert own.communicate(timeout=60) == ("1\n", "")


def test_so_does_one_of_timeout_which_sends_to_us_and_to_the_group(started):
    # It does so, too, with a signal of its own.
    own = started("timeout", "60", *WATCH, *PYTHON)
    own.terminate()
    assert own.communicate(timeout=60)[0] == "1\n"


def test_one_of_slurmstepd_to_us_alone_is_passed_on(started, tmp_path):
    # Slurm's proctrack/cgroup signals the children of slurmstepd only.
    own, stepd = started(*WATCH, *PYTHON), tmp_path / "slurmstepd"
    stepd.symlink_to(shutil.which("sh"))
    with subprocess.Popen([stepd, "-c", f"kill {own.pid}; sleep 1"]):
        assert own.communicate(timeout=60) == ("1\n", "")


def test_a_command_of_another_group_is_passed_what_the_group_gets(started):
    own = started(*WATCH, "setsid", *PYTHON)
    os.killpg(own.pid, signal.SIGTERM)
    assert own.communicate(timeout=60) == ("1\n", "")


def test_a_terminal_that_hangs_up_tells_the_first_of_its_session_only(started):
    # As with `ssh -t HOST ddpdiag watch ...`, which makes us that: the kernel tells nobody else.
    outer, inner = pty.openpty()
    own = started(*WATCH, *PYTHON, stdin=inner, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(inner)
    os.close(outer)
    assert own.communicate(timeout=60) == ("1\n", "")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes a capability from itself")
def test_that_a_signal_is_refused_is_said_once(started):
    without = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
    stranger = ("setpriv", "--reuid=1", "sh", "-c", "echo up; read line")
    own = started(*without, *WATCH, *stranger, stdin=subprocess.PIPE)
    own.terminate()
    told = own.stderr.readline()
    assert told.startswith("ddpdiag")
    assert {"SIGTERM", "(sh).", "0"} <= {*told.split()}
    own.terminate()
    own.send_signal(signal.SIGHUP)
    assert "SIGHUP" in own.stderr.readline()
    assert own.communicate("\n", timeout=60) == ("", "")
    assert own.returncode == 0
