"""GPU012: arithmetic and memory of each GPU."""

import pytest
from cards import host_of, uuid_of
from msgspec import structs
from seen import seen_of, together

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.compute import CHECK, Data
from ddpdiag.model import RunOptions, Severity
from ddpdiag.model.measurements import Compute, GpuLoad
from ddpdiag.probes.gpu.health import Process

H100 = "NVIDIA H100 80GB HBM3"
BUSY = GpuLoad(sm_hz=1.755e9, events=0x4, celsius=61)


def gpu(rank=0, *, bf16=700.0, memory=2.9, load=BUSY, **changes):
    """An H100 as it should be."""
    own = {
        "device": H100,
        "index": rank % 8,
        "uuid": uuid_of(rank % 8, rank // 8),
        "pci": f"0000:{rank % 8}b:00.0",
        "processors": 132,
        "dtype": "bfloat16",
        "flop_per_s": tuple(bf16 * 1e12 * (1 - number / 100) for number in range(5)),
        "copy_bytes_per_s": tuple(memory * 1e12 * (1 - number / 100) for number in range(5)),
        "loads": (load,) * 5,
        "pid": 2000 + rank,
        "pids": (2000 + rank,),
    }
    return Data(devices=(Compute(**(own | changes)),))


def node(sick=None, count=8, **changes):
    """All GPUs of a host; `sick` maps a rank to what differs."""
    return {rank: gpu(rank, **(changes | dict(sick or {}).get(rank, {}))) for rank in range(count)}


def run_of(*runs, look=None, options=None, torch=True, **world) -> Seen:
    """One run with these measurements, and with what GPU002 and GPU003 saw before."""
    size = max(map(len, runs))
    hosts = -(-size // 8)
    world = {"size": size, "ranks_per_node": 8, "gpus": 8, "options": options} | world
    looks = {8 * host: look or host_of(host=host) for host in range(hosts)}
    whole = seen_of(memory_errors.CHECK, looks, **world)
    if torch:
        shown = tuple(devices.TorchGpu(H100, uuid_of(number)) for number in range(8))
        views = {n: devices.Data(torch="2.15", cuda="13.2", gpus=shown, chosen=n % 8) for n in range(min(size, 8))}
        whole = together(whole, seen_of(devices.CHECK, views, **world))
    for run in runs:
        whole = together(whole, seen_of(CHECK, run, **world))
    return whole.of(CHECK)


def judged(*runs, **more):
    return list(CHECK.judge(run_of(*runs, **more)))


def twice(run, **more):
    return judged(run, run, **more)


HOT = structs.replace(BUSY, sm_hz=9.9e8, events=0x40, celsius=87)
BRAKED = structs.replace(BUSY, sm_hz=8e8, events=0x80)
USED = {"processes": (Process(4711, 19 << 30),)}


def one(findings, code, severity=Severity.WARNING, rank=5):
    """The only finding, which blames GPU 5 alone."""
    (finding,) = findings
    assert (finding.code, finding.severity) == (code, severity)
    assert (finding.ranks, finding.gpus, finding.hosts) == ((rank,), (uuid_of(rank),), ("n0",))
    return finding


WARM = structs.replace(BUSY, events=0x24, celsius=85)
SICK = {
    "products": ("slow", Severity.WARNING, "unknown", {"bf16": 412.0}, {}),
    "copies": ("slow", Severity.WARNING, "unknown", {"memory": 1.6}, {}),
    "a-tenth": ("slow", Severity.ERROR, "unknown", {"bf16": 30.0}, {}),
    "heat": ("slow", Severity.WARNING, "heat", {"bf16": 412.0, "load": HOT}, {}),
    "power-brake": ("slow", Severity.WARNING, "power-brake", {"bf16": 400.0, "load": BRAKED}, {}),
    "used": ("slow", Severity.NOTE, "others", {"bf16": 60.0}, USED),
    "used-meanwhile": ("slow", Severity.NOTE, "others", {"bf16": 300.0, "pids": (2005, 4711)}, {}),
    "other-namespace": ("slow", Severity.WARNING, "unknown", {"bf16": 300.0, "pids": (881234,)}, {}),
    "throttled before it is slow": ("throttled", Severity.WARNING, "heat", {"load": WARM}, {}),
}


@pytest.mark.parametrize(("word", "severity", "cause", "sick", "look"), SICK.values(), ids=SICK)
def test_a_sick_gpu_is_named_with_its_cause(golden, word, severity, cause, sick, look):
    finding = one(twice(node({5: sick}), look=host_of({5: look})), f"GPU012.{word}", severity)
    assert finding.evidence["cause"] == cause
    golden(finding)


def test_the_slower_of_two_gpus_is_named():
    finding = one(twice(node({1: {"bf16": 350.0}}, count=2)), "GPU012.slow", rank=1)
    assert finding.evidence["slower_share"] == pytest.approx(0.5)


def test_a_host_that_is_asked_alone_measures_all_gpus_and_compares_them():
    all_gpus = Data(devices=tuple(own for row in node({5: {"bf16": 412.0}}).values() for own in row.devices))
    (finding,) = twice({0: all_gpus}, size=1, torch=False, options=RunOptions(alone=True))
    assert (finding.code, finding.gpus) == ("GPU012.slow", (uuid_of(5),))
    assert CHECK.report(run_of({0: all_gpus}, size=1, torch=False)).columns[0]["bf16_flop_per_s"] == 412e12


CUT = {"device": f"{H100} MIG 1g.10gb", "uuid": "GPU-slice", "processors": 16, "bf16": 80.0, "memory": 0.35}
HALF = {"bf16": 350.0, "memory": 1.4, "uuid": uuid_of(5)}
SLOW = node({5: {"bf16": 300.0}})
SILENT = {
    "alike": ([node()], {}),
    "one alone": ([{0: gpu()}], {"size": 1}),
    "flicker": ([node({5: {"loads": (structs.replace(BUSY, events=0x20), *(BUSY,) * 4)}})], {}),
    "benign events": ([node({6: {"load": structs.replace(BUSY, events=0x4 | 0x10)}})], {}),
    "spread": ([node({n: {"bf16": 620.0 + 20 * n, "memory": 2.7 + n / 40} for n in range(8)})], {}),
    "models": ([node({n: {"device": "A100", "bf16": 260.0, "memory": 1.8} for n in range(4)})], {}),
    "a slice among whole ones": ([node({5: CUT})] * 2, {"torch": False}),
    "a slice by NVML": ([node({5: {"bf16": 80.0, "memory": 0.35}})] * 2, {"look": host_of({5: {"mig": True}})}),
    "two ranks on one GPU": ([node({5: HALF, 6: HALF})], {"torch": False}),
    "slow at first": ([SLOW, node()], {}),
    "slow the second time": ([node(), SLOW], {}),
    "slow in another way each time": ([SLOW, node({5: {"memory": 1.0}})], {}),
}


@pytest.mark.parametrize(("runs", "world"), SILENT.values(), ids=SILENT)
def test_healthy_gpus_are_silent(runs, world):
    assert judged(*runs, **world) == []


def test_without_a_second_measurement_it_is_a_warning():
    one(judged(node({5: {"bf16": 30.0}})), "GPU012.slow")
    full = {5: {"flop_per_s": (), "copy_bytes_per_s": (), "why_unmeasured": "CUDA out of memory"}}
    one(judged(node({5: {"bf16": 30.0}}), node(full)), "GPU012.slow")


def test_what_cannot_run_is_not_measured_and_no_fault(golden):
    reason = "cuBLAS does not start (CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`)"
    rows = {rank: Data(devices=(Compute(device=H100, index=rank, why_unmeasured=reason),)) for rank in range(2)}
    (finding,) = judged(rows)
    assert (finding.code, finding.severity, finding.ranks) == ("GPU012.unmeasured", Severity.NOTE, (0, 1))
    assert CHECK.plan(run_of(rows)) == ()
    golden(finding)


def test_a_fleet_is_judged_in_a_moment_and_finds_the_one_that_is_slow():
    run = node({5: {"bf16": 412.0}}, count=4096)
    assert [finding.code for finding in twice(run, torch=False)] == ["GPU012.slow"]


def test_each_gpu_is_measured_by_one_rank():
    views = {
        rank: devices.Data(torch="2", cuda="13", gpus=(devices.TorchGpu(H100, uuid_of(rank // 2)),), chosen=0)
        for rank in range(4)
    }
    (trial,) = CHECK.plan(seen_of(devices.CHECK, views, ranks_per_node=4, gpus=2).of(CHECK))
    assert trial.groups == ((0,), (2,))


def test_ranks_to_which_torch_shows_no_gpu_measure_nothing():
    views = {rank: devices.Data(torch="2.15.0+cpu") for rank in range(2)}
    assert CHECK.plan(seen_of(devices.CHECK, views, gpus=2).of(CHECK)) == ()


def test_a_doubtful_run_is_measured_once_more_and_a_healthy_one_is_not():
    (trial,) = CHECK.plan(run_of(SLOW))
    assert trial.groups == tuple((rank,) for rank in range(8))
    assert CHECK.plan(run_of(SLOW, node())) == CHECK.plan(run_of(node())) == ()
