"""GPU012: arithmetic and memory of each GPU."""

import pytest
from cards import clocks, host_of, uuid_of
from msgspec import structs
from seen import seen_of, together

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.compute import CHECK, Data, nameplate_of
from ddpdiag.checks.registry import by_code
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.comparison import Direction, compared_figures
from ddpdiag.model import Options, Severity
from ddpdiag.model.measurements import Compute, Gemm, GpuLoad
from ddpdiag.probes.gpu.health import Process

H100 = "NVIDIA H100 80GB HBM3"
BUSY = GpuLoad(sm_hz=1.755e9, memory_hz=2.619e9, events=0x4, celsius=61)


def gemm(dtype="bfloat16", teraflops=700.0, **changes):
    """Five batches, the last the fastest."""
    rates = tuple(teraflops * 1e12 * (1 - number / 100) for number in range(5))
    size = 8192 if dtype != "float32" else 4096
    own = {"compared": 131072, "wrong": 0, "error": 0.04}
    return Gemm(dtype=dtype, size=size, flop_per_s=rates, **(own | changes))


def data(device):
    return Data(devices=(device,))


def gpu(rank=0, *, bf16=700.0, fp32=50.0, memory=2.9, half=None, single=None, load=BUSY, **changes):
    """An H100 as it should be."""
    own = {
        "device": H100,
        "torch": "2.15.0",
        "index": rank % 8,
        "uuid": uuid_of(rank % 8, rank // 8),
        "pci": f"0000:{rank % 8}b:00.0",
        "processors": 132,
        "driver": "580.1",
        "gemms": (gemm(teraflops=bf16, **(half or {})), gemm("float32", fp32, **(single or {}))),
        "copy_bytes": 256 << 20,
        "copy_bytes_per_s": tuple(memory * 1e12 * (1 - number / 100) for number in range(5)),
        "during": (load,) * 5,
        "pid": 2000 + rank,
        "pids": (2000 + rank,),
    }
    return data(Compute(**(own | changes)))


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
        views = {
            rank: devices.Data(torch="2.15.0", cuda="13.2", gpus=shown, chosen=rank % 8) for rank in range(min(size, 8))
        }
        whole = together(whole, seen_of(devices.CHECK, views, **world))
    for run in runs:
        whole = together(whole, seen_of(CHECK, run, **world))
    return whole.of(CHECK)


def judged(*runs, **more):
    """The findings; the second measurement is as the first, unless it is given."""
    return list(CHECK.judge(run_of(*runs, **more)))


def twice(run, **more):
    return judged(run, run, **more)


# Sick GPUs -----------------------------------------------------------------------------------------------------------


def one(findings, code, severity=Severity.WARNING, rank=5):
    """The only finding, which blames GPU 5 alone."""
    (finding,) = findings
    assert (finding.code, finding.severity) == (code, severity)
    assert (finding.ranks, finding.gpus, finding.hosts) == ((rank,), (uuid_of(rank),), ("n0",))
    return finding


def test_a_slow_gpu_is_named_with_its_peers(golden):
    finding = one(twice(node({5: {"bf16": 412.0}})), "GPU012.slow")
    assert finding.evidence["cause"] == "unknown"
    assert finding.evidence["slower_share"] == pytest.approx(1 - 412 / 700)
    golden(finding)


def test_a_gpu_that_heat_slows_has_that_cause(golden):
    hot = structs.replace(BUSY, sm_hz=9.9e8, events=0x40, celsius=87)
    finding = one(twice(node({5: {"bf16": 412.0, "load": hot}})), "GPU012.slow")
    assert finding.evidence["cause"] == "heat"
    golden(finding)


@pytest.mark.parametrize(
    ("load", "look", "cause"),
    [
        ({"sm_hz": 8e8, "events": 0x80}, {}, "power-brake"),
        ({"sm_hz": 1.1e9}, clocks(power_limit_watts=350), "power-limit"),
        ({"sm_hz": 1.1e9, "events": 0x2}, {}, "clocks"),
    ],
)
def test_the_cause_is_what_the_data_shows(golden, load, look, cause):
    run = node({5: {"bf16": 400.0, "load": structs.replace(BUSY, **load)}})
    finding = one(twice(run, look=host_of({5: look})), "GPU012.slow")
    assert finding.evidence["cause"] == cause
    golden(finding)


def test_a_throttled_gpu_is_told_before_it_is_slow(golden):
    finding = one(twice(node({5: {"load": structs.replace(BUSY, events=0x24, celsius=85)}})), "GPU012.throttled")
    golden(finding)


def test_slow_memory_is_named(golden):
    finding = one(twice(node({5: {"memory": 1.6}})), "GPU012.slow")
    assert finding.evidence["memory_usual_bytes_per_s"] == pytest.approx(2.9e12)
    golden(finding)


def test_slow_memory_with_a_lower_memory_clock_says_so():
    slow = {"memory": 1.6, "load": structs.replace(BUSY, memory_hz=1.6e9)}
    assert one(twice(node({5: slow})), "GPU012.slow").evidence["cause"] == "clocks"


def test_gpus_far_below_their_data_sheet_are_named_without_a_peer(golden):
    finding = one(twice({0: gpu(bf16=120.0)}), "GPU012.nameplate", rank=0)
    assert finding.evidence["bf16_nameplate_flop_per_s"] == 989e12
    golden(finding)


def test_all_gpus_far_below_their_data_sheet_are_named():
    found = twice(node(memory=0.9))
    assert [(finding.code, finding.ranks) for finding in found] == [("GPU012.nameplate", (n,)) for n in range(8)]


def test_a_tenth_of_what_others_reach_is_an_error():
    one(twice(node({5: {"bf16": 30.0}})), "GPU012.slow", Severity.ERROR)


def test_an_error_above_what_rounding_explains_in_two_measurements_is_an_error(golden):
    finding = one(twice(node({5: {"half": {"wrong": 3, "error": 40.0}}})), "GPU012.wrong", Severity.ERROR)
    assert finding.evidence["bf16_wrong"] == 3
    golden(finding)


def test_what_is_wrong_in_one_of_two_measurements_is_a_warning():
    sick = node({5: {"half": {"wrong": 3, "error": None}}})
    one(judged(sick, node()), "GPU012.wrong")
    one(judged(node(), sick), "GPU012.wrong")
    one(judged(sick), "GPU012.wrong")


def test_words_that_differ_within_the_memory_are_wrong(golden):
    golden(one(twice(node({5: {"wrong_words": 2}})), "GPU012.wrong", Severity.ERROR))


def test_the_slower_of_two_gpus_is_named():
    one(twice(node({1: {"fp32": 30.0}}, count=2)), "GPU012.slow", rank=1)


def test_a_host_that_is_asked_alone_measures_all_gpus_and_compares_them():
    all_gpus = Data(devices=tuple(own for row in node({5: {"bf16": 412.0}}).values() for own in row.devices))
    (finding,) = twice({0: all_gpus}, size=1, torch=False, options=Options(alone=True))
    assert (finding.code, finding.gpus) == ("GPU012.slow", (uuid_of(5),))
    assert CHECK.report(run_of({0: all_gpus}, size=1, torch=False)).columns[0]["bf16_flop_per_s"] == 412e12


# Healthy ones --------------------------------------------------------------------------------------------------------


def test_a_healthy_host_is_silent_and_measured_once():
    assert judged(node()) == []
    assert CHECK.plan(run_of(node())) == ()


def test_benign_clock_events_and_a_flicker_are_silent():
    flicker = (structs.replace(BUSY, events=0x20), *(BUSY,) * 4)
    assert judged(node({5: {"during": flicker}, 6: {"load": structs.replace(BUSY, events=0x4 | 0x10)}})) == []


def test_the_usual_spread_of_equal_gpus_is_silent():
    assert judged(node({rank: {"bf16": 620.0 + 20 * rank, "memory": 2.7 + rank / 40} for rank in range(8)})) == []


def test_slices_of_a_gpu_are_compared_with_no_whole_one():
    slices = {"device": f"{H100} MIG 1g.10gb", "uuid": "GPU-slice", "processors": 16, "bf16": 80.0, "memory": 0.35}
    cut = node({5: slices})
    assert twice(cut, torch=False) == []
    by_name = node({5: {"bf16": 80.0, "memory": 0.35}})
    assert twice(by_name, look=host_of({5: {"mig": True}})) == []


def test_a_gh200_is_no_h200():
    grace = gpu(device="NVIDIA GH200 480GB", bf16=640.0, memory=3.4)
    assert judged({0: grace}, size=1) == []
    assert nameplate_of("NVIDIA GH200 480GB").memory_bytes_per_s == 4e12
    assert nameplate_of("NVIDIA H200").memory_bytes_per_s == 4.8e12


def test_mixed_models_are_compared_with_their_own():
    older = {"device": "NVIDIA A100-SXM4-80GB", "processors": 108, "bf16": 260.0, "fp32": 19.0, "memory": 1.8}
    assert judged(node(dict.fromkeys(range(4), older))) == []


def test_a_model_without_a_nameplate_is_held_against_peers_only():
    assert judged({0: gpu(device="NVIDIA GeForce RTX 9090", bf16=1.0, fp32=1.0, memory=0.01)}) == []


def test_one_gpu_alone_is_silent():
    assert judged({0: gpu()}, size=1) == []


def test_two_ranks_on_one_gpu_are_compared_with_no_other():
    half = {"bf16": 350.0, "memory": 1.4, "uuid": uuid_of(5)}
    assert judged(node({5: half, 6: half}), torch=False) == []


def test_a_gpu_that_others_use_is_slow_for_that(golden):
    used = host_of({5: {"processes": (Process(4711, 19 << 30),)}})
    finding = one(twice(node({5: {"bf16": 60.0}}), look=used), "GPU012.slow", Severity.NOTE)
    golden(finding)


def test_other_users_are_seen_during_the_measurement_too():
    one(twice(node({5: {"bf16": 300.0, "pids": (2005, 4711)}})), "GPU012.slow", Severity.NOTE)


def test_pids_of_another_namespace_say_nothing():
    one(twice(node({5: {"bf16": 300.0, "pids": (881234,)}})), "GPU012.slow")


def test_what_was_slow_once_is_silent():
    assert judged(node({5: {"bf16": 300.0}}), node()) == []
    assert judged(node(), node({5: {"bf16": 300.0}})) == []
    assert judged(node({5: {"bf16": 300.0}}), node({5: {"memory": 1.0}})) == []


def test_without_a_second_measurement_it_is_a_warning():
    one(judged(node({5: {"bf16": 30.0}})), "GPU012.slow")
    full = {5: {"gemms": (), "copy_bytes_per_s": (), "unmeasured": "CUDA out of memory"}}
    one(judged(node({5: {"bf16": 30.0}}), node(full)), "GPU012.slow")


def test_what_cannot_run_is_not_measured_and_no_fault(golden):
    reason = "cuBLAS does not start (CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`)"
    rows = {rank: data(Compute(device=H100, torch="2.15.0", index=rank, unmeasured=reason)) for rank in range(2)}
    (finding,) = judged(rows)
    assert (finding.code, finding.severity, finding.ranks) == ("GPU012.unmeasured", Severity.NOTE, (0, 1))
    assert CHECK.plan(run_of(rows)) == ()
    golden(finding)


def test_a_fleet_is_judged_in_a_moment_and_finds_the_one_that_is_slow():
    run = node({5: {"bf16": 412.0}}, count=4096)
    assert [finding.code for finding in twice(run, torch=False)] == ["GPU012.slow"]


# What is planned, and shown ------------------------------------------------------------------------------------------


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


def test_a_doubtful_run_is_measured_once_more():
    doubtful = run_of(node({5: {"bf16": 300.0}}))
    (trial,) = CHECK.plan(doubtful)
    assert trial.groups == tuple((rank,) for rank in range(8))
    assert CHECK.plan(run_of(node({5: {"bf16": 300.0}}), node())) == ()


def test_the_ranks_table_and_the_figures_have_the_best_rates():
    seen = run_of(node({5: {"bf16": 412.0}}))
    assert CHECK.report(seen).columns[5] == {
        "bf16_flop_per_s": 412e12,
        "fp32_flop_per_s": 50e12,
        "memory_bytes_per_s": 2.9e12,
    }
    figures = CHECK.report(seen).figures
    assert figures["compute.bf16.min_flop_per_s"] == 412e12
    assert figures["compute.bf16.median_flop_per_s"] == 700e12
    assert figures["compute.memory.min_bytes_per_s"] == 2.9e12


def test_a_gpu_that_became_slower_than_in_an_earlier_run_is_a_regression():
    old, new = (
        snapshot_of(seen.world, seen.recording) for seen in (run_of(node()), run_of(node({5: {"bf16": 412.0}})))
    )
    held, changes = compared_figures(old, new)
    (change,) = changes
    assert held == 3 * 8
    assert (change.direction, change.ranks, change.name) == (Direction.REGRESSION, (5,), "compute.bf16_flop_per_s")
    assert "700 TFLOP/s" in change.text or "686 TFLOP/s" in change.text


def test_the_check_is_in_the_list():
    assert by_code("GPU012") is CHECK
