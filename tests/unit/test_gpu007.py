"""GPU007: fabric and recovery."""

import pytest
from cards import fabric, host_of, judged, uuid_of, with_fifth

from ddpdiag.checks.gpu007 import CHECK
from ddpdiag.model import Severity
from ddpdiag.probes.gpu_device import Broken
from ddpdiag.probes.gpu_links import Fabric


def test_gpus_that_joined_are_silent():
    assert judged(CHECK, host_of()) == []


def test_a_card_without_a_fabric_is_silent():
    assert with_fifth(CHECK, fabric=Fabric(), recovery_action=None) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": 1}, "state: not started"),
        ({"state": 2}, "state: in progress"),
        ({"status": 999}, "status 999"),
    ],
)
def test_a_gpu_that_has_not_joined_is_an_error(changes, words):
    (finding,) = with_fifth(CHECK, **fabric(**changes))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU007.fabric", Severity.ERROR, (uuid_of(5),))
    assert words in finding.message
    assert "nvidia-fabricmanager" in finding.remedy


def test_an_error_of_the_fabric_manager_does_not_count_before_it_is_done():
    assert "in progress" in with_fifth(CHECK, **fabric(state=2, status=999))[0].message


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"health": 2}, Severity.ERROR, "unhealthy"),
        ({"health": 3, "health_mask": 0x1}, Severity.WARNING, "bandwidth is degraded"),
        ({"health": None, "health_mask": 0x1 << 4}, Severity.WARNING, "routes are unhealthy"),
        ({"health": 2, "health_mask": 0x5 << 8}, Severity.ERROR, "the configuration is wrong"),
    ],
)
def test_a_degraded_fabric_is_told(changes, severity, words):
    (finding,) = with_fifth(CHECK, **fabric(**changes))
    assert (finding.code, finding.severity) == ("GPU007.fabric-health", severity)
    assert words in finding.message


def test_bits_that_say_no_are_healthy():
    assert with_fifth(CHECK, **fabric(health_mask=0x1AA)) == []


@pytest.mark.parametrize(
    ("action", "does", "words"),
    [(1, "reset", "GPU reset"), (2, "reboot", "node reboot"), (4, "reset", "drain and reset")],
)
def test_what_the_driver_asks_for_is_an_error_with_that_remedy(action, does, words):
    (finding,) = with_fifth(CHECK, recovery_action=action)
    assert (finding.code, finding.severity) == ("GPU007.recovery", Severity.ERROR)
    assert finding.evidence["action"] == does
    assert words in finding.message


def test_an_action_that_nobody_knows_condemns_no_host():
    (finding,) = with_fifth(CHECK, recovery_action=99)
    assert (finding.severity, finding.evidence["action"]) == (Severity.WARNING, "monitor")


@pytest.mark.parametrize(("broken", "word"), [(Broken.RESET_REQUIRED, "reset-required"), (Broken.LOST, "lost")])
def test_a_code_that_speaks_of_the_gpu_itself_is_an_error(broken, word):
    (finding,) = with_fifth(CHECK, broken=broken)
    assert (finding.code, finding.gpus) == (f"GPU007.{word}", (uuid_of(5),))


def test_what_the_driver_asks_for_explains_the_code():
    assert [f.code for f in with_fifth(CHECK, recovery_action=1, broken=Broken.RESET_REQUIRED)] == ["GPU007.recovery"]
