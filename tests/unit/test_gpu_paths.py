"""Ways between GPUs: the real pynvml on stand-ins for NVIDIA's library, and what P2P001 makes of it."""

import os
import subprocess
import sys

import fake_nvml
import msgspec
import pytest
from seen import seen_of

from ddpdiag.checks.p2p.paths import CHECK, Data
from ddpdiag.codec import decode
from ddpdiag.model import Severity
from ddpdiag.model.bench import Peer
from ddpdiag.probes.gpu.paths import Level, Paths

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")
pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

PATHS = """
import sys
from ddpdiag.codec import encode
from ddpdiag.probes.gpu.paths import gpu_paths
print(encode(gpu_paths(lambda step: print(step, file=sys.stderr, flush=True))).decode())
"""


PEERS = """
import sys
from msgspec.json import encode
from ddpdiag.probes.gpu.paths import peers_of
print(encode(peers_of(sys.argv[1], sys.argv[2:])).decode())
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture(scope="session")
def asked(folder):
    """asked("healthy"): what the probe sees through that stand-in, and the steps that it announced."""

    def ask(name: str) -> tuple[Paths, list[str]]:
        environ = os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build(name, folder))}
        command = [sys.executable, "-c", PATHS]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=True)
        return decode(done.stdout.encode(), Paths), done.stderr.splitlines()

    return ask


def peers_seen(folder, name, *uuids):
    environ = os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build(name, folder))}
    command = [sys.executable, "-c", PEERS, *uuids]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=True)
    return msgspec.json.decode(done.stdout, type=dict[str, Peer])


def test_a_rank_knows_the_paths_from_its_gpu_to_those_that_it_sees(folder):
    uuids = [fake_nvml.uuid_of(index) for index in range(4)]
    assert peers_seen(folder, "bridged", *uuids) == {
        uuids[1]: Peer(nvlinks=12, level=Level.NODE, p2p=True),
        uuids[2]: Peer(nvlinks=0, level=Level.SYS, p2p=True),
        uuids[3]: Peer(nvlinks=0, level=Level.SYS, p2p=True),
    }
    assert peers_seen(folder, "bridged", uuids[0], "GPU-of-another-host") == {}


def ways(paths):
    return {(way.source, way.target): way for way in paths.paths}


def seen(paths):
    return seen_of(CHECK, {0: Data(paths=paths)}, size=8, ranks_per_node=8, gpus=8)


def test_gpus_at_switches_have_all_links_to_each_other(asked):
    paths, _ = asked("healthy")
    assert [gpu.pci for gpu in paths.gpus] == [fake_nvml.pci_of(index) for index in range(8)]
    assert len(paths.paths) == 56
    assert {way.nvlinks for way in paths.paths} == {18}
    way = ways(paths)[3, 4]
    assert (way.level, way.read, way.write, way.nvlink) == (Level.SYS, 0, 0, 0)
    assert list(CHECK.judge(seen(paths))) == []


def test_the_topology_is_shown_as_nvidia_smi_shows_it(asked):
    (matrix,) = CHECK.report(seen(asked("bridged")[0])).matrices
    assert (matrix.name, matrix.rows) == ("p2p.topology.n0", ("GPU 0", "GPU 1", "GPU 2", "GPU 3"))
    assert matrix.cells[0] == ("X", "NV12", "SYS", "SYS")
    assert matrix.cells[3] == ("SYS", "SYS", "NV12", "X")
    (switched,) = CHECK.report(seen(asked("healthy")[0])).matrices
    assert switched.cells[1] == ("NV18", "X", *["NV18"] * 6)


def test_a_link_that_is_down_is_missing_on_both_of_its_ways(asked):
    paths, _ = asked("nvlink-down")
    assert ways(paths)[5, 0].nvlinks == ways(paths)[0, 5].nvlinks == 17
    assert ways(paths)[0, 1].nvlinks == 18


def test_a_pair_that_is_switched_off_is_named_and_no_other_one(golden, asked):
    (finding,) = CHECK.judge(seen(asked("pcie-pair-disabled")[0]))
    assert (finding.code, finding.severity) == ("P2P001.disabled", Severity.WARNING)
    assert finding.links == ("n0: GPU 1 <-> GPU 2",)
    golden(finding)
    for guilty in (1, 2):
        assert any(fake_nvml.uuid_of(guilty) in gpu for gpu in finding.evidence["gpus"])
    for innocent in (0, 3):
        assert fake_nvml.uuid_of(innocent) not in f"{finding}"
    (topology,) = CHECK.report(seen(asked("pcie-pair-disabled")[0])).matrices
    assert topology.cells[1] == ("PIX", "X", "SYS DR", "SYS")


@pytest.mark.parametrize(
    ("name", "code", "severity", "links"),
    [
        ("pcie-one-direction", "P2P001.disabled", Severity.WARNING, ("n0: GPU 1 -> GPU 2",)),
        ("driver-gone", "P2P001.unreadable", Severity.WARNING, ()),
    ],
    ids=["pcie-one-direction", "driver-gone"],
)
def test_ways_that_are_closed_or_unknown_are_told_as_bad_as_they_are(golden, asked, name, code, severity, links):
    (finding,) = CHECK.judge(seen(asked(name)[0]))
    assert (finding.code, finding.severity, finding.links) == (code, severity, links)
    golden(finding)


@pytest.mark.parametrize("name", ["pcie", "bridged", "two-models", "consumer"])
def test_siblings_with_other_ways_are_normal(asked, name):
    assert list(CHECK.judge(seen(asked(name)[0]))) == []


@pytest.mark.parametrize("name", ["older-card", "nothing-supported"])
def test_what_is_not_told_is_no_finding(asked, name):
    paths, _ = asked(name)
    assert {way.level for way in paths.paths} == {None}
    assert list(CHECK.judge(seen(paths))) == []


def test_a_lost_gpu_does_not_hide_the_ways_between_the_others(asked):
    paths, _ = asked("lost")
    assert paths.gpus[5].error is not None
    assert len(paths.paths) == 42


def test_the_steps_tell_which_gpu_is_asked(asked):
    steps = asked("pcie")[1]
    assert steps[:3] == ["NVML", "NVML: GPU 0", f"GPU 0 (PCI {fake_nvml.pci_of(0)})"]
    assert steps[-1] == f"ways from GPU 3 (PCI {fake_nvml.pci_of(3)})"


def test_a_call_that_hangs_leaves_the_gpu_as_the_last_step(folder):
    environ = os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build("p2p-hanging", folder))}
    last = f"ways from GPU 2 (PCI {fake_nvml.pci_of(2)})"
    with subprocess.Popen([sys.executable, "-c", PATHS], env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert last in (line.strip() for line in process.stderr)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()
        assert process.stderr.read() == ""
