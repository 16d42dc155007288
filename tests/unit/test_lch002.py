"""LCH002: variables that differ, or harm."""

import pytest
from seen import seen_of

from ddpdiag.checks.launch.variables import CHECK, HIDDEN_FAULTS, Data
from ddpdiag.model import Severity


def found(rows, **world):
    return list(CHECK.judge(seen_of(CHECK, rows, **world)))


def with_variables(*values, name="NCCL_ALGO"):
    return {rank: Data({} if value is None else {name: value}, {}) for rank, value in enumerate(values)}


def test_variables_that_agree_are_silent():
    assert found(with_variables("Ring", "Ring", "Ring")) == []


def test_the_odd_one_is_named_with_both_values(golden):
    (finding,) = found(with_variables("Ring", "Ring", "Tree", "Ring"))
    assert (finding.code, finding.severity) == ("LCH002.variable", Severity.WARNING)
    assert (finding.ranks, finding.hosts) == ((2,), ("n1",))
    golden(finding)


def test_a_variable_that_one_rank_lacks_is_unset_there(golden):
    (finding,) = found(with_variables("Ring", None, "Ring"))
    assert (finding.code, finding.ranks) == ("LCH002.variable", (1,))
    golden(finding)


def test_two_ranks_that_differ_blame_nobody_and_show_both():
    (finding,) = found(with_variables("Ring", "Tree"))
    assert finding.ranks == ()
    assert finding.evidence == {"rank 0": "Ring", "rank 1": "Tree"}


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_ERROR_FILE"]
)
def test_what_must_differ_may_differ(name):
    assert found(with_variables("0", "1", "2", name=name)) == []


NCCL_CLASS = "TORCH_DIST_USE_NCCL2"


@pytest.mark.parametrize(("values", "ranks"), [((None, "0"), ()), (("1", "0", None), (1,)), (("0", "0", "1"), (2,))])
def test_ranks_that_open_another_process_group_are_one_finding(golden, values, ranks):
    (finding,) = found(with_variables(*values, name=NCCL_CLASS))
    assert (finding.code, finding.severity, finding.ranks) == ("LCH002.process-group", Severity.WARNING, ranks)
    golden(finding)


@pytest.mark.parametrize("values", [("1", None), ("0", "0"), ("true", "1")])
def test_values_that_mean_the_same_process_group_are_silent(values):
    assert found(with_variables(*values, name=NCCL_CLASS)) == []


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
    assert [finding.code for finding in found(with_variables("Ring", "Tree"), gpus=2)] == ["LCH002.variable"]


def test_nccl_hostid_is_flagged_even_where_all_agree():
    (finding,) = found(with_variables("a", "a", name="NCCL_HOSTID"))
    assert finding.code == "LCH002.host-id"
    assert finding.ranks == (0, 1)


def test_a_debug_level_that_torch_refuses_is_an_error():
    (finding,) = found(with_variables("verbose", "verbose", name="TORCH_DISTRIBUTED_DEBUG"))
    assert finding.code == "LCH002.debug-level"
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL", "detail"])
def test_debug_levels_that_torch_knows_are_silent(level):
    assert found(with_variables(level, level, name="TORCH_DISTRIBUTED_DEBUG")) == []


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
