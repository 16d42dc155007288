"""GPU005: clocks."""

import pytest
from cards import clocks, host_of, judged, uuid_of, with_fifth
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.checks.gpu005 import CHECK
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu_health import Clocks

BENIGN = 0x1 | 0x2 | 0x4 | 0x10 | 0x100
HARDWARE = 0x8 | 0x40 | 0x80


def test_idle_gpus_are_silent():
    assert judged(CHECK, host_of()) == []


def test_idle_with_a_software_power_cap_is_benign():
    assert with_fifth(CHECK, **clocks(events=0x5)) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (0x84, "power brake (clock events 0x84)"),
        (0x48, "hardware slowdown and hardware thermal slowdown (clock events 0x48)"),
        (0x9, "hardware slowdown (clock events 0x9)"),
    ],
)
def test_a_hardware_slowdown_without_load_is_a_warning(events, words):
    (finding,) = with_fifth(CHECK, **clocks(events=events))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU005.slowdown", Severity.WARNING, (uuid_of(5),))
    assert words in finding.message
    assert ("power supplies" in finding.remedy) is bool(events & 0x80)


def test_a_software_slowdown_for_heat_is_a_warning():
    (finding,) = with_fifth(CHECK, **clocks(events=0x21))
    assert (finding.code, finding.severity) == ("GPU005.warm", Severity.WARNING)


@given(st.integers(0, 0xFFF))
def test_bits_are_tested_as_bits(events):
    found = {finding.code for finding in with_fifth(CHECK, **clocks(events=events))}
    expected = "GPU005.slowdown" if events & HARDWARE else "GPU005.warm" if events & 0x20 else None
    assert found == ({expected} if expected else set())


@given(st.integers(0, BENIGN).map(lambda bits: bits & BENIGN))
def test_benign_bits_alone_are_silent(events):
    assert with_fifth(CHECK, **clocks(events=events)) == []


@pytest.mark.parametrize(("margin", "findings"), [(11, 0), (10, 1), (-2, 1), (None, 0)])
def test_a_small_margin_before_the_job_is_a_warning(margin, findings):
    found = with_fifth(CHECK, **clocks(celsius=84, margin_celsius=margin))
    assert [finding.code for finding in found] == ["GPU005.margin"] * findings


@pytest.mark.parametrize(
    ("margin", "words"),
    [(3, "84 C, 3 C below its slowdown temperature"), (-2, "84 C, 2 C above its slowdown temperature")],
)
def test_the_margin_is_said_in_words(margin, words):
    assert words in with_fifth(CHECK, **clocks(celsius=84, margin_celsius=margin))[0].message


def test_the_margin_can_be_set():
    options = Options(settings={"GPU005.margin_celsius": "2"})
    assert judged(CHECK, host_of({5: clocks(margin_celsius=5)}), options=options) == []


def test_heat_that_slows_already_is_one_finding():
    assert len(with_fifth(CHECK, **clocks(events=0x40, celsius=90, margin_celsius=-3))) == 1


def test_a_lower_power_limit_than_that_of_the_others_is_a_warning():
    (finding,) = with_fifth(CHECK, **clocks(power_limit_watts=350))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU005.power-limit", Severity.WARNING, (uuid_of(5),))
    assert "350 W, 700 W expected" in finding.message
    assert "nvidia-smi -i 5 -pl 700" in finding.remedy


def test_cards_of_several_makers_have_their_own_limits():
    (finding,) = judged(CHECK, host_of({1: clocks(power_limit_watts=450, default_power_limit_watts=450)}, count=2))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU005.power-limit", Severity.INFO, (uuid_of(1),))
    assert "450 W, as its maker set it; others of that model have 700 W" in finding.message


def test_a_limit_that_all_have_is_good_to_know_and_blames_nobody():
    (finding,) = judged(CHECK, host_of({index: clocks(power_limit_watts=500) for index in range(8)}))
    assert (finding.severity, finding.gpus, finding.nodes) == (Severity.INFO, (), ())
    assert "500 W, 700 W by default" in finding.message


def test_a_higher_limit_than_the_others_is_silent():
    assert with_fifth(CHECK, **clocks(power_limit_watts=750)) == []


def test_nothing_told_is_no_finding():
    assert with_fifth(CHECK, clocks=Clocks()) == []
