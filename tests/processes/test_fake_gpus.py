"""The whole tool on a host whose NVML is a stand-in: eight GPUs, of which one is sick, or does not answer."""

import sys
import time
from pathlib import Path

import fake_nvml
import pytest
from jobs import CHECK, Job, Start, torchrun

deep = pytest.mark.deep
pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")
# GPU001 asks once on each rank, GPU003 once on each host.
STARTS_BEFORE_THE_END = 2
# Without persistence mode, 4 s for each GPU: what Azure saw at worst.
SLOW = ("--nproc-per-node", "2", "--json", "{json}", "--stage", "launch,gpu", "--ignore", "GPU002,GPU012")
ONE = ("--nproc-per-node", "1", "--json", "{json}")
STAGE = (*ONE, "--stage", "gpu")
HEALTH = (*ONE, "--select", "GPU003,GPU004,GPU005,GPU006,GPU007,GPU008")


@pytest.fixture
def checked(start: Start, tmp_path: Path):
    """checked("healthy", ...): the check with that stand-in, over."""

    def check(
        name: str, *options: str, launcher: tuple[str, ...] = CHECK, arguments: tuple[str, ...] = HEALTH, **more: str
    ) -> Job:
        variables = {
            "LD_LIBRARY_PATH": str(fake_nvml.build(name, tmp_path)),
            "DDPDIAG_PROCFS": str(fake_nvml.driver_of_eight(tmp_path)),
            "FAKE_NVML_STARTS": str(tmp_path / "starts"),
            "FAKE_NVML_LATER": "0" if "later" not in name else str(STARTS_BEFORE_THE_END + 1),
            "DDPDIAG_KMSG": str(_kmsg(tmp_path)),
        }
        job = start(*launcher, *arguments, *options, **(variables | more))
        job.wait()
        return job

    return check


def _kmsg(folder: Path, *texts: str) -> Path:
    """A kernel's log with a harmless record, and these of this moment."""
    now = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    path = folder / "kmsg"
    lines = [f"6,{100 + number},{now},-;{text}\n" for number, text in enumerate(["usb 1-1: new device", *texts])]
    path.write_text("".join(lines))
    return path


@deep
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("healthy", None),
        ("ecc-uncorrected", "GPU003.uncorrected"),
        ("pcie-x8", "GPU004.narrow"),
        ("throttle-thermal", "GPU005.slowdown"),
    ],
)
def test_the_sick_gpu_is_named_and_no_other_one(checked, name, code):
    job = checked(name)
    found = [f for f in job.report["findings"] if f["code"].startswith("GPU")]
    assert [(f["code"], f["gpus"]) for f in found] == ([(code, [fake_nvml.uuid_of(5)])] if code else []), job.told()
    assert all(fake_nvml.pci_of(5) in finding["message"] for finding in found)
    assert not job.has_traceback, job.told()
    assert job.process.returncode == int(code == "GPU003.uncorrected"), job.told()
    job.check_left_nothing()


@deep
def test_a_call_that_hangs_ends_in_a_hung_trial_and_not_in_a_hung_tool(checked):
    job = checked("hanging", "--set", "GPU003.deadline_seconds=3")
    assert job.process.returncode == 1, job.told()
    (hung,) = job.errors
    assert hung["code"] == "RUN003.hung"
    assert f"GPU 5 (PCI {fake_nvml.pci_of(5)})" in hung["message"]
    job.check_left_nothing()


@pytest.mark.parametrize(
    ("name", "codes"), [pytest.param("pcie", [], marks=deep), ("pcie-pair-disabled", ["P2P001.disabled"])]
)
def test_ways_between_gpus_are_shown_and_the_pair_that_is_switched_off_is_named(checked, name, codes):
    # The last --select counts.
    job = checked(name, "--select", "P2P001")
    assert job.process.returncode == 0, job.told()
    found = [f for f in job.report["findings"] if f["code"].startswith("P2P") and f["severity"] != "note"]
    assert [f["code"] for f in found] == codes, job.told()
    assert [f["links"] for f in found] == [[f"{f['hosts'][0]}: GPU 1 <-> GPU 2"] for f in found]
    topology = job.report["matrices"][0]
    assert topology["cells"][0] == ["X", "PIX", "SYS", "SYS"]
    assert ["GPU", "3", "SYS", "SYS", "PIX", "X"] in [line.split() for line in job.told().splitlines()]
    job.check_left_nothing()


# The second look ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("later-ecc", {"GPU010.uncorrected": "error"}),
        pytest.param("later-gone", {"GPU010.gone": "error"}, marks=deep),
        pytest.param("later-links", {"GPU010.nvlink-errors": "warning", "GPU010.pcie-replays": "warning"}, marks=deep),
    ],
)
def test_a_gpu_that_falls_sick_during_the_run_is_named_and_the_other_seven_are_not(checked, name, codes):
    job = checked(name, arguments=STAGE)
    found = [f for f in job.report["findings"] if f["code"] > "GPU003" and f["code"].startswith("GPU")]
    assert {f["code"]: f["severity"] for f in found} == codes, job.told()
    for finding in found:
        assert finding["gpus"] == [fake_nvml.uuid_of(5)]
        assert fake_nvml.pci_of(5) in finding["message"]
        assert all(fake_nvml.uuid_of(other) not in str(finding) for other in {*range(8)} - {5})
    job.check_left_nothing()


@pytest.mark.deep
def test_the_whole_stage_on_healthy_gpus_has_nothing_to_say_of_them(checked):
    job = checked("healthy", arguments=STAGE)
    # torch has no CUDA here.
    assert {f["code"] for f in job.report["findings"]} <= {"GPU002.cpu-build"}, job.told()
    last = [line["code"] for line in job.report["checks"] if line["statuses"].get("done")][-2:]
    assert last == ["GPU010", "GPU011"]


# Without persistence mode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "limit"), [(0.2, 1), pytest.param(4, 10, marks=deep)], ids=["1.6 s in all", "32 s in all"]
)
def test_gpus_are_started_once_for_the_whole_run_and_slow_ones_are_a_warning(checked, tmp_path, seconds, limit):
    (driver := tmp_path / "driver").mkdir()
    slow = {"FAKE_NVML_DRIVER": str(driver), "FAKE_NVML_GPU_SECONDS": str(seconds)}
    job = checked("healthy", "--set", f"RUN003.slow_start_seconds={limit}", arguments=SLOW, **slow)
    assert job.process.returncode == 0, job.told()
    assert {path.name: path.read_text() for path in driver.glob("gpu-*")} == {f"gpu-{n}": "." for n in range(8)}
    (finding,) = [f for f in job.report["findings"] if f["code"].startswith("RUN")]
    assert (finding["code"], finding["severity"]) == ("RUN003.slow-start", "warning")
    assert 8 * seconds <= finding["evidence"]["seconds"] < 8 * seconds + 10
    assert "nvidia-smi -pm 1" in finding["fix"]
    job.check_left_nothing()


# The kernel's log -----------------------------------------------------------------------------------------------------

FALLEN = f"NVRM: Xid (PCI:{fake_nvml.pci_of(5)[:-2]}): 79, pid=1234, name=python, GPU has fallen off the bus."


@pytest.mark.deep
def test_an_xid_before_the_run_names_its_gpu(checked, tmp_path):
    (tmp_path / "before").mkdir()
    job = checked("healthy", arguments=STAGE, DDPDIAG_KMSG=str(_kmsg(tmp_path / "before", FALLEN)))
    (finding,) = [f for f in job.report["findings"] if f["code"].startswith("GPU011")]
    assert (finding["code"], finding["severity"], finding["gpus"]) == ("GPU011.xid", "error", [fake_nvml.uuid_of(5)])
    assert (finding["evidence"]["xid"], finding["evidence"]["count_during_run"]) == (79, 0)


@deep
@pytest.mark.parametrize(
    ("arguments", "codes", "verdict"),
    [
        ((*ONE, "--select", "GPU003,GPU004"), [], "fit"),
        ((*ONE, "--select", "GPU011"), ["GPU011.unreadable"], "unknown"),
        ((*STAGE, "--ignore", "GPU002,GPU012"), ["GPU011.unread"], "fit"),
    ],
    ids=["others", "the log", "the stage"],
)
def test_a_closed_log_is_unknown_to_whom_asked_for_it_only(checked, tmp_path, arguments, codes, verdict):
    job = checked("healthy", arguments=arguments, DDPDIAG_KMSG=str(tmp_path / "missing"))
    assert [f["code"] for f in job.report["findings"]] == codes, job.told()
    assert (job.report["verdict"], job.process.returncode) == (verdict, 3 if verdict == "unknown" else 0)


# Who is who -----------------------------------------------------------------------------------------------------------

UUIDS = [fake_nvml.uuid_of(index) for index in range(8)]
AS_NVML = {"DDPDIAG_TEST_TORCH_GPUS": ",".join(UUIDS)}
# As CUDA counts where the fastest GPU is not the first on the bus.
OTHERWISE = {"DDPDIAG_TEST_TORCH_GPUS": ",".join(UUIDS[index] for index in (3, 5, 0, 1, 2, 4, 6, 7))}
WHO = ("--select", "GPU001,GPU002,GPU003", "--json", "{json}")
SICK = {"GPU003.uncorrected": ([UUIDS[5]], [1])}


@pytest.mark.parametrize(
    ("value", "torch", "sick"),
    [
        ("7,5", AS_NVML, SICK),
        pytest.param(f"{UUIDS[7]},{UUIDS[5]}", AS_NVML, SICK, marks=deep),
        pytest.param("GPU-00000007,GPU-00000005", AS_NVML, SICK, marks=deep),
        pytest.param("7,6", AS_NVML, {}, marks=deep),
        pytest.param("0,1", OTHERWISE, SICK, marks=deep),
        pytest.param("7,5", {}, SICK, marks=deep),
    ],
    ids=["permuted", "UUIDs", "short UUIDs", "somebody else's", "torch counts otherwise", "without torch's view"],
)
def test_the_variable_leads_to_the_rank_that_takes_the_sick_gpu(checked, value, torch, sick):
    # Without CUDA, torch is not asked.
    select = WHO if torch else ("--select", "GPU001,GPU003", *WHO[2:])
    arguments = ("--nproc-per-node", "2", *select)
    job = checked("ecc-uncorrected", arguments=arguments, CUDA_VISIBLE_DEVICES=value, **torch)
    assert who(job) == sick, job.told()
    assert job.report["verdict"] == ("unfit" if sick else "fit")


@deep
def test_of_ranks_that_are_shown_one_gpu_each_the_sick_one_is_its_ranks(checked):
    # What Slurm's --gpus-per-task sets, by hand.
    own = "CUDA_VISIBLE_DEVICES=$((LOCAL_RANK + 4)) exec "
    command = f'{own} {sys.executable} -m ddpdiag check "$@"'
    launcher = (*torchrun(2), "--no-python", "bash", "-c", command, "ddpdiag")
    job = checked("ecc-uncorrected", launcher=launcher, arguments=WHO, **AS_NVML)
    assert who(job) == SICK, job.told()


@deep
def test_two_ranks_on_one_gpu_are_named_before_nccl_is_touched(checked):
    job = checked("healthy", arguments=("--nproc-per-node", "2", *WHO), CUDA_VISIBLE_DEVICES="5", **AS_NVML)
    assert who(job)["GPU002.shared"] == ([UUIDS[5]], [0, 1]), job.told()


def who(job: Job) -> dict[str, tuple[list[str], list[int]]]:
    return {f["code"]: (f["gpus"], f["ranks"]) for f in job.report["findings"] if f["code"].startswith("GPU")}
