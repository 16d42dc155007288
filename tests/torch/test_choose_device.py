"""The device that a rank takes."""

import pytest
import torch

from ddpdiag.workloads.devices import choose_device


class Cuda:
    """torch.cuda where NVML lists eight GPUs that are cut into slices, of which CUDA shows one."""

    def __init__(self) -> None:
        self.started = False
        self.chosen: torch.device | None = None

    def device_count(self) -> int:
        """torch asks NVML before it has started CUDA (torch/cuda/__init__.py, device_count)."""
        return 1 if self.started else 8

    def init(self) -> None:
        """Start CUDA."""
        self.started = True

    def set_device(self, device: torch.device) -> None:
        """Take a device; CUDA's error for one that it does not show."""
        if device.index >= self.device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.chosen = device


@pytest.mark.parametrize("local_rank", [None, 0, 3])
def test_a_rank_takes_what_cuda_shows_and_not_what_nvml_lists(
    monkeypatch: pytest.MonkeyPatch, local_rank: int | None
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: cuda)
    assert choose_device("nccl", local_rank) == torch.device("cuda", 0) == cuda.chosen


def test_without_a_gpu_the_backend_and_torch_are_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r"nccl needs a GPU, and torch \S+ sees none"):
        choose_device("nccl", 0)
