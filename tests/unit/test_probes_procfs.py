"""Files of a fake procfs."""

import os
from pathlib import Path

import pytest

from ddpdiag.probes.gpu.visibility import ProcGpu, openable_gpus, withheld_gpu_count
from ddpdiag.probes.host.environment import driver_version
from ddpdiag.probes.host.kernel import age_seconds, boot_id, memory, proc_root, process_state

INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 283
GPU UUID: \t {uuid}
Bus Location: \t 0000:1b:00.0
Device Minor: \t {minor}
"""


def add_gpu(root: Path, address: str, uuid: str = "GPU-11111111-2222", minor: int = 0) -> None:
    entry = root / "driver" / "nvidia" / "gpus" / address
    entry.mkdir(parents=True)
    (entry / "information").write_text(INFORMATION.format(uuid=uuid, minor=minor))


def test_gpus_of_the_driver_are_listed_in_bus_order(tmp_path):
    add_gpu(tmp_path, "0000:3a:00.0", "GPU-b")
    add_gpu(tmp_path, "0000:1b:00.0", "GPU-a")
    add_gpu(tmp_path, "0000:4a:00.0", "GPU-????????-????")  # as long as the driver does not know it
    assert openable_gpus(tmp_path) == (
        ProcGpu("0000:1b:00.0", "GPU-a"),
        ProcGpu("0000:3a:00.0", "GPU-b"),
        ProcGpu("0000:4a:00.0", None),
    )


def test_gpus_whose_device_files_are_missing_or_cannot_be_opened_are_not_counted(tmp_path, monkeypatch):
    def counted() -> tuple[list[str], int]:
        gpus = openable_gpus(tmp_path, tmp_path / "dev")
        return [gpu.uuid for gpu in gpus], withheld_gpu_count(tmp_path, tmp_path / "dev")

    every = [f"GPU-{minor}" for minor in range(8)]
    for minor, uuid in enumerate(every):
        add_gpu(tmp_path, f"0000:{minor}b:00.0", uuid, minor)
    (tmp_path / "dev").mkdir()
    assert counted()[0] == every  # nothing was opened since the boot
    (tmp_path / "dev" / "nvidia6").touch()
    assert counted() == (["GPU-6"], 7)
    for minor in range(8):
        (tmp_path / "dev" / f"nvidia{minor}").touch()
    assert counted() == (every, 0)
    # A device cgroup refuses root as well; the kernel asks it in access(2).
    opened = {str(tmp_path / "dev" / "nvidia6")}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) in opened and mode == os.R_OK | os.W_OK)
    assert counted() == (["GPU-6"], 7)
    opened.clear()
    assert counted() == ([], 8)


def test_a_driver_that_tells_no_device_file_is_believed(tmp_path):
    (tmp_path / "driver" / "nvidia" / "gpus" / "0000:1b:00.0").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    assert len(openable_gpus(tmp_path, tmp_path / "dev")) == 1
    assert withheld_gpu_count(tmp_path, tmp_path / "dev") == 0


def test_without_a_driver_nothing_is_said_about_gpus(tmp_path):
    assert openable_gpus(tmp_path) is driver_version(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC\n", "535.104.05"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
    ],
)
def test_the_driver_version_is_read_from_both_kinds_of_module(tmp_path, line, version):
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(f"NVRM version: {line}")
    assert driver_version(tmp_path) == version


@pytest.mark.parametrize(
    ("stat", "wchan", "state"),
    [
        ("42 (a) b (c)) D 1 42 42 0 -1\n", "nvidia_ioctl", ("D", "nvidia_ioctl")),
        ("42 (python) R 1 42\n", "0", ("R", None)),
    ],
    ids=["a name with blanks and parentheses", "a process that runs"],
)
def test_a_process_has_a_state_and_a_function_in_which_it_waits(tmp_path, stat, wchan, state):
    assert process_state(42, tmp_path) == (None, None)
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "stat").write_text(stat)
    (tmp_path / "42" / "wchan").write_text(wchan)
    assert process_state(42, tmp_path) == state


def test_this_process_is_seen_in_the_real_proc():
    assert process_state(os.getpid())[0] in ("R", "S")
    assert 0 <= age_seconds(os.getpid()) <= age_seconds(1)
    assert age_seconds(os.getpid(), Path("/nowhere")) is None


def test_memory_is_in_bytes_and_none_when_meminfo_is_odd(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n")
    assert memory(tmp_path).available_bytes == 512 * 1024
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\n")
    assert memory(tmp_path) is None
    assert memory(tmp_path / "nowhere") is None


def test_the_boot_id_is_a_text_even_where_there_is_none(tmp_path):
    assert boot_id(tmp_path) == ""
    path = tmp_path / "sys" / "kernel" / "random"
    path.mkdir(parents=True)
    (path / "boot_id").write_text("7678536a\n")
    assert boot_id(tmp_path) == "7678536a"


def test_the_root_can_be_replaced():
    assert proc_root({}) == Path("/proc")
    assert proc_root({"DDPDIAG_PROCFS": "/host/proc"}) == Path("/host/proc")
