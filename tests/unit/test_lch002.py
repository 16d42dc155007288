"""LCH002: variables that differ, or harm."""

import pytest
from seen import seen_of

from ddpdiag.checks.launch.variables import CHECK, HIDDEN_FAULTS, Data
from ddpdiag.model import Severity


def found(rows, **world):
    return list(CHECK.judge(seen_of(CHECK, rows, **world)))


def with_variables(*values, name="NCCL_ALGO"):
    return {rank: Data({} if value is None else {name: value}, {}) for rank, value in enumerate(values)}


GROUP_CLASS, DEBUG, TORCHRUN = "TORCH_DIST_USE_NCCL2", "TORCH_DISTRIBUTED_DEBUG", "TORCHELASTIC_ERROR_FILE"
OWN = ("RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", TORCHRUN)
# The variable, its values on the ranks, and the finding with its ranks.
VALUES = [
    ("NCCL_ALGO", ("Ring", "Ring", "Ring"), None),
    ("NCCL_ALGO", ("Ring", "Ring", "Tree", "Ring"), ("variable", Severity.WARNING, (2,))),
    ("NCCL_ALGO", ("Ring", None, "Ring"), ("variable", Severity.WARNING, (1,))),
    ("NCCL_ALGO", ("Ring", "Tree"), ("variable", Severity.WARNING, ())),
    *((name, ("0", "1", "2"), None) for name in OWN),
    (GROUP_CLASS, (None, "0"), ("process-group", Severity.WARNING, ())),
    (GROUP_CLASS, ("1", "0", None), ("process-group", Severity.WARNING, (1,))),
    (GROUP_CLASS, ("0", "0", "1"), ("process-group", Severity.WARNING, (2,))),
    *((GROUP_CLASS, values, None) for values in (("1", None), ("0", "0"), ("true", "1"))),
    ("NCCL_HOSTID", ("a", "a"), ("host-id", Severity.WARNING, (0, 1))),
    (DEBUG, ("verbose", "verbose"), ("debug-level", Severity.ERROR, (0, 1))),
    *((DEBUG, (level, level), None) for level in ("OFF", "INFO", "DETAIL", "detail")),
]


@pytest.mark.parametrize(("name", "values", "expected"), VALUES)
def test_values_that_differ_or_harm_are_one_finding(golden, name, values, expected):
    findings = found(with_variables(*values, name=name))
    assert [(each.code.removeprefix("LCH002."), each.severity, each.ranks) for each in findings] == (
        [expected] if expected else []
    )
    golden(*findings)


def test_a_configuration_file_on_one_host_is_named(golden):
    file = {"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}}
    (finding,) = found({0: Data({}, {}), 1: Data({}, {}), 2: Data({}, file)}, ranks_per_node=1)
    assert (finding.code, finding.hosts) == ("LCH002.file", ("n2",))
    golden(finding)


def test_what_replaces_nccls_choices_on_all_ranks_is_listed_for_a_job_over_nccl(golden):
    variables = {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "4194304", "NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    rows = dict.fromkeys(range(2), Data(variables, {"/etc/nccl.conf": {"NCCL_IB_DISABLE": "1"}}))
    (finding,) = found(rows, gpus=2)
    assert (finding.code, finding.severity, finding.ranks) == ("LCH002.set", Severity.NOTE, ())
    golden(finding)
    assert found(rows) == [], "over gloo"
    rows = dict.fromkeys(range(2), Data({"NCCL_RINGS": "1"}, {}, {"NCCL_RINGS": ""}))
    assert [each.code for each in found(rows, gpus=2)] == ["LCH002.unread"], "without effect"


def test_a_variable_that_differs_is_listed_once():
    (finding,) = found(with_variables("Ring", "Tree"), gpus=2)
    assert (finding.code, finding.evidence) == ("LCH002.variable", {"rank 0": "Ring", "rank 1": "Tree"})


def test_variables_without_effect_are_named_with_the_nearest_names(golden):
    everywhere = {"NCCL_P2P_DISALBE": "NCCL_P2P_DISABLE", "NCCL_RINGS": ""}
    rows = {rank: Data({}, {}, everywhere | ({"GLOO_IFNAME": ""} if rank == 1 else {})) for rank in range(3)}
    findings = found(rows)
    assert [(each.code, each.severity, each.ranks) for each in findings] == [
        ("LCH002.unread", Severity.WARNING, ()),
        ("LCH002.unread", Severity.WARNING, (1,)),
    ]
    golden(*findings)


@pytest.mark.parametrize("name", HIDDEN_FAULTS)
@pytest.mark.parametrize(("value", "is_flagged"), [("1", True), ("2", True), ("0", False), ("", False)])
def test_a_variable_that_hides_a_fault_is_flagged_unless_it_is_off(golden, name, value, is_flagged):
    findings = found(with_variables(value, value, name=name))
    assert [(each.code, each.ranks) for each in findings] == [("LCH002.ignored-fault", ())] * is_flagged
    if value == "1":
        golden(*findings)


def test_a_file_can_hide_a_fault_and_the_affinity_switch_hides_none():
    file = {"/etc/nccl.conf": {"NCCL_IGNORE_NET_MISMATCH": "1"}}
    assert [each.code for each in found({0: Data({}, file)})] == ["LCH002.ignored-fault"]
    assert found(with_variables("1", "1", name="NCCL_IGNORE_CPU_AFFINITY")) == []
