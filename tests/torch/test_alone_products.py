"""What one process computes alone, on the CPU."""

import torch

from ddpdiag.workloads.devices import MATRIX_ROWS, check_product, factors

CPU = torch.device("cpu")


def test_the_product_of_small_integers_is_exact_in_float32():
    left, right = factors()
    exact = left.to(torch.int64) @ right.to(torch.int64)
    product = check_product(CPU, left, right, exact)
    assert (product.device, product.wrong, product.error) == ("the CPU", 0, None)
    # Every partial sum fits float32's 24 bits, whatever the order.
    assert left.abs().max() * right.abs().max() * MATRIX_ROWS < 2**24


def test_one_spoilt_factor_is_seen_in_a_row_of_the_product():
    left, right = factors()
    exact = left.to(torch.int64) @ right.to(torch.int64)
    left[5, 7] += 1
    assert 0 < check_product(CPU, left, right, exact).wrong <= MATRIX_ROWS


def test_what_torch_raises_is_an_answer():
    left, right = factors()
    assert check_product(CPU, left, right[:3], torch.zeros(1)).error
