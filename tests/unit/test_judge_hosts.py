"""Which hosts to leave out, and which to call good."""

from msgspec import structs
from reports import finding_of, fit, judged_of
from seen import seen_of, world_of

from ddpdiag.checks.api import Nothing
from ddpdiag.checks.run import roll_call
from ddpdiag.checks.world import World
from ddpdiag.cli.outputs import Outputs
from ddpdiag.judgement.hosts import sort_hosts
from ddpdiag.model import End, Event, EventKind, Finding, HostLists, Recording, RunOptions, Severity, Skip


def run_of(*events: Event, ended: bool = True) -> Recording:
    recording = seen_of(roll_call.CHECK, {rank: Nothing() for rank in range(8)}).recording
    return structs.replace(recording, events=events, end=End(seconds=1.0) if ended else None)


def sorted_hosts(
    *findings: Finding, world: World | None = None, run: Recording | None = None, doubt: str = ""
) -> tuple[HostLists, tuple[str, ...]]:
    hosts = sort_hosts(world or world_of(8), run or run_of(), judged_of(findings), doubt)
    return structs.replace(hosts, caveats=()), hosts.caveats


def test_without_errors_every_host_is_good() -> None:
    hosts, notes = sorted_hosts()
    assert (hosts, notes) == (HostLists(healthy=("n0", "n1", "n2", "n3")), ())


def test_blamed_ranks_make_their_hosts_bad() -> None:
    hosts, _ = sorted_hosts(finding_of(ranks=(2,)), finding_of(hosts=("n3",)))
    assert hosts == HostLists(failing=("n1", "n3"), healthy=("n0", "n2"))


def test_a_host_that_a_warning_blames_is_not_healthy_and_failing_with_strict(golden) -> None:
    slow = finding_of(Severity.WARNING, ranks=(2,))
    hosts, notes = sorted_hosts(slow)
    assert hosts == HostLists(healthy=("n0", "n2", "n3"))
    golden(*notes)
    strict, _ = sorted_hosts(slow, world=world_of(8, options=RunOptions(strict=True)))
    assert strict == HostLists(failing=("n1",), healthy=("n0", "n2", "n3"))


def test_warnings_about_every_host_or_the_run_sort_out_none() -> None:
    same = [finding_of(Severity.WARNING, code="HST007.old", hosts=(f"n{host}",)) for host in range(4)]
    is_about_run = structs.replace(finding_of(Severity.WARNING, ranks=(2,)), is_about_run=True)
    hosts, notes = sorted_hosts(*same, is_about_run)
    assert (hosts, notes) == (HostLists(healthy=("n0", "n1", "n2", "n3")), ())
    strict, _ = sorted_hosts(*same, world=world_of(8, options=RunOptions(strict=True)))
    assert strict == HostLists(failing=("n0", "n1", "n2", "n3"))


def test_ends_of_a_blamed_link_are_neither_good_nor_bad(golden) -> None:
    hosts, notes = sorted_hosts(finding_of(links=("n1 -> n2", "n2 -> n1")))
    assert hosts == HostLists(healthy=("n0", "n3"))
    golden(*notes)


def test_who_left_before_the_end_is_not_good() -> None:
    hosts, _ = sorted_hosts(finding_of(ranks=(0,)), world=world_of(8, out=frozenset({5})))
    assert hosts == HostLists(failing=("n0",), healthy=("n1", "n3"))


def test_an_error_that_blames_nobody_leaves_nobody_good_and_says_so(golden) -> None:
    hosts, notes = sorted_hosts(finding_of(ranks=(2,)), finding_of(code="RUN003.hung", title="nobody knows"))
    assert hosts == HostLists(failing=("n1",))
    golden(*notes)


def test_a_host_of_a_slow_rank_is_slow_where_there_is_another_one() -> None:
    slow = finding_of(Severity.WARNING, code="TRN003.straggler", ranks=(3,), hosts=("n1",))
    slow = structs.replace(slow, evidence={"slower_share": 0.4})
    hosts, _ = sorted_hosts(slow)
    assert (hosts.slow, hosts.failing) == ({"n1": 0.4}, ())
    alone, _ = sorted_hosts(slow, world=world_of(8, ranks_per_node=8))
    assert alone.slow == {}


def test_no_host_is_good_where_time_ran_out() -> None:
    spent = run_of(Event(kind=EventKind.BUDGET, seconds=57.0, detail="before FAB001 could run"))
    hosts, notes = sorted_hosts(finding_of(ranks=(2,)), run=spent)
    assert hosts == HostLists(failing=("n1",))
    assert "time limit" in notes[0]


def test_what_was_not_looked_at_is_not_good(golden) -> None:
    for hosts, notes in (sorted_hosts(doubt="not run"), sorted_hosts(run=run_of(ended=False))):
        assert hosts == HostLists()
        golden(*notes)


def test_an_error_of_a_gpu_on_no_named_host_leaves_nobody_good() -> None:
    hosts, _ = sorted_hosts(finding_of(gpus=("GPU-0",)))
    assert hosts == HostLists()


def test_a_host_that_could_not_be_looked_at_is_neither_good_nor_bad() -> None:
    unread = finding_of(Severity.WARNING, code="HST004.unreadable", ranks=(5,))
    hosts, _ = sorted_hosts(unread, finding_of(ranks=(0,)))
    assert hosts == HostLists(failing=("n0",), healthy=("n1", "n3"))


def test_what_is_no_name_of_one_host_is_in_neither_list() -> None:
    hosts, _ = sorted_hosts(finding_of(hosts=("?", "n[0-3]", "n1\nn2", "n3,n0", "gpu-1.x_y")))
    assert hosts == HostLists(failing=("gpu-1.x_y",), healthy=("n0", "n1", "n2", "n3"))


def test_what_good_hosts_were_not_tested_with_is_told(golden) -> None:
    run = structs.replace(
        run_of(),
        skips=(
            Skip(code="COL001", reason="", is_inapplicable=False),
            Skip(code="GPU001", reason="no GPU", is_inapplicable=True),
        ),
    )
    hosts, notes = sorted_hosts(finding_of(ranks=(2,)), run=run)
    assert hosts.healthy == ("n0", "n2", "n3")
    golden(*notes)


def test_an_absent_rank_on_no_known_host_cannot_be_excluded(golden) -> None:
    hosts, notes = sorted_hosts(finding_of(ranks=(9,)), run=run_of(Event(kind=EventKind.ABSENT, rank=9)))
    assert hosts.failing == ()
    golden(*notes)


def test_who_asks_for_the_lists_is_told_what_they_lack() -> None:
    report = fit(hosts=HostLists(healthy=("n0",), caveats=("n1 is in neither list",)))
    shown = {
        name: Outputs(write_failing_hosts=bad, write_healthy_hosts=good).page(report, color=False, width=80)
        for name, bad, good in (("neither", None, None), ("bad", "b", None), ("good", None, "g"))
    }
    assert [name for name, text in shown.items() if "n1 is in neither list\n" in text] == ["bad", "good"]
    told = structs.replace(report, recording_problems=report.hosts.caveats)
    assert Outputs(write_healthy_hosts="g").page(told, color=False, width=80).count("n1 is in neither list") == 1
