"""Where the bottleneck of a sweep is, and how it is told."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.bandwidth.bottleneck import assess
from ddpdiag.bandwidth.expectations import Bound
from ddpdiag.bandwidth.facts import Facts, Slow
from ddpdiag.bandwidth.fit import fit
from ddpdiag.bandwidth.formulas import busbw, factor
from ddpdiag.model.bench import COLLECTIVES, Bottleneck, Fit, Limits

# The machine may be busy.
relaxed = settings(deadline=None)

MIB = 1 << 20
SIZES = tuple(8 << power for power in range(28))  # 8 B to 1 GiB
LOOPBACK = Bound(1.44e9, Bottleneck.COPY, "this host's loopback 1.6 GB/s, measured in this run")
NVLINK = Bound(352e9, Bottleneck.NVLINK, "0.95 x 371 GB/s of the GPU's NVLinks")
PCIE = Bound(24e9, Bottleneck.PCIE, "24 GB/s of PCIe")
RAILS = Bound(184e9, Bottleneck.NIC, "0.92 x 200 GB/s of 8 network cards of n0", cards=8)
ONE_CARD = Bound(0.1175e9, Bottleneck.NIC, "0.94 x 125 MB/s of the network card of n0", cards=1)


def facts(
    endless: float, bound: Bound | None, *, latency: float = 20e-6, sizes: tuple[int, ...] = SIZES, **more: Any
) -> Facts:
    """An all-reduce of 8 ranks along a line: bus bandwidth of an endless message, and seconds of an empty one."""
    backend = more.pop("backend", "gloo" if bound and bound.part is Bottleneck.COPY else "nccl")
    rate = endless / factor("all_reduce", 8)
    points = more.pop("points", [(size, latency + size / rate) for size in sizes])
    peak, best = max((busbw("all_reduce", size, seconds, 8), size) for size, seconds in points)
    found = Facts(
        collective="all_reduce",
        backend=backend,
        ranks=8,
        hosts=2 if bound and bound.part is Bottleneck.NIC else 1,
        peak_busbw_bytes_per_s=peak,
        best_bytes=best,
        fit=fit("all_reduce", 8, points),
        bound=bound,
        points=points,
    )
    return found._replace(**more)


def told(found: Facts) -> str:
    return assess(found)[1]


def part(found: Facts) -> Bottleneck:
    return assess(found)[0]


def test_gloo_is_bound_by_copies() -> None:
    found = facts(1.31e9, LOOPBACK, latency=100e-6)
    assert assess(found) == (
        Bottleneck.COPY,
        "all_reduce over gloo is bound by copies on this host's CPU: 1.31 GB/s busbw at 1 GiB, 91 % of 1.44 GB/s"
        " (this host's loopback 1.6 GB/s, measured in this run).",
    )


def test_gloo_far_above_its_expectation_says_what_that_means() -> None:
    assert "busier moment" not in told(facts(1.5e9, LOOPBACK, latency=100e-6))
    assert "copies were timed at a busier moment than this" in told(facts(3.1e9, LOOPBACK, latency=100e-6))


def test_the_end_of_the_caches_is_no_congestion() -> None:
    found = facts(1.31e9, LOOPBACK)
    slower = [(size, seconds * (1.3 if size > 64 * MIB else 1)) for size, seconds in found.points]
    assert part(found._replace(points=slower)) is Bottleneck.COPY


def test_a_busy_core_is_the_bottleneck_of_gloo_whatever_was_expected() -> None:
    found = facts(0.6e9, LOOPBACK, cores_used=1.2)
    assert part(found) is Bottleneck.COPY
    assert "a rank uses 1.2 cores" in told(found)
    assert part(found._replace(bound=None)) is Bottleneck.COPY
    assert part(found._replace(cores_used=0.4)) is Bottleneck.UNKNOWN


@pytest.mark.parametrize(
    ("endless", "bound", "expected"),
    [
        (366e9, NVLINK, Bottleneck.NVLINK),
        (23.5e9, PCIE, Bottleneck.PCIE),
        (180e9, RAILS, Bottleneck.NIC),
        (0.115e9, ONE_CARD, Bottleneck.NIC),
        (200e9, NVLINK, Bottleneck.UNKNOWN),
        (200e9, None, Bottleneck.UNKNOWN),
    ],
)
def test_a_plateau_shows_whose_limit_was_reached(endless: float, bound: Bound | None, expected: Bottleneck) -> None:
    assert part(facts(endless, bound)) is expected


def test_more_than_a_ring_is_nvls() -> None:
    assert told(facts(478e9, NVLINK)).endswith("(0.95 x 371 GB/s of the GPU's NVLinks), so NVLS is at work.")


def test_more_than_the_cards_carry_is_a_tree() -> None:
    assert "NCCL_ALGO=RING" in told(facts(260e9, RAILS))
    assert "NCCL_ALGO=RING" not in told(facts(260e9, RAILS, collective="send_recv"))


def test_far_too_little_between_hosts_may_be_sockets() -> None:
    assert "NET/Socket" in told(facts(10e9, RAILS))


def test_nothing_known_is_said() -> None:
    assert told(facts(200e9, None)).endswith("what this hardware should reach is not known.")


def test_seven_of_eight_cards_show() -> None:
    found = facts(184e9 * 7 / 8, RAILS)
    assert assess(found)[0] is Bottleneck.MISSING_PART
    assert "7/8 of what its network can do, as if one of 8 cards carried nothing" in told(found)


def test_one_of_two_ports_shows() -> None:
    assert part(facts(92e9, RAILS._replace(cards=2))) is Bottleneck.MISSING_PART


def test_messages_too_short_for_the_network_are_no_missing_card() -> None:
    """7/8 of the network at a size of 7 times the half: the network is whole."""
    half = 1 << 30
    found = facts(184e9, RAILS, latency=(half / 7) / (184e9 / 1.75))
    assert found.share == pytest.approx(7 / 8, rel=1e-3)
    assert part(found) is Bottleneck.NIC


def test_half_of_pcie_is_lanes_or_a_way_through_host_memory() -> None:
    assert part(facts(12e9, PCIE)) is Bottleneck.MISSING_PART
    full = Limits(pcie_bytes_per_s=24e9, pcie_now_bytes_per_s=24e9)
    assert part(facts(12e9, PCIE, limits=full)) is Bottleneck.PCIE
    assert "P2P is off" in told(facts(12e9, PCIE, limits=full))


def test_a_slot_that_runs_below_itself_is_named() -> None:
    limits = Limits(pcie_bytes_per_s=24e9, pcie_now_bytes_per_s=12e9)
    assert part(facts(11e9, PCIE, limits=limits)) is Bottleneck.MISSING_PART
    assert "12 GB/s of 24 GB/s" in told(facts(11e9, PCIE, limits=limits))
    assert part(facts(23e9, PCIE, limits=limits)) is Bottleneck.PCIE  # it had only slept


def test_links_that_are_down_are_counted() -> None:
    found = facts(310e9, NVLINK._replace(busbw_bytes_per_s=313e9), links_up=(16, 18))
    assert part(found) is Bottleneck.MISSING_PART
    assert "16 are up on the GPU with fewest, 18 on others of its model" in told(found)


def test_a_gpu_whose_links_are_all_down_leaves_pcie_and_is_told() -> None:
    assert part(facts(20e9, PCIE, links_up=(0, 18))) is Bottleneck.MISSING_PART
    assert part(facts(20e9, PCIE, links_up=(4, 18))) is Bottleneck.PCIE


def test_links_that_no_gpu_has_up_are_not_missed() -> None:
    """A board that wires 12 of the GPU's 18."""
    found = facts(230e9, NVLINK._replace(busbw_bytes_per_s=235e9), limits=Limits(nvlinks=12, nvlinks_max=18))
    assert part(found._replace(links_up=(12, 12))) is Bottleneck.NVLINK
    assert part(found) is Bottleneck.NVLINK


@pytest.mark.parametrize("endless", [1.1e9, 12e9], ids=["slower than an idle slot", "half of PCIe"])
def test_a_network_of_unknown_speed_is_not_blamed_on_pcie(endless: float) -> None:
    idle = Limits(pcie_bytes_per_s=24e9, pcie_now_bytes_per_s=1.5e9)
    bound = PCIE._replace(network_unknown=True)
    found = facts(endless, bound, limits=idle, hosts=2)
    assert part(found) is Bottleneck.UNKNOWN
    assert "may be the network between the hosts" in told(found)
    assert part(found._replace(bound=PCIE)) is not Bottleneck.UNKNOWN
    assert part(facts(12e9, bound, hosts=2)) is Bottleneck.UNKNOWN


def test_links_without_a_switch_are_why_nothing_is_expected() -> None:
    bridged = facts(20e9, None, limits=Limits(nvlinks=4, nvlink_switched=False))
    assert told(bridged).endswith("what this hardware should reach over NVLinks without a switch is not known.")


def test_bandwidth_that_falls_as_messages_grow_is_congestion() -> None:
    found = facts(180e9, RAILS)
    dropped = [(size, seconds * (1.1 if size == SIZES[-1] else 1)) for size, seconds in found.points]
    assert part(found._replace(points=dropped)) is Bottleneck.CONGESTION
    assert "at 512 MiB to 163 GB/s at 1 GiB" in told(found._replace(points=dropped))


def test_a_fall_of_less_than_a_twentieth_is_none() -> None:
    found = facts(180e9, RAILS)
    dropped = [(size, seconds * (1.03 if size == SIZES[-1] else 1)) for size, seconds in found.points]
    assert part(found._replace(points=dropped)) is Bottleneck.NIC


def test_a_sweep_of_small_messages_is_bound_by_latency() -> None:
    found = facts(1.31e9, LOOPBACK, latency=120e-6, sizes=SIZES[:13])
    assert part(found) is Bottleneck.LATENCY
    assert told(found).startswith("all_reduce over gloo is latency-bound up to 32 KiB: 120 us a call")


def test_a_flat_sweep_is_bound_by_latency_and_has_no_fit() -> None:
    flat = [(size, 120e-6) for size in SIZES[:18]]
    assert told(facts(1e9, LOOPBACK, points=flat)) == (
        "all_reduce over gloo is latency-bound up to 1 MiB: 120 us a call."
    )


def test_one_large_size_is_judged_by_its_bandwidth() -> None:
    assert part(facts(1.4e9, LOOPBACK, sizes=(64 * MIB,))) is Bottleneck.COPY


def test_messages_that_are_too_short_for_the_machine_are_said_to_be() -> None:
    found = facts(180e9, RAILS, latency=200e-6, sizes=SIZES[:24])
    assert part(found) is Bottleneck.LATENCY
    assert "needs larger messages than 64 MiB" in told(found)


def test_more_ranks_than_cores_are_not_judged() -> None:
    assert assess(facts(0.4e9, LOOPBACK, oversubscribed=(4, 2))) == (
        Bottleneck.NOT_JUDGED,
        "More ranks (4) than cores (2): the numbers say nothing about this machine, and are not judged.",
    )


def test_one_rank_is_not_judged() -> None:
    assert part(facts(1e9, None, ranks=1)) is Bottleneck.NOT_JUDGED


def test_a_slow_rank_comes_before_everything_else() -> None:
    slow = Slow(1, "n0", "copies 2.1x slower than the median of its peers")
    assert assess(facts(0.4e9, LOOPBACK, oversubscribed=(4, 2), slow=(slow,))) == (
        Bottleneck.SLOW_RANK,
        "rank 1 on n0 holds the others back: it copies 2.1x slower than the median of its peers.",
    )


def test_two_slow_ranks_are_both_named() -> None:
    slow = (Slow(1, "n0", "copies 2.1x slower"), Slow(5, "n1", "comes last"))
    assert told(facts(1e9, None, slow=slow)) == (
        "2 ranks hold the others back: rank 1 on n0 copies 2.1x slower; rank 5 on n1 comes last."
    )


def test_what_was_not_measured_is_unknown() -> None:
    empty = facts(1e9, None)._replace(points=(), fit=None, peak_busbw_bytes_per_s=0.0)
    assert assess(empty) == (Bottleneck.UNKNOWN, "all_reduce over nccl was not measured.")


numbers = st.floats() | st.sampled_from([0.0, 1.0, 1e9])
optional = st.none() | numbers
bounds = st.builds(
    Bound,
    numbers,
    st.sampled_from([Bottleneck.COPY, Bottleneck.NIC, Bottleneck.PCIE, Bottleneck.NVLINK]),
    st.just("source"),
    st.integers(0, 16),
    st.booleans(),
)
fits = st.builds(Fit, latency_seconds=numbers, busbw_bytes_per_s=numbers, half_bytes=numbers)
limits = st.builds(
    Limits,
    nvlinks=st.none() | st.integers(0, 18),
    nvlink_switched=st.none() | st.booleans(),
    pcie_bytes_per_s=optional,
    pcie_now_bytes_per_s=optional,
)


@relaxed
@given(
    st.builds(
        Facts,
        collective=st.sampled_from(COLLECTIVES),
        backend=st.sampled_from(["gloo", "nccl", "mpi"]),
        ranks=st.integers(0, 9),
        hosts=st.integers(0, 3),
        peak_busbw_bytes_per_s=numbers,
        best_bytes=st.integers(0, 1 << 40),
        fit=st.none() | fits,
        bound=st.none() | bounds,
        points=st.lists(st.tuples(st.integers(-1, 1 << 33), numbers), max_size=6),
        limits=limits,
        links_up=st.none() | st.tuples(st.integers(0, 18), st.integers(0, 18)),
        oversubscribed=st.none(),
        cores_used=optional,
        slow=st.just(()),
    )
)
def test_any_facts_are_told_in_one_sentence(found: Facts) -> None:
    _, sentence = assess(found)
    assert sentence.isascii()
    assert sentence.endswith(".")
