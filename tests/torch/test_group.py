"""How groups are opened and closed."""

import weakref

import pytest
import torch
import torch.distributed as dist

from ddpdiag.workloads import group


def test_the_backend_outlives_its_group_so_that_it_ends_without_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    # In torch 2.6 and 2.7 gloo's threads need the GIL, and the group's destructor waits for them and keeps it.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    backend = weakref.ref(dist.group.WORLD._get_backend(torch.device("cpu")))
    assert backend() is None, "no Python object of the backend is left from its creation"
    real, alive = dist.destroy_process_group, []

    def destroy() -> None:
        kept = weakref.ref(dist.group.WORLD._get_backend(torch.device("cpu")))
        real()
        alive.append(kept() is not None)

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    group.close_group()
    assert alive == [True]
    assert not dist.is_initialized()
