"""The steps of a soak in one process: repeatable to the last bit, and digests that see each bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.workloads import mnist
from ddpdiag.workloads.soak import compute_step, deterministic, digest, draw_matrix

DTYPES = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def test_a_step_repeats_to_the_last_bit_and_steps_differ():
    digits, matrix = mnist.load(), draw_matrix(256, torch.device("cpu"))
    with deterministic():
        first, second, other = (compute_step(digits, matrix, step) for step in (7, 7, 9))
    assert first == second
    assert first.keys() == other.keys()
    assert not set(first.values()) & set(other.values())
    assert not torch.are_deterministic_algorithms_enabled()


@given(st.sampled_from(list(DTYPES)), st.integers(0, 99), st.integers(0, 15), st.integers(0, 3))
def test_one_flipped_bit_changes_the_digest(dtype, index, bit, seed):
    values = torch.rand((10, 10), generator=torch.Generator().manual_seed(seed)).to(dtype)
    flipped = values.clone()
    flipped.view(DTYPES[dtype]).view(-1)[index] ^= 1 << bit if bit < 15 else -1
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(flipped)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_a_digest_is_of_bits_and_not_of_values(value):
    values = torch.full((4,), value)
    assert digest(values) == digest(values.clone()) != digest(torch.zeros(4))
