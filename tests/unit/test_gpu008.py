"""GPU008: who else uses a GPU."""

from cards import host_of, judged, uuid_of, with_fifth
from seen import seen_of, together

from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.other_users import CHECK
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.health import Process

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


def test_what_a_display_holds_is_good_to_know():
    (finding,) = with_fifth(CHECK, memory_used_bytes=40 << 20)
    assert (finding.code, finding.severity) == ("GPU008.in-use", Severity.NOTE)
    (server,) = with_fifth(CHECK, memory_used_bytes=40 << 20, processes=(Process(4711, 27 << 20),))
    assert server.severity is Severity.WARNING


XORG, SHELL = Process(1490, 300 << 20), Process(1702, 170 << 20)


def test_what_a_desktop_draws_with_is_good_to_know(golden):
    (finding,) = with_fifth(CHECK, memory_used_bytes=611 << 20, graphics=(XORG, SHELL))
    assert (finding.code, finding.severity, finding.evidence["pids"]) == ("GPU008.in-use", Severity.NOTE, [])
    golden(finding)


def test_a_cuda_process_beside_a_desktop_or_memory_that_no_desktop_holds_is_a_warning():
    (beside,) = with_fifth(CHECK, **{**FOREIGN, "graphics": (XORG, Process(4711, 19 << 30))})
    (hidden,) = with_fifth(CHECK, memory_used_bytes=20 << 30, graphics=(XORG,))
    assert (beside.severity, hidden.severity) == (Severity.WARNING, Severity.WARNING)
    assert "pid 4711 (19456 MiB), pid 1490 (300 MiB) for graphics" in beside.message


def test_what_slices_of_a_gpu_hold_is_no_matter_of_the_job():
    found = with_fifth(CHECK, mig=True, memory_used_bytes=20 << 30)
    assert [finding.code for finding in found] == ["GPU008.mig"]


def test_a_slice_is_harmless_for_a_single_rank():
    (finding,) = judged(CHECK, host_of({0: {"mig": True}}, count=1), size=1, gpus=1)
    assert (finding.code, finding.severity) == ("GPU008.mig", Severity.NOTE)


def test_a_prohibited_gpu_is_an_error():
    (finding,) = with_fifth(CHECK, compute_mode=2)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU008.prohibited", Severity.ERROR, (uuid_of(5),))
    assert "nvidia-smi -i 5 -c DEFAULT" in finding.fix


def test_an_exclusive_gpu_is_good_to_know_unless_somebody_has_it(golden):
    (free,) = with_fifth(CHECK, compute_mode=3)
    (taken,) = with_fifth(CHECK, compute_mode=3, processes=(Process(4711, None),))
    assert (free.code, free.severity) == ("GPU008.exclusive", Severity.NOTE)
    assert taken.severity is Severity.WARNING
    golden(free, taken)


def test_an_exclusive_gpu_that_two_ranks_take_is_a_warning_that_names_them(golden):
    rows = {rank: devices.Data(torch="2", gpus=(devices.TorchGpu("H100", uuid_of(0)),), chosen=0) for rank in range(2)}
    world = {"size": 2, "ranks_per_node": 2, "gpus": 1}
    look = seen_of(memory_errors.CHECK, {0: host_of({0: {"compute_mode": 3}}, count=1)}, **world)
    (finding,) = CHECK.judge(together(look, seen_of(devices.CHECK, rows, **world)).of(CHECK))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0, 1))
    golden(finding)


def test_mig_is_a_warning():
    (finding,) = with_fifth(CHECK, mig=True)
    assert (finding.code, finding.severity, finding.gpus) == ("GPU008.mig", Severity.WARNING, (uuid_of(5),))
