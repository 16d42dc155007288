"""GPU002: torch's view of the GPUs."""

import pytest
from seen import arrival_of, seen_of, skip_text, together, with_arrivals

from ddpdiag.checks.gpu import present
from ddpdiag.checks.gpu.devices import CHECK, Data, TorchGpu
from ddpdiag.model import RunOptions, Severity
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu
from ddpdiag.probes.gpu.visibility import device_index


def seen(*rows, nvml=None, gpus=2, **world):
    run = seen_of(CHECK, dict(enumerate(rows)), gpus=gpus, **world)
    if nvml is None:
        return run
    listed = present.Data(nvml=Enumeration(gpus=tuple(nvml)))
    return together(run, seen_of(present.CHECK, dict.fromkeys(range(len(rows)), listed), gpus=gpus))


def found(*rows, **world):
    return list(CHECK.judge(seen(*rows, **world)))


def rank(chosen, *uuids, **changes):
    gpus = tuple(TorchGpu("NVIDIA H100", uuid) for uuid in uuids)
    return Data(**({"torch": "2.13.0+cu130", "cuda": "13.0", "gpus": gpus, "chosen": chosen} | changes))


CPU_BUILD = Data(torch="2.13.0+cpu")
TOO_OLD = rank(None, error="The NVIDIA driver on your system is too old (found version 11060)")
ERROR, WARNING = Severity.ERROR, Severity.WARNING
SILENT = {
    "a GPU for each rank": (
        [rank(0, "GPU-a", "GPU-b"), rank(1, "GPU-a", "GPU-b")],
        {"nvml": [ListedGpu(index=0, uuid="GPU-b"), ListedGpu(index=1, uuid="GPU-a")]},
    ),
    "one visible GPU each": ([rank(0, "GPU-a"), rank(0, "GPU-b")], {"gpus": 1}),
    "slices": ([rank(0, "GPU-slice")], {"nvml": [ListedGpu(index=0, uuid="GPU-a", mig=True)]}),
}


@pytest.mark.parametrize(("rows", "world"), SILENT.values(), ids=SILENT)
def test_what_is_no_fault_is_silent(rows, world):
    assert found(*rows, **world) == []


FAULTS = {
    "torch without CUDA": ("cpu-build", ERROR, (0, 1), [CPU_BUILD] * 2, {}),
    "CUDA does not start": ("cuda-start", ERROR, (0, 1), [TOO_OLD] * 2, {}),
    "one GPU for two ranks": ("shared", ERROR, (0, 1), [rank(0, "GPU-a")] * 2, {"gpus": 1}),
    "one GPU for two ranks of gloo": (
        "shared",
        WARNING,
        (0, 1),
        [rank(0, "GPU-a")] * 2,
        {"gpus": 1, "options": RunOptions(backend="gloo")},
    ),
    "fewer than visible": ("count", ERROR, (0,), [rank(0, "GPU-a")], {"gpus": 2}),
    "more than visible": ("count", WARNING, (0,), [rank(0, "GPU-a", "GPU-b")], {"gpus": 1}),
}


@pytest.mark.parametrize(("word", "severity", "ranks", "rows", "world"), FAULTS.values(), ids=FAULTS)
def test_what_torch_lacks_is_named_once(golden, word, severity, ranks, rows, world):
    (finding,) = found(*rows, **world)
    assert (finding.code, finding.severity, finding.ranks) == (f"GPU002.{word}", severity, ranks)
    golden(finding)


def test_there_is_no_ground_without_a_visible_gpu():
    assert skip_text(CHECK, seen(gpus=0, size=2).world) is not None
    assert skip_text(CHECK, seen(gpus=1, size=2).world) is None


def test_a_cpu_host_among_gpu_hosts_is_left_to_gpu001():
    run = seen(CPU_BUILD, CPU_BUILD, gpus=0)
    arrivals = {0: arrival_of(0, 2, ranks_per_node=1), 1: arrival_of(1, 2, ranks_per_node=1, gpus=1)}
    assert [finding.hosts for finding in CHECK.judge(with_arrivals(run, arrivals))] == [("n1",)]


def test_every_rank_gets_its_gpu_in_the_report():
    run = seen(rank(0, "GPU-a", "GPU-b"), rank(1, "GPU-a", "GPU-b"), CPU_BUILD)
    assert CHECK.report(run).columns == {
        0: {"gpu_uuid": "GPU-a", "gpu_name": "NVIDIA H100"},
        1: {"gpu_uuid": "GPU-b", "gpu_name": "NVIDIA H100"},
    }


@pytest.mark.parametrize(
    ("local_rank", "count", "index"), [(3, 8, 3), (3, 1, 0), (3, 2, 1), (None, 2, 0), (0, 0, None)]
)
def test_a_rank_takes_the_gpu_of_its_local_rank(local_rank, count, index):
    assert device_index(local_rank, count) == index


def test_a_recording_that_names_a_gpu_it_does_not_list_names_none():
    assert Data(torch="2", chosen=3).gpu is None
