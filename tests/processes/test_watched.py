"""A call in a child that has a deadline: it ends, whatever the child does."""

import os
import re
import signal
import subprocess
import sys

import pytest
from jobs import Job, Start

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


@pytest.fixture
def watch(start: Start):
    """watch("    return 3", 10): what a process said that watched over this call, and its exit code."""

    def run(body: str, seconds: float) -> tuple[int, str, Job]:
        job = start("-c", SCRIPT.format(body=body, seconds=seconds))
        code = job.wait()
        job.check_left_nothing()
        return code, job.stdout.strip(), job

    return run


def test_the_exit_code_is_that_of_the_call(watch):
    code, said, _ = watch("    return 5", 10)
    assert (code, said) == (5, "")


def test_a_call_that_hangs_and_ignores_sigterm_is_killed_and_named_with_where_it_stood(watch):
    body = "    signal.signal(signal.SIGTERM, signal.SIG_IGN); stand('write /mnt/dead/x.json'); time.sleep(60)"
    code, said, _ = watch(body, 1)
    assert code == 3
    assert re.search(r"'write /mnt/dead/x.json' .* its 1 s ", said)


def test_a_stopped_call_is_told_from_one_that_works(watch):
    code, said, _ = watch("    os.kill(os.getpid(), signal.SIGSTOP)", 1)
    assert code == 3
    assert "state T" in said


def test_a_call_that_crashes_is_no_verdict(watch):
    code, said, _ = watch("    stand('judge'); os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)", 10)
    assert code == 3
    assert re.search(r"'judge' .*SIGSEGV", said)


ENDS_ITSELF = """\
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
"""


def test_a_call_that_ends_when_its_time_is_over_was_not_cancelled(watch):
    code, _, _ = watch(f"{ENDS_ITSELF}    time.sleep(60)", 2)
    assert code == 3


def test_a_signal_is_passed_on_and_the_call_ends_by_itself(watch):
    body = f"{ENDS_ITSELF}    os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    code, said, _ = watch(body, 10)
    assert (code, said) == (143, "")


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
