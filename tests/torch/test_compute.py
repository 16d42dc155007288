"""GPU012's workload on the CPU: the same factors everywhere, and products that are held against fp64."""

import time
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from ddpdiag.checks.gpu.compute import CHECK
from ddpdiag.model import Options, Place
from ddpdiag.model.measurements import Compute
from ddpdiag.workloads import compute
from ddpdiag.workloads.compute import deviation, factor

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of 256 rows and short batches."""
    monkeypatch.setattr(compute, "MOST_ON_CPU", 256)
    monkeypatch.setattr(compute, "COPY_BYTES_ON_CPU", 1 << 20)
    monkeypatch.setattr(compute, "PACES", dict.fromkeys(compute.PACES, compute.Pace(0.001, 0.001, 0.001, 0.001)))


def test_the_cpu_computes_right_and_copies(small: None) -> None:
    steps: list[str] = []
    found = compute.compute(SimpleNamespace(step=steps.append, options=Options()), CPU)
    assert (found.device, found.index, found.unmeasured, found.wrong_words) == ("CPU", None, "", 0)
    assert [(gemm.dtype, gemm.size, gemm.wrong) for gemm in found.gemms] == [("bfloat16", 256, 0), ("float32", 256, 0)]
    assert all(gemm.error is not None and gemm.error <= 1 for gemm in found.gemms)
    assert all(len(gemm.flop_per_s) == 5 and min(gemm.flop_per_s) > 0 for gemm in found.gemms)
    assert len(found.copy_bytes_per_s) == 5
    # Loading kernels is slow on healthy machines: a step of first use has time of its own.
    assert [step for step in steps if step.startswith("context")] == [
        "context",
        "context: first product in bfloat16",
        "context: first product in float32",
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_are_multiples_of_one_128th_in_any_precision(dtype: torch.dtype) -> None:
    one, other = (factor(128, number, dtype, CPU) for number in range(2))
    assert torch.equal((one * 128).round(), one * 128)
    assert float(one.float().abs().max()) <= 1
    assert torch.equal(one.float(), factor(128, 0, torch.float32, CPU))
    assert not torch.equal(one, other)
    # No structure that would let products cancel: the mean is near 0, and so is that of each row.
    assert float(factor(256, 0, torch.float32, CPU).mean(dim=1).abs().max()) < 0.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_no_error_and_a_wrong_element_is(dtype: torch.dtype) -> None:
    left, right = (factor(256, number, dtype, CPU) for number in range(2))
    product = left @ right
    wrong, error = deviation(left, right, product)
    assert wrong == 0
    assert error is not None
    assert error <= 1
    product[16, 200] += 1
    assert deviation(left, right, product)[0] == 1


def test_what_is_no_number_is_wrong() -> None:
    left, right = (factor(128, number, torch.float32, CPU) for number in range(2))
    product = left @ right
    product[0, 0], product[8, 1] = float("nan"), float("inf")
    assert deviation(left, right, product) == (2, None)


def test_a_host_that_is_asked_alone_measures_its_gpus_as_long_as_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(compute, "compute", lambda ctx, device: Compute(device="GPU", torch="2", index=device.index))
    place = Place(rank=0, world_size=1, host="n0", launcher="alone", local_rank=0, local_world_size=1, node_rank=0)
    for alone, seconds, indices in ((True, 60.0, [0, 1, 2]), (True, 0.5, [0]), (False, 60.0, [0])):
        end = time.monotonic() + seconds
        ctx = SimpleNamespace(place=place, options=Options(alone=alone), end=end)
        found = CHECK.measure(ctx).devices
        assert [device.index for device in found if not device.unmeasured] == indices
        assert [device.index for device in found if device.unmeasured] == [*range(3 if alone else 1)][len(indices) :]


def test_without_cublas_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "cuBLAS does not start (CUDA error: CUBLAS_STATUS_NOT_INITIALIZED)"
    monkeypatch.setattr(compute, "unusable", lambda device: reason)
    found = compute.compute(SimpleNamespace(step=lambda label: None, options=Options()), CPU)
    assert found == structs.replace(found, unmeasured=reason, gemms=(), copy_bytes_per_s=())
