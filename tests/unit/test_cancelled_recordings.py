"""A run that is told to end, wherever it is: no rank is blamed for that, and what was established before stays."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import Raw, structs

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.model import End, Event, EventKind, Outcome, Recording, Report, Severity, Status, Trial, Verdict
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, simulate

QUIET = Noise(sigma=0.005, transients=0.0)
Ending = Callable[[Outcome], Outcome]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


def recorded(name: str) -> Recording:
    """A real run, whose trials say when they began, as those of today do."""
    run, now, trials = read_recording([Path(__file__).parents[1] / "recordings" / f"{name}.jsonl"]), 1.0, []
    for trial in run.trials:
        trials.append(structs.replace(trial, begin_seconds=now))
        now += max(own.seconds for own in of_trial(run, trial))
    return structs.replace(run, trials=tuple(trials))


def of_trial(run: Recording, trial: Trial) -> list[Outcome]:
    return [outcome for outcome in run.outcomes if outcome.trial == trial.number]


HEALTHY = {
    "1 host": lambda: recorded("healthy-2-ranks"),
    "3 hosts": lambda: simulate(Fleet(3, noise=QUIET)),
    "12 hosts with 2 ranks each": lambda: simulate(Fleet(12, noise=QUIET, seed=4), ranks_per_host=2),
}


def ending(status: Status, error: str = "", **more: object) -> Ending:
    """How an outcome ends instead."""
    return lambda outcome: structs.replace(outcome, status=status, error=error, data=Raw(b"null"), **more)


# As the coordinator closes a trial at the end of the run.
skipped = ending(Status.SKIPPED, interrupted=True)
# The signal was sent to the worker as well, and came there first.
killed = ending(Status.DIED, "killed by SIGTERM")
# Its peer's worker is gone.
echoing = ending(Status.RAISED, "RuntimeError: Connection closed by peer")
# After the signal: its worker met the end of another process.
failing = ending(Status.RAISED, "OSError: no such file", seconds=1e6)


def told(run: Recording, ranks: tuple[int, ...], seconds: float, signum: int) -> Recording:
    """The run with the events of its end; no ranks stand for rank 0's own process."""
    events = [Event(kind=EventKind.LEAVING, rank=rank, seconds=seconds, detail=str(signum)) for rank in ranks]
    own = [] if ranks else [Event(kind=EventKind.SIGNAL, seconds=seconds, detail=str(signum))]
    return structs.replace(run, events=(*run.events, *events, *own), end=End(seconds=seconds + 0.1))


def cut(
    run: Recording, number: int, whole: int, what: Ending | None = skipped, first: Ending | None = None
) -> Recording:
    """The run up to a trial, of which so many ranks had completed their part; the next one is `first`."""
    trials = tuple(trial for trial in run.trials if trial.number <= number)
    own = of_trial(run, trials[-1]) if trials else []
    rest = own[whole:]
    after = [(first if first and index == 0 else what)(outcome) for index, outcome in enumerate(rest)] if what else []
    if what is echoing and trials and max(map(len, trials[-1].groups)) == 1:  # no rank has a peer
        after = list(map(skipped, rest))
    before = [outcome for outcome in run.outcomes if outcome.trial < number]
    return structs.replace(run, trials=trials, outcomes=(*before, *own[:whole], *after), skips=(), end=None)


def moments(run: Recording) -> Iterator[tuple[int, int]]:
    """The boundaries of trials, and in each trial those of its outcomes; of many outcomes a few."""
    yield 0, 0
    for trial in run.trials:
        ranks = len(trial.ranks)
        yield from ((trial.number, whole) for whole in sorted({0, 1, ranks - 1, ranks}))


def now(run: Recording) -> float:
    """Just after the last outcome that came before the signal."""
    begins = {trial.number: trial.begin_seconds or 0.0 for trial in run.trials}
    ends = [begins[o.trial] + o.seconds for o in run.outcomes if not o.interrupted and o.seconds < 1e6]
    return max((*ends, *begins.values(), 1.0)) + 0.001


def assert_blames_no_rank(run: Recording, signum: int) -> None:
    report = judge(run, all_checks())
    assert report.exit_code == CODES[signum], report.sentence
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert {finding.code for finding in errors} <= {"RUN004.told"}
    assert blame(report) == set()
    assert report.hosts.failing == report.hosts.healthy == ()
    assert report.verdict.value == "unknown"


def blame(report: Report) -> set[str]:
    named = [finding for finding in report.findings if finding.severity is not Severity.NOTE]
    return {finding.code for finding in named if finding.ranks or finding.hosts or finding.gpus or finding.links}


@pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)
@pytest.mark.parametrize("who", ["one rank", "all ranks", "rank 0's process"])
@pytest.mark.parametrize("world", HEALTHY)
def test_a_healthy_run_that_is_cancelled_blames_no_rank_wherever_it_is(world, who, signum) -> None:
    run = HEALTHY[world]()
    size = run.header.world_size
    ranks = {"one rank": (size - 1,), "all ranks": tuple(range(size)), "rank 0's process": ()}[who]
    for number, whole in moments(run):
        for what, first in ((skipped, None), (None, None), (echoing, killed), (skipped, killed), (failing, None)):
            ended = cut(run, number, whole, what, first)
            assert_blames_no_rank(told(ended, ranks, now(ended), signum), signum)


FAULTY = {
    "rank_segfaults": lambda: recorded("failures/rank_segfaults"),
    "rank_sleeps": lambda: recorded("failures/rank_sleeps"),
    "values_corrupt": lambda: recorded("failures/values_corrupt"),
    "hang-4-ranks": lambda: recorded("hang-4-ranks"),
    "a slow host": lambda: simulate(Fleet(12, Faults(((Fault.SLOW_HOST, 1),), 0.4), QUIET, seed=3)),
}


@pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)
@pytest.mark.parametrize("fault", FAULTY)
def test_what_was_found_before_the_signal_stays_with_its_blame(fault, signum) -> None:
    run = FAULTY[fault]()
    whole = judge(run, all_checks())
    assert blame(whole)
    report = judge(told(run, (0,), now(run), signum), all_checks())
    cancelled = {f.code: f.ranks for f in report.findings if f.code != "RUN004.told"}
    assert cancelled == {f.code: f.ranks for f in whole.findings}
    assert report.exit_code == CODES[signum]
    assert report.verdict is (Verdict.UNFIT if whole.verdict is Verdict.UNFIT else Verdict.UNKNOWN)
    assert report.hosts.failing == whole.hosts.failing


def test_a_rank_that_died_before_the_others_were_told_to_stop_is_blamed() -> None:
    run = recorded("healthy-2-ranks")
    trial = next(trial for trial in run.trials if trial.code == "COL001")
    first, second = of_trial(run, trial)
    before = tuple(outcome for outcome in run.outcomes if outcome.trial < trial.number)
    died = structs.replace(killed(second), error="killed by SIGSEGV")
    trials = tuple(known for known in run.trials if known.number <= trial.number)
    run = structs.replace(run, trials=trials, outcomes=(*before, skipped(first), died), skips=())
    report = judge(told(run, (0,), now(run), signal.SIGTERM), all_checks())
    assert (report.exit_code, {f.code: f.ranks for f in report.findings if f.ranks}) == (143, {"RUN003.died": (1,)})


def test_a_rank_that_was_lost_is_the_reason_why_its_launcher_ends_the_others() -> None:
    run = cut(recorded("healthy-2-ranks"), 3, 0)
    outcomes = tuple(
        structs.replace(outcome, status=Status.UNHEARD, interrupted=False, error="it was lost")
        if (outcome.trial, outcome.rank) == (3, 1)
        else outcome
        for outcome in run.outcomes
    )
    run = told(structs.replace(run, outcomes=outcomes), (0,), now(run), signal.SIGTERM)
    lost = Event(kind=EventKind.LOST, rank=1, seconds=run.events[-1].seconds + 2.0, detail="it was silent for 2 s")
    report = judge(structs.replace(run, events=(*run.events, lost)), all_checks())
    assert (report.exit_code, {f.code: f.ranks for f in report.findings if f.ranks}) == (1, {"RUN002.lost": (1,)})


def test_a_worker_that_somebody_kills_in_a_run_that_goes_on_is_blamed() -> None:
    run = recorded("healthy-2-ranks")
    number = next(trial.number for trial in run.trials if trial.code == "COL001")
    ended = structs.replace(cut(run, number, 1, killed), skips=run.skips, end=run.end)
    assert "RUN003.died" in blame(judge(ended, all_checks()))
