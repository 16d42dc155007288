"""What bus bandwidth this hardware should reach."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag.bandwidth import lowest_bound
from ddpdiag.model.bench import COLLECTIVES, Bottleneck, Limits, PeerPath

# The machine may be busy.

CPU = Limits(copy_bytes_per_s=9.8e9, loopback_bytes_per_s=1.45e9)
COPIES = 1 / (1 / 1.45e9 + 0.75 / 9.8e9)
H100 = Limits(nvlinks=18, nvlink_switched=True, nvlink_bytes_per_s=370.8e9, pcie_bytes_per_s=48e9)
GB200 = structs.replace(H100, nvlink_bytes_per_s=18 * 40.1e9)
# Bridged with a neighbour, no switch.
A40 = Limits(nvlinks=4, nvlink_switched=False, nvlink_bytes_per_s=48e9, pcie_bytes_per_s=24e9)


def world(*sizes: int) -> dict[str, tuple[int, ...]]:
    """Hosts n0, n1, ... with so many ranks each."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return {f"n{at}": tuple(range(start, start + sizes[at])) for at, start in enumerate(starts)}


def same(limits: Limits, ranks: int) -> dict[int, Limits]:
    return dict.fromkeys(range(ranks), limits)


def card(limits: Limits, rate: float, name: str = "eth0") -> Limits:
    return structs.replace(limits, nic=name, nic_bytes_per_s=rate)


def infiniband(limits: Limits, ports: int, rate: float) -> Limits:
    """All ports of a host as one card, as every rank of it sees them."""
    return structs.replace(
        limits, nic="mlx5_0+mlx5_1", nic_bytes_per_s=ports * rate, nic_ports=ports, nic_port_bytes_per_s=rate
    )


def with_rails(rate: float, *, hosts: int = 2) -> dict[int, Limits]:
    """H100 hosts of 8, a card for each GPU."""
    return {rank: card(H100, rate, f"mlx5_{rank % 8}") for rank in range(8 * hosts)}


def test_a_slow_rank_does_not_lower_what_is_asked_of_all() -> None:
    slow = Limits(copy_bytes_per_s=1e9, loopback_bytes_per_s=0.2e9)
    assert lowest_bound("all_reduce", "gloo", world(3), {**same(CPU, 3), 1: slow}) == lowest_bound(
        "all_reduce", "gloo", world(3), same(CPU, 3)
    )


SLOW_THIRD = {**same(H100, 8), 3: structs.replace(H100, nvlink_bytes_per_s=350e9)}
BOUNDS = {
    "gloo on one host": ("gloo", world(3), same(CPU, 3), "COPY", COPIES),
    "gloo, copies not measured": ("gloo", world(2), same(Limits(loopback_bytes_per_s=2e9), 2), "COPY", 2e9),
    "gloo between hosts is one stream": ("gloo", world(1, 1), same(card(CPU, 0.125e9), 2), "NIC", 0.94 * 0.125e9),
    "gloo on fast cards has its copies": ("gloo", world(1, 1), same(card(CPU, 50e9), 2), "COPY", COPIES),
    "gloo, a card of unknown speed": ("gloo", world(1, 1), same(CPU, 2), "COPY", COPIES),
    "the slowest gpu in the ring": ("nccl", world(8), SLOW_THIRD, "NVLINK", 0.95 * 350e9),
    "a pair needs no switch": ("nccl", world(2), same(A40, 2), "NVLINK", 0.95 * 48e9),
    "no nvlink": ("nccl", world(2), {0: H100, 1: Limits(pcie_bytes_per_s=24e9)}, "PCIE", 24e9),
    "a gpu alone on its host": ("nccl", world(1, 1), same(card(H100, 100e9), 2), "PCIE", 48e9),
    "all cards of a host": ("nccl", world(8, 8), with_rails(25e9), "NIC", 0.92 * 200e9),
    "a shared card counts once": ("nccl", world(8, 8), same(card(H100, 25e9), 16), "NIC", 0.92 * 25e9),
    "fast networks": ("nccl", world(8, 8), with_rails(100e9), "NVLINK", 0.95 * 370.8e9),
    "links without a switch": ("nccl", world(4, 4), same(card(A40, 12.5e9), 8), "NIC", 0.92 * 12.5e9),
}


@pytest.mark.parametrize(("backend", "hosts", "limits", "part", "busbw"), BOUNDS.values(), ids=BOUNDS)
def test_the_slowest_part_bounds_an_all_reduce(golden, backend, hosts, limits, part, busbw) -> None:
    found = lowest_bound("all_reduce", backend, hosts, limits)
    assert found is not None
    assert found.bottleneck.name == part
    assert found.busbw_bytes_per_s == pytest.approx(busbw)
    golden(found.source)


def trays(*domains: str | None) -> dict[int, Limits]:
    """Trays with 4 GPUs and 4 cards of 400 Gbit/s, each in this domain of NVLinks."""
    own = infiniband(GB200, 4, 50e9)
    return {
        4 * tray + gpu: structs.replace(own, nvlink_domain=domain)
        for tray, domain in enumerate(domains)
        for gpu in range(4)
    }


@pytest.mark.parametrize(
    ("domains", "part", "busbw"),
    [
        (("a.1", "a.1"), Bottleneck.NVLINK, 0.95 * 721.8e9),
        ((*["a.1"] * 18,), Bottleneck.NVLINK, 0.95 * 721.8e9),
        # As NVL8 of three racks reach 393 GB/s as a ring (NCCL issue 1801).
        (("a.1", "a.1", "b.1", "b.1"), Bottleneck.NIC, 0.92 * 400e9),
        (("a.1", "a.2"), Bottleneck.NIC, 0.92 * 200e9),
        ((None, None), Bottleneck.NIC, 0.92 * 200e9),
        (("a.1", "a.1", None), Bottleneck.NIC, 0.92 * 200e9),
    ],
    ids=["two trays", "a rack", "two racks", "two cliques", "no domain", "a tray without"],
)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_hosts_in_one_domain_of_nvlinks_are_not_bound_by_their_cards(golden, collective, domains, part, busbw) -> None:
    found = lowest_bound(collective, "nccl", world(*[4] * len(domains)), trays(*domains))
    assert found is not None
    assert (found.bottleneck, found.network_unknown) == (part, False)
    assert found.busbw_bytes_per_s == pytest.approx(busbw)
    if collective == "all_reduce":
        golden(found.source)


def test_ranks_that_alternate_between_hosts_share_the_card() -> None:
    limits = same(card(CPU, 0.125e9), 4)
    together = lowest_bound("all_reduce", "gloo", {"a": (0, 1), "b": (2, 3)}, limits)
    apart = lowest_bound("all_reduce", "gloo", {"a": (0, 2), "b": (1, 3)}, limits)
    assert together is not None
    assert apart is not None
    assert apart.busbw_bytes_per_s == pytest.approx(together.busbw_bytes_per_s / 2)


def test_all_ports_of_infiniband_are_counted_one_by_one() -> None:
    """Every rank sees all of them under one name: 8 ports of 400 Gbit/s are 8 cards, not one of 3200 Gbit/s."""
    found = lowest_bound("all_reduce", "nccl", world(8, 8), same(infiniband(H100, 8, 25e9), 16))
    assert found == lowest_bound("all_reduce", "nccl", world(8, 8), with_rails(25e9))


def test_a_neighbour_gets_what_one_port_carries(golden) -> None:
    found = lowest_bound("send_recv", "nccl", world(8, 8), same(infiniband(H100, 8, 50e9), 16))
    assert found is not None
    assert found.bottleneck is Bottleneck.NIC
    assert found.busbw_bytes_per_s == pytest.approx(0.92 * 50e9)
    golden(found.source)


def test_a_network_of_unknown_speed_is_told_from_a_known_one() -> None:
    unknown = lowest_bound("all_reduce", "nccl", world(1, 1), same(H100, 2))
    half = lowest_bound("all_reduce", "nccl", world(1, 1), {0: H100, 1: card(H100, 50e9)})
    known = lowest_bound("all_reduce", "nccl", world(1, 1), same(card(H100, 50e9), 2))
    alone = lowest_bound("all_reduce", "nccl", world(2), same(H100, 2))
    assert [found and found.network_unknown for found in (unknown, half, known, alone)] == [True, True, False, False]


PXB, PHB, SYS = 20, 30, 50


def on_one_host(limits: Limits, paths: dict[tuple[int, int], PeerPath], processor: str) -> dict[int, Limits]:
    """Ranks 0, 1, ... whose GPUs know the paths between them."""
    count = max(max(pair) for pair in paths) + 1
    every = {**paths, **{(b, a): path for (a, b), path in paths.items()}}
    return {
        rank: structs.replace(
            limits,
            uuid=f"GPU-{rank}",
            cpu_vendor=processor,
            peers={f"GPU-{other}": every[rank, other] for other in range(count) if other != rank},
        )
        for rank in range(count)
    }


def all_pairs(count: int, path: PeerPath, **others: PeerPath) -> dict[tuple[int, int], PeerPath]:
    """The same path between all of them but for those that are named: `_0_1`."""
    named = {tuple(map(int, name[1:].split("_"))): own for name, own in others.items()}
    return {pair: named.get(pair, path) for pair in combinations(range(count), 2)}


# Four A100 that are wired directly: four links from each to each other one.
WIRED = Limits(nvlinks=12, nvlink_switched=False, nvlink_bytes_per_s=240e9, pcie_bytes_per_s=24e9)
CARD = Limits(pcie_bytes_per_s=24e9)
NEAR, FAR = PeerPath(nvlinks=0, pcie_level=PXB, p2p=True), PeerPath(nvlinks=0, pcie_level=SYS, p2p=True)
BRIDGE = PeerPath(nvlinks=4, pcie_level=PHB, p2p=True)
INSIDE = {
    "all of four wired GPUs": (WIRED, all_pairs(4, BRIDGE), "GenuineIntel", 0.95 * 240e9),
    "two of four wired GPUs": (WIRED, all_pairs(2, BRIDGE), "GenuineIntel", 0.95 * 80e9),
    "bridged in pairs, near": (A40, all_pairs(4, NEAR, _0_1=BRIDGE, _2_3=BRIDGE), "GenuineIntel", 24e9),
    "bridged in pairs, far": (A40, all_pairs(4, FAR, _0_1=BRIDGE, _2_3=BRIDGE), "GenuineIntel", 12e9),
    "behind one switch": (CARD, all_pairs(4, NEAR), "GenuineIntel", 24e9),
    "across host bridges": (CARD, all_pairs(4, PeerPath(nvlinks=0, pcie_level=PHB, p2p=True)), "GenuineIntel", 12e9),
    "two switches": (CARD, all_pairs(4, FAR, _0_1=NEAR, _2_3=NEAR), "GenuineIntel", 12e9),
    "two cards under AMD": (CARD, all_pairs(2, FAR), "AuthenticAMD", 24e9),
    "four cards under AMD": (CARD, all_pairs(4, FAR), "AuthenticAMD", 12e9),
    "cards without P2P": (CARD, all_pairs(2, PeerPath(nvlinks=0, pcie_level=PXB, p2p=False)), "AuthenticAMD", 12e9),
    "NVML says nothing": (CARD, all_pairs(2, PeerPath()), "GenuineIntel", 24e9),
}


@pytest.mark.parametrize(("limits", "paths", "processor", "busbw"), INSIDE.values(), ids=INSIDE)
def test_the_weakest_place_of_a_ring_bounds_it(golden, limits, paths, processor, busbw) -> None:
    own = on_one_host(limits, paths, processor)
    found = lowest_bound("all_reduce", "nccl", world(len(own)), own)
    assert found is not None
    assert found.busbw_bytes_per_s == pytest.approx(busbw)
    golden(found.source)


def test_an_all_to_all_sends_more_out_of_its_host_than_a_ring() -> None:
    """2 hosts of 8: each rank sends 8 of its 16 parts away, so a host 8 x S/2, while S x 15/16 counts."""
    found = lowest_bound("all_to_all", "nccl", world(8, 8), with_rails(25e9))
    assert found is not None
    seconds_per_byte = 8 * 0.5 / 200e9
    assert found.busbw_bytes_per_s == pytest.approx(0.92 * (15 / 16) / seconds_per_byte)


@pytest.mark.parametrize(
    ("backend", "hosts", "limits"),
    [
        pytest.param("gloo", world(2), {}, id="nothing measured"),
        pytest.param("gloo", world(2), same(Limits(copy_bytes_per_s=1e9), 2), id="no loopback"),
        pytest.param("nccl", world(2), same(CPU, 2), id="no gpu"),
        pytest.param("nccl", world(1), same(H100, 1), id="one rank"),
        pytest.param("mpi", world(2), same(H100, 2), id="unknown backend"),
        pytest.param("gloo", {}, {}, id="no host"),
        pytest.param("nccl", world(4), same(A40, 4), id="links without a switch"),
    ],
)
def test_where_nothing_is_known_nothing_is_expected(backend, hosts, limits) -> None:
    assert lowest_bound("all_reduce", backend, hosts, limits) is None


rates = st.none() | st.floats()
peers = st.dictionaries(
    st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]),
    st.builds(PeerPath, nvlinks=st.none() | st.integers(0, 18), p2p=st.none() | st.booleans()),
)
limits = st.builds(
    Limits,
    copy_bytes_per_s=rates,
    loopback_bytes_per_s=rates,
    nic=st.none() | st.sampled_from(["eth0", "ib0"]),
    nic_bytes_per_s=rates,
    nic_ports=st.none() | st.integers(0, 16),
    nic_port_bytes_per_s=rates,
    nvlink_switched=st.none() | st.booleans(),
    nvlink_bytes_per_s=rates,
    pcie_bytes_per_s=rates,
    nvlinks=st.none() | st.integers(0, 18),
    uuid=st.none() | st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]),
    peers=peers,
    cpu_vendor=st.sampled_from([None, "AuthenticAMD", "ARM"]),
)


@settings(deadline=None)
@given(
    st.sampled_from(COLLECTIVES),
    st.sampled_from(["nccl", "gloo"]),
    st.lists(st.integers(0, 4), max_size=4),
    st.dictionaries(st.integers(0, 15), limits, max_size=16),
)
def test_any_limits_are_read(collective: str, backend: str, sizes: list[int], limits: dict[int, Limits]) -> None:
    found = lowest_bound(collective, backend, world(*sizes), limits)
    if found is not None:
        assert found.busbw_bytes_per_s >= 0
        assert found.source.isascii()
