"""GPU005: clocks."""

import pytest
from cards import clocks, host_of, judged, uuid_of, with_fifth
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.checks.gpu.clocks import CHECK
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.health import Clocks

HARMFUL = 0x8 | 0x20 | 0x40 | 0x80


@pytest.mark.parametrize("events", [0x84, 0x48, 0x9, 0x21], ids=["power-brake", "thermal", "hardware", "software"])
def test_a_slowdown_without_load_is_a_warning(golden, events):
    (finding,) = with_fifth(CHECK, **clocks(events=events, celsius=88))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU005.slowdown", Severity.WARNING, (uuid_of(5),))
    golden(finding)


@given(st.integers(0, 0xFFF))
def test_bits_are_tested_as_bits(events):
    found = {finding.code for finding in with_fifth(CHECK, **clocks(events=events))}
    assert found == ({"GPU005.slowdown"} if events & HARMFUL else set())


def test_a_lower_power_limit_than_that_of_the_others_is_a_warning(golden):
    (finding,) = with_fifth(CHECK, **clocks(power_limit_watts=350))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU005.power-limit", Severity.WARNING, (uuid_of(5),))
    golden(finding)


def test_other_power_limits_are_silent():
    assert with_fifth(CHECK, clocks=Clocks()) == []
    assert with_fifth(CHECK, **clocks(power_limit_watts=750)) == []
    assert judged(CHECK, host_of({1: clocks(power_limit_watts=450, default_power_limit_watts=450)}, count=2)) == []
    assert judged(CHECK, host_of({index: clocks(power_limit_watts=500) for index in range(8)})) == []
