"""What ranks put into a collective, and what must come out: exact in every dtype, whatever the order of adding."""

from functools import cache

import pytest
import torch

from ddpdiag.bench.workloads.operations import (
    CONTRIBUTING_RANKS,
    DTYPES,
    count_differing,
    fill_buffer,
    input_period,
    repeat_period,
    sum_period,
)


@cache
def parts_of(ranks):
    """What each rank gives, int64 [ranks, period]."""
    return torch.stack([input_period(rank, ranks) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 15, 16, 17, 40])
def test_the_total_is_the_sum_of_all_parts(ranks):
    assert torch.equal(sum_period(ranks), parts_of(ranks).sum(0))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("ranks", [2, 7, 100])
def test_every_partial_sum_is_exact_in_every_dtype(name, ranks):
    given = parts_of(ranks).to(DTYPES[name])
    first, *others = torch.randperm(ranks).tolist()
    running = given[first]
    for rank in others:
        running = running + given[rank]
    assert count_differing(running, sum_period(ranks)) == 0


@pytest.mark.parametrize("ranks", [2, 16, 33])
def test_a_rank_that_is_left_out_shows(ranks):
    for missing in range(ranks):
        assert count_differing(sum_period(ranks) - input_period(missing, ranks), sum_period(ranks)) > 0


@pytest.mark.parametrize("ranks", [2, 8, 16, 17, 48, 64])
def test_no_rank_looks_like_another_one(ranks):
    assert len(parts_of(ranks).unique(dim=0)) == ranks


def test_large_buffers_are_filled_and_compared_in_parts():
    buffer = torch.zeros((1 << 22) + 1000, dtype=torch.int8)
    fill_buffer(input_period(1, 3), buffer)
    assert count_differing(buffer, input_period(1, 3)) == 0
    buffer[-1] += 1
    buffer[0] += 1
    assert count_differing(buffer, input_period(1, 3)) == 2


def test_no_more_ranks_than_that_give_something_to_an_element():
    assert int((parts_of(100) > 0).sum(0).max()) == CONTRIBUTING_RANKS


def test_parts_from_the_middle_and_what_is_no_number():
    table = torch.arange(7)
    got = repeat_period(table, 12, torch.zeros(10, dtype=torch.float32))
    assert got.tolist() == [5, 6, 0, 1, 2, 3, 4, 5, 6, 0]
    assert count_differing(got, table, 12) == 0
    got[3] = float("nan")
    assert count_differing(got, table, 12) == 1
