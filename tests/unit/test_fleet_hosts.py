"""Slow hosts degrade a run, and the lists of hosts of a fleet."""

import pytest
from msgspec import structs
from reports import finding_of, judged_of
from test_judge import recording

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.fabric.rounds import FabricState
from ddpdiag.checks.fabric.search_data import Rules
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.world import World
from ddpdiag.cli.judge import run as judge_files
from ddpdiag.cli.outputs import Outputs
from ddpdiag.codec import disassemble, encode_line
from ddpdiag.judgement import judge
from ddpdiag.judgement import world_of as world_of_run
from ddpdiag.judgement.doubt import doubt_of
from ddpdiag.judgement.hosts import fastest_first
from ddpdiag.judgement.stages import summaries_of
from ddpdiag.judgement.verdict import Conclusion, conclude
from ddpdiag.model import Finding, HostLists, Recording, RunOptions, Severity, Verdict
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, simulate

BAD = finding_of(hosts=("n2",))


def concluded(*findings: Finding, strict: bool = False) -> Conclusion:
    """Four hosts of one rank each, among which an all-reduce was done."""
    run = recording(size=4)
    options = RunOptions(strict=strict)
    run = structs.replace(run, header=structs.replace(run.header, options=options))
    world = World(size=4, launcher="hand", options=options, arrivals=run.arrivals)
    judged = judged_of(findings)
    return conclude(world, run, judged, doubt_of(world, run, judged, summaries_of(run, judged).stages), {})


def slowing(rank: int, **evidence: float) -> Finding:
    return finding_of(Severity.WARNING, code="TRN003.straggler", ranks=(rank,), hosts=(f"n{rank}",), evidence=evidence)


def test_a_rank_that_slows_the_job_down_leaves_it_fit_and_degraded(golden) -> None:
    slow = concluded(slowing(1, slower_share=0.4))
    assert (slow.verdict, slow.exit_code, slow.degraded) == (Verdict.FIT, 0, True)
    assert concluded(slowing(1, slower_share=0.4), strict=True).exit_code == 1
    many = concluded(*(slowing(rank, slower_share=0.2 + rank / 10) for rank in range(3)))
    host = concluded(finding_of(Severity.WARNING, code="FAB001.host", hosts=("n2",)))
    golden(slow.sentence, many.sentence, host.sentence)


def test_what_slows_nothing_down_or_names_none_does_not_degrade() -> None:
    assert not concluded().degraded
    assert not concluded(finding_of(Severity.WARNING, code="LCH001.uneven")).degraded
    assert not concluded(structs.replace(slowing(1), ranks=(), hosts=())).degraded
    assert not concluded(structs.replace(slowing(1), severity=Severity.NOTE)).degraded
    assert not concluded(slowing(1), BAD).degraded  # UNFIT


def simulated(*faults: tuple[Fault, int], slower: float = 0.7, **fields: object) -> Recording:
    fleet = Fleet(16, Faults(faults, slower), Noise(), seed=3, hosts_per_leaf=4)
    options = structs.replace(RunOptions(stages=("fabric",), backend="nccl"), **fields)
    return simulate(fleet, ranks_per_host=2, options=options, run_id="seed-3")


def test_good_hosts_come_fastest_first() -> None:
    run = simulated()
    report = judge(run, all_checks())
    best = {row["host"]: row["host_busbw_bytes_per_s"] for row in report.ranks}
    rates = [best[name] for name in report.hosts.healthy]
    assert len(rates) == 16
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_hosts_without_a_figure_keep_their_order_behind_the_others() -> None:
    hosts = HostLists(healthy=("n0", "n1", "n2", "n3"))
    rows = [{"rank": 0, "host": "n0"}, {"host": "n2", "host_busbw_bytes_per_s": 1e9}]
    assert fastest_first(hosts, rows).healthy == ("n2", "n0", "n1", "n3")
    assert fastest_first(hosts, []).healthy == hosts.healthy


def domains(topology: dict[str, str], leaves: tuple[str, ...], names: tuple[str, ...] = ()) -> dict[int, str]:
    """The leaf of each host, of one rank each, in a run with this file, whose ranks tell these leaves."""
    run = recording(size=len(leaves), options=RunOptions(topology=topology))
    arrivals = {
        rank: structs.replace(own, leaf_switch=leaves[rank], place=structs.replace(own.place, host=name))
        for (rank, own), name in zip(run.arrivals.items(), names or [f"n{rank}" for rank in run.arrivals], strict=True)
    }
    run = structs.replace(run, arrivals=arrivals)
    fabric = FabricState(Seen(world_of_run(run), fab001.CHECK, run), Rules())
    return dict(fabric.search_input.domains)


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


@pytest.mark.parametrize(("options", "code", "healthy", "failing"), [({}, 0, 15, 0), ({"strict": True}, 1, 15, 1)])
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
