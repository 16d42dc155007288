"""Whom a signal was meant for, and what is told of one that may not be passed on."""

import os
import signal
import subprocess

from ddpdiag.model import Finding, ProcessState, Severity
from ddpdiag.watch.child import SignalProbe, end_all
from ddpdiag.watch.command import kill_text, may_work_text
from ddpdiag.watch.look import Look, Witness
from ddpdiag.watch.report import Reporter


def bystanders() -> list[int]:
    """Our own children that do nothing."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def test_a_signal_to_all_is_told_from_one_to_us_alone():
    before = set(bystanders())
    probe = SignalProbe()
    (own,) = set(bystanders()) - before
    assert os.getpgid(own) == os.getpgrp()
    assert probe.received(signal.SIGTERM) is False
    os.kill(own, signal.SIGTERM)
    assert probe.received(signal.SIGINT) is False
    assert probe.received(signal.SIGTERM) is True
    assert probe.received(signal.SIGTERM) is False, "each signal counts once"
    probe.end()
    assert set(bystanders()) == before


def test_two_signals_at_once_are_both_known():
    before = set(bystanders())
    probe = SignalProbe()
    (own,) = set(bystanders()) - before
    os.kill(own, signal.SIGTERM)
    os.kill(own, signal.SIGHUP)
    assert probe.received(signal.SIGHUP) is True
    assert probe.received(signal.SIGTERM) is True
    assert probe.received(signal.SIGTERM) is False
    probe.end()


def test_a_signal_that_was_never_ours_is_forgotten():
    before = set(bystanders())
    probe = SignalProbe()
    (own,) = set(bystanders()) - before
    os.kill(own, signal.SIGTERM)  # pkill cat
    probe.forget()
    assert probe.received(signal.SIGTERM) is False
    probe.end()


def test_a_bystander_that_is_gone_says_nothing_and_gets_a_successor():
    before = set(bystanders())
    probe = SignalProbe()
    os.kill(*(set(bystanders()) - before), signal.SIGKILL)
    while probe.received(signal.SIGTERM) is not None:
        pass
    assert probe.received(signal.SIGTERM) is False
    probe.end()
    assert probe.received(signal.SIGTERM) is None


def test_without_the_program_there_is_no_bystander(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert SignalProbe().received(signal.SIGTERM) is None


# What --kill ends ----------------------------------------------------------------------------------------------------


class Command:
    """A process as `end_all` takes it."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.send = process.send_signal
        self.is_over = lambda: process.poll() is not None


def test_what_outlives_sigterm_is_killed_and_named():
    stubborn = ("sh", "-c", "trap '' TERM; echo ready; read word")
    with subprocess.Popen(stubborn, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        command = Command(process)
        told = end_all(command, (), lambda: [] if command.is_over() else [process.pid], grace_seconds=0.2)
        assert command.is_over()
    assert told == f"--kill: SIGKILL to pid {process.pid} (sh), still running 0.2 s after SIGTERM."


def finding(*ranks: int) -> Finding:
    return Finding(code="watch.awaited", severity=Severity.ERROR, title="", message="", ranks=ranks)


def test_a_kill_names_processes_signals_and_the_reason(golden):
    for named in ((), (3,), (1, 2)):
        golden(kill_text(look(), finding(*named), [7, 9]))


def seen(rank: int, *stack: str, state: str = "S") -> Witness:
    return Witness(rank=rank, pid=9, process=ProcessState(pid=9, state=state, stack=stack), holds_gpu=False)


def test_a_rank_that_may_validate_is_not_killed_at_the_first_look(golden):
    waits, runs = seen(0, "barrier (distributed_c10d.py:4900)"), seen(1, "validate (train.py:9)", state="R")
    golden(may_work_text(look(ranks=(waits, runs))))
    assert may_work_text(look(ranks=(waits, runs), looks=2)) == ""
    assert may_work_text(look(ranks=(waits, seen(1, state="T")))) == ""
    assert may_work_text(look(ranks=(waits,))) == ""


# Reports -------------------------------------------------------------------------------------------------------------


def look(**more) -> Look:
    return Look(host="n0", unix_seconds=0.0, silent_seconds=9.0, stall_seconds=8.0, command="torchrun", **more)


def test_a_note_is_shown_once_and_again_on_request():
    shown: list[tuple[str, ...]] = []
    said: list[str] = []
    reporter = Reporter(lambda _, __, notes: shown.append(tuple(notes)), said.append)
    notes = ("No stack of rank 0: refused.", "Not ended.")
    for asked in (False, False, True):
        reporter.report(look(asked=asked, notes=notes), finding(), why="Not ended.")
    assert shown == [notes, ("Not ended.",), notes]
    for sentence in ("SIGTERM is not passed on.", "", "SIGTERM is not passed on."):
        reporter.say_once(sentence)
    assert said == ["SIGTERM is not passed on."]
