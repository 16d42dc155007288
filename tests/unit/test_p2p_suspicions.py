"""What is named as the probable cause where P2P fails on a host."""

from cards import fabric
from cards import host_of as cards_on
from hypothesis import given
from hypothesis import strategies as st
from paths import around, both, bound, host_of, port_of, seen, seen_of_rows, translating, uuid_of
from seen import seen_of

from ddpdiag.checks import gpu001, gpu003, hst003
from ddpdiag.checks.gpu_view import Data as Enumerated
from ddpdiag.checks.p2p001 import CHECK
from ddpdiag.checks.p2p_suspicions import suspicions
from ddpdiag.probes.gpu_paths import P2P
from ddpdiag.probes.limits import SharedMemory
from ddpdiag.probes.nvml import Enumeration, Gpu

HOST = (0, 1, 2, 3, 4, 5, 6, 7)
LINKED = {"nvlinks": 18, "nvlink": 0}
ONE_SOCKET = {"level": 40}
OFF = {"read": int(P2P.DISABLED_BY_REGKEY), "write": int(P2P.DISABLED_BY_REGKEY)}


def shown(indices):
    return Enumerated(nvml=Enumeration(gpus=tuple(Gpu(index=index, uuid=uuid_of(index)) for index in indices)))


def enumerated(rows, **world):
    return seen_of(gpu001.CHECK, rows, **({"size": 8, "ranks_per_node": 8, "gpus": 4} | world))


def said(*hosts, others=(), ranks=HOST):
    return suspicions(seen(*hosts, others=others), ranks)


def test_a_healthy_board_is_not_suspected():
    assert said(host_of(everywhere=ONE_SOCKET)) == ()


def test_nothing_is_said_where_nothing_was_looked_at():
    assert suspicions(seen_of(CHECK, {}, size=2, gpus=2), (0, 1)) == ()


def test_nvlinks_clear_the_board():
    assert said(host_of(everywhere=LINKED, surroundings=translating(ports=(0, 1), virtual=True))) == ()


def test_acs_comes_before_the_iommu_and_the_sockets():
    acs, iommu, sockets = said(host_of(surroundings=translating(ports=(0, 1))))
    assert acs.startswith(f"ACS redirects traffic on PCI bridges {port_of(0)}, {port_of(1)} (between GPU 0 - GPU 1")
    assert "iommu=pt" in iommu
    assert "different sockets (SYS)" in sockets


def test_acs_that_only_root_may_read_is_said_to_be_hidden():
    (iommu,) = said(host_of(everywhere=ONE_SOCKET, surroundings=translating(acs=None)))
    assert iommu.endswith("whether ACS redirects is known to root only")


def test_a_virtual_machine_is_named_instead_of_its_acs():
    (virtual,) = said(host_of(everywhere=ONE_SOCKET, surroundings=around(ports=(0, 1), virtual=True)))
    assert "n0 is a virtual machine" in virtual


def test_a_fabric_that_was_not_joined_comes_first():
    look = seen_of(
        gpu003.CHECK, {0: cards_on({index: fabric(state=2) for index in range(4)}, count=4)}, size=8, ranks_per_node=8
    )
    first, *others = said(host_of(surroundings=translating()), others=(look,))
    assert first.startswith("GPU 0 on n0 (")
    assert "(and 3 more GPUs)" in first
    assert "nvidia-fabricmanager" in first
    assert "IOMMU" in others[0]


def test_ranks_that_see_one_gpu_each_are_told():
    rows = enumerated({rank: shown([rank]) for rank in range(4)}, size=4, ranks_per_node=4, gpus=1)
    own = seen_of_rows(dict(enumerate(bound())), others=(rows,), size=4, ranks_per_node=4, gpus=1)
    first, *_ = suspicions(own, (0, 1, 2, 3))
    assert first.startswith("a rank is shown 1 of 4 GPUs of its host by a control group")


def test_ranks_that_see_all_gpus_are_not():
    rows = enumerated({rank: shown(range(4)) for rank in range(8)})
    assert said(host_of(everywhere=ONE_SOCKET), others=(rows,)) == ()


def test_a_registry_key_is_told():
    (first,) = said(host_of(both(1, 2, **OFF), everywhere=ONE_SOCKET))
    assert first == "P2P is switched off in the driver (registry key) for GPU 1 - GPU 2"


def test_small_shared_memory_comes_last():
    small = SharedMemory(size_bytes=64 << 20, free_bytes=64 << 20, error=None)
    memory = seen_of(hst003.CHECK, {0: hst003.Data(small)}, size=8, ranks_per_node=8, gpus=4)
    sockets, last = said(host_of(), others=(memory,))
    assert "SYS" in sockets
    assert last.startswith("n0: 64 of 64 MiB free in /dev/shm")


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
