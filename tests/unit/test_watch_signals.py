"""The target of a signal: the group of `ddpdiag watch`, or that process alone."""

import os
import signal

from ddpdiag.watch.child import SignalProbe


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))


def test_the_probe_distinguishes_signals_to_the_group_and_ends() -> None:
    before = children()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
    probe = SignalProbe()
    (pid,) = children() - before
    assert os.getpgid(pid) == os.getpgrp()
    assert not probe.wait_for(signal.SIGTERM)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGHUP)
    assert not probe.wait_for(signal.SIGINT)
    assert [probe.wait_for(signum) for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)] == [True, True, False]
    os.kill(pid, signal.SIGKILL)
    assert not probe.wait_for(signal.SIGTERM)
    assert not probe.is_running
    probe.end()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert children() == before
