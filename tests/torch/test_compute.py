"""GPU012's workload on the CPU."""

import time
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from ddpdiag.checks.gpu.compute import CHECK
from ddpdiag.model import Place, RunOptions
from ddpdiag.model.measurements import Compute
from ddpdiag.workloads import compute

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of 256 rows and short batches."""
    monkeypatch.setattr(compute, "MAX_ROWS_ON_CPU", 256)
    monkeypatch.setattr(compute, "COPY_BYTES_ON_CPU", 1 << 20)
    monkeypatch.setattr(compute, "DURATIONS", dict.fromkeys(compute.DURATIONS, compute.Durations(0.001, 0.001, 0.001)))


def test_the_cpu_multiplies_and_copies(small: None) -> None:
    steps: list[str] = []
    found = compute.measure_rates(SimpleNamespace(step=steps.append, options=RunOptions()), CPU)
    assert (found.device, found.index, found.why_unmeasured, found.dtype) == ("CPU", None, "", "bfloat16")
    assert all(len(rates) == 5 and min(rates) > 0 for rates in (found.flop_per_s, found.copy_bytes_per_s))
    # Loading kernels is slow on healthy machines: a step of first use has time of its own.
    assert [step for step in steps if step.startswith("context")] == ["context", "context: first product in bfloat16"]


def test_a_host_that_is_asked_alone_measures_its_gpus_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(compute, "measure_rates", lambda ctx, device: Compute(device="GPU", index=device.index))
    place = Place(rank=0, world_size=1, host="n0", launcher="alone", local_rank=0, local_world_size=1, node_rank=0)
    for alone, seconds, indices in ((True, 60.0, [0, 1, 2]), (True, 0.5, [0]), (False, 60.0, [0])):
        end = time.monotonic() + seconds
        ctx = SimpleNamespace(place=place, options=RunOptions(alone=alone), end=end)
        found = CHECK.measure(ctx).devices
        assert [device.index for device in found if not device.why_unmeasured] == indices
        assert [device.index for device in found if device.why_unmeasured] == [*range(3 if alone else 1)][
            len(indices) :
        ]


def test_without_cublas_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "cuBLAS does not start (CUDA error: CUBLAS_STATUS_NOT_INITIALIZED)"
    monkeypatch.setattr(compute, "start_cublas", lambda device: reason)
    found = compute.measure_rates(SimpleNamespace(step=lambda label: None, options=RunOptions()), CPU)
    assert found == structs.replace(found, why_unmeasured=reason, flop_per_s=(), copy_bytes_per_s=())
