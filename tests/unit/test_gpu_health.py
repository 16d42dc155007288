"""The real pynvml on stand-ins for NVIDIA's library: what the probes read, and what the checks make of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import fake_nvml
import msgspec
import pytest
from forked import Forked
from seen import seen_of

from ddpdiag.checks.p2p.paths import CHECK as P2P001
from ddpdiag.checks.p2p.paths import Data
from ddpdiag.checks.registry import all_checks, check_by_code
from ddpdiag.codec import decode
from ddpdiag.model import Severity
from ddpdiag.model.bench import PeerPath
from ddpdiag.model.measurements import GpuLoad
from ddpdiag.probes.gpu.health import GpuReading, reports_recovery
from ddpdiag.probes.gpu.nvml import BrokenState, Enumeration
from ddpdiag.probes.gpu.paths import Level, Paths
from ddpdiag.watch.observer import read_gpu_uses

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")
pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

CHECKS = [check for check in all_checks() if "GPU003" <= check.code <= "GPU008"]
SILENT = (
    "clocks-benign",
    "compute-exclusive",
    "desktop",
    "healthy",
    "older-card",
    "recovery-older-driver",
    "rising",
    "two-models",
)
LOOK = """
import sys
from ddpdiag.codec import encode
from ddpdiag.probes.gpu.health import read_gpus
for _ in range(int(sys.argv[1])):
    found = encode(read_gpus(lambda step: print(step, file=sys.stderr, flush=True)))
print(found.decode())
"""
ENUMERATE = """
from ddpdiag.codec import encode
from ddpdiag.probes.gpu.nvml import enumerate_gpus
print(encode(enumerate_gpus(lambda _: None)).decode())
"""
WAIT = """
import subprocess, sys
from types import SimpleNamespace
from ddpdiag.runtime.supervisor.worker import _wait_for_gpus
steps, ending = [], subprocess.Popen(["sleep", "0.5"])
_wait_for_gpus((ending.pid,), SimpleNamespace(step=steps.append))
print(ending.poll() is not None, "; ".join(steps).replace(str(ending.pid), "PID"))
"""
LOAD = """
import sys
from msgspec.json import encode
from ddpdiag.probes.gpu.health import gpu_monitor
with gpu_monitor(None if sys.argv[1] == "none" else sys.argv[1]) as gpu:
    print(encode((gpu.load(), gpu.pids())).decode())
"""
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


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture(scope="module")
def run(libraries):
    """run("healthy", code): that code in a Python that finds this stand-in as NVIDIA's library."""

    def run_python(name: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # LD_LIBRARY_PATH is read when a process starts; a library that is loaded is found by its name.
        library = fake_nvml.build(name, libraries) / fake_nvml.LIBRARY
        done = forked.run(f"import ctypes; ctypes.CDLL({str(library)!r})\n{code}", *arguments)
        done.check_returncode()
        return done

    with Forked("import ddpdiag.probes.gpu.health, ddpdiag.probes.gpu.paths, ddpdiag.codec, pynvml") as forked:
        yield run_python


@pytest.fixture
def looked(run):
    """What the probe sees through the stand-in of that name."""

    def look(name: str, times: int = 1) -> GpuReading:
        return decode(run(name, LOOK, str(times)).stdout.encode(), GpuReading)

    return look


@pytest.mark.parametrize(
    ("name", "waited"),
    [
        ("compute-exclusive", "True NVML; context: wait until the driver has taken its GPU back from pid PID"),
        ("healthy", "False NVML"),
        ("driver-gone", "False NVML"),
    ],
)
def test_an_exclusive_gpu_is_waited_for_until_the_killed_process_has_ended(run, name, waited):
    assert run(name, WAIT).stdout.strip() == waited


def findings(look: GpuReading) -> list:
    seen = seen_of(check_by_code("GPU003"), {0: look}, size=8, ranks_per_node=8, gpus=8)
    return [finding for check in CHECKS for finding in check.judge(seen.of(check))]


@pytest.mark.parametrize(
    ("name", "code", "severity"),
    [
        ("clocks-power-brake", "GPU005.slowdown", Severity.WARNING),
        ("compute-prohibited", "GPU008.prohibited", Severity.ERROR),
        ("ecc-corrected-many", "GPU003.corrected", Severity.WARNING),
        ("ecc-uncorrected", "GPU003.uncorrected", Severity.ERROR),
        ("fabric-failed", "GPU007.fabric", Severity.ERROR),
        ("fabric-in-progress", "GPU007.fabric", Severity.ERROR),
        ("foreign-process", "GPU008.in-use", Severity.WARNING),
        ("mig-on", "GPU008.mig", Severity.WARNING),
        ("nvlink-down", "GPU006.down", Severity.ERROR),
        ("nvlink-errors", "GPU006.errors", Severity.WARNING),
        ("nvlink-recovered", "GPU006.errors", Severity.WARNING),
        ("pcie-x8", "GPU004.narrow", Severity.WARNING),
        ("power-limit-low", "GPU005.power-limit", Severity.WARNING),
        ("recovery-reset", "GPU007.recovery", Severity.ERROR),
        ("reset-required", "GPU007.reset-required", Severity.ERROR),
        ("retired-pages-pending", "GPU003.retirement-pending", Severity.ERROR),
        ("row-remap-failed", "GPU003.remap-failed", Severity.ERROR),
        ("row-remap-pending", "GPU003.remap-pending", Severity.ERROR),
        ("sram-volatile", "GPU003.sram", Severity.ERROR),
        ("throttle-thermal", "GPU005.slowdown", Severity.WARNING),
    ],
)
def test_the_sick_gpu_is_named_and_the_other_seven_are_not(looked, name, code, severity):
    (finding,) = findings(looked(name))
    assert (finding.code, finding.severity, finding.gpus) == (code, severity, (fake_nvml.uuid_of(5),))
    said = f"{finding.message} {finding.fix} {finding.evidence}"
    assert fake_nvml.pci_of(5) in said
    for healthy in {*range(8)} - {5}:
        assert fake_nvml.uuid_of(healthy) not in said
        assert fake_nvml.pci_of(healthy) not in said


@pytest.mark.parametrize("name", SILENT)
def test_healthy_gpus_are_silent(looked, name):
    look = looked(name)
    assert len(look.gpus) == 8
    assert all(gpu.is_known for gpu in look.gpus)
    assert findings(look) == []


@pytest.mark.parametrize("name", ["driver-gone", "nothing-supported"])
def test_what_cannot_be_read_is_unknown_and_not_healthy(looked, name):
    (finding,) = findings(looked(name))
    assert finding.code == "GPU003.unreadable"
    assert finding.gpus == ()


def test_every_field_is_read(looked):
    gpu = looked("healthy").gpus[5]
    assert (gpu.uuid, gpu.pci) == (fake_nvml.uuid_of(5), fake_nvml.pci_of(5))
    assert (gpu.memory.remaps, gpu.memory.uncorrected, gpu.memory.remap_pending) == (0, 0, False)
    assert (gpu.pcie.width, gpu.pcie.generation_max) == (16, 5)
    assert (gpu.clocks.celsius, gpu.clocks.power_limit_watts) == (34, 700)
    assert (len(gpu.nvlinks), gpu.nvlinks[17].bytes_per_s, gpu.nvlinks[17].errors) == (18, 26.562e9, 0)
    assert (gpu.fabric.state, gpu.fabric.health, gpu.recovery_action) == (3, 1, 0)
    assert (gpu.fabric.cluster, gpu.fabric.may_span_hosts) == ("0", False)
    assert (gpu.mig, gpu.compute_mode) == (False, 0)
    assert (gpu.processes, gpu.has_graphics) == ((), False)


def test_what_an_older_card_or_driver_lacks_is_none_and_the_rest_is_read(looked):
    gpu = looked("older-card").gpus[5]
    assert (gpu.memory.remap_pending, gpu.memory.retirement_pending, gpu.memory.sram_uncorrected) == (None, False, 0)
    assert (gpu.clocks.events, gpu.fabric.state) == (1, None)
    assert (gpu.recovery_action, gpu.mig, gpu.processes) == (None, None, None)
    assert gpu.memory_used_bytes == 1 << 20


@pytest.mark.parametrize(
    ("driver", "tells"),
    [("570.86.15", True), ("590.1", True), ("1000.1", True), ("565.57.01", False), ("", False), (None, False)],
)
def test_the_recovery_action_is_asked_from_driver_570_on(driver, tells):
    assert reports_recovery(driver) is tells


@pytest.mark.parametrize(
    ("name", "field", "of_fifth"),
    [
        ("recovery-older-driver", "recovery_action", None),
        ("reset-required", "broken", BrokenState.RESET_REQUIRED),
        ("lost", "error", "GPU is lost"),
    ],
)
def test_a_state_of_one_gpu_is_read_of_that_gpu_alone(looked, name, field, of_fifth):
    assert [getattr(gpu, field) for gpu in looked(name).gpus] == [None] * 5 + [of_fifth] + [None] * 2


@pytest.mark.parametrize("name", ["later-ecc", "later-gone", "later-links"])
def test_a_gpu_that_falls_sick_later_is_well_before(looked, name):
    assert looked(name) == looked("healthy")


def test_a_counter_that_rises_is_seen_at_the_second_look(looked):
    before, after = (looked("rising", times).gpus[5] for times in (1, 2))
    assert (before.memory.uncorrected, after.memory.uncorrected) == (0, 3)
    assert (before.pcie.replays, after.pcie.replays) == (10, 450)
    assert (before.nvlinks[3].errors, after.nvlinks[3].errors) == (0, 2)
    assert looked("healthy", 2) == looked("healthy")


@pytest.mark.parametrize(
    ("name", "code", "last"),
    [
        ("hanging", LOOK, f"GPU 5 (PCI {fake_nvml.pci_of(5)})"),
        ("p2p-hanging", PATHS, f"ways from GPU 2 (PCI {fake_nvml.pci_of(2)})"),
    ],
    ids=["a GPU", "a path"],
)
def test_a_call_that_hangs_leaves_the_gpu_as_the_last_step(libraries, name, code, last):
    environ = os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build(name, libraries))}
    command = [sys.executable, "-c", code, "1"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert last in (line.strip() for line in process.stderr)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()
        assert process.stderr.read() == ""


def test_an_old_driver_does_not_break_the_enumeration(run):
    found = decode(run("older-card", ENUMERATE).stdout.encode(), Enumeration)
    assert [gpu.mig for gpu in found.gpus] == [None] * 8
    assert found.driver == "470.256.02"


@pytest.mark.parametrize(
    ("name", "uuid", "load", "pids"),
    [
        pytest.param("computing", fake_nvml.uuid_of(5), GpuLoad(sm_hz=990e6, events=0x40, celsius=87), (8123,), id="5"),
        pytest.param("computing", fake_nvml.uuid_of(6), GpuLoad(events=0x4, celsius=61), (), id="6, in part"),
        ("computing", "GPU-unknown", None, None),
        ("computing", "none", None, None),
        ("driver-gone", "any", None, None),
    ],
)
def test_clocks_heat_and_processes_of_a_gpu_are_what_nvml_reports(run, name, uuid, load, pids):
    answer = tuple[GpuLoad | None, tuple[int, ...] | None]
    assert msgspec.json.decode(run(name, LOAD, uuid).stdout, type=answer) == (load, pids)


@pytest.fixture
def uses(libraries, monkeypatch):
    """How busy GPUs are, as the observer reads it within some seconds."""

    def read(name: str, seconds: float = 20):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml.build(name, libraries)))
        return read_gpu_uses(time.monotonic() + seconds)

    return read


def test_the_one_that_idles_among_those_that_wait(uses):
    gpus, trouble = uses("waiting")
    assert trouble == ""
    assert [use.busy_share for use in gpus] == [1.0] * 5 + [0.0] + [1.0] * 2
    assert (gpus[5].power_watts, gpus[5].pids) == (71.0, (8123,))


def test_what_is_not_supported_is_not_told(uses):
    gpus, _ = uses("nothing-supported")
    assert {(use.busy_share, use.power_watts, use.pids) for use in gpus} == {(None, None, ())}


def test_nvml_that_hangs_is_left(golden, uses):
    gpus, trouble = uses("use-hanging", 1.0)
    assert gpus == ()
    golden(trouble)


@pytest.fixture(scope="module")
def asked(run):
    """asked("healthy"): what the probe sees through that stand-in, and the steps that it announced."""

    def ask(name: str) -> tuple[Paths, list[str]]:
        done = run(name, PATHS)
        return decode(done.stdout.encode(), Paths), done.stderr.splitlines()

    return ask


def test_a_rank_knows_the_paths_from_its_gpu_to_those_that_it_sees(run):
    def peers(*uuids):
        return msgspec.json.decode(run("bridged", PEERS, *uuids).stdout, type=dict[str, PeerPath])

    uuids = [fake_nvml.uuid_of(index) for index in range(4)]
    assert peers(*uuids) == {
        uuids[1]: PeerPath(nvlinks=12, pcie_level=Level.NODE, p2p=True),
        uuids[2]: PeerPath(nvlinks=0, pcie_level=Level.SYS, p2p=True),
        uuids[3]: PeerPath(nvlinks=0, pcie_level=Level.SYS, p2p=True),
    }
    assert peers(uuids[0], "GPU-of-another-host") == {}


def ways(paths):
    return {(way.source, way.target): way for way in paths.paths}


def paths_seen(paths):
    return seen_of(P2P001, {0: Data(paths=paths)}, size=8, ranks_per_node=8, gpus=8)


def test_gpus_at_switches_have_all_links_to_each_other(asked):
    paths, _ = asked("healthy")
    assert [gpu.pci for gpu in paths.gpus] == [fake_nvml.pci_of(index) for index in range(8)]
    assert len(paths.paths) == 56
    assert {way.nvlinks for way in paths.paths} == {18}
    way = ways(paths)[3, 4]
    assert (way.level, way.read, way.write, way.nvlink) == (Level.SYS, 0, 0, 0)
    assert list(P2P001.judge(paths_seen(paths))) == []


def test_the_topology_is_shown_as_nvidia_smi_shows_it(asked):
    (matrix,) = P2P001.report(paths_seen(asked("bridged")[0])).matrices
    assert (matrix.name, matrix.rows) == ("p2p.topology.n0", ("GPU 0", "GPU 1", "GPU 2", "GPU 3"))
    assert matrix.cells[0] == ("X", "NV12", "SYS", "SYS")
    assert matrix.cells[3] == ("SYS", "SYS", "NV12", "X")
    (switched,) = P2P001.report(paths_seen(asked("healthy")[0])).matrices
    assert switched.cells[1] == ("NV18", "X", *["NV18"] * 6)


def test_a_link_that_is_down_is_missing_on_both_of_its_ways(asked):
    paths, _ = asked("nvlink-down")
    assert ways(paths)[5, 0].nvlinks == ways(paths)[0, 5].nvlinks == 17
    assert ways(paths)[0, 1].nvlinks == 18


@pytest.mark.parametrize(
    ("name", "code", "links"),
    [
        ("pcie-pair-disabled", "P2P001.disabled", ("n0: GPU 1 <-> GPU 2",)),
        ("pcie-one-direction", "P2P001.disabled", ("n0: GPU 1 -> GPU 2",)),
        ("driver-gone", "P2P001.unreadable", ()),
    ],
    ids=["pcie-pair-disabled", "pcie-one-direction", "driver-gone"],
)
def test_pairs_that_are_closed_or_unknown_are_named_and_no_other(golden, asked, name, code, links):
    (finding,) = P2P001.judge(paths_seen(asked(name)[0]))
    assert (finding.code, finding.severity, finding.links) == (code, Severity.WARNING, links)
    assert [index for index in range(4) if fake_nvml.uuid_of(index) in f"{finding}"] == ([1, 2] if links else [])
    golden(finding)


@pytest.mark.parametrize("name", ["pcie", "bridged", "two-models", "consumer", "older-card", "nothing-supported"])
def test_ways_that_differ_or_are_not_reported_are_no_finding(asked, name):
    paths, _ = asked(name)
    assert ({way.level for way in paths.paths} == {None}) is (name in ("older-card", "nothing-supported"))
    assert list(P2P001.judge(paths_seen(paths))) == []


def test_a_lost_gpu_does_not_hide_the_ways_between_the_others(asked):
    paths, _ = asked("lost")
    assert paths.gpus[5].error is not None
    assert len(paths.paths) == 42


def test_the_steps_tell_which_gpu_is_asked(asked):
    steps = asked("pcie")[1]
    assert steps[:3] == ["NVML", "NVML: GPU 0", f"GPU 0 (PCI {fake_nvml.pci_of(0)})"]
    assert steps[-1] == f"ways from GPU 3 (PCI {fake_nvml.pci_of(3)})"
