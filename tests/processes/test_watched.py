"""A call in a child that has a deadline: it ends, whatever the child does."""

import re

import pytest
from jobs import Job, Start

SCRIPT = """\
import os, signal, sys, time
from ddpdiag.errors import RunLost
from ddpdiag.runtime.watched import watched

def call(stand):
{body}

try:
    sys.exit(watched(call, {seconds}))
except RunLost as lost:
    print(lost, flush=True)
    os._exit(lost.exit_code)
"""


@pytest.fixture
def watch(start: Start):
    """watch("    return 3", 10): what a process said that watched over this call, and its exit code."""

    def run(body: str, seconds: float) -> tuple[int, str, Job]:
        job = start("-c", SCRIPT.format(body=body, seconds=seconds))
        code = job.wait(20)
        job.check_left_nothing()
        return code, job.stdout.strip(), job

    return run


def test_the_exit_code_is_that_of_the_call(watch):
    code, said, _ = watch("    return 5", 10)
    assert (code, said) == (5, "")


def test_a_call_that_hangs_and_ignores_sigterm_is_killed_and_named_with_where_it_stood(watch):
    body = "    signal.signal(signal.SIGTERM, signal.SIG_IGN); stand('write /mnt/dead/x.json'); time.sleep(60)"
    code, said, _ = watch(body, 0.6)
    assert code == 3
    assert re.search(r"stood at 'write /mnt/dead/x.json' .* when its 0.6 s were over; it was killed", said)


def test_a_stopped_call_is_told_from_one_that_works(watch):
    code, said, _ = watch("    os.kill(os.getpid(), signal.SIGSTOP)", 0.6)
    assert code == 3
    assert "state T" in said


def test_a_call_that_crashes_is_no_verdict(watch):
    code, said, _ = watch("    stand('judge'); os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)", 10)
    assert code == 3
    assert re.search(r"stood at 'judge' .*SIGSEGV", said)


def test_a_signal_is_passed_on_and_the_call_ends_by_itself(watch):
    body = """\
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)"""
    code, said, _ = watch(body, 10)
    assert (code, said) == (143, "")
