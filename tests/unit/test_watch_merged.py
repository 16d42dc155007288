"""Looks of several hosts: which of them are of one silence, and what they say together."""

import time

import pytest
from msgspec import structs

from ddpdiag.errors import UsageError
from ddpdiag.model import ProcessState
from ddpdiag.watch.bundle import merged
from ddpdiag.watch.judge import judge, notes
from ddpdiag.watch.look import Look, Witness
from ddpdiag.watch.report import render

WAITS = ("all_reduce (distributed_c10d.py:3252)", "<module> (train.py:25)")
COMPUTES = ("spin (train.py:7)", "<module> (train.py:14)")


def seen(rank: int, stack: tuple[str, ...]) -> Witness:
    process = ProcessState(pid=100 + rank, state="S", stack=stack)
    return Witness(rank=rank, pid=100 + rank, process=process, core_share=0.0, holds_gpu=False)


def look(host: str, at: float, *stacks: tuple[str, ...], first: int = 0, silent: float = 300.0, **more) -> Look:
    """The ranks from `first` on, a stack each, of four."""
    ranks = tuple(seen(first + n, stack) for n, stack in enumerate(stacks))
    facts = {"host": host, "unix_seconds": at, "silent_seconds": silent, "stall_seconds": 300.0, "command": "torchrun"}
    return Look(**facts | {"ranks": ranks, "world_size": 4} | more)


def ranks_of(stall: Look) -> list[int]:
    return [own.rank for own in stall.ranks]


def shown(look: Look, **how) -> str:
    """The report, with a time that is the same in all time zones."""
    when = time.strftime("%H:%M:%S", time.localtime(look.unix_seconds))
    return render(look, judge(look), notes(look), color=False, width=80, **how).replace(when, "HH:MM:SS")


def test_hosts_that_each_only_wait_name_together_who_is_missing(golden):
    here = look("n0", 1000.0, WAITS, WAITS)
    there = [look("n1", at, stack, COMPUTES, first=2) for at, stack in ((700.0, COMPUTES), (1009.0, WAITS))]
    assert judge(here).ranks == ()
    both = merged([there[1], here, there[0]])
    assert judge(both).ranks == (3,)
    golden(*notes(both))


def test_a_report_shows_stacks(golden):
    stall = merged([look("n0", 1000.0, WAITS, COMPUTES, silent=600.0, looks=2)])
    when = time.strftime("%H:%M:%S", time.localtime(1000.0))
    golden(render(stall, judge(stall), notes(stall), color=False, width=80).replace(when, "HH:MM:SS"))


def test_a_quiet_report_has_no_stacks(golden):
    stall = structs.replace(merged([look("n0", 1000.0, WAITS, COMPUTES)]), gpus_unseen="no GPU was looked at")
    when = time.strftime("%H:%M:%S", time.localtime(1000.0))
    golden(render(stall, judge(stall), notes(stall), color=False, width=80, quiet=True).replace(when, "HH:MM:SS"))


def test_two_hosts_of_one_rank_are_of_two_trainings(golden):
    with pytest.raises(UsageError) as caught:
        merged([look("n0", 1000.0, WAITS), look("n2", 1000.0, WAITS)])
    golden(str(caught.value))


def test_a_look_from_before_the_silence_is_left_out_and_told(golden):
    # Where rank 0 is not, nothing may ever be heard: that host looked at 2400 s, before the others fell silent at 3000.
    far = [look("n1", silent, COMPUTES, COMPUTES, first=2, silent=silent) for silent in (300.0, 600.0, 1200.0, 2400.0)]
    stall = merged([*far, look("n0", 3300.0, WAITS, WAITS)])
    assert ranks_of(stall) == [0, 1]
    golden(*stall.notes)
    stall = merged([*far, look("n0", 3300.0, WAITS, WAITS), look("n1", 4800.0, WAITS, WAITS, first=2, silent=4800.0)])
    assert ranks_of(stall) == [2, 3], "n0 has not looked again at 3600: it went on"
    golden(*stall.notes)


def test_looks_that_come_ever_more_rarely_are_of_one_silence_while_it_lasts():
    early = look("n0", 2200.0, WAITS, WAITS, silent=1200.0)
    late = look("n1", 3300.0, WAITS, COMPUTES, first=2, silent=2000.0)
    assert ranks_of(merged([early, late])) == [0, 1, 2, 3], "the next look of n0 is due at 3400"


def test_looks_that_a_signal_asked_for_on_all_hosts_at_once_are_joined():
    asked = [
        look("n0", 5000.0, WAITS, WAITS, silent=2.0, asked=True),
        look("n1", 5003.0, WAITS, COMPUTES, first=2, silent=4000.0, asked=True),
    ]
    assert judge(merged(asked)).ranks == (3,)


def test_two_watches_of_one_host_are_joined_and_of_each_the_last_look_counts(golden):
    ones = [look("n0", 1000.0 + n, WAITS, first=n) for n in range(2)]
    old = look("n0", 960.0, COMPUTES, COMPUTES, silent=260.0, asked=True)
    stall = merged([old, *ones])
    assert (ranks_of(stall), judge(stall).ranks) == ([0, 1], ())
    golden(judge(stall).title)


def test_ranks_that_nothing_names_are_not_joined_with_others(golden):
    guessed = look("n1", 1005.0, WAITS, guessed=True)
    stall = merged([look("n0", 1000.0, WAITS, WAITS), guessed])
    assert ranks_of(stall) == [0, 1]
    assert ranks_of(merged([guessed])) == [0]
    golden(*stall.notes)
