"""What the report of many hosts says of all of them together."""

import pytest
from msgspec import Raw, structs
from test_simulate import QUIET, fleet, names, simulated

from ddpdiag.checks.fabric.rounds import Data
from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import decode, encode
from ddpdiag.judgement import judge
from ddpdiag.model import Event, EventKind, Finding
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, simulate
from ddpdiag.stats import Samples


def test_of_many_bad_hosts_the_verdict_names_them_and_not_one(golden, tmp_path):
    report = simulated(tmp_path, "--hosts", "64", *QUIET, "--fault", "dead-host:5").report
    assert set(report["hosts"]["failing"]) == names(fleet(64, (Fault.DEAD_HOST, 5)).failing)
    golden(report["sentence"])


def test_slow_hosts_are_a_list_and_in_the_verdict(golden, tmp_path):
    done = simulated(tmp_path, "--hosts", "64", *QUIET, "--fault", "slow-host:5")
    assert set(done.report["hosts"]["slow"]) == names(fleet(64, (Fault.SLOW_HOST, 5)).failing)
    assert all(0.2 < share < 0.3 for share in done.report["hosts"]["slow"].values())
    golden(*done.text.rstrip().split("\n\n")[-2:])


def test_hosts_that_are_slow_only_all_together_are_a_warning_that_blames_nobody(golden):
    whole = simulate(Fleet(32, Faults(()), seed=1))
    proof = whole.trials[-1]
    assert proof.params["phase"] == "verify"
    slow = [
        structs.replace(own, data=Raw(encode(halved(decode(own.data, Data)))))
        for own in whole.outcomes
        if own.trial == proof.number
    ]
    again = structs.replace(proof, number=proof.number + 1)
    twice = (*slow, *(structs.replace(own, trial=again.number) for own in slow))
    others = tuple(own for own in whole.outcomes if own.trial != proof.number)
    report = judge(structs.replace(whole, trials=(*whole.trials, again), outcomes=(*others, *twice)), all_checks())
    found = {finding.code: finding for finding in report.findings}
    assert not found["FAB001.together"].hosts
    assert len(report.hosts.healthy) == 32
    golden(found["FAB001.together"], found["FAB001.clear"])


def halved(data: Data) -> Data:
    """At half the rate."""
    seconds = Samples(
        min=2 * data.seconds.min, median=2 * data.seconds.median, p95=2 * data.seconds.p95, count=data.seconds.count
    )
    return structs.replace(data, seconds=seconds)


ENDS = {
    "budget": {"kind": EventKind.BUDGET},
    "hurry": {"hurried": True},
    "lost": {"kind": EventKind.LOST},
    "nothing known": {},
}


def ended_by(*, kind: EventKind | None = None, hurried: bool = False) -> Finding:
    """What is said where a search among hosts was cut short by this."""
    whole = simulate(Fleet(64, Faults(((Fault.SLOW_HOST, 2),), 0.5), seed=1))
    trials = (structs.replace(whole.trials[0], is_shortened=hurried),)
    events = () if kind is None else (Event(kind=kind, rank=3, seconds=9.0, detail="15"),)
    outcomes = tuple(own for own in whole.outcomes if own.trial == trials[0].number)
    cut = structs.replace(whole, trials=trials, outcomes=outcomes[:-5], events=events)
    report = judge(cut, all_checks())
    return next(finding for finding in report.findings if finding.code == "FAB001.unmeasured")


@pytest.mark.parametrize("how", ENDS.values(), ids=ENDS)
def test_what_ended_a_search_is_what_its_remedy_is_about(golden, how):
    golden(ended_by(**how))
