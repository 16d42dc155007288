"""GPU009: GPUs of one model that are set up alike."""

import pytest
from cards import host_of, judged, memory, seen, uuid_of, with_fifth
from seen import seen_of, together

from ddpdiag.checks.gpu.configuration import CHECK
from ddpdiag.checks.launch import versions
from ddpdiag.model import Options, Severity


def test_gpus_that_are_alike_are_silent():
    assert judged(CHECK, host_of(), host_of(host=1)) == []


@pytest.mark.parametrize(
    ("changes", "word", "severity"),
    [
        ({"vbios": "95.9"}, "vbios", Severity.WARNING),
        (memory(ecc=False), "ecc", Severity.WARNING),
    ],
)
def test_the_one_that_differs_is_named(golden, changes, word, severity):
    (finding,) = with_fifth(CHECK, **changes)
    assert (finding.code, finding.severity) == (f"GPU009.{word}", severity)
    assert (finding.gpus, finding.hosts, finding.evidence["pci"]) == ((uuid_of(5),), ("n0",), ["0000:5b:00.0"])
    golden(finding)


def test_consumer_cards_of_several_makers_are_good_to_know():
    changes = {index: {"name": "NVIDIA GeForce RTX 4090", "vbios": f"95.02.{index // 2}"} for index in range(4)}
    (finding,) = judged(CHECK, host_of(changes, count=4))
    assert (finding.code, finding.severity) == ("GPU009.vbios", Severity.NOTE)


def test_without_a_majority_nobody_is_named(golden):
    (finding,) = judged(CHECK, host_of({index: {"vbios": "95.9"} for index in range(4)}))
    assert (finding.gpus, finding.hosts) == ((), ())
    golden(finding)


def test_another_driver_names_its_host(golden):
    (finding,) = judged(CHECK, host_of(), host_of(host=1), host_of(host=2, driver="570.1"))
    assert (finding.code, finding.hosts) == ("GPU009.driver", ("n2",))
    golden(finding)


def test_drivers_that_lch003_tells_apart_are_not_told_twice():
    looks = (host_of(), host_of(host=1), host_of(host=2, driver="570.1"))
    rows = {
        rank: versions.Data(torch="2.13", cuda="12.8", hip=None, nccl=None, python="3.11", driver=driver)
        for rank, driver in ((0, "580.1"), (8, "580.1"), (16, "570.1"))
    }
    world = {"size": 24, "ranks_per_node": 8, "gpus": 8}
    met = together(seen(*looks), seen_of(versions.CHECK, rows, **world))
    assert list(CHECK.judge(met.of(CHECK))) == []


def test_other_models_may_differ():
    changes = {"name": "NVIDIA A100", "vbios": "92.0"}
    assert judged(CHECK, host_of({4: changes, 5: changes})) == []


def test_what_is_not_told_is_no_finding():
    assert with_fifth(CHECK, vbios=None, **memory(ecc=None)) == []


def test_gpus_that_were_left_out_by_the_users_choice_are_unknown(golden):
    without = seen_of(versions.CHECK, {}, size=2, gpus=2, options=Options(select=("GPU009",)))
    (finding,) = CHECK.judge(without.of(CHECK))
    assert (finding.code, finding.severity, finding.ranks) == ("GPU009.unreadable", Severity.WARNING, ())
    golden(finding)
