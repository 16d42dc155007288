"""Rendezvous, names and all-reduce, judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import seen_of, together, world_of

from ddpdiag.check import Seen
from ddpdiag.checks import col001, rdz001, rdz002
from ddpdiag.model import Depth, Finding, Options, Severity, Status
from ddpdiag.stats import Samples


def timing(seconds: float) -> Samples:
    return Samples(min=seconds, median=seconds, p95=seconds, count=8)


def reduced(wrong: int = 0, seconds: float = 1e-3, ranks: int = 2) -> col001.Data:
    return col001.Data("gloo", ranks, 4, timing(1e-4), 1 << 20, timing(seconds), wrong)


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@given(st.integers(2, 10_000), st.floats(1e-6, 100), st.integers(1, 1 << 40))
def test_busbw_is_as_nccl_tests_defines_it(ranks: int, seconds: float, size: int) -> None:
    assert col001.busbw(size, seconds, ranks) == pytest.approx(size / seconds * 2 * (ranks - 1) / ranks)


def test_right_values_are_silent() -> None:
    assert list(col001.judge(seen_of(col001.CHECK, {0: reduced(), 1: reduced()}, params={"backend": "gloo"}))) == []


def test_wrong_values_everywhere_blame_nobody() -> None:
    seen = seen_of(col001.CHECK, {rank: reduced(wrong=7) for rank in range(4)}, params={"backend": "gloo"})
    (finding,) = col001.judge(seen)
    assert (finding.code, finding.ranks) == ("COL001.wrong", ())
    assert "every rank" in finding.message
    assert "7 elements" in finding.message


def test_wrong_values_on_one_rank_of_four_blame_it() -> None:
    rows = {rank: reduced(wrong=int(rank == 0)) for rank in range(4)}
    (finding,) = col001.judge(seen_of(col001.CHECK, rows, params={"backend": "gloo"}))
    assert finding.ranks == (0,)


def test_wrong_values_on_one_rank_of_two_cannot_be_pinned() -> None:
    rows = {0: reduced(), 1: reduced(wrong=1)}
    (finding,) = col001.judge(seen_of(col001.CHECK, rows, params={"backend": "gloo"}))
    assert finding.ranks == ()


def test_the_slowest_rank_stands_in_the_figures_and_every_rank_in_its_row() -> None:
    seen = seen_of(col001.CHECK, {0: reduced(seconds=1e-3), 1: reduced(seconds=2e-3)}, params={"backend": "gloo"})
    assert col001.figures(seen)["all_reduce.gloo.busbw_bytes_per_s"] == pytest.approx((1 << 20) / 2e-3)
    assert col001.columns(seen)[0]["busbw_bytes_per_s"] == pytest.approx((1 << 20) / 1e-3)


def test_gloo_is_tried_before_the_jobs_own_backend() -> None:
    seen = seen_of(col001.CHECK, {0: reduced(), 1: reduced()}, params={"backend": "gloo"}, gpus=2)
    (trial,) = col001.plan(seen)
    assert trial.params["backend"] == "nccl"


def test_without_gpus_gloo_is_all() -> None:
    assert col001.plan(seen_of(col001.CHECK, {0: reduced(), 1: reduced()}, params={"backend": "gloo"})) == ()


def test_one_rank_has_no_ground_for_a_collective() -> None:
    assert col001.ground(world_of(1)) is not None
    assert col001.ground(world_of(2)) is None


def test_nccl_without_gpus_has_no_ground() -> None:
    assert "nccl needs GPUs" in (col001.ground(world_of(2, options=Options(backend="nccl"))) or "")
    assert col001.ground(world_of(2, gpus=1, options=Options(backend="nccl"))) is None


@pytest.mark.parametrize(
    ("call_seconds", "left_seconds", "calls"),
    [(1e-3, 10.0, (2, 8)), (1.0, 10.0, (1, 4)), (2.0, 10.0, (1, 1)), (8.0, 7.0, (0, 1)), (1.0, -1.0, (0, 1))],
)
def test_a_slow_all_reduce_is_called_less_often(call_seconds: float, left_seconds: float, calls: object) -> None:
    assert col001.affordable(2, 8, call_seconds, left_seconds) == calls


def test_deadlines_grow_with_the_group_unless_given() -> None:
    def deadline(size: int, **options: object) -> float:
        options_ = Options(**options)  # type: ignore[arg-type]
        return seen_of(col001.CHECK, {}, size=size, options=options_).trials[0].deadline_seconds

    assert deadline(128) == pytest.approx(col001.CHECK.deadline + 128 * 0.15)
    assert deadline(128, settings={"COL001.deadline_seconds": "7"}) == 7
    assert seen_of(rdz002.CHECK, {}, size=128).trials[0].deadline_seconds == rdz002.CHECK.deadline


def test_the_jobs_own_backend_decides_whether_a_check_is_ready() -> None:
    failed = {1: Status.DIED}
    assert not seen_of(col001.CHECK, {0: reduced()}, statuses=failed, params={"backend": "gloo"}).ready
    assert seen_of(col001.CHECK, {0: reduced()}, statuses=failed, params={"backend": "gloo"}, gpus=2).ready
    assert not seen_of(col001.CHECK, {0: reduced()}, statuses=failed, params={"backend": "nccl"}, gpus=2).ready


def test_every_depth_has_its_size() -> None:
    assert set(col001.LARGE_BYTES) == set(Depth)


def met(method: str, statuses: dict[int, Status] | None = None, **world: object) -> Seen[rdz001.Data]:
    ranks = [rank for rank in range(2) if rank not in (statuses or {})]
    rows = {rank: rdz001.Data(method, 0.1) for rank in ranks}
    return seen_of(rdz001.CHECK, rows, statuses=statuses, params={"method": method}, size=2, **world)  # type: ignore[arg-type]


def test_the_methods_are_tried_in_turn() -> None:
    (trial,) = rdz001.plan(met("tcp"))
    assert trial.params["method"] == "env"


def test_a_file_needs_a_shared_directory_on_several_hosts() -> None:
    assert rdz001._methods(world_of(2, ranks_per_node=1)) == ("tcp", "env")
    shared = world_of(2, ranks_per_node=1, options=Options(shared_dir="/shared"))
    assert rdz001._methods(shared) == rdz001.METHODS
    (finding,) = rdz001.judge(met("tcp", ranks_per_node=1))
    assert (finding.code, finding.severity) == ("RDZ001.file", Severity.INFO)


def test_one_failed_method_is_not_this_checks_finding_unless_another_works() -> None:
    assert list(rdz001.judge(met("tcp", {1: Status.HUNG}))) == []


def test_a_method_that_fails_over_gloo_is_a_warning_where_the_jobs_own_backend_works() -> None:
    def over_gloo(method: str, statuses: dict[int, Status] | None = None) -> Seen[rdz001.Data]:
        rows = {rank: rdz001.Data(method, 0.1) for rank in range(2) if rank not in (statuses or {})}
        params = {"method": method, "backend": "gloo"}
        return seen_of(rdz001.CHECK, rows, statuses=statuses, params=params, size=2, gpus=2)

    tried = together(over_gloo("tcp"), over_gloo("env", {1: Status.RAISED}))
    nccl = seen_of(col001.CHECK, {0: reduced(), 1: reduced()}, params={"backend": "nccl"}, gpus=2)
    (finding,) = rdz001.judge(tried)
    assert finding.severity is Severity.ERROR
    (finding,) = rdz001.judge(together(tried, nccl))
    assert (finding.code, finding.severity) == ("RDZ001.method", Severity.WARNING)
    assert "nccl, which the job takes, works" in finding.message


def named(
    addresses: tuple[str, ...] | None = ("10.0.0.1",), own: tuple[str, ...] = ("10.0.0.2",), **more: object
) -> rdz002.Data:
    values = {"name": "n0", "seconds": 0.01, "own_name": "n1", "interface": None} | more
    return rdz002.Data(addresses=addresses, own_addresses=own, **values)  # type: ignore[arg-type]


def test_good_names_are_silent() -> None:
    assert list(rdz002.judge(seen_of(rdz002.CHECK, {0: named(), 1: named()}, ranks_per_node=1))) == []


def test_an_unknown_coordinator_is_named_with_the_host_that_does_not_know_it() -> None:
    (finding,) = rdz002.judge(seen_of(rdz002.CHECK, {0: named(), 1: named(addresses=())}, ranks_per_node=1))
    assert (finding.code, finding.nodes) == ("RDZ002.unknown", ("n1",))


def test_loopback_matters_on_several_hosts_only() -> None:
    rows = {0: named(addresses=("127.0.1.1",)), 1: named()}
    assert codes(list(rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=1)))) == ["RDZ002.loopback"]
    assert list(rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=2))) == []


def test_gloo_offering_loopback_is_an_error_unless_an_interface_is_named() -> None:
    rows = {0: named(), 1: named(own=("127.0.1.1",))}
    (finding,) = rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=1))
    assert (finding.code, finding.severity, finding.nodes) == ("RDZ002.own", Severity.ERROR, ("n1",))
    rows = {0: named(), 1: named(own=("127.0.1.1",), interface="eth0")}
    assert list(rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=1))) == []


def test_a_slow_look_up_is_a_warning() -> None:
    (finding,) = rdz002.judge(seen_of(rdz002.CHECK, {0: named(seconds=3.0), 1: named()}, ranks_per_node=1))
    assert (finding.code, finding.severity) == ("RDZ002.slow", Severity.WARNING)


def test_a_resolver_that_never_answers_is_an_error_and_no_unknown_name() -> None:
    rows = {0: named(), 1: named(addresses=None, seconds=12.0)}
    (finding,) = rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=1))
    assert (finding.code, finding.severity, finding.nodes) == ("RDZ002.slow", Severity.ERROR, ("n1",))
    assert "no answer in 12.0 s" in finding.message


def test_a_loopback_on_the_coordinators_own_host_is_a_warning_where_the_ranks_met() -> None:
    seen = seen_of(rdz002.CHECK, {0: named(addresses=("127.0.1.1",)), 1: named()}, ranks_per_node=1)
    (finding,) = rdz002.judge(together(seen, met("tcp", ranks_per_node=1)))
    assert (finding.code, finding.severity) == ("RDZ002.loopback", Severity.WARNING)
    (finding,) = rdz002.judge(together(seen, met("tcp", {1: Status.HUNG}, ranks_per_node=1)))
    assert finding.severity is Severity.ERROR


def test_the_host_with_another_address_is_the_odd_one_out() -> None:
    rows = {0: named(("10.0.0.1", "fe80::1")), 1: named(("10.0.0.1",)), 2: named(("192.168.7.1",))}
    (finding,) = rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=1))
    assert (finding.code, finding.severity, finding.nodes) == ("RDZ002.differs", Severity.WARNING, ("n2",))
    assert "n0 is 10.0.0.1 on 2 of 3 hosts, and 192.168.7.1 on n2" in finding.message


def test_of_two_hosts_that_differ_neither_is_blamed() -> None:
    rows = {0: named(("10.0.0.1",)), 1: named(("10.0.0.9",))}
    (finding,) = rdz002.judge(seen_of(rdz002.CHECK, rows, ranks_per_node=1))
    assert (finding.code, finding.nodes) == ("RDZ002.differs", ())


def test_the_coordinators_addresses_are_among_the_measurements() -> None:
    rows = {0: named(("10.0.0.1", "fe80::1")), 1: named(()), 2: named(None)}
    assert rdz002.figures(seen_of(rdz002.CHECK, rows, ranks_per_node=1)) == {
        "coordinator.n0": "10.0.0.1, fe80::1",
        "coordinator.n1": "unknown",
        "coordinator.n2": None,
    }
    assert len(rdz002.figures(seen_of(rdz002.CHECK, dict.fromkeys(range(99), named()), ranks_per_node=1))) == 64
