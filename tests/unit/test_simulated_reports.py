"""What the report of many hosts says of all of them together."""

import re

from msgspec import Raw, structs
from test_simulate import QUIET, fleet, names, simulated

from ddpdiag.checks import all_checks
from ddpdiag.checks.fab_view import Data
from ddpdiag.codec import decode, encode
from ddpdiag.judgement import judge
from ddpdiag.model import Event, EventKind, Skip
from ddpdiag.simulate import Fault, Faults, Fleet, simulate
from ddpdiag.stats import Samples


def test_of_many_bad_hosts_the_verdict_names_them_and_not_one(tmp_path):
    report = simulated(tmp_path, "--hosts", "64", *QUIET, "--fault", "dead-host:5").report
    bad = sorted(names(fleet(64, (Fault.DEAD_HOST, 5)).bad))
    assert (
        f"512 ranks on 64 hosts cannot train: 5 of 64 hosts are bad: {', '.join(bad)} (FAB001.alone: "
        in (report["sentence"])
    )
    assert "more error" not in report["sentence"]


def test_slow_hosts_are_a_list_and_in_the_verdict(tmp_path):
    done = simulated(tmp_path, "--hosts", "64", *QUIET, "--fault", "slow-host:5")
    assert set(done.report["hosts"]["slow"]) == names(fleet(64, (Fault.SLOW_HOST, 5)).bad)
    assert all(0.2 < share < 0.3 for share in done.report["hosts"]["slow"].values())
    assert re.search(r"; but 5 of 64 hosts hold it back, by up to 2\d %; 5 warnings\.", done.report["sentence"])
    assert re.search(r"\n5 hosts are 2\d(?: to 2\d)? % slower than most:\n    n\[", done.text)


def test_a_leaf_comes_before_hosts_that_are_bad_by_themselves(tmp_path):
    done = simulated(tmp_path, "--hosts", "256", *QUIET, "--fault", "leaf", "--fault", "hang:2")
    codes = [finding["code"] for finding in done.report["findings"]]
    assert codes.index("FAB001.domain") < codes.index("FAB001.alone")
    assert re.search(r"leaf\d+ holds the others back", done.report["sentence"])


def test_all_pairs_are_in_the_evidence_and_not_some(tmp_path):
    report = simulated(tmp_path, "--hosts", "2048", "--transients", "0.1").report
    transient = next(finding for finding in report["findings"] if finding["code"] == "FAB001.transient")
    number = int(re.match(r"\d+", transient["message"])[0])
    assert len(transient["evidence"]["pairs"]) == number > 64


def test_hosts_that_are_slow_only_all_together_are_not_said_to_hold_nobody_back():
    whole = simulate(Fleet(32, Faults(()), seed=1))
    proof = whole.trials[-1]
    assert proof.params["phase"] == "verify"
    slow = tuple(
        structs.replace(own, data=Raw(encode(halved(decode(own.data, Data))))) if own.trial == proof.number else own
        for own in whole.outcomes
    )
    report = judge(structs.replace(whole, outcomes=slow), all_checks())
    clear = next(finding for finding in report.findings if finding.code == "FAB001.clear")
    assert clear.title == "no host holds the others back in pairs, but all together they are slow"
    assert clear.remedy.startswith("Run it again")


def halved(data: Data) -> Data:
    """At half the rate."""
    seconds = Samples(
        min=2 * data.seconds.min, median=2 * data.seconds.median, p95=2 * data.seconds.p95, count=data.seconds.count
    )
    return structs.replace(data, seconds=seconds)


def ended_by(kind: EventKind | None, *, hurried: bool = False, skip: str = "") -> str:
    """The remedy, where a search among hosts was cut short by this."""
    whole = simulate(Fleet(64, Faults(((Fault.SLOW_HOST, 2),), 0.5), seed=1))
    trials = (structs.replace(whole.trials[0], hurried=hurried),)
    events = () if kind is None else (Event(kind=kind, rank=3, seconds=9.0, detail="15"),)
    skips = (Skip(code="FAB001", reason=skip, grounds=False),) if skip else ()
    outcomes = tuple(own for own in whole.outcomes if own.trial == trials[0].number)
    cut = structs.replace(whole, trials=trials, outcomes=outcomes[:-5], events=events, skips=skips)
    report = judge(cut, all_checks())
    return next(finding.remedy for finding in report.findings if finding.code == "FAB001.unmeasured")


def test_what_ended_a_search_is_what_its_remedy_is_about():
    assert ended_by(EventKind.BUDGET) == "Give it more time (--budget 120)."
    assert ended_by(None, hurried=True) == "Give it more time (--budget 120)."
    assert ended_by(EventKind.SIGNAL) == "Run it again, and let it end."
    assert ended_by(EventKind.LOST) == "Mend that first, or run again without them."
    assert "RUN002" in ended_by(None, skip="rank 3 can take no further part")
    assert ended_by(None) == "Run it again, and let it end."
