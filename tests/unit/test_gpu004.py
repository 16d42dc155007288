"""GPU004: PCIe links."""

from cards import host_of, judged, pcie, seen, uuid_of, with_fifth

from ddpdiag.checks.gpu.pcie_link import CHECK
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.links import PcieLink


def test_full_width_is_silent_whatever_the_generation_is():
    assert judged(CHECK, host_of()) == []
    assert with_fifth(CHECK, **pcie(generation_max=4, replays=9999)) == []


def test_a_narrow_link_is_a_warning_with_both_widths(golden):
    (finding,) = with_fifth(CHECK, **pcie(width=8))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU004.narrow", Severity.WARNING, (uuid_of(5),))
    assert (finding.evidence["width"], finding.evidence["width_of_card_and_slot"]) == (8, 16)
    golden(finding)


def test_a_width_that_all_gpus_of_a_model_have_is_silent():
    assert judged(CHECK, host_of({index: pcie(width=8) for index in range(8)})) == []


def test_a_width_that_is_not_told_is_no_finding():
    assert with_fifth(CHECK, pcie=PcieLink()) == []
    assert with_fifth(CHECK, **pcie(width_max=None)) == []


def test_without_gpu003_it_says_that_nothing_was_read(golden):
    alone = seen(size=8, options=Options(select=("GPU004",)))
    empty = type(alone.recording)(header=alone.recording.header, arrivals=alone.world.arrivals)
    golden(CHECK.skip(type(alone)(alone.world, CHECK, empty)).text)
