"""What keeps a fork of the fork server from using CUDA."""

from pathlib import Path

import pytest

from ddpdiag.runtime.supervisor.fork_server import fork_hazard


@pytest.fixture
def process(tmp_path):
    """A made-up /proc/self."""

    def make(*descriptors: str, threads: tuple[str, ...] = ("python",)) -> Path:
        (tmp_path / "fd").mkdir()
        for number, target in enumerate(descriptors):
            (tmp_path / "fd" / str(number)).symlink_to(target)
        for number, name in enumerate(threads):
            (tmp_path / "task" / str(number)).mkdir(parents=True)
            (tmp_path / "task" / str(number) / "comm").write_text(f"{name}\n")
        return tmp_path

    return make


def test_files_and_threads_of_other_libraries_are_no_hazard(process):
    pytest.importorskip("torch.cuda")
    assert fork_hazard(process("/dev/null", "socket:[1]", "/tmp/nvidia", threads=("python", "openblas-1"))) is None


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg"])
def test_an_open_gpu_is_one(process, device):
    assert device in (fork_hazard(process("/dev/null", device)) or "")


def test_a_thread_of_cuda_is_one(process):
    assert "cuda-EvtHandlr" in (fork_hazard(process(threads=("python", "cuda-EvtHandlr"))) or "")


def test_this_process_has_none():
    pytest.importorskip("torch.cuda")
    assert fork_hazard() is None
