"""GPU002: torch's view of the GPUs."""

from seen import arrival_of, seen_of, skip_text, together, with_arrivals

from ddpdiag.checks.gpu import present
from ddpdiag.checks.gpu.devices import CHECK, Data, TorchGpu
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu
from ddpdiag.probes.gpu.visibility import device_index


def seen(*rows, nvml=None, gpus=2, **world):
    run = seen_of(CHECK, dict(enumerate(rows)), gpus=gpus, **world)
    if nvml is None:
        return run
    listed = Enumeration(gpus=tuple(ListedGpu(index=i, uuid=uuid) for i, uuid in enumerate(nvml)))
    return together(run, seen_of(present.CHECK, dict.fromkeys(range(len(rows)), present.Data(nvml=listed)), gpus=gpus))


def found(*rows, **world):
    return list(CHECK.judge(seen(*rows, **world)))


def rank(chosen, *uuids, **changes):
    gpus = tuple(TorchGpu("NVIDIA H100", uuid) for uuid in uuids)
    return Data(**({"torch": "2.13.0+cu130", "cuda": "13.0", "gpus": gpus, "chosen": chosen} | changes))


def test_a_gpu_for_each_rank_is_silent():
    assert found(rank(0, "GPU-a", "GPU-b"), rank(1, "GPU-a", "GPU-b"), nvml=("GPU-b", "GPU-a")) == []


def test_a_host_with_gpus_and_a_torch_without_cuda_is_an_error(golden):
    (finding,) = found(Data(torch="2.13.0+cpu"), Data(torch="2.13.0+cpu"))
    assert finding.code == "GPU002.cpu-build"
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (0, 1)
    golden(finding)


def test_why_cuda_does_not_start_is_shown_once_per_host(golden):
    old = "The NVIDIA driver on your system is too old (found version 11060)"
    (finding,) = found(rank(None, error=old), rank(None, error=old))
    assert finding.code == "GPU002.cuda-start"
    golden(finding)


def test_two_ranks_on_one_gpu_are_an_error_that_names_both():
    (finding,) = found(rank(0, "GPU-a"), rank(0, "GPU-a"), gpus=1)
    assert finding.code == "GPU002.shared"
    assert finding.severity is Severity.ERROR
    assert (finding.ranks, finding.gpus) == ((0, 1), ("GPU-a",))


def test_gloo_lets_ranks_share_a_gpu():
    (finding,) = found(rank(0, "GPU-a"), rank(0, "GPU-a"), gpus=1, options=Options(backend="gloo"))
    assert finding.severity is Severity.WARNING


def test_one_visible_gpu_each_is_fine_when_the_uuids_differ():
    assert found(rank(0, "GPU-a"), rank(0, "GPU-b"), gpus=1) == []


def test_fewer_gpus_than_visible_are_an_error_and_more_a_warning():
    (fewer,) = found(rank(0, "GPU-a"), gpus=2)
    (more,) = found(rank(0, "GPU-a", "GPU-b"), gpus=1)
    assert (fewer.code, fewer.severity) == ("GPU002.count", Severity.ERROR)
    assert more.severity is Severity.WARNING


def test_slices_are_not_compared():
    run = seen(rank(0, "GPU-slice"), gpus=2)
    listed = Enumeration(gpus=(ListedGpu(index=0, uuid="GPU-a", mig=True),))
    assert list(CHECK.judge(together(run, seen_of(present.CHECK, {0: present.Data(nvml=listed)})))) == []


def test_there_is_no_ground_without_a_visible_gpu():
    assert skip_text(CHECK, seen(gpus=0, size=2).world) is not None
    assert skip_text(CHECK, seen(gpus=1, size=2).world) is None


def test_a_cpu_host_among_gpu_hosts_is_left_to_gpu001():
    run = seen(Data(torch="2.13.0+cpu"), Data(torch="2.13.0+cpu"), gpus=0)
    arrivals = {0: arrival_of(0, 2, ranks_per_node=1), 1: arrival_of(1, 2, ranks_per_node=1, gpus=1)}
    assert [finding.hosts for finding in CHECK.judge(with_arrivals(run, arrivals))] == [("n1",)]


def test_every_rank_gets_its_gpu_in_the_report():
    run = seen(rank(0, "GPU-a", "GPU-b"), rank(1, "GPU-a", "GPU-b"), Data(torch="2.13.0+cpu"))
    assert CHECK.report(run).columns == {
        0: {"gpu_uuid": "GPU-a", "gpu_name": "NVIDIA H100"},
        1: {"gpu_uuid": "GPU-b", "gpu_name": "NVIDIA H100"},
    }


def test_a_rank_takes_the_gpu_of_its_local_rank():
    assert device_index(3, 8) == 3
    assert device_index(3, 1) == 0
    assert device_index(3, 2) == 1
    assert device_index(None, 2) == 0
    assert device_index(0, 0) is None


def test_a_recording_that_names_a_gpu_it_does_not_list_names_none():
    assert Data(torch="2", chosen=3).gpu is None
