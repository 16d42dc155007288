"""GPU003: memory errors, and who asks the GPUs."""

import pytest
from cards import healthy, host_of, judged, memory, seen, uuid_of, with_fifth
from seen import seen_of, skip_text, together

from ddpdiag.checks.gpu import devices, present
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.gpu.memory_errors import CHECK
from ddpdiag.checks.gpu.present import Data as Enumerated
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.health import Health, Look, MemoryErrors
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu


@pytest.mark.parametrize(
    ("word", "action", "changes"),
    [
        ("uncorrected", "reset", {"uncorrected": 2}),
        ("sram", "reset", {"uncorrected": 1, "sram_uncorrected": 1}),
        ("sram", "isolate", {"sram_threshold_exceeded": True}),
        ("remap-pending", "reset", {"remap_pending": True}),
        ("remap-failed", "isolate", {"remap_failed": True, "remaps": 300}),
        ("retirement-pending", "reset", {"retirement_pending": True}),
    ],
)
def test_a_sick_gpu_is_an_error_with_its_own_remedy(golden, word, action, changes):
    (finding,) = with_fifth(CHECK, **memory(**changes))
    assert (finding.code, finding.severity) == (f"GPU003.{word}", Severity.ERROR)
    assert (finding.gpus, finding.hosts, finding.evidence["action"]) == ((uuid_of(5),), ("n0",), action)
    golden(finding)


@pytest.mark.parametrize(
    "changes",
    [
        {"remaps": 511},
        {"corrected": 20_000_000},
        {"uncorrected": None, "sram_uncorrected": None, "corrected": None},
    ],
)
def test_what_is_within_limits_or_not_told_is_no_finding(changes):
    assert with_fifth(CHECK, **memory(**changes)) == []


def test_sram_errors_are_not_counted_twice(golden):
    both = with_fifth(CHECK, **memory(uncorrected=3, sram_uncorrected=1))
    assert [finding.code for finding in both] == ["GPU003.uncorrected", "GPU003.sram"]
    golden(*both)


def test_correctable_errors_are_a_warning_that_can_be_set():
    (finding,) = with_fifth(CHECK, **memory(corrected=20_000_001))
    assert (finding.code, finding.severity) == ("GPU003.corrected", Severity.WARNING)
    options = Options(settings={"GPU003.corrected_errors": "5e7"})
    assert judged(CHECK, host_of({5: memory(corrected=20_000_001)}), options=options) == []


def test_a_gpu_that_two_ranks_saw_is_one_finding():
    looks = {rank: host_of({5: memory(uncorrected=1)}) for rank in range(2)}
    assert len(list(CHECK.judge(seen_of(CHECK, looks, ranks_per_node=8, gpus=8)))) == 1


def test_nothing_that_can_be_read_is_unknown(golden):
    (gone,) = judged(CHECK, Look(error="Driver Not Loaded"))
    (mute,) = judged(CHECK, Look(gpus=(Health(index=0, uuid="GPU-1", name="NVIDIA T400"),)))
    assert gone.code == mute.code == "GPU003.unreadable"
    golden(gone, mute)


def test_a_card_without_ecc_is_not_unreadable():
    assert judged(CHECK, Look(gpus=(healthy(0, memory=MemoryErrors()),))) == []


def test_a_gpu_that_cannot_be_opened_is_left_to_gpu001():
    assert judged(CHECK, Look(gpus=(Health(index=0, error="GPU is lost"),))) == []


# Whose GPUs they are --------------------------------------------------------------------------------------------------


def torch_row(*indices, chosen=0):
    gpus = tuple(devices.TorchGpu("NVIDIA H100", uuid_of(index)) for index in indices)
    return devices.Data(torch="2.13", cuda="12.8", gpus=gpus, chosen=chosen)


def of_job(look, rows, *, gpus):
    """Host n0 with this many visible GPUs for each rank, and what torch saw there."""
    world = {"size": len(rows), "ranks_per_node": len(rows), "gpus": gpus}
    return together(seen_of(CHECK, {0: look}, **world), seen_of(devices.CHECK, rows, **world))


def test_the_rank_that_takes_a_gpu_is_blamed():
    met = of_job(host_of({1: memory(uncorrected=1)}, count=2), {r: torch_row(0, 1, chosen=r) for r in (0, 1)}, gpus=2)
    (finding,) = CHECK.judge(met)
    assert finding.ranks == (1,)


def test_gpus_that_no_rank_may_use_are_left_out():
    met = of_job(host_of({5: memory(uncorrected=1)}), {r: torch_row(0, 1, chosen=r) for r in (0, 1)}, gpus=2)
    assert list(CHECK.judge(met)) == []
    assert [card.health.index for card in cards_of(met)] == [0, 1]


def test_a_gpu_that_cuda_leaves_out_is_not_somebody_elses():
    # CUDA should show eight and shows seven: the one that is missing may be the sick one.
    rows = {0: torch_row(0, 1, 2, 3, 4, 6, 7)}
    (finding,) = CHECK.judge(of_job(host_of({5: memory(uncorrected=1)}), rows, gpus=8))
    assert finding.gpus == (uuid_of(5),)


# Who asks -------------------------------------------------------------------------------------------------------------


def planned(views, **world):
    """The groups of the first trial, where GPU001 saw these UUIDs on each rank."""
    rows = {
        rank: Enumerated(nvml=Enumeration(gpus=tuple(ListedGpu(index=i, uuid=u) for i, u in enumerate(uuids))))
        for rank, uuids in views.items()
    }
    seen_before = seen_of(present.CHECK, rows, **({"ranks_per_node": 4, "gpus": 4} | world))
    return [group for trial in CHECK.plan(seen_before.of(CHECK)) for group in trial.groups]


def test_one_rank_of_each_host_asks():
    assert planned(dict.fromkeys(range(8), ("a", "b"))) == [(0,), (4,)]


def test_ranks_that_are_bound_to_their_gpus_all_ask():
    assert planned({0: ("a",), 1: ("b",), 2: ("a",), 3: ("c",)}) == [(0,), (1,), (3,)]


def test_where_no_gpu_was_seen_one_rank_says_why():
    assert planned(dict.fromkeys(range(4), ())) == [(0,)]


def test_without_an_answer_from_gpu001_every_rank_asks():
    assert planned({}, size=4) == [(0,), (1,), (2,), (3,)]


def test_hosts_without_gpus_are_not_asked():
    assert planned({0: ()}, size=4, gpus=0) == []


def test_it_is_asked_once():
    assert CHECK.plan(seen(host_of())) == ()


def test_no_gpu_is_no_ground(golden):
    golden(skip_text(CHECK, seen(gpus=0, size=1).world))
    assert skip_text(CHECK, seen(host_of()).world) is None
