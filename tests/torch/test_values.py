"""What ranks put into a collective, and what must come out: exact in every dtype, whatever the order of adding."""

from functools import cache
from itertools import product

import pytest
import torch

from ddpdiag.bench.workloads.operations import ACTIVE, DTYPES, OPS, Values, differing, put, spread

REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "prod": lambda parts: parts.prod(0),
    "min": lambda parts: parts.min(0).values,
    "max": lambda parts: parts.max(0).values,
}


@cache
def parts_of(op, ranks):
    """What each rank gives, int64 [ranks, period]."""
    return torch.stack([Values(op, ranks).of(rank) for rank in range(ranks)])


@pytest.mark.parametrize("op", OPS)
def test_the_reduction_is_that_of_all_parts(op):
    for ranks in (1, 2, 3, 15, 16, 17, 40):
        assert torch.equal(Values(op, ranks).reduced(), REDUCE[op](parts_of(op, ranks).double())), ranks


@pytest.mark.parametrize("name", DTYPES)
def test_every_partial_result_is_exact_in_every_dtype(name):
    for ranks, op in product((2, 7, 100), ("sum", "prod", "min", "max")):
        values, given = Values(op, ranks), parts_of(op, ranks).to(DTYPES[name])
        first, *others = torch.randperm(ranks).tolist()
        running = given[first]
        for rank in others:
            running = REDUCE[op](torch.stack([running, given[rank]])).to(DTYPES[name])
        assert differing(running, values.reduced(), values.tolerance(running.dtype), 0) == 0, (op, ranks)


@pytest.mark.parametrize("ranks", [2, 16, 33])
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_is_left_out_shows(op, ranks):
    values = Values(op, ranks)
    whole, tolerance = values.reduced(), values.tolerance(torch.float32)
    for missing in range(ranks):
        parts = parts_of(op, ranks)[[rank for rank in range(ranks) if rank != missing]].double()
        got = parts.sum(0) / ranks if op == "avg" else REDUCE[op](parts)
        assert differing(got, whole, tolerance, 0) > 0


@pytest.mark.parametrize("ranks", [2, 8, 16, 17, 48, 64])
def test_no_rank_looks_like_another_one(ranks):
    for op in ("sum", "avg", "prod"):
        assert len(parts_of(op, ranks).unique(dim=0)) == ranks


def test_large_buffers_are_filled_and_compared_in_parts():
    values = Values("sum", 3)
    buffer = torch.zeros((1 << 22) + 1000, dtype=torch.int8)
    put(values.of(1), buffer)
    none = torch.zeros(values.period, dtype=torch.float64)
    assert differing(buffer, values.of(1), none, 0) == 0
    buffer[-1] += 1
    buffer[0] += 1
    assert differing(buffer, values.of(1), none, 0) == 2


def test_no_more_ranks_than_that_give_something_to_an_element():
    values = Values("sum", 100)
    parts = torch.stack([values.of(rank) for rank in range(100)])
    assert int((parts > 0).sum(0).max()) == ACTIVE


def test_an_average_may_be_rounded_and_not_be_wrong():
    values = Values("avg", 3)
    got = values.reduced().to(torch.float16)
    assert differing(got, values.reduced(), values.tolerance(got.dtype), 0) == 0
    got[5] += 0.25
    assert differing(got, values.reduced(), values.tolerance(got.dtype), 0) == 1


def test_parts_from_the_middle_and_what_is_no_number():
    table = torch.arange(7).double()
    like = torch.zeros(1, dtype=torch.float32)
    got = spread(table, 12, 10, like)
    assert got.tolist() == [5, 6, 0, 1, 2, 3, 4, 5, 6, 0]
    none = torch.zeros(7, dtype=torch.float64)
    assert differing(got, table, none, 12) == 0
    got[3] = float("nan")
    assert differing(got, table, none, 12) == 1
    assert differing(got, table, none + 1e-3, 12) == 1
