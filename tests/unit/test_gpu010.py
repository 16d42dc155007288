"""GPU010: what rises while a run loads the GPUs."""

from dataclasses import replace

import pytest
from cards import clocks, healthy, host_of, links, memory, pcie, uuid_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of, skip_text, together

from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.counters import CHECK
from ddpdiag.model import RunOptions, Severity, Status
from ddpdiag.probes.gpu.health import GpuReading, Health
from ddpdiag.probes.gpu.links import Fabric
from ddpdiag.probes.gpu.nvml import BrokenState

WORLD = {"size": 8, "ranks_per_node": 8, "gpus": 8}


def at(look, seconds):
    return structs.replace(look, boot_seconds=seconds)


def judged(before, after, *, seconds=30.0, **world):
    """The findings where the second look came so many seconds after the first one."""
    place = WORLD | world
    first = seen_of(memory_errors.CHECK, {0: at(before, 1000.0)}, **place)
    return list(CHECK.judge(together(seen_of(CHECK, {0: at(after, 1000.0 + seconds)}, **place), first)))


def fifth(*, before=None, after=None, **more):
    return judged(host_of({5: before or {}}), host_of({5: after or {}}), **more)


def test_what_stays_as_it_is_is_silent():
    sick = {5: memory(uncorrected=7, corrected=900, remaps=3, remap_pending=True)}
    assert judged(host_of(sick), host_of(sick)) == []


RISES = (
    ("uncorrected", Severity.ERROR, "reset", memory(uncorrected=2)),
    ("sram", Severity.ERROR, "reset", memory(uncorrected=1, sram_uncorrected=1)),
    ("remap-pending", Severity.ERROR, "reset", memory(remap_pending=True)),
    ("remap-failed", Severity.ERROR, "isolate", memory(remap_failed=True)),
    ("retirement-pending", Severity.ERROR, "reset", memory(retirement_pending=True)),
    ("reset-required", Severity.ERROR, "reset", {"broken": BrokenState.RESET_REQUIRED}),
    ("lost", Severity.ERROR, "reboot", {"broken": BrokenState.LOST}),
    ("sram", Severity.ERROR, "isolate", memory(sram_threshold_exceeded=True)),
    ("recovery", Severity.ERROR, "reset", {"recovery_action": 1}),
    ("recovery", Severity.ERROR, "reboot", {"recovery_action": 2}),
    ("pcie-replays", Severity.WARNING, "monitor", pcie(replays=450)),
    ("nvlink-errors", Severity.WARNING, "monitor", links(link3={"errors": 2})),
    ("remapped", Severity.ERROR, "reset", memory(remaps=4)),
    ("nvlink-down", Severity.ERROR, "reset", links(down=[3])),
    ("slowdown", Severity.WARNING, "monitor", clocks(events=0x81, celsius=61)),
)


@pytest.mark.parametrize(
    ("word", "severity", "action", "after"), RISES, ids=[f"{row[0]} {row[1].value} {row[2]}" for row in RISES]
)
def test_what_rises_or_comes_up_names_the_gpu_with_its_remedy(golden, word, severity, action, after):
    (finding,) = fifth(before=pcie(replays=10) | memory(remaps=0), after=pcie(replays=10) | memory(remaps=0) | after)
    assert (finding.code, finding.severity) == (f"GPU010.{word}", severity)
    assert (finding.gpus, finding.hosts, finding.evidence["action"]) == ((uuid_of(5),), ("n0",), action)
    assert finding.evidence["seconds"] == 30.0
    golden(finding)


def test_a_few_replays_a_minute_are_normal():
    for rise, seconds, number in ((8, 30, 0), (9, 30, 1), (9, 120, 0), (17, 120, 1)):
        assert len(fifth(before=pcie(replays=0), after=pcie(replays=rise), seconds=seconds)) == number
    options = RunOptions(settings={"GPU010.pcie_replays_per_minute": "500"})
    assert fifth(before=pcie(replays=0), after=pcie(replays=400), options=options) == []


def test_a_link_without_a_switch_that_goes_down_is_a_warning():
    alone = {"fabric": Fabric()}
    (finding,) = fifth(before=alone, after=alone | links(down=[3]))
    assert finding.severity is Severity.WARNING


WHOLE = host_of()
LOST = structs.replace(WHOLE, gpus=(*WHOLE.gpus[:5], Health(index=5, error="GPU is lost"), *WHOLE.gpus[6:]))
NOT_LISTED = structs.replace(
    WHOLE, gpus=tuple(structs.replace(gpu, index=index) for index, gpu in enumerate(WHOLE.gpus[:5] + WHOLE.gpus[6:]))
)


@pytest.mark.parametrize("after", [LOST, NOT_LISTED], ids=["cannot be opened", "is not listed"])
def test_a_gpu_that_is_gone_is_named_and_the_rest_is_not_mixed_up(golden, after):
    (finding,) = judged(WHOLE, after)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU010.gone", Severity.ERROR, (uuid_of(5),))
    golden(finding)


def test_a_gpu_that_was_lost_before_is_left_to_gpu001():
    assert judged(LOST, LOST) == []


def test_a_second_look_that_fails_is_unknown_and_not_healthy(golden):
    (finding,) = judged(host_of(), GpuReading(error="Unknown Error"))
    assert (finding.code, finding.severity, finding.gpus) == ("GPU010.unreadable", Severity.WARNING, ())
    golden(finding)


def test_a_second_look_that_hung_is_left_to_run003():
    first = seen_of(memory_errors.CHECK, {0: host_of()}, **WORLD)
    second = seen_of(CHECK, {}, statuses={0: Status.HUNG}, **WORLD)
    assert list(CHECK.judge(together(second, first))) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            {rank: GpuReading(gpus=(healthy(rank),)) for rank in range(8)},
            {n: GpuReading(gpus=(healthy(n, **memory(uncorrected=1) if n == 5 else {}),)) for n in range(8)},
            id="each rank sees one",
        ),
        pytest.param(
            dict.fromkeys((0, 1), WHOLE),
            dict.fromkeys((0, 1), host_of({5: memory(uncorrected=1)})),
            id="two ranks see all",
        ),
    ],
)
def test_each_gpu_is_one_finding_and_held_against_itself(before, after):
    met = together(seen_of(CHECK, after, **WORLD), seen_of(memory_errors.CHECK, before, **WORLD))
    assert [finding.gpus for finding in CHECK.judge(met)] == [(uuid_of(5),)]


COUNTS = st.one_of(st.none(), st.integers(0, 1 << 40))


def counts(drawn):
    return memory(**dict(zip(("uncorrected", "sram_uncorrected", "remaps"), drawn, strict=True)))


@given(st.tuples(*[COUNTS] * 3), st.tuples(*[COUNTS] * 3), st.floats(0, 1e6))
def test_a_finding_says_a_rise_and_never_a_fall(before, after, seconds):
    for finding in fifth(before=counts(before), after=counts(after), seconds=seconds):
        assert finding.evidence["after"] > finding.evidence["before"]
        assert finding.gpus == (uuid_of(5),)


@given(st.integers(0, 0xFFF), st.integers(0, 0xFFF))
def test_only_slowdowns_that_are_new_are_reported(before, after):
    found = fifth(before=clocks(events=before), after=clocks(events=after))
    harmful = 0x8 | 0x20 | 0x40 | 0x80
    assert bool(found) is bool(after & harmful and not before & harmful)


def planned(rows, **world):
    met = seen_of(memory_errors.CHECK, rows, **(WORLD | world)).of(CHECK)
    met = replace(met, is_last=True)
    return [group for trial in CHECK.plan(met) for group in trial.groups], skip_text(CHECK, met)


def test_who_saw_gpus_asks_them_again():
    assert planned({0: host_of(), 8: host_of(host=1)}, size=16) == ([(0,), (8,)], None)


def test_who_saw_none_does_not_and_the_reason_is_told(golden):
    assert planned({0: host_of(), 8: GpuReading(error="gone")}, size=16)[0] == [(0,)]
    groups, reason = planned({0: GpuReading(error="gone")})
    assert groups == []
    golden(reason)
