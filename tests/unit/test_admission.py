"""Which hosts torchrun's rendezvous admits: the settings of --rdzv-conf, and the decision after a check."""

from importlib.metadata import entry_points

import pytest

from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.integrations.admission import (
    Action,
    OnUnfit,
    OnUnknown,
    Scope,
    Settings,
    WorldVerdict,
    decide,
    read_settings,
    world_verdict,
)
from ddpdiag.model import HostLists, Report, Verdict, WorldSummary

FIT = WorldVerdict(ExitCode.FIT, "all well")
UNFIT = WorldVerdict(ExitCode.UNFIT, "h2 fails.", {2: "h2"})
TWO_UNFIT = WorldVerdict(ExitCode.UNFIT, "two fail.", {1: "h1", 2: "h2"})
NO_HOST_BLAMED = WorldVerdict(ExitCode.UNFIT, "it hangs.")
UNKNOWN = WorldVerdict(ExitCode.UNKNOWN, "h1 never joined.")


def test_torchrun_finds_both_entry_points():
    groups = ("torchrun.handlers", "torchrun.logs_specs")
    assert [entry.name for group in groups for entry in entry_points(group=group) if entry.name == "ddpdiag"] == [
        "ddpdiag",
        "ddpdiag",
    ]


def test_settings_are_read_beside_those_of_torch():
    conf = {"check": "standard", "budget": "45", "on_unfit": "stop", "on_unknown": "stop", "last_call_timeout": "5"}
    expected = Settings(check=Scope.STANDARD, budget=45.0, on_unfit=OnUnfit.STOP, on_unknown=OnUnknown.STOP)
    assert read_settings(conf) == expected
    assert read_settings({"is_host": "1"}) == Settings()


@pytest.mark.parametrize(
    ("conf", "match"),
    [
        ({"chek": "host"}, r"--rdzv-conf chek: expected check, budget.*did you mean check\?"),
        ({"check": "all"}, "check=all: expected none, host, quick or standard"),
        ({"on_unfit": ""}, "on_unfit=: expected leave, stop or warn"),
        ({"on_unknown": "leave"}, "on_unknown=leave: expected go or stop"),
        ({"budget": "soon"}, "budget=soon: expected a number of seconds, 5 or more"),
        ({"budget": "1"}, "budget=1"),
        ({"budget": "nan"}, "budget=nan"),
        ({"budget": "inf"}, "budget=inf"),
    ],
)
def test_wrong_settings_are_refused(conf, match):
    with pytest.raises(UsageError, match=match):
        read_settings(conf)


@pytest.mark.parametrize(
    ("verdict", "settings", "actions"),
    [
        (FIT, Settings(), "go go go"),
        (UNFIT, Settings(), "again again leave"),
        (UNFIT, Settings(on_unfit=OnUnfit.WARN), "go go go"),
        (UNFIT, Settings(on_unfit=OnUnfit.STOP), "stop stop stop"),
        (TWO_UNFIT, Settings(), "stop stop stop"),
        (NO_HOST_BLAMED, Settings(), "stop stop stop"),
        (UNKNOWN, Settings(), "go go go"),
        (UNKNOWN, Settings(on_unknown=OnUnknown.STOP), "stop stop stop"),
        (WorldVerdict(ExitCode.BUG, "a bug"), Settings(on_unknown=OnUnknown.STOP), "stop stop stop"),
    ],
)
def test_three_hosts_of_which_two_must_remain_decide(verdict, settings, actions):
    decisions = [decide(verdict, settings, node_rank=rank, node_count=3, min_nodes=2) for rank in range(3)]
    assert [action for action, _ in decisions] == [Action(word) for word in actions.split()]
    assert len({reason for _, reason in decisions}) == 1


def test_too_few_hosts_are_counted():
    _, reason = decide(TWO_UNFIT, Settings(), node_rank=0, node_count=3, min_nodes=2)
    assert reason == "two fail. Without h1, h2, only 1 of at least 2 hosts (--nnodes) is left."


def test_a_failing_host_is_found_by_its_ranks():
    rows = tuple({"rank": rank, "host": f"h{rank // 2}"} for rank in range(6))
    world = WorldSummary(size=6, hosts=("h0", "h1", "h2"), launcher="hand", backend="gloo")
    report = Report(
        verdict=Verdict.UNFIT,
        sentence="h1 fails.",
        exit_code=1,
        seconds=1.0,
        budget_seconds=30.0,
        run_id="run",
        world=world,
        ranks=rows,
        stages=(),
        checks=(),
        findings=(),
        hosts=HostLists(failing=("h1",)),
    )
    assert world_verdict(report, 2) == WorldVerdict(ExitCode.UNFIT, "h1 fails.", {1: "h1"})
