"""GPU007: fabric and recovery."""

import pytest
from cards import fabric, host_of, judged, seen, uuid_of, with_fifth
from seen import seen_of, together

from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.nvswitch import CHECK
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.links import Fabric
from ddpdiag.probes.gpu.nvml import Broken


def test_gpus_that_joined_are_silent():
    assert judged(CHECK, host_of()) == []


def test_a_card_without_a_fabric_is_silent():
    assert with_fifth(CHECK, fabric=Fabric(), recovery_action=None) == []


@pytest.mark.parametrize(
    "changes",
    [{"state": 1}, {"state": 2}, {"status": 999}, {"state": 2, "status": 999}],
    ids=["not-started", "in-progress", "failed", "in-progress-whatever-its-status"],
)
def test_a_gpu_that_has_not_joined_is_an_error(golden, changes):
    (finding,) = with_fifth(CHECK, **fabric(**changes))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU007.fabric", Severity.ERROR, (uuid_of(5),))
    assert "nvidia-fabricmanager" in finding.fix
    golden(finding)


def test_a_gpu_that_has_not_joined_and_on_which_cuda_starts_is_a_warning():
    row = devices.Data(torch="2", gpus=tuple(devices.TorchGpu("H100", uuid_of(index)) for index in range(8)))
    world = {"size": 8, "ranks_per_node": 8, "gpus": 8}
    torch = seen_of(devices.CHECK, dict.fromkeys(range(8), row), **world)
    for changes, severity in (({"state": 2}, Severity.WARNING), ({"status": 999}, Severity.ERROR)):
        met = together(seen(host_of({5: fabric(**changes)})), torch)
        (finding,) = CHECK.judge(met.of(CHECK))
        assert finding.severity is severity


@pytest.mark.parametrize(
    ("health", "severity"), [(2, Severity.ERROR), (3, Severity.WARNING)], ids=["unhealthy", "limited"]
)
def test_a_fabric_that_is_not_healthy_is_named(golden, health, severity):
    (finding,) = with_fifth(CHECK, **fabric(health=health))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU007.fabric-health", severity, (uuid_of(5),))
    golden(finding)


@pytest.mark.parametrize(
    ("action", "severity", "does"),
    [
        (1, Severity.ERROR, "reset"),
        (2, Severity.ERROR, "reboot"),
        (4, Severity.ERROR, "reset"),
        (99, Severity.WARNING, "monitor"),
    ],
)
def test_what_the_driver_asks_for_is_told_and_is_an_error_if_it_is_known(golden, action, severity, does):
    (finding,) = with_fifth(CHECK, recovery_action=action)
    assert (finding.code, finding.severity, finding.evidence["action"]) == ("GPU007.recovery", severity, does)
    golden(finding)


@pytest.mark.parametrize(("broken", "word"), [(Broken.RESET_REQUIRED, "reset-required"), (Broken.LOST, "lost")])
def test_a_code_that_speaks_of_the_gpu_itself_is_an_error(broken, word):
    (finding,) = with_fifth(CHECK, broken=broken)
    assert (finding.code, finding.gpus) == (f"GPU007.{word}", (uuid_of(5),))


def test_what_the_driver_asks_for_explains_the_code():
    assert [f.code for f in with_fifth(CHECK, recovery_action=1, broken=Broken.RESET_REQUIRED)] == ["GPU007.recovery"]
