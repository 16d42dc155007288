"""The real pynvml on stand-ins for NVIDIA's library: what is read, and what the checks make of it."""

import os
import subprocess
import sys
from pathlib import Path

import fake_nvml
import pytest
from seen import seen_of

from ddpdiag.checks.registry import all_checks, by_code
from ddpdiag.codec import decode
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.health import Look, tells_recovery
from ddpdiag.probes.gpu.nvml import Broken, Enumeration

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
from ddpdiag.probes.gpu.health import look
for _ in range(int(sys.argv[1])):
    found = encode(look(lambda step: print(step, file=sys.stderr, flush=True)))
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


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


def run(library: Path, code: str, *arguments: object, seconds: float = 30) -> str:
    """What Python prints with that library; LD_LIBRARY_PATH is read when a process starts."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environ = os.environ | {"LD_LIBRARY_PATH": str(library)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds, check=True).stdout


@pytest.fixture
def looked(libraries):
    """What the probe sees through the stand-in of that name."""

    def look(name: str, times: int = 1) -> Look:
        return decode(run(fake_nvml.build(name, libraries), LOOK, times).encode(), Look)

    return look


@pytest.mark.parametrize(
    ("name", "waited"),
    [
        ("compute-exclusive", "True NVML; context: wait until the driver has taken its GPU back from pid PID"),
        ("healthy", "False NVML"),
        ("driver-gone", "False NVML"),
    ],
)
def test_an_exclusive_gpu_is_waited_for_until_the_killed_process_has_ended(libraries, name, waited):
    assert run(fake_nvml.build(name, libraries), WAIT).strip() == waited


def findings(look: Look) -> list:
    seen = seen_of(by_code("GPU003"), {0: look}, size=8, ranks_per_node=8, gpus=8)
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
    assert tells_recovery(driver) is tells


def test_what_an_older_driver_says_in_that_field_is_not_taken_for_it(looked):
    assert {gpu.recovery_action for gpu in looked("recovery-older-driver").gpus} == {None}


def test_a_gpu_that_needs_a_reset_says_so_in_its_codes(looked):
    look = looked("reset-required")
    assert [gpu.broken for gpu in look.gpus] == [None] * 5 + [Broken.RESET_REQUIRED] + [None] * 2


def test_a_lost_gpu_does_not_hide_the_others(looked):
    look = looked("lost")
    assert [gpu.error for gpu in look.gpus] == [None] * 5 + ["GPU is lost"] + [None] * 2
    assert findings(look) == []  # GPU001 names it.


@pytest.mark.parametrize("name", ["later-ecc", "later-gone", "later-links"])
def test_a_gpu_that_falls_sick_later_is_well_before(looked, name):
    assert looked(name) == looked("healthy")


def test_a_counter_that_rises_is_seen_at_the_second_look(looked):
    before, after = (looked("rising", times).gpus[5] for times in (1, 2))
    assert (before.memory.uncorrected, after.memory.uncorrected) == (0, 3)
    assert (before.pcie.replays, after.pcie.replays) == (10, 450)
    assert (before.nvlinks[3].errors, after.nvlinks[3].errors) == (0, 2)
    assert looked("healthy", 2) == looked("healthy")


def test_a_call_that_hangs_leaves_the_gpu_as_the_last_step(libraries):
    environ = os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build("hanging", libraries))}
    command = [sys.executable, "-c", LOOK, "1"]
    last = f"GPU 5 (PCI {fake_nvml.pci_of(5)})"
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert last in (line.strip() for line in process.stderr)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
        assert process.stderr.read() == ""


def test_an_old_driver_does_not_break_the_enumeration(libraries):
    found = decode(run(fake_nvml.build("older-card", libraries), ENUMERATE).encode(), Enumeration)
    assert [gpu.mig for gpu in found.gpus] == [None] * 8
    assert found.driver == "470.256.02"
