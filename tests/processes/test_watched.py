"""A call in a child that has a deadline: it ends, whatever the child does."""

import os
import re
import signal
import subprocess
import sys

import pytest
from jobs import Start

SCRIPT = """\
import os, signal, sys, time
from ddpdiag.errors import RunLost
from ddpdiag.runtime.single_rank import call_with_deadline

def call(stand):
{body}

try:
    sys.exit(call_with_deadline(call, {seconds}))
except RunLost as lost:
    print(lost, flush=True)
    os._exit(lost.exit_code)
"""


ENDS_ITSELF = """\
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
"""
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
CALLS = {
    "returns": ("    return 5", 10, 5, ""),
    "hangs and ignores SIGTERM": (
        f"    {IGNORES}; stand('write /mnt/dead/x.json'); time.sleep(60)",
        1,
        3,
        r".*'write /mnt/dead/x.json' .* its 1 s .*",
    ),
    "is stopped": ("    os.kill(os.getpid(), signal.SIGSTOP)", 1, 3, ".*state T.*"),
    "crashes": (
        "    stand('judge'); os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)",
        10,
        3,
        ".*'judge' .*SIGSEGV.*",
    ),
    "ends when its time is over": (f"{ENDS_ITSELF}    time.sleep(60)", 2, 3, ".*"),
    "ends at a signal, which is passed on": (
        f"{ENDS_ITSELF}    os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)",
        10,
        143,
        "",
    ),
}


@pytest.mark.parametrize(("body", "seconds", "code", "pattern"), CALLS.values(), ids=CALLS)
def test_a_call_ends_with_its_exit_code_or_is_named(start: Start, body, seconds, code, pattern):
    job = start("-c", SCRIPT.format(body=body, seconds=seconds))
    assert job.wait() == code, job.told()
    assert re.fullmatch(pattern, job.stdout.strip(), re.DOTALL)
    job.check_left_nothing()


def captured(body: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """As $( ) has it: until the last one that holds the pipe has ended."""
    script = SCRIPT.format(body=body, seconds=seconds)
    return subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )


def test_who_reads_the_output_is_not_held_up_by_what_goes_on() -> None:
    """A process that survives SIGKILL cannot be had; one that was forked off holds the output as long."""
    body = """\
    if not (left := os.fork()):
        time.sleep(60)
    print("said", left, flush=True)
    print("and", file=sys.stderr, flush=True)
    os.write(1, b"more" * 50_000)
    return 5"""
    done = captured(body, 20)
    said, number = done.stdout.split()[:2]
    os.kill(int(number), signal.SIGKILL)  # it lives
    assert (done.returncode, said) == (5, "said")
    assert done.stdout.endswith("\nand\n" + "more" * 50_000)


def test_what_was_said_before_the_end_of_the_time_is_passed_on() -> None:
    done = captured("    print('said', flush=True); time.sleep(60)", 1)
    assert done.returncode == 3
    assert re.fullmatch(r"said\npid \d+ .* its 1 s .*\n", done.stdout)


def test_a_reader_that_left_is_noticed() -> None:
    script = SCRIPT.format(body="    os.write(1, b'said'); return 0", seconds=10)
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", script], stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(theirs)
    assert "BrokenPipeError" in done.stderr
