"""HST002: memory for every rank."""

from seen import seen_of

from ddpdiag.checks.host.memory import CHECK, Data
from ddpdiag.checks.hosts import GIB, MIB
from ddpdiag.model import Options, Severity


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def test_plenty_is_silent():
    assert found(Data(available_bytes=64 * GIB), Data(available_bytes=64 * GIB)) == []


def test_little_is_a_warning_once_a_host_and_too_little_to_import_torch_an_error(golden):
    (little,) = found(Data(available_bytes=1 * GIB), Data(available_bytes=1 * GIB))
    (less,) = found(Data(available_bytes=300 * MIB), Data(available_bytes=300 * MIB))
    assert (little.severity, less.severity) == (Severity.WARNING, Severity.ERROR)
    assert (little.ranks, little.evidence) == ((0, 1), {"bytes": GIB, "ranks": 2, "expected_bytes": 2 * GIB})
    golden(little, less)


def test_a_limit_counts_where_it_is_tighter_than_the_host(golden):
    (finding,) = found(Data(available_bytes=64 * GIB, limit_bytes=2 * GIB, left_bytes=700 * MIB))
    assert finding.evidence["bytes"] == 700 * MIB
    golden(finding)


def test_a_rank_with_a_gpu_needs_more():
    assert found(Data(available_bytes=3 * GIB)) == []
    assert len(found(Data(available_bytes=3 * GIB), gpus=1)) == 1


def test_memory_that_cannot_be_read_is_unknown_and_not_plenty(golden):
    (finding,) = found(Data())
    assert (finding.code, finding.severity) == ("HST002.unreadable", Severity.WARNING)
    golden(finding)


def test_a_limit_is_enough_to_judge_by():
    assert found(Data(limit_bytes=8 * GIB, left_bytes=4 * GIB)) == []


def test_one_rank_of_a_host_speaks_for_all_of_its_ranks(golden):
    run = seen_of(CHECK, {0: Data(available_bytes=3 * GIB)}, size=4, ranks_per_node=4)
    assert run.trials[0].groups == ((0,),)
    (finding,) = CHECK.judge(run)
    assert finding.ranks == (0, 1, 2, 3)
    golden(finding)


def test_earlier_kills_are_a_warning(golden):
    (finding,) = found(Data(available_bytes=64 * GIB, oom_kills=3))
    assert (finding.code, finding.severity) == ("HST002.oom-kills", Severity.WARNING)
    assert finding.evidence == {"oom_kills": 3}
    golden(finding)


def test_the_threshold_can_be_set():
    assert found(Data(available_bytes=700 * MIB), options=Options(settings={"HST002.cpu_mib": "512"})) == []
