"""HST001: cores against ranks and threads."""

from seen import seen_of

from ddpdiag.checks.host.cores import CHECK, Data
from ddpdiag.model import Severity, Status


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def rank(*affinity, cores=8, **more):
    return Data(cores=cores, affinity=affinity, **more)


def test_a_core_and_a_thread_for_each_rank_is_silent():
    assert found(rank(0, 1, omp_threads=2), rank(2, 3, omp_threads=2)) == []


def test_ranks_pinned_to_one_core_are_one_warning_per_host(golden):
    (finding,) = found(rank(3), rank(3))
    assert (finding.code, finding.severity, finding.ranks) == ("HST001.one-core", Severity.WARNING, (0, 1))
    golden(finding)


def test_a_host_with_a_single_core_is_not_pinned_but_oversubscribed(golden):
    (finding,) = found(rank(0, cores=1, omp_threads=1), rank(0, cores=1, omp_threads=1))
    assert (finding.code, finding.severity) == ("HST001.oversubscribed", Severity.NOTE)
    golden(finding)


def test_threads_beyond_twice_the_cores_are_a_warning_with_the_fitting_number(golden):
    (finding,) = found(*[rank(*range(8))] * 4, ranks_per_node=4)
    assert (finding.code, finding.severity) == ("HST001.oversubscribed", Severity.WARNING)
    assert finding.env == {"OMP_NUM_THREADS": "2"}
    golden(finding)


def test_ranks_with_one_thread_each_are_too_many_and_no_variable_mends_that(golden):
    (finding,) = found(*[rank(0, 1, omp_threads=1)] * 8, ranks_per_node=8)
    assert (finding.code, finding.severity, finding.env) == ("HST001.oversubscribed", Severity.WARNING, {})
    golden(finding)


def test_too_many_ranks_and_threads_are_one_finding(golden):
    (finding,) = found(*[rank(0, 1)] * 4, ranks_per_node=4)
    assert (finding.severity, finding.env) == (Severity.WARNING, {"OMP_NUM_THREADS": "1"})
    assert "torchrun --nproc-per-node=2" in finding.fix
    golden(finding)


def test_twice_as_many_threads_as_cores_is_silent():
    assert found(rank(0, 1), rank(0, 1)) == []


def test_a_quota_counts_where_it_is_tighter_than_the_binding():
    (finding,) = found(rank(*range(8), quota=1.5), rank(*range(8), quota=1.5))
    assert finding.evidence["cores"] == 1.5
    (finding,) = found(rank(*range(8), quota=1.0), rank(*range(8), quota=1.0))
    assert finding.code == "HST001.oversubscribed"


def test_a_rank_that_did_not_answer_is_left_out():
    seen = seen_of(CHECK, {1: rank(0)}, statuses={0: Status.HUNG})
    assert list(CHECK.judge(seen)) == []


def test_ranks_on_one_core_of_a_host_with_an_unknown_number_are_unknown(golden):
    (finding,) = found(rank(0, cores=None), rank(0, cores=None))
    assert (finding.code, finding.severity) == ("HST001.unreadable", Severity.WARNING)
    golden(finding)


def test_an_unknown_number_of_cores_does_not_matter_where_ranks_have_their_own():
    assert found(rank(0, cores=None, omp_threads=1), rank(1, cores=None, omp_threads=1)) == []


def test_an_unknown_binding_is_unknown_and_names_the_rank():
    (finding,) = found(rank(0, 1), rank())
    assert finding.code == "HST001.unreadable"
    assert finding.ranks == (1,)
