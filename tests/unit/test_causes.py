"""What other checks know of why messages between hosts do not arrive."""

from meshes import every, meshed, slow
from msgspec import structs
from seen import seen_of
from test_run_checks import judge_as, only, outcome, run_of

from ddpdiag.checks.api import Nothing, Seen
from ddpdiag.checks.rendezvous import coordinator_name
from ddpdiag.checks.rendezvous.coordinator_name import Data
from ddpdiag.checks.run import trials as run003
from ddpdiag.checks.run.trials import findings_between, network_errors
from ddpdiag.model import Collective, Finding, ProcessState, Severity, Status

NAMES = Data("head.cluster", ("10.0.0.1",), 0.0, "n1", ("127.0.1.1",), None)
GOOD = Data("head.cluster", ("10.0.0.1",), 0.0, "n0", ("10.0.0.1",), None)


def a_hang_beside(rows: dict[int, Data]) -> Seen[Nothing]:
    """All ranks hang in COL001, one of them elsewhere; and what RDZ002 saw."""
    names = seen_of(coordinator_name.CHECK, rows, size=4)
    waits = ProcessState(pid=1, state="S", stack=("wait (a.py:1)",))
    alone = ProcessState(pid=1, state="S", stack=("connect (b.py:1)",))
    hang = run_of(*(outcome(rank, Status.HUNG, process=alone if rank == 0 else waits) for rank in range(4)))
    trials = (*names.recording.trials, structs.replace(hang.recording.trials[0], number=7))
    outcomes = (*names.recording.outcomes, *(structs.replace(o, trial=7) for o in hang.recording.outcomes))
    return Seen(hang.world, hang.check, structs.replace(hang.recording, trials=trials, outcomes=outcomes))


def test_a_hang_is_put_down_to_the_address_that_peers_cannot_reach(golden) -> None:
    finding = only(judge_as(run003.CHECK, a_hang_beside({0: GOOD, 2: NAMES})))
    assert (finding.ranks, finding.hosts, "RDZ002.own" in finding.title) == ((), ("n1",), True)
    golden(finding)


def test_without_such_a_cause_the_odd_rank_is_blamed() -> None:
    seen = a_hang_beside({0: GOOD, 2: structs.replace(NAMES, own_addresses=("10.0.0.2",))})
    assert network_errors(seen) == ()
    assert only(judge_as(run003.CHECK, seen)).ranks == (0,)


def test_a_cause_concerns_those_hosts_that_it_names() -> None:
    plain = Finding(code="X.y", severity=Severity.ERROR, title="t", message="m")
    link, host = structs.replace(plain, links=("n0 -> n1",)), structs.replace(plain, hosts=("n1",))
    assert findings_between((plain, link, host), {"n0", "n1"}) == (plain, link, host)
    assert findings_between((plain, link, host), {"n1", "n2"}) == (plain, host)
    assert findings_between((plain, link, host), {"n1"}) == (), "one host needs no network"


def a_slow_hang(rate: float, *, short: int | None = None) -> Seen[Nothing]:
    """Three hosts, n2's network carries `rate` B/s; all wait in an all-reduce of 32 MiB, but the one `short` of it."""
    mesh = meshed(3, every(3, slow(rate), sender=2, receiver=2))
    posted = Collective(seq=3, name="gloo:all_reduce", elements=8 << 20, dtype="Float")
    hung = [outcome(r, Status.HUNG, collectives=(posted,), step_count=7 if r == short else 8) for r in range(3)]
    trial = structs.replace(run_of(size=3).recording.trials[0], number=7, deadline_seconds=15.0)
    trials = (*mesh.recording.trials, trial)
    outcomes = (*mesh.recording.outcomes, *(structs.replace(o, trial=7) for o in hung))
    return Seen(mesh.world, run003.CHECK, structs.replace(mesh.recording, trials=trials, outcomes=outcomes))


def test_a_hang_is_put_down_to_a_network_that_could_not_carry_it_in_time(golden) -> None:
    finding = only(judge_as(run003.CHECK, a_slow_hang(2e6)))
    assert (finding.code, finding.ranks, finding.hosts) == ("RUN003.hung", (), ("n2",))
    assert "RDZ004.slow" in finding.title
    golden(finding)


def test_a_slow_network_takes_no_blame_from_a_rank_that_the_others_wait_for() -> None:
    assert only(judge_as(run003.CHECK, a_slow_hang(2e6, short=0))).ranks == (0,)
