"""Fewer hosts than there are: what a run comes to for a job that could leave some out."""

import pytest
from msgspec import structs
from reports import finding_of, judged_of
from seen import world_of
from test_judge import recording

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.fabric.notes import Rules
from ddpdiag.checks.fabric.rounds import FabricState
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.world import World
from ddpdiag.cli.judge import run as judge_files
from ddpdiag.cli.outputs import Outputs
from ddpdiag.codec import disassemble, encode_line
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement import world_of as world_of_run
from ddpdiag.judgement.doubt import doubt_of
from ddpdiag.judgement.ending import Run
from ddpdiag.judgement.hosts import fastest_first, sort_hosts
from ddpdiag.judgement.judged import Judged
from ddpdiag.judgement.stages import lines_of
from ddpdiag.judgement.verdict import Conclusion, conclude
from ddpdiag.model import Event, EventKind, Finding, HostsLine, Options, Recording, Severity, Skip, Status, Verdict
from ddpdiag.model.bench import Bench
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, simulate

EXIT_CODES = {Verdict.FIT: 0, Verdict.UNFIT: 1, Verdict.UNKNOWN: 3}


def concluded(
    *findings: Finding, need: int | None, run: Recording | None = None, world: World | None = None, strict: bool = False
) -> Conclusion:
    """Four hosts of one rank each, among which an all-reduce was done, unless `run` says otherwise."""
    run = run or recording(size=4)
    options = Options(need_hosts=need, strict=strict)
    run = structs.replace(run, header=structs.replace(run.header, options=options))
    world = world or World(size=4, launcher="hand", options=options, arrivals=run.arrivals)
    judged = judged_of(findings)
    judged += [
        Judged(check=check, skip=skip) for check in all_checks() for skip in run.skips if skip.code == check.code
    ]
    doubt = doubt_of(world, run, judged, lines_of(run, judged).stages)
    return conclude(world, Run(run, run), judged, doubt, sort_hosts(world, run, judged, doubt)[0], {})


UNREAD = finding_of(Severity.WARNING, code="HST004.unreadable", ranks=(1,))
UNREAD_SOMEWHERE = finding_of(Severity.WARNING, code="HST004.unreadable", title="unread")
BAD = finding_of(hosts=("n2",))
BAD_WAY = finding_of(links=("n1 -> n2", "n2 -> n1"))


@pytest.mark.parametrize(
    ("findings", "need", "verdict"),
    [
        pytest.param((BAD,), 3, Verdict.FIT, id="enough are good, whatever is wrong with another"),
        pytest.param((BAD, finding_of(ranks=(1,))), 3, Verdict.UNFIT, id="too few are good"),
        pytest.param((BAD,), None, Verdict.UNFIT, id="without the option an error is an error"),
        pytest.param((finding_of(ranks=(0,)),), 3, Verdict.FIT, id="rank 0's host may be left out"),
        pytest.param((finding_of(title="who?"), BAD), 1, Verdict.UNFIT, id="an error blames nobody"),
        pytest.param((), 5, Verdict.UNFIT, id="more are needed than there are"),
        pytest.param((), 2, Verdict.FIT, id="all are good"),
        pytest.param((BAD_WAY,), 2, Verdict.FIT, id="the ends of a bad way are not needed"),
        pytest.param((BAD_WAY,), 3, Verdict.UNFIT, id="the ends of a bad way do not count"),
        pytest.param((UNREAD, BAD), 2, Verdict.FIT, id="one that could not be looked at is not needed"),
        pytest.param((UNREAD_SOMEWHERE, BAD), 2, Verdict.UNKNOWN, id="one that could not be looked at is not good"),
    ],
)
def test_the_verdict_is_whether_enough_hosts_are_good(golden, findings, need, verdict) -> None:
    found = concluded(*findings, need=need)
    assert (found.verdict, found.exit_code) == (verdict, EXIT_CODES[verdict])
    golden(found.sentence)


def slowing(rank: int, **evidence: float) -> Finding:
    return finding_of(Severity.WARNING, code="TRN003.straggler", ranks=(rank,), hosts=(f"n{rank}",), evidence=evidence)


def test_a_rank_that_slows_the_job_down_leaves_it_fit_and_degraded(golden) -> None:
    slow = concluded(slowing(1, slower_share=0.4), need=None)
    assert (slow.verdict, slow.exit_code, slow.degraded) == (Verdict.FIT, 0, True)
    assert concluded(slowing(1, slower_share=0.4), need=None, strict=True).exit_code == 1
    many = concluded(*(slowing(rank, slower_share=0.2 + rank / 10) for rank in range(3)), need=None)
    host = concluded(finding_of(Severity.WARNING, code="FAB001.host", hosts=("n2",)), need=None)
    golden(slow.sentence, many.sentence, host.sentence)


def test_what_slows_nothing_down_or_names_none_does_not_degrade() -> None:
    assert not concluded(need=None).degraded
    assert not concluded(finding_of(Severity.WARNING, code="LCH001.uneven"), need=None).degraded
    assert not concluded(structs.replace(slowing(1), ranks=(), hosts=()), need=None).degraded
    assert not concluded(structs.replace(slowing(1), severity=Severity.NOTE), need=None).degraded
    assert not concluded(slowing(1), BAD, need=None).degraded  # UNFIT


def test_a_job_is_degraded_by_the_hosts_that_it_needs_only() -> None:
    assert concluded(slowing(1), need=3).degraded
    left = concluded(slowing(2), BAD, need=3)
    assert (left.verdict, left.degraded) == (Verdict.FIT, False)
    kept = concluded(slowing(1), BAD, need=3)
    assert (kept.verdict, kept.degraded) == (Verdict.FIT, True)


def test_good_hosts_that_were_not_tried_together_are_unknown(golden) -> None:
    hung = recording(size=4, statuses={0: Status.HUNG, 1: Status.HUNG, 2: Status.HUNG, 3: Status.DIED})
    found = concluded(finding_of(ranks=(3,)), need=3, run=hung)
    assert (found.verdict, found.exit_code) == (Verdict.UNKNOWN, 3)
    golden(found.sentence)


def test_gloo_does_not_stand_for_nccl() -> None:
    run = recording(size=4)
    world = World(size=4, launcher="hand", options=Options(backend="nccl"), arrivals=run.arrivals)
    assert concluded(finding_of(ranks=(3,)), need=3, run=run, world=world).verdict is Verdict.UNKNOWN


def test_what_could_not_run_because_of_a_bad_host_is_told(golden) -> None:
    run = recording(size=4, skips=(Skip(code="TRN001", reason="COL001 failed", grounds=False),))
    found = concluded(BAD, need=3, run=run)
    assert found.verdict is Verdict.FIT
    golden(found.sentence)


def test_a_rank_on_no_known_host_may_belong_on_a_good_one(golden) -> None:
    whole = recording(size=4)
    arrivals = {rank: own for rank, own in whole.arrivals.items() if rank != 3}
    run = structs.replace(whole, arrivals=arrivals, events=(Event(kind=EventKind.ABSENT, rank=3),))
    unplaced = concluded(finding_of(ranks=(3,)), need=2, run=run)
    assert (unplaced.verdict, unplaced.exit_code) == (Verdict.UNKNOWN, 3)
    told = structs.replace(run, header=structs.replace(run.header, layout=("n0", "n0", "n1", "n9")))
    placed = concluded(finding_of(ranks=(3,), hosts=("n9",)), need=3, run=told)
    assert placed.verdict is Verdict.FIT
    golden(unplaced.sentence, placed.sentence)


def test_a_part_of_a_run_is_not_short_of_hosts() -> None:
    whole = recording(size=4, ended=False)
    part = structs.replace(whole, arrivals={0: whole.arrivals[0]})
    assert concluded(need=4, run=part).verdict is Verdict.UNKNOWN


def test_strict_counts_warnings_of_the_good_ones_only() -> None:
    assert concluded(BAD, finding_of(Severity.WARNING, hosts=("n2",)), need=3, strict=True).exit_code == 0
    assert concluded(BAD, finding_of(Severity.WARNING, hosts=("n1",)), need=3, strict=True).exit_code == 1


def test_a_host_that_left_is_in_doubt_and_not_bad() -> None:
    run = recording(size=4)
    world = structs.replace(world_of(4, ranks_per_node=1), out=frozenset({3}))
    assert concluded(need=3, run=run, world=world).verdict is Verdict.FIT
    found = concluded(need=4, run=run, world=world)
    assert (found.verdict, found.exit_code) == (Verdict.UNKNOWN, 3)


def test_one_good_rank_needs_no_collective() -> None:
    hung = recording(size=2, statuses={0: Status.HUNG, 1: Status.DIED})
    world = World(size=2, launcher="hand", options=Options(), arrivals=hung.arrivals)
    assert concluded(finding_of(ranks=(1,)), need=1, run=hung, world=world).verdict is Verdict.FIT


# Whole runs ----------------------------------------------------------------------------------------------------------


def simulated(*faults: tuple[Fault, int], slower: float = 0.7, **fields: object) -> Recording:
    fleet = Fleet(16, Faults(faults, slower), Noise(), seed=3, hosts_per_leaf=4)
    options = structs.replace(Options(stages=("fabric",), backend="nccl"), **fields)
    return simulate(fleet, ranks_per_host=2, options=options, run_id="seed-3")


def test_a_fleet_with_a_dead_host_is_fit_for_a_smaller_job(golden) -> None:
    run = simulated((Fault.DEAD_HOST, 1), need_hosts=15)
    report = judge(run, all_checks())
    assert (report.verdict, report.exit_code) == (Verdict.FIT, 0), report.sentence
    golden(report.sentence)
    header = structs.replace(run.header, options=structs.replace(run.header.options, need_hosts=16))
    assert judge(structs.replace(run, header=header), all_checks()).exit_code == 1


def test_good_hosts_come_fastest_first() -> None:
    run = simulated()
    report = judge(run, all_checks())
    best = {row["host"]: row["host_busbw_bytes_per_s"] for row in report.ranks}
    rates = [best[name] for name in report.hosts.healthy]
    assert len(rates) == 16
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_hosts_without_a_figure_keep_their_order_behind_the_others() -> None:
    hosts = HostsLine(healthy=("n0", "n1", "n2", "n3"))
    rows = [{"rank": 0, "host": "n0"}, {"host": "n2", "host_busbw_bytes_per_s": 1e9}]
    assert fastest_first(hosts, rows).healthy == ("n2", "n0", "n1", "n3")
    assert fastest_first(hosts, []).healthy == hosts.healthy


def domains(topology: dict[str, str], leaves: tuple[str, ...], names: tuple[str, ...] = ()) -> dict[int, str]:
    """The leaf of each host, of one rank each, in a run with this file, whose ranks tell these leaves."""
    run = recording(size=len(leaves), options=Options(topology=topology))
    arrivals = {
        rank: structs.replace(own, leaf=leaves[rank], place=structs.replace(own.place, host=name))
        for (rank, own), name in zip(run.arrivals.items(), names or [f"n{rank}" for rank in run.arrivals], strict=True)
    }
    run = structs.replace(run, arrivals=arrivals)
    fabric = FabricState(Seen(world_of_run(run), fab001.CHECK, run), Rules())
    return dict(fabric.ground.domains)


def test_leaves_that_ranks_tell_count_where_the_file_names_none() -> None:
    assert domains({}, ("s0", "s0", "", "s1")) == {0: "s0", 1: "s0", 3: "s1"}
    assert domains({"other": "x"}, ("s0", "s1")) == {0: "s0", 1: "s1"}


def test_the_file_counts_before_what_ranks_tell() -> None:
    assert domains({"n0": "leaf0"}, ("s0", "s1")) == {0: "leaf0"}


def test_a_long_name_is_known_by_its_short_one() -> None:
    assert domains({"n0": "leaf0", "n1.b": "leaf1"}, ("", ""), ("n0.a", "n1.b")) == {0: "leaf0", 1: "leaf1"}


@pytest.mark.parametrize("names", [[f"n{host:04d}" for host in range(15)], ["other"]], ids=["15-of-16", "none"])
def test_a_topology_of_other_hosts_is_noticed(golden, names) -> None:
    report = judge(simulated(topology=dict.fromkeys(names, "leaf")), all_checks())
    (finding,) = (finding for finding in report.findings if finding.code == "FAB001.topology")
    assert finding.severity is Severity.NOTE
    golden(finding)


def test_a_recording_is_judged_for_a_smaller_job(tmp_path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(map(encode_line, disassemble(simulated((Fault.DEAD_HOST, 1))))))
    codes = [judge_files([str(file)], Outputs(json="-", need_hosts=need)) for need in (None, 15, 16)]
    assert codes == [1, 0, 1]


@pytest.mark.parametrize(
    ("options", "code", "healthy", "failing"),
    [
        ({}, 0, 15, 0),
        ({"strict": True}, 1, 15, 1),
        ({"strict": True, "need_hosts": 15}, 0, 15, 1),
        ({"strict": True, "need_hosts": 16}, 1, 15, 1),
        ({"need_hosts": 15}, 0, 15, 0),
        ({"need_hosts": 16}, 0, 16, 0),
    ],
)
def test_a_slow_host_is_not_healthy_and_failing_with_strict(tmp_path, options, code, healthy, failing) -> None:
    file, bad, good = (tmp_path / name for name in ("run.jsonl", "bad", "good"))
    run = simulated((Fault.SLOW_HOST, 1), slower=0.25)
    (slow,) = judge(run, all_checks()).hosts.slow
    file.write_bytes(b"".join(map(encode_line, disassemble(run))))
    outputs = Outputs(write_failing_hosts=str(bad), write_healthy_hosts=str(good), **options)
    assert judge_files([str(file)], outputs) == code
    lists = [path.read_text().split() for path in (good, bad)]
    assert [len(names) for names in lists] == [healthy, failing]
    assert [slow in names for names in lists] == [healthy == 16, failing == 1]


def test_a_benchmark_is_judged_on_all_its_hosts(tmp_path) -> None:
    run = recording(options=Options(bench=Bench()))
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(map(encode_line, disassemble(run))))
    with pytest.raises(UsageError, match="--need-hosts"):
        judge_files([str(file)], Outputs(need_hosts=1))


def test_exports_that_the_good_ones_need_are_told(golden) -> None:
    run = recording(size=4, options=Options(need_hosts=3))
    world = World(size=4, launcher="hand", options=Options(need_hosts=3), arrivals=run.arrivals)
    judged = judged_of([BAD])
    hosts = HostsLine(failing=("n2",), healthy=("n0", "n1", "n3"))
    found = conclude(world, Run(run, run), judged, "", hosts, {"NCCL_P2P_DISABLE": "1"})
    golden(found.sentence)
