"""Which GPUs a process may use, from variables and a fake procfs."""

import pytest

from ddpdiag.probes.gpu.visibility import has_wsl_gpu, named_gpu_count, promised_gpu_count, visible_gpu_count


@pytest.fixture
def four(tmp_path):
    """A procfs whose driver lists four GPUs."""
    for index, letter in enumerate("abcd"):
        entry = tmp_path / "driver" / "nvidia" / "gpus" / f"0000:{index}b:00.0"
        entry.mkdir(parents=True)
        (entry / "information").write_text(f"GPU UUID: \t GPU-{letter}{letter}-1234\n")
    return tmp_path


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("", 0),
        ("0", 1),
        ("0,1,3", 3),
        (" 0, 1", 2),
        ("0,2,-1,1", 2),
        ("0,4,1", 1),  # 4 is no GPU here, and ends the list
        ("1gpu,2", 2),
        ("0,0", 0),
        ("NoDevFiles", 0),
        ("GPU-aa,GPU-bb-1234", 2),
        ("GPU-zz,GPU-aa", 0),
        ("GPU-", 0),  # fits more than one
        ("GPU-aa,GPU-aa-1234", 0),
        ("GPU-aa,1", 1),
        ("MIG-11,MIG-22", 1),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(four, value, count):
    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": value}, four) == count


@pytest.mark.parametrize(("value", "with_driver", "without"), [(None, 4, 0), ("0,1", 2, 2), ("GPU-x,GPU-y", 0, 2)])
def test_names_are_believed_where_no_driver_shows_itself(four, value, with_driver, without):
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert (visible_gpu_count(env, four), visible_gpu_count(env, four / "nowhere")) == (with_driver, without)


@pytest.mark.parametrize(("cut", "count"), [(range(4), 1), (range(3), 4), ((), 4)])
def test_of_gpus_that_are_all_cut_into_slices_cuda_shows_one_slice(four, cut, count):
    for index, letter in enumerate("abcd"):
        entry = four / "driver" / "nvidia" / "gpus" / f"0000:{index}b:00.0"
        (entry / "information").write_text(f"GPU UUID: \t GPU-{letter}{letter}-1234\nDevice Minor: \t {index}\n")
        capabilities = four / "driver" / "nvidia" / "capabilities" / f"gpu{index}" / "mig"
        capabilities.mkdir(parents=True)
        (capabilities / "access").touch()
        if index in cut:
            (capabilities / "gi1").mkdir()
    assert visible_gpu_count({}, four, four / "dev") == count


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (("dev/dxg", "wsl/lib/libcuda.so.1"), True),
        (("dev/dxg", "wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1"), True),
        (("dev/dxg", "wsl/lib/libd3d12.so"), False),
        (("dev/dxg", "wsl/drivers/iigd_dch.inf_amd64_1/x.so"), False),
        (("wsl/lib/libcuda.so.1",), False),
        ((), False),
    ],
)
def test_wsl2_has_a_gpu_where_windows_driver_is_nvidias(tmp_path, files, found):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    places = (tmp_path / "proc", tmp_path / "dev", tmp_path / "wsl")
    assert has_wsl_gpu(*places[1:]) is found
    assert visible_gpu_count({}, *places) == int(found)
    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": ""}, *places) == 0
    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": "0,1"}, *places) == 2


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, 0),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("8", 1),
        ("0,1,9", 3),
        ("0,-1,1", 1),
        ("GPU-zz,GPU-yy", 2),
        ("MIG-11,MIG-22", 1),
    ],
)
def test_what_is_named_counts_whether_it_is_there_or_not(value, count):
    assert named_gpu_count(value) == count


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "gpu:4"}, 4),
        ({"SLURM_JOB_GPUS": "0,2-3"}, 3),
        ({"SLURM_STEP_GPUS": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0-3"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-x,GPU-y"}, 2),
    ],
)
def test_a_promise_is_a_number_that_somebody_named(env, count):
    assert promised_gpu_count(env) == count
