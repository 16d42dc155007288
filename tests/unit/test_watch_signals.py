"""Whom a signal was meant for, and what is told of one that may not be passed on."""

import os
import signal

from ddpdiag.watch.model import Judged, Stall
from ddpdiag.watch.reporter import Mouth
from ddpdiag.watch.signal_probe import Bystander


def bystanders() -> list[int]:
    """Our own children that do nothing."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def test_a_signal_to_all_is_told_from_one_to_us_alone():
    before = set(bystanders())
    bystander = Bystander()
    (own,) = set(bystanders()) - before
    assert os.getpgid(own) == os.getpgrp()
    assert bystander.saw(signal.SIGTERM) is False
    os.kill(own, signal.SIGTERM)
    assert bystander.saw(signal.SIGINT) is False
    assert bystander.saw(signal.SIGTERM) is True
    assert bystander.saw(signal.SIGTERM) is False, "each signal counts once"
    bystander.leave()
    assert set(bystanders()) == before


def test_two_signals_at_once_are_both_known():
    before = set(bystanders())
    bystander = Bystander()
    (own,) = set(bystanders()) - before
    os.kill(own, signal.SIGTERM)
    os.kill(own, signal.SIGHUP)
    assert bystander.saw(signal.SIGHUP) is True
    assert bystander.saw(signal.SIGTERM) is True
    assert bystander.saw(signal.SIGTERM) is False
    bystander.leave()


def test_a_signal_that_was_never_ours_is_forgotten():
    before = set(bystanders())
    bystander = Bystander()
    (own,) = set(bystanders()) - before
    os.kill(own, signal.SIGTERM)  # pkill cat
    bystander.forget()
    assert bystander.saw(signal.SIGTERM) is False
    bystander.leave()


def test_a_bystander_that_is_gone_says_nothing_and_gets_a_successor():
    before = set(bystanders())
    bystander = Bystander()
    os.kill(*(set(bystanders()) - before), signal.SIGKILL)
    while bystander.saw(signal.SIGTERM) is not None:
        pass
    assert bystander.saw(signal.SIGTERM) is False
    bystander.leave()
    assert bystander.saw(signal.SIGTERM) is None


def test_without_the_program_there_is_no_bystander(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert Bystander().saw(signal.SIGTERM) is None


# What is told of it --------------------------------------------------------------------------------------------------


def look(*, asked: bool = False) -> Stall:
    return Stall(host="n0", unix_seconds=0.0, silent_seconds=9.0, stall_seconds=8.0, command="torchrun", asked=asked)


def test_what_is_refused_is_said_once_and_again_to_who_asks():
    shown: list[tuple[str, ...]] = []
    said: list[str] = []
    mouth = Mouth(lambda _, verdict: shown.append(verdict.notes), said.append)
    verdict = Judged(named=(), title="", message="", remedy="", notes=("No stack of rank 0: refused.", "Not ended."))
    for asked in (False, False, True):
        mouth.tell(look(asked=asked), verdict, why="Not ended.")
    assert shown == [verdict.notes, ("Not ended.",), verdict.notes]
    for sentence in ("SIGTERM is not passed on.", "", "SIGTERM is not passed on."):
        mouth.say_once(sentence)
    assert said == ["SIGTERM is not passed on."]
