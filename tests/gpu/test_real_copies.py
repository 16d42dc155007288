"""Copies over real PCIe and NVLink, by the loops themselves."""

import math

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpus")]


class Silent:
    """A trial without a deadline."""

    end = math.inf

    def step(self, label): ...

    def report(self, known, text): ...

    def add_timing(self, name, seconds): ...


@pytest.fixture(scope="module")
def found(gpus):
    """What was measured, with all that there is."""
    from ddpdiag.workloads.copies import CudaDevices, measure_copies

    return measure_copies(CudaDevices(), Silent())


def test_every_gpu_has_its_ways_to_and_from_the_host(found, gpus):
    assert len(found.gpus) == gpus
    assert found.done == found.jobs
    for gpu in found.gpus:
        assert gpu.uuid
        assert min(gpu.to_bytes_per_s, gpu.from_bytes_per_s) > 1e9
        assert (gpu.wrong_to, gpu.wrong_from) == (0, 0)


def test_every_pair_is_right_and_has_a_rate(found, gpus):
    if gpus < 2:
        pytest.skip("there is one GPU")
    assert len(found.pairs) == gpus * (gpus - 1)
    for pair in found.pairs:
        assert (pair.wrong, pair.wrong_through_host) == (0, 0)
        assert pair.bytes_per_s > 0.5e9
        assert pair.through_host_bytes_per_s is None or pair.through_host_bytes_per_s > 0.5e9


def test_nothing_is_faster_than_any_link(found):
    # 900 GB/s is one direction of NVLink 5; PCIe 6 x16 carries 121.
    rates = [rate for gpu in found.gpus for rate in (gpu.to_bytes_per_s, gpu.from_bytes_per_s)]
    assert max([*rates, *(pair.bytes_per_s for pair in found.pairs)]) < 1000e9
