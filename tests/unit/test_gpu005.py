"""GPU005: clocks."""

import pytest
from cards import clocks, host_of, judged, uuid_of, with_fifth
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.checks.gpu.clocks import CHECK
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.health import Clocks

BENIGN = 0x1 | 0x2 | 0x4 | 0x10 | 0x100
HARDWARE = 0x8 | 0x40 | 0x80


def test_idle_gpus_are_silent():
    assert judged(CHECK, host_of()) == []


def test_idle_with_a_software_power_cap_is_benign():
    assert with_fifth(CHECK, **clocks(events=0x5)) == []


@pytest.mark.parametrize(
    ("code", "events"),
    [("slowdown", 0x84), ("slowdown", 0x48), ("slowdown", 0x9), ("warm", 0x21)],
    ids=["power-brake", "thermal", "hardware", "software"],
)
def test_a_slowdown_without_load_is_a_warning(golden, code, events):
    (finding,) = with_fifth(CHECK, **clocks(events=events, celsius=88))
    assert (finding.code, finding.severity, finding.gpus) == (f"GPU005.{code}", Severity.WARNING, (uuid_of(5),))
    golden(finding)


@given(st.integers(0, 0xFFF))
def test_bits_are_tested_as_bits(events):
    found = {finding.code for finding in with_fifth(CHECK, **clocks(events=events))}
    expected = "GPU005.slowdown" if events & HARDWARE else "GPU005.warm" if events & 0x20 else None
    assert found == ({expected} if expected else set())


@given(st.integers(0, BENIGN).map(lambda bits: bits & BENIGN))
def test_benign_bits_alone_are_silent(events):
    assert with_fifth(CHECK, **clocks(events=events)) == []


@pytest.mark.parametrize("margin", [10, -2])
def test_a_small_margin_before_the_job_is_a_warning(golden, margin):
    (finding,) = with_fifth(CHECK, **clocks(celsius=84, margin_celsius=margin))
    assert finding.code == "GPU005.margin"
    golden(finding)


@pytest.mark.parametrize("margin", [11, None])
def test_a_margin_that_is_large_or_not_told_is_silent(margin):
    assert with_fifth(CHECK, **clocks(celsius=84, margin_celsius=margin)) == []


def test_the_margin_can_be_set():
    options = Options(settings={"GPU005.margin_celsius": "2"})
    assert judged(CHECK, host_of({5: clocks(margin_celsius=5)}), options=options) == []


def test_heat_that_slows_already_is_one_finding():
    assert len(with_fifth(CHECK, **clocks(events=0x40, celsius=90, margin_celsius=-3))) == 1


def test_a_lower_power_limit_than_that_of_the_others_is_a_warning(golden):
    (finding,) = with_fifth(CHECK, **clocks(power_limit_watts=350))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU005.power-limit", Severity.WARNING, (uuid_of(5),))
    golden(finding)


def test_limits_of_makers_and_a_limit_that_all_have_are_silent():
    assert judged(CHECK, host_of({1: clocks(power_limit_watts=450, default_power_limit_watts=450)}, count=2)) == []
    assert judged(CHECK, host_of({index: clocks(power_limit_watts=500) for index in range(8)})) == []


def test_a_higher_limit_than_the_others_is_silent():
    assert with_fifth(CHECK, **clocks(power_limit_watts=750)) == []


def test_nothing_told_is_no_finding():
    assert with_fifth(CHECK, clocks=Clocks()) == []
