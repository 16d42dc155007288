"""What is named as the probable cause where P2P fails on a host."""

import pytest
from cards import fabric
from cards import host_of as cards_on
from hypothesis import given
from hypothesis import strategies as st
from paths import around, both, bound, host_of, port_of, seen, seen_of_rows, translating, uuid_of
from seen import seen_of

from ddpdiag.checks.gpu import memory_errors, present
from ddpdiag.checks.gpu.visibility import Data as Enumerated
from ddpdiag.checks.host import shared_memory
from ddpdiag.checks.p2p.fallback.causes import suspicions
from ddpdiag.checks.p2p.paths import CHECK
from ddpdiag.probes.gpu.nvml import Enumeration, Gpu
from ddpdiag.probes.gpu.paths import P2P
from ddpdiag.probes.host.limits import SharedMemory

HOST = (0, 1, 2, 3, 4, 5, 6, 7)
LINKED = {"nvlinks": 18, "nvlink": 0}
ONE_SOCKET = {"level": 40}
OFF = {"read": int(P2P.DISABLED_BY_REGKEY), "write": int(P2P.DISABLED_BY_REGKEY)}


def shown(indices):
    return Enumerated(nvml=Enumeration(gpus=tuple(Gpu(index=index, uuid=uuid_of(index)) for index in indices)))


def enumerated(rows, **world):
    return seen_of(present.CHECK, rows, **({"size": 8, "ranks_per_node": 8, "gpus": 4} | world))


def said(*hosts, others=(), ranks=HOST):
    return suspicions(seen(*hosts, others=others), ranks)


def test_a_healthy_board_is_not_suspected():
    assert said(host_of(everywhere=ONE_SOCKET)) == ()


def test_nothing_is_said_where_nothing_was_looked_at():
    assert suspicions(seen_of(CHECK, {}, size=2, gpus=2), (0, 1)) == ()


def test_nvlinks_clear_the_board():
    assert said(host_of(everywhere=LINKED, surroundings=translating(ports=(0, 1), virtual=True))) == ()


def test_acs_comes_before_the_iommu_and_the_sockets(golden):
    acs, iommu, sockets = said(host_of(surroundings=translating(ports=(0, 1))))
    assert f"{port_of(0)}, {port_of(1)}" in acs
    assert "iommu=pt" in iommu
    assert "SYS" in sockets
    golden(acs, iommu, sockets)


@pytest.mark.parametrize(
    "surroundings",
    [translating(acs=None), around(ports=(0, 1), virtual=True)],
    ids=["that-only-root-may-read", "of-a-virtual-machine"],
)
def test_acs_that_cannot_be_judged_is_said_to_be_hidden(golden, surroundings):
    (suspicion,) = said(host_of(everywhere=ONE_SOCKET, surroundings=surroundings))
    golden(suspicion)


def test_a_fabric_that_was_not_joined_comes_first(golden):
    look = seen_of(
        memory_errors.CHECK,
        {0: cards_on({index: fabric(state=2) for index in range(4)}, count=4)},
        size=8,
        ranks_per_node=8,
    )
    first, *others = said(host_of(surroundings=translating()), others=(look,))
    assert "nvidia-fabricmanager" in first
    assert "IOMMU" in others[0]
    golden(first)


def test_ranks_that_see_one_gpu_each_are_told(golden):
    rows = enumerated({rank: shown([rank]) for rank in range(4)}, size=4, ranks_per_node=4, gpus=1)
    own = seen_of_rows(dict(enumerate(bound())), others=(rows,), size=4, ranks_per_node=4, gpus=1)
    first, *_ = suspicions(own, (0, 1, 2, 3))
    golden(first)


def test_ranks_that_see_all_gpus_are_not():
    rows = enumerated({rank: shown(range(4)) for rank in range(8)})
    assert said(host_of(everywhere=ONE_SOCKET), others=(rows,)) == ()


def test_a_registry_key_is_told(golden):
    (first,) = said(host_of(both(1, 2, **OFF), everywhere=ONE_SOCKET))
    golden(first)


def test_small_shared_memory_comes_last(golden):
    small = SharedMemory(size_bytes=64 << 20, free_bytes=64 << 20, error=None)
    memory = seen_of(shared_memory.CHECK, {0: shared_memory.Data(small)}, size=8, ranks_per_node=8, gpus=4)
    sockets, last = said(host_of(), others=(memory,))
    assert "SYS" in sockets
    assert "/dev/shm" in last
    golden(last)


def test_another_host_is_not_suspected():
    hosts = (host_of(everywhere=ONE_SOCKET), host_of(surroundings=translating(ports=(0, 1)), host=1))
    assert said(*hosts) == ()
    assert len(said(*hosts, ranks=(8, 9))) == 3


@given(st.booleans(), st.booleans(), st.sampled_from([None, True, False]), st.sets(st.integers(0, 3)))
def test_every_sentence_is_ascii_without_a_full_stop(translates, linked, virtual, ports):
    facts = (translating if translates else around)(ports=tuple(ports), virtual=virtual)
    for sentence in said(host_of(everywhere=LINKED if linked else None, surroundings=facts)):
        assert sentence.isascii()
        assert not sentence.endswith(".")
