"""The judgement of a job's process groups: what each pattern of measurements on four ranks on two hosts means."""

import pytest
from msgspec import structs

from ddpdiag.cli.manual import manual_page
from ddpdiag.judgement.groups import find_mistake, group_report, judge_groups, needs_repetition, reporters
from ddpdiag.model import Severity, Verdict
from ddpdiag.model.groups import GroupArrival, GroupCheck, GroupRecord, GroupTimes, group_key

MIB = 1 << 20


def keys(members):
    return {name: group_key(ranks) for name, ranks in members.items()}


# Four ranks on two hosts. DP joins the hosts, TP is inside each.
MEMBERS = {rank: {"dp": (rank % 2, rank % 2 + 2), "tp": (rank // 2 * 2, rank // 2 * 2 + 1)} for rank in range(4)}
HOSTS = {rank: f"n{rank // 2}" for rank in range(4)}
SIZES = {"dp": MIB, "tp": MIB}
ARRIVALS = {rank: GroupArrival(HOSTS[rank], keys(MEMBERS[rank]), SIZES) for rank in range(4)}
TIMED_OUT = {"stopped_at": "the all-reduce", "error": "Operation timed out!", "timed_out": True}


def record(rank, members=MEMBERS, *, product=1e-3, core=1e-3, slow=(), factor=4.0, **changes):
    """The record of a rank. Messages over the links in `slow`, (source, rank), take `factor` times longer."""
    times = []
    for name, ranks in members[rank].items():
        source = ranks[ranks.index(rank) - 1]
        seconds = 1e-3 * (factor if (source, rank) in slow else 1)
        times.append(
            GroupTimes(
                name=name,
                group_size=len(ranks),
                size_bytes=MIB,
                source=source,
                all_reduce_seconds=2e-3,
                receive_seconds=seconds,
            )
        )
    each = GroupRecord(device="cuda", product_seconds=product, core_seconds=core, cores=(0, 1), groups=tuple(times))
    return structs.replace(each, **changes)


def check_of(*rounds, arrivals=ARRIVALS, first=None, size=4):
    hosts = {rank: arrival.host for rank, arrival in arrivals.items()} if size != 4 else HOSTS
    return GroupCheck(
        world_size=size,
        join_seconds=600,
        budget_seconds=60,
        arrivals=arrivals,
        hosts=hosts,
        rounds=rounds,
        first=first or {},
    )


def round_of(**changes):
    """The records of four ranks, with changes for all."""
    return {rank: record(rank, **changes) for rank in range(4)}


def without(values, *ranks):
    return {rank: value for rank, value in values.items() if rank not in ranks}


def ring(slow=(), size=5):
    """A check of one group, each rank on a host of its own."""
    ranks = tuple(range(size))
    members = {rank: {"dp": ranks} for rank in ranks}
    records = {rank: record(rank, members, slow=slow) for rank in members}
    arrivals = {rank: GroupArrival(f"n{rank}", keys(members[rank]), {"dp": MIB}) for rank in members}
    return check_of(records, records, arrivals=arrivals, size=size)


def one(**changes):
    """A round in which rank 3 differs."""
    return round_of() | {3: record(3, **changes)}


STUCK_DP = {
    # Ranks 0 and 2 stop in DP. Ranks 1 and 3 wait for them in TP.
    0: record(0, groups=(), stopped_in="dp", **TIMED_OUT),
    2: record(2, groups=(), stopped_in="dp", **TIMED_OUT),
    1: record(1, stopped_in="tp", **TIMED_OUT),
    3: record(3, stopped_in="tp", **TIMED_OUT),
}
WRONG = structs.replace(record(3).groups[0], wrong_received=5, wrong_sums=5)
WRONG_SUMS = structs.replace(record(3).groups[0], wrong_sums=5)
CASES = {
    "healthy": (check_of(round_of()), []),
    "absent": (check_of(arrivals=without(ARRIVALS, 3)), [("absent", (3,), ())]),
    "absent majority": (check_of(arrivals=without(ARRIVALS, 0, 1, 3)), [("absent", (), ())]),
    "silent": (check_of(without(STUCK_DP, 3)), [("hung", (3,), ())]),
    "raised": (check_of(STUCK_DP | {3: record(3, stopped_at="x", error="CUDA error: ECC")}), [("failed", (3,), ())]),
    "only an echo": (
        check_of(STUCK_DP | {2: record(2, stopped_in="dp", stopped_at="x", error="Connection closed by peer")}),
        [("stuck", (), ("n0 -> n1",))],
    ),
    "stuck": (check_of(STUCK_DP), [("stuck", (), ("n0 -> n1",))]),
    "wrong message": (check_of(one(groups=(WRONG,))), [("wrong", (), ("n0 -> n1",))]),
    "wrong sum": (check_of(one(groups=(WRONG_SUMS,))), [("wrong", (), ())]),
    "slow rank": (check_of(one(product=3e-3), one(product=3e-3)), [("slow-rank", (3,), ())]),
    "slow once": (check_of(one(product=3e-3), round_of()), []),
    # Cores 0 and 1 of each host serve two ranks each, so all time counts. With one core, another process may have it.
    "shared cores": (check_of(*[{r: record(r, product=3e-3 if r else 1e-3, cores=(0,)) for r in range(4)}] * 2), []),
    "slow cores": (
        check_of(*[{r: record(r, core=3e-3 if r == 1 else 1e-3, cores=(0,)) for r in range(4)}] * 2),
        [("slow-rank", (1,), ())],
    ),
    "slow rank explains its links": (
        check_of(*[one(product=3e-3, slow=[(1, 3), (2, 3)])] * 2),
        [("slow-rank", (3,), ())],
    ),
    "slow rank with a slower link": (
        check_of(*[one(product=3e-3, slow=[(1, 3)], factor=20.0)] * 2),
        [("slow-rank", (3,), ()), ("slow-link", (), ("n0 -> n1",))],
    ),
    "slow link": (check_of(*[round_of(slow=[(1, 3)])] * 2), [("slow-link", (), ("n0 -> n1",))]),
    "slow link inside a host": (
        check_of(*[round_of(slow=[(2, 3), (3, 2)])] * 2),
        [("slow-link", (), ("rank 3 -> rank 2",))],
    ),
    "loopback": (check_of(*[round_of(slow=[(2, 3)], device="cpu")] * 2), []),
    "slow network card": (ring(slow=[(1, 2), (2, 3)]), [("slow-link", (2,), ())]),
}


@pytest.mark.parametrize(("check", "expected"), CASES.values(), ids=CASES.keys())
def test_a_pattern_of_measurements_blames(check, expected):
    findings = judge_groups(check)
    assert [(f.code.removeprefix("GRP001."), f.ranks, f.links) for f in findings] == expected
    report = group_report(check, findings, strict=False)
    is_error = any(finding.severity is Severity.ERROR for finding in findings)
    assert report.verdict is (Verdict.UNFIT if is_error else Verdict.FIT)
    assert report.exit_code == int(is_error)
    assert group_report(check, findings, strict=True).exit_code == int(bool(findings))
    assert report.degraded == bool(findings and not is_error)
    assert needs_repetition(findings) == any(".slow-" in finding.code for finding in findings)
    shown = sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)
    assert all(finding.title in report.sentence for finding in shown[:1])
    assert all(f"- {word}: " in manual_page(f"GRP001.{word}", width=80, color=False) for word, _, _ in expected)


@pytest.mark.parametrize(
    ("sent", "absent"),
    [((0, 1, 2), (3,)), ((1, 2, 3), (0,)), ((1, 2), (0, 3)), ((0, 1, 2, 3), (0,))],
    ids=["rank 0 waits", "rank 0 is late", "two are late", "rank 0 does not answer"],
)
def test_without_an_answer_rank_0_is_blamed_unless_it_waits_for_another_rank(sent, absent):
    arrivals = {rank: ARRIVALS[rank] for rank in reporters(sent, 4)}
    (finding,) = judge_groups(check_of(arrivals=arrivals))
    assert (finding.code, finding.ranks) == ("GRP001.absent", absent)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"product": 3e-3}, "; only in the first of two measurements, rank 3 on n1 computes 3.0 times slower."),
        (
            {"slow": [(1, 3)]},
            "; only in the first of two measurements, the link from rank 1 on n0 to rank 3 on n1 is slow.",
        ),
        ({}, "in the groups dp, tp."),
    ],
    ids=["rank", "link", "none"],
)
def test_what_the_second_measurement_does_not_confirm_is_in_the_sentence_only(fault, text):
    report = group_report(check_of(one(**fault), one(product=1.2e-3)), (), strict=True)
    assert report.sentence.endswith(text)
    assert (report.exit_code, report.findings, report.degraded) == (0, (), False)
    assert report.measurements["product.longest_seconds"] == 1.2e-3


@pytest.mark.parametrize(("factor", "severity"), [(4.0, Severity.WARNING), (20.0, Severity.ERROR)])
def test_a_link_that_is_far_too_slow_twice_is_an_error(factor, severity):
    check = check_of(*[round_of(slow=[(1, 3)], factor=factor)] * 2)
    assert [finding.severity for finding in judge_groups(check)] == [severity]


@pytest.mark.parametrize(("product", "slow", "word"), [(2e-3, (), "slow-rank"), (1e-3, [(0, 1)], "slow-link")])
def test_one_of_two_ranks_is_compared_with_its_first_check(product, slow, word):
    members = {rank: {"dp": (0, 1)} for rank in range(2)}
    arrivals = {rank: GroupArrival(f"n{rank}", keys(members[rank]), {"dp": MIB}) for rank in range(2)}
    first = {rank: record(rank, members) for rank in range(2)}
    now = {0: first[0], 1: record(1, members, product=product, slow=slow)}
    assert judge_groups(check_of(now, now, arrivals=arrivals, size=2)) == ()
    (finding,) = judge_groups(check_of(now, now, arrivals=arrivals, first=first, size=2))
    assert finding.code == f"GRP001.{word}"
    assert "the first check of this job" in finding.message
    assert ("it had 50 % of it" in finding.message) == (word == "slow-rank")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"groups": keys({"dp": (1, 3)})}, "groups dp (1 MiB) on rank 3, but dp (1 MiB), tp (1 MiB) on rank 0"),
        ({"sizes": {"dp": 4, "tp": MIB}}, "groups dp (4 B), tp (1 MiB) on rank 3"),
        ({"groups": keys(MEMBERS[3] | {"tp": (0, 3)})}, "group tp of rank 2 has 2 ranks, but only rank 2 passed it"),
        ({"groups": keys(MEMBERS[3] | {"tp": ()})}, "group tp of rank 2 has 2 ranks, but only rank 2 passed it"),
    ],
    ids=["equal", "names", "sizes", "ranks", "outside"],
)
def test_ranks_that_pass_different_groups_are_told(change, text):
    mistake = find_mistake(ARRIVALS | {3: structs.replace(ARRIVALS[3], **change)})
    assert text in mistake
    assert bool(mistake) == bool(text)


def test_thousands_of_ranks_take_seconds_and_not_hours():
    check = ring(slow=[(1, 2), (2, 3)], size=4_000)
    assert find_mistake(check.arrivals) == ""
    assert [finding.ranks for finding in judge_groups(check)] == [(2,)]
