"""The flight recorder of the torch that is installed, read while it records."""

import time

import pytest
import torch
import torch.distributed as dist

from ddpdiag.evidence.recorder import MAX_COLLECTIVES, posted_collectives
from ddpdiag.model import Collective


@pytest.fixture
def group():
    """A group of one rank over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_a_group_posts_is_read_back_with_its_sizes(group):
    before = time.time()
    assert posted_collectives(before) == ()
    for size in range(1, MAX_COLLECTIVES + 3):
        dist.all_reduce(torch.ones(size, 2))
    dist.barrier()
    *_, reduced, barrier = posted_collectives(before)
    upto = MAX_COLLECTIVES + 2
    assert reduced == Collective(seq=upto, name="gloo:all_reduce", elements=2 * upto, dtype="Float", group="0")
    assert (barrier.seq, barrier.name) == (MAX_COLLECTIVES + 3, "gloo:barrier")
    assert len(posted_collectives(before)) == MAX_COLLECTIVES
    assert posted_collectives(time.time()) == (), "the next trial does not see it"
