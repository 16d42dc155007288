"""Which hosts to leave out, and which to call good."""

import pytest
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


def warned(**fields: object) -> Finding:
    return finding_of(Severity.WARNING, **fields)


ALL = ("n0", "n1", "n2", "n3")
ON_1 = warned(ranks=(2,))
EVERYWHERE = [warned(code="HST007.old", hosts=(host,)) for host in ALL]
STRICTLY = {"world": world_of(8, options=RunOptions(strict=True))}
OUT_OF_TIME = run_of(Event(kind=EventKind.BUDGET, seconds=57.0, detail="before FAB001 could run"))
LEFT_OUT = structs.replace(
    run_of(),
    skips=(
        Skip(code="COL001", reason="", is_inapplicable=False),
        Skip(code="GPU001", reason="no GPU", is_inapplicable=True),
    ),
)
# What is found, other circumstances, the failing and the healthy hosts.
SORTED = {
    "no errors": ([], {}, (), ALL),
    "blamed ranks and hosts": ([finding_of(ranks=(2,)), finding_of(hosts=("n3",))], {}, ("n1", "n3"), ("n0", "n2")),
    "a warning": ([ON_1], {}, (), ("n0", "n2", "n3")),
    "a warning, strictly": ([ON_1], STRICTLY, ("n1",), ("n0", "n2", "n3")),
    "warnings of every host or the run": ([*EVERYWHERE, structs.replace(ON_1, is_about_run=True)], {}, (), ALL),
    "warnings of every host, strictly": (EVERYWHERE, STRICTLY, ALL, ()),
    "ends of a link": ([finding_of(links=("n1 -> n2", "n2 -> n1"))], {}, (), ("n0", "n3")),
    "a rank that left early": (
        [finding_of(ranks=(0,))], {"world": world_of(8, out=frozenset({5}))}, ("n0",), ("n1", "n3")
    ),
    "an error that blames nobody": (
        [finding_of(ranks=(2,)), finding_of(code="RUN003.hung", title="nobody knows")], {}, ("n1",), ()
    ),
    "no time": ([finding_of(ranks=(2,))], {"run": OUT_OF_TIME}, ("n1",), ()),
    "a doubt": ([], {"doubt": "not run"}, (), ()),
    "no end": ([], {"run": run_of(ended=False)}, (), ()),
    "a GPU on no named host": ([finding_of(gpus=("GPU-0",))], {}, (), ()),
    "a host that could not be read": (
        [warned(code="HST004.unreadable", ranks=(5,)), finding_of(ranks=(0,))], {}, ("n0",), ("n1", "n3")
    ),
    "what is no name of one host": (
        [finding_of(hosts=("?", "n[0-3]", "n1\nn2", "n3,n0", "gpu-1.x_y"))], {}, ("gpu-1.x_y",), ALL
    ),
    "tests that were left out": ([finding_of(ranks=(2,))], {"run": LEFT_OUT}, ("n1",), ("n0", "n2", "n3")),
    "an absent rank on no known host": (
        [finding_of(ranks=(9,))], {"run": run_of(Event(kind=EventKind.ABSENT, rank=9))}, (), ALL
    ),
}  # fmt: skip


@pytest.mark.parametrize(("findings", "more", "failing", "healthy"), SORTED.values(), ids=SORTED)
def test_hosts_are_sorted(golden, findings: list[Finding], more: dict, failing: tuple, healthy: tuple) -> None:
    hosts, notes = sorted_hosts(*findings, **more)
    assert hosts == HostLists(failing=failing, healthy=healthy)
    golden(*notes)


def test_a_host_of_a_slow_rank_is_slow_where_there_is_another_one() -> None:
    slow = warned(code="TRN003.straggler", ranks=(3,), hosts=("n1",), evidence={"slower_share": 0.4})
    hosts, _ = sorted_hosts(slow)
    assert (hosts.slow, hosts.failing) == ({"n1": 0.4}, ())
    alone, _ = sorted_hosts(slow, world=world_of(8, ranks_per_node=8))
    assert alone.slow == {}


def test_who_asks_for_the_lists_is_told_what_they_lack() -> None:
    report = fit(hosts=HostLists(healthy=("n0",), caveats=("n1 is in neither list",)))
    shown = {
        name: Outputs(write_failing_hosts=bad, write_healthy_hosts=good).page(report, color=False, width=80)
        for name, bad, good in (("neither", None, None), ("bad", "b", None), ("good", None, "g"))
    }
    assert [name for name, text in shown.items() if "n1 is in neither list\n" in text] == ["bad", "good"]
    told = structs.replace(report, recording_problems=report.hosts.caveats)
    assert Outputs(write_healthy_hosts="g").page(told, color=False, width=80).count("n1 is in neither list") == 1
