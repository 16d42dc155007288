"""Which hosts torchrun's rendezvous admits: the settings of --rdzv-conf, and the decision after a check."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from msgspec import structs

import ddpdiag
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.integrations.admission import (
    Action,
    OnUnfit,
    OnUnknown,
    OnWarning,
    Scope,
    Settings,
    WorldVerdict,
    decide,
    read_settings,
    world_verdict,
)
from ddpdiag.model import Finding, HostLists, Severity, Verdict

HEALTHY = ddpdiag.judge(Path(__file__).parents[1] / "recordings" / "healthy-2-ranks.jsonl")
FIT = WorldVerdict(ExitCode.FIT, "all well")
UNFIT = WorldVerdict(ExitCode.UNFIT, "h2 fails.", {2: "h2"})
TWO_UNFIT = WorldVerdict(ExitCode.UNFIT, "two fail.", {1: "h1", 2: "h2"})
NO_HOST_BLAMED = WorldVerdict(ExitCode.UNFIT, "it hangs.")
UNKNOWN = WorldVerdict(ExitCode.UNKNOWN, "h1 never joined.")
INTERRUPTED = WorldVerdict(ExitCode.INTERRUPTED, "SIGINT on h1.", {1: "h1"})
TERMINATED = WorldVerdict(ExitCode.TERMINATED, "SIGTERM on h1.")
WARNED = WorldVerdict(ExitCode.FIT, "h2 is slow.", warned={2: "h2"})
ALL_WARNED = WorldVerdict(ExitCode.FIT, "each is slow.", warned={0: "h0", 1: "h1", 2: "h2"})


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
    assert read_settings({"is_host": "1", "cas_backoff_max_seconds": "2"}) == Settings()
    assert read_settings({"on_warning": "leave"}).on_warning is OnWarning.LEAVE


@pytest.mark.parametrize(
    ("conf", "match"),
    [
        ({"chek": "host"}, r"--rdzv-conf chek: expected check, budget.*did you mean check\?"),
        ({"check": "all"}, "check=all: expected none, host, quick or standard"),
        ({"on_unfit": ""}, "on_unfit=: expected leave, stop or warn"),
        ({"on_unknown": "leave"}, "on_unknown=leave: expected go or stop"),
        ({"on_warning": "yes"}, "on_warning=yes: expected go or leave"),
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
        (WARNED, Settings(), "go go go"),
        (WARNED, Settings(on_warning=OnWarning.LEAVE), "again again leave"),
        (ALL_WARNED, Settings(on_warning=OnWarning.LEAVE), "go go go"),
        (UNFIT, Settings(), "again again leave"),
        (UNFIT, Settings(on_unfit=OnUnfit.WARN), "go go go"),
        (UNFIT, Settings(on_unfit=OnUnfit.STOP), "stop stop stop"),
        (TWO_UNFIT, Settings(), "stop stop stop"),
        (NO_HOST_BLAMED, Settings(), "stop stop stop"),
        (UNKNOWN, Settings(), "go go go"),
        (UNKNOWN, Settings(on_unknown=OnUnknown.STOP), "stop stop stop"),
        # Its host has ended torchrun, so the others meet without it.
        (INTERRUPTED, Settings(), "again again again"),
        (TERMINATED, Settings(on_unknown=OnUnknown.STOP), "again again again"),
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


def warning(title, **subject):
    return Finding(code="HST004.small", severity=Severity.WARNING, title=title, message="", **subject)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (
            {"verdict": Verdict.UNFIT, "exit_code": 1, "hosts": HostLists(failing=("h1",))},
            WorldVerdict(ExitCode.UNFIT, "It ends.", {1: "h1"}),
        ),
        (
            {"findings": (warning("h2 is small", ranks=(4, 5)),), "hosts": HostLists(healthy=("h0", "h1"))},
            WorldVerdict(ExitCode.FIT, "It ends. Warnings: h2 is small.", {}, {2: "h2"}),
        ),
        (
            {"findings": (warning("all are small"),), "hosts": HostLists(healthy=("h0", "h1", "h2"))},
            WorldVerdict(ExitCode.FIT, "It ends. Warnings: all are small."),
        ),
        # Without a warning, other reasons keep hosts out of the list of healthy ones.
        ({"hosts": HostLists()}, WorldVerdict(ExitCode.FIT, "It ends.")),
        ({"findings": (warning("a run of one rank", is_about_run=True),)}, WorldVerdict(ExitCode.FIT, "It ends.")),
    ],
)
def test_hosts_that_a_report_blames_are_found_by_their_ranks(changes, verdict):
    rows = tuple({"rank": rank, "host": f"h{rank // 2}"} for rank in range(6))
    report = structs.replace(HEALTHY, sentence="It ends.", ranks=rows, findings=(), hosts=HostLists())
    assert world_verdict(structs.replace(report, **changes), 2) == verdict
