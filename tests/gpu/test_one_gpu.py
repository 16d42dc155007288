"""The whole tool on one real GPU: alone, and shared by two ranks over NCCL. No bandwidth is judged here.

Two ranks on one GPU are what GPU002.shared refuses, rightly; so these tests leave that check out. Each rank has an
NCCL_HOSTID of its own, of which LCH002.host-id warns.
"""

import subprocess

import pytest
from jobs import CHECK

from ddpdiag.checks.registry import check_by_code
from ddpdiag.errors import UsageError
from ddpdiag.probes.gpu.health import read_gpus
from ddpdiag.probes.gpu.nvml import enumerate_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpus")]
# GPU time is shared in slices, and each rank makes a context first.
PATIENT = ("--budget", "240", "--set", "COL001.deadline_seconds=60", "--set", "TRN001.deadline_seconds=90")
# What a sandbox may lack (shared memory, limits, names) is not the question here.
FAMILIES = ("GPU", "COL", "P2P", "TRN", "RUN")


def errors(job):
    return [finding for finding in job.errors if finding["code"].startswith(FAMILIES)]


def status(job, code):
    return next(check["statuses"] for check in job.report["checks"] if check["code"] == code)


def nvidia_smi(*fields):
    """Each GPU's answers, as nvidia-smi prints them."""
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nvidia-smi does not tell: {error}")
    return [[word.strip() for word in line.split(",")] for line in printed.splitlines()]


# One rank -------------------------------------------------------------------------------------------------------------


def test_check_on_one_gpu(start, keep):
    job = start(*CHECK, "--nproc-per-node", "1", *PATIENT, *keep, "--json", "{json}", CUDA_VISIBLE_DEVICES="0")
    job.wait(300)
    assert errors(job) == [], job.told()
    (rank,) = job.report["ranks"]
    assert rank["gpu_uuid"].startswith(("GPU-", "MIG-"))
    assert status(job, "TRN001") == {"done": 1}, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_copies_of_one_gpu(start, keep):
    options = ("--nproc-per-node", "1", "--select", "GPU002,GPU003,P2P002", "--depth", "deep")
    job = start(*CHECK, *options, *PATIENT, *keep, "--json", "{json}", CUDA_VISIBLE_DEVICES="0")
    job.wait(300)
    assert errors(job) == [], job.told()
    (host,) = [own for own in job.report["matrices"] if own["name"].startswith("p2p.host.")]
    # Less than one lane of PCIe 3 would be no measurement.
    assert all(rate > 1e9 for row in host["cells"] for rate in row), host


# What NVML tells ------------------------------------------------------------------------------------------------------


def test_gpus_are_those_of_nvidia_smi():
    told = nvidia_smi("index", "uuid", "name")
    assert [[str(gpu.index), gpu.uuid, gpu.name] for gpu in enumerate_gpus(lambda _: None).gpus] == told


def test_health_is_that_of_nvidia_smi():
    fields = ("uuid", "pci.bus_id", "driver_version", "pcie.link.width.current", "pcie.link.gen.max")
    found = read_gpus(lambda step: None)
    assert found.error is None
    for gpu, (uuid, pci, driver, width, generation) in zip(found.gpus, nvidia_smi(*fields), strict=True):
        assert (gpu.uuid, found.driver) == (uuid, driver)
        assert pci.lower().endswith(gpu.pci.lower())
        assert (str(gpu.pcie.width), str(gpu.pcie.generation_max)) == (width, generation)


def test_error_counters_are_those_of_nvidia_smi():
    fields = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "power.limit", "compute_mode")
    modes = {"Default": 0, "Prohibited": 2, "Exclusive_Process": 3}
    pending = {"No": False, "0": False, "Yes": True, "1": True}
    for gpu, (errors, remap, watts, mode) in zip(read_gpus(print).gpus, nvidia_smi(*fields), strict=True):
        if errors.isdigit():
            assert gpu.memory.uncorrected == int(errors)
        if remap in pending:
            assert gpu.memory.remap_pending is pending[remap]
        if watts.replace(".", "").isdigit():
            assert gpu.clocks.power_limit_watts == pytest.approx(float(watts), abs=0.1)
        assert gpu.compute_mode == modes[mode]


# Two ranks over NCCL --------------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu_train_over_nccl(pair):
    job = pair("check", "--ignore", "GPU002", *PATIENT)
    assert errors(job) == [], job.told()
    assert status(job, "COL001")["done"] == 4, job.told()  # gloo and nccl
    assert status(job, "TRN001") == {"done": 2}
    assert "all_reduce.nccl.busbw_bytes_per_s" in job.report["measurements"]
    assert [f["code"] for f in job.report["findings"] if f["code"] == "LCH002.host-id"] == ["LCH002.host-id"]
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_two_ranks_on_one_gpu_are_refused_by_name(pair):
    job = pair("check", "--select", "GPU002", *PATIENT)
    (finding,) = job.errors
    assert (finding["code"], finding["ranks"]) == ("GPU002.shared", [0, 1]), job.told()


def test_a_benchmark_over_nccl_has_right_values(pair):
    job = pair("allreduce-bench", "-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-w", "1", "--budget", "240")
    report = job.report
    assert [row["size_bytes"] for row in report["bench"]["rows"]] == [1 << 10, 1 << 15, 1 << 20], job.told()
    assert report["bench"]["wrong"] == 0
    assert not job.has_traceback, job.told()


def test_an_interface_that_is_not_there_is_named_by_the_fallback(pair):
    try:
        check_by_code("P2P003")
    except UsageError as error:
        pytest.skip(str(error))
    job = pair("check", "--ignore", "GPU002", *PATIENT, NCCL_SOCKET_IFNAME="nosuch0")
    helped = [finding for finding in job.report["findings"] if finding["code"].startswith("P2P003.")]
    assert any(finding["env"].get("NCCL_SOCKET_IFNAME", "") is None for finding in helped), job.told()
