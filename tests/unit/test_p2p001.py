"""P2P001: paths between GPUs, and what is found on them."""

from itertools import permutations

import pytest
from cards import healthy
from cards import host_of as cards_on
from hypothesis import given
from hypothesis import strategies as st
from paths import around, both, bound, host_of, judged, seen, seen_of_rows, translating, uuid_of
from seen import seen_of, skip_text, world_of

from ddpdiag.checks.gpu import devices, memory_errors, present
from ddpdiag.checks.gpu.present import Data as Enumerated
from ddpdiag.checks.p2p.paths import CHECK, Data
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.nvml import Enumeration, Gpu
from ddpdiag.probes.gpu.paths import P2P, Paths

OFF = {"read": int(P2P.DISABLED_BY_REGKEY), "write": int(P2P.DISABLED_BY_REGKEY)}
NO = {"read": int(P2P.CHIPSET_NOT_SUPPORTED), "write": int(P2P.CHIPSET_NOT_SUPPORTED)}


ACROSS = {(source, target): NO for source in range(4) for target in range(4) if source // 2 != target // 2}
UNTOLD = dict.fromkeys(("level", "nvlinks", "nvlink", "read", "write"))
SILENT = {
    "GPUs that reach each other": [host_of(), host_of(host=1)],
    "one of two pairs of a kind": [host_of(both(0, 1, **NO))],
    "none across sockets, which the board decides": [host_of(ACROSS), host_of(ACROSS, host=1)],
    "consumer cards": [host_of(everywhere=NO)],
    "NVLinks everywhere": [host_of(everywhere={"nvlinks": 4})],
    "nothing reported": [host_of(everywhere=UNTOLD)],
    "an unknown status": [host_of(everywhere=UNTOLD | {"read": 77, "write": int(P2P.UNKNOWN)})],
    "a root port above both GPUs": [host_of(count=2, surroundings=around(2, roots=(0,)))],
    "a virtual machine, which needs ACS": [host_of(surroundings=around(ports=(0, 1), virtual=True))],
    "NVLinks, which do not pass the bridges": [
        host_of(everywhere={"nvlinks": 18, "nvlink": 0}, surroundings=translating(ports=(0, 1, 2, 3)))
    ],
}


@pytest.mark.parametrize("hosts", SILENT.values(), ids=SILENT)
def test_what_is_no_fault_is_silent(hosts):
    assert judged(*hosts) == []


DISABLED = {
    "a pair that is switched off": ([host_of(), host_of(both(1, 2, **OFF), host=1)], ("n1: GPU 1 <-> GPU 2",), ()),
    "a pair unlike most of its kind": (
        [host_of(both(0, 1, **NO) if number == 2 else None, host=number) for number in range(3)],
        ("n2: GPU 0 <-> GPU 1",),
        (),
    ),
    "a GPU in every odd pair": (
        [host_of(both(3, 0, **OFF) | both(3, 1, **OFF) | both(3, 2, **OFF))],
        ("n0: GPU 0 <-> GPU 3", "n0: GPU 1 <-> GPU 3", "n0: GPU 2 <-> GPU 3"),
        (uuid_of(3),),
    ),
    "NVLinks that are switched off": (
        [host_of(both(0, 1, nvlinks=4, nvlink=int(P2P.DISABLED_BY_REGKEY)))],
        ("n0: GPU 0 <-> GPU 1",),
        (),
    ),
    "one direction": ([host_of({(2, 1): {"write": int(P2P.NOT_SUPPORTED)}})], ("n0: GPU 2 -> GPU 1",), ()),
}


@pytest.mark.parametrize(("hosts", "links", "gpus"), DISABLED.values(), ids=DISABLED)
def test_pairs_that_could_do_p2p_and_may_not_are_named(golden, hosts, links, gpus):
    (finding,) = judged(*hosts)
    assert (finding.code, finding.severity, finding.hosts) == ("P2P001.disabled", Severity.WARNING, (links[0][:2],))
    assert (finding.links, finding.gpus) == (links, gpus)
    golden(finding)


OTHERS = {
    "ACS at a switch": (host_of(surroundings=around(ports=(0, 1))), "acs", Severity.WARNING),
    "ACS at root ports": (host_of(surroundings=around(roots=(0, 2))), "acs", Severity.NOTE),
    "an IOMMU that translates": (host_of(surroundings=translating(acs=None)), "acs", Severity.NOTE),
    "NVML cannot be read": (Data(paths=Paths(error="Driver Not Loaded")), "unreadable", Severity.WARNING),
}


@pytest.mark.parametrize(("host", "word", "severity"), OTHERS.values(), ids=OTHERS)
def test_what_redirects_copies_or_is_not_known_is_a_finding_of_its_host(golden, host, word, severity):
    (finding,) = judged(host)
    assert (finding.code, finding.severity, finding.hosts) == (f"P2P001.{word}", severity, ("n0",))
    golden(finding, *finding.evidence.get("bridges", ()))


def test_ranks_that_are_bound_to_gpus_of_their_own_have_no_pairs():
    own = seen_of_rows(dict(enumerate(bound())), size=4, ranks_per_node=4, gpus=1)
    assert list(CHECK.judge(own)) == list(CHECK.report(own).matrices) == []


def test_gpus_of_others_are_left_out():
    # torch shows GPUs 0 and 1 of four; the pair that is switched off is somebody else's.
    look = seen_of(memory_errors.CHECK, {0: cards_on(count=4)}, size=2, gpus=2)
    cuda = devices.Data(
        torch="2.9", cuda="12.8", gpus=tuple(devices.TorchGpu("NVIDIA H100", healthy(index).uuid) for index in (0, 1))
    )
    torch = seen_of(devices.CHECK, {0: cuda, 1: cuda}, size=2, gpus=2)
    own = seen_of_rows({0: host_of(both(2, 3, **OFF))}, others=(look, torch), size=2, ranks_per_node=2, gpus=2)
    assert list(CHECK.judge(own)) == []
    (matrix,) = CHECK.report(own).matrices
    assert matrix.rows == ("GPU 0", "GPU 1")


def test_slices_have_no_p2p():
    look = seen_of(memory_errors.CHECK, {0: cards_on({3: {"mig": True}}, count=4)}, size=8, ranks_per_node=8, gpus=4)
    changes = both(3, 0, **NO) | both(3, 1, **NO) | both(3, 2, **NO)
    assert judged(host_of(changes), others=(look,)) == []


def test_matrices_are_as_nvidia_smi_shows_them(golden):
    hosts = (
        host_of(both(0, 1, nvlinks=12)),
        host_of(both(1, 2, **OFF), host=1),
        host_of(both(0, 1, level=None, nvlinks=None), host=2),
    )
    linked, odd, unknown = CHECK.report(seen(*hosts)).matrices
    assert (linked.name, odd.name) == ("p2p.topology.n0", "p2p.topology.n1")
    assert linked.cells[0] == ("X", "NV12", "SYS", "SYS")
    assert odd.cells[1] == ("PIX", "X", "SYS DR", "SYS")
    assert unknown.cells[0] == ("X", None, "SYS", "SYS")
    golden(odd.title)


def test_one_rank_of_each_host_asks_or_each_that_is_bound():
    def shown(*indices):
        return Enumerated(nvml=Enumeration(gpus=tuple(Gpu(index=index, uuid=uuid_of(index)) for index in indices)))

    whole = seen_of(present.CHECK, dict.fromkeys(range(4), shown(0, 1, 2, 3)), ranks_per_node=4, gpus=4).of(CHECK)
    assert [trial.groups for trial in CHECK.plan(whole)] == [((0,),)]
    rows = {rank: shown(rank) for rank in range(4)}
    alone = seen_of(present.CHECK, rows, ranks_per_node=4, gpus=1).of(CHECK)
    assert [trial.groups for trial in CHECK.plan(alone)] == [((0,), (1,), (2,), (3,))]


def test_a_pair_takes_two_gpus_on_one_host(golden):
    worlds = [world_of(ranks, ranks_per_node=ranks, gpus=gpus) for ranks, gpus in ((2, 1), (1, 2))]
    assert [skip_text(CHECK, world) for world in worlds] == [None, None]
    golden(*(skip_text(CHECK, world_of(2, ranks_per_node=count, gpus=gpus)) for count, gpus in ((2, 0), (1, 1))))


@given(
    st.dictionaries(st.sampled_from(list(permutations(range(4), 2))), st.one_of(st.none(), st.integers(0, 9))),
    st.integers(1, 3),
)
def test_whatever_nvml_says_only_pairs_that_are_not_allowed_are_named(said, hosts):
    changes = {way: {"read": status, "write": status} for way, status in said.items()}
    rows = [host_of(changes if number == 0 else None, host=number) for number in range(hosts)]
    closed = {way for way, status in said.items() if status not in (None, 0)}
    for finding in judged(*rows):
        assert finding.hosts == ("n0",)
        for link in finding.links:
            one, other = (int(part.split()[-1]) for part in link.split(" <-> " if "<->" in link else " -> "))
            assert closed & {(one, other), (other, one)}
