"""GPU008: who else uses a GPU."""

from cards import host_of, judged, uuid_of, with_fifth
from seen import seen_of, together

from ddpdiag.checks.gpu import devices, memory_errors, present
from ddpdiag.checks.gpu.other_users import CHECK
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.health import Process
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu

FOREIGN = {"memory_used_bytes": 20 << 30, "processes": (Process(4711, 19 << 30),)}


def test_gpus_that_nobody_uses_are_silent():
    assert judged(CHECK, host_of()) == []


def test_a_foreign_process_is_a_warning_with_its_pid(golden):
    (finding,) = with_fifth(CHECK, **FOREIGN)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU008.in-use", Severity.WARNING, (uuid_of(5),))
    assert finding.evidence["pids"] == [4711]
    golden(finding)


def test_memory_without_a_visible_process_is_told_too(golden):
    (finding,) = with_fifth(CHECK, memory_used_bytes=1 << 30)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU008.in-use", Severity.WARNING, (uuid_of(5),))
    golden(finding)


def test_memory_that_an_idle_driver_holds_is_silent():
    assert with_fifth(CHECK, memory_used_bytes=15 << 20) == []
    assert with_fifth(CHECK, memory_used_bytes=None, processes=None) == []
    options = Options(settings={"GPU008.used_mib": "30000"})
    assert judged(CHECK, host_of({5: FOREIGN}), options=options) == []


def test_what_a_display_or_a_desktop_holds_is_silent():
    assert with_fifth(CHECK, memory_used_bytes=40 << 20) == []
    assert with_fifth(CHECK, memory_used_bytes=611 << 20, has_graphics=True) == []
    (server,) = with_fifth(CHECK, memory_used_bytes=40 << 20, processes=(Process(4711, 27 << 20),))
    assert server.severity is Severity.WARNING


def test_a_cuda_process_beside_a_desktop_is_a_warning():
    (beside,) = with_fifth(CHECK, **FOREIGN, has_graphics=True)
    assert beside.severity is Severity.WARNING
    assert "pid 4711 (19456 MiB)" in beside.message


def test_what_slices_of_a_gpu_hold_is_no_matter_of_the_job():
    found = with_fifth(CHECK, mig=True, memory_used_bytes=20 << 30)
    assert [finding.code for finding in found] == ["GPU008.mig"]


def test_a_slice_is_harmless_for_a_single_rank():
    assert judged(CHECK, host_of({0: {"mig": True}}, count=1), size=1, gpus=1) == []


def with_slices(*uuids, backend="auto"):
    """What GPU002 and GPU008 say of a host with two GPUs that are cut, where the ranks take these slices."""
    rows = {
        rank: devices.Data(torch="2", cuda="13", gpus=(devices.TorchGpu("MIG", uuid),), chosen=0)
        for rank, uuid in enumerate(uuids)
    }
    world = {"size": len(uuids), "ranks_per_node": len(uuids), "gpus": 1, "options": Options(backend=backend)}
    look = host_of({0: {"mig": True}, 1: {"mig": True}}, count=2)
    listed = Enumeration(gpus=tuple(ListedGpu(index=index, uuid=uuid_of(index), mig=True) for index in range(2)))
    met = together(seen_of(memory_errors.CHECK, {0: look}, **world), seen_of(devices.CHECK, rows, **world))
    met = together(met, seen_of(present.CHECK, dict.fromkeys(rows, present.Data(nvml=listed, visible=1)), **world))
    return list(devices.CHECK.judge(met.of(devices.CHECK))), list(CHECK.judge(met.of(CHECK)))


def test_ranks_that_share_a_slice_are_an_error(golden):
    (shared,), found = with_slices("MIG-a", "MIG-a", "MIG-a")
    assert [(finding.code, finding.severity) for finding in found] == [("GPU008.mig", Severity.WARNING)] * 2
    assert (shared.code, shared.severity, shared.ranks) == ("GPU002.shared", Severity.ERROR, (0, 1, 2))
    golden(shared)


def test_a_torch_that_does_not_start_on_slices_is_told_what_to_do():
    assert_error = "device >= 0 && device < num_gpus INTERNAL ASSERT FAILED"
    rows = {0: devices.Data(torch="2.6", cuda="12", error=assert_error)}
    met = together(seen_of(devices.CHECK, rows, gpus=1), seen_of(memory_errors.CHECK, {0: host_of({0: {"mig": True}})}))
    (finding,) = devices.CHECK.judge(met)
    assert (finding.code, finding.fix) == ("GPU002.cuda-start", devices.SLICES_FIX)


def test_a_slice_for_each_rank_or_gloo_is_no_error():
    shared, found = with_slices("MIG-a", "MIG-b")
    assert (shared, {finding.severity for finding in found}) == ([], {Severity.WARNING})
    (shared,), _ = with_slices("MIG-a", "MIG-a", backend="gloo")
    assert shared.severity is Severity.WARNING


def test_a_prohibited_gpu_is_an_error():
    (finding,) = with_fifth(CHECK, compute_mode=2)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU008.prohibited", Severity.ERROR, (uuid_of(5),))
    assert f"nvidia-smi -i {uuid_of(5)} -c DEFAULT" in finding.fix
