"""P2P004's measurement, with gloo in NCCL's place and a log of NCCL's that lies where NCCL would write it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpdiag.checks.p2p import transport
from ddpdiag.model import Depth, Kind, Place, RunOptions, Trial
from ddpdiag.model.trial import Context
from ddpdiag.workloads import group

LOGS = Path(__file__).parent.parent / "unit" / "nccl_logs"


class Alone:
    """The context of a rank that is called 5, in a group of its own, whose folder has a % in its name."""

    def __init__(self, scratch: Path) -> None:
        self.place = Place(rank=5, world_size=8, host="n0", launcher="hand")
        params = {"backend": "nccl"}
        self.trial = Trial(code="P2P004", groups=((5,),), kind=Kind.TORCH, deadline_seconds=20, number=3, params=params)
        self.options = RunOptions(depth=Depth.QUICK)
        self.group = (5,)
        self.group_rank = 0
        self.scratch = str(scratch)
        self.steps: list[str] = []

    def step(self, label: str) -> None:
        self.steps.append(label)

    def add_timing(self, name: str, seconds: float) -> None:
        """Nobody looks at it."""


@pytest.fixture
def context(tmp_path: Path) -> Alone:
    scratch = tmp_path / "100%h"
    scratch.mkdir()
    return Alone(scratch)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that NCCL writes; what is not there is not written."""
    texts: list[str] = []

    @contextmanager
    def process_group(_ctx: Context, backend: str) -> Iterator[torch.device]:
        assert backend == "nccl"
        group._enable_nccl_log(_ctx)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for text in texts:
            Path(os.environ["NCCL_DEBUG_FILE"].replace("%%", "%")).write_text(text)
        yield torch.device("cpu")
        dist.destroy_process_group()

    monkeypatch.setattr(group, "process_group", process_group)
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
    return texts


def test_the_log_is_read_from_where_nccl_was_told_to_write(context: Alone, nccl: list[str]) -> None:
    nccl.append((LOGS / "sockets-2.18.log").read_text())
    data = transport.measure(context)  # type: ignore[arg-type]
    assert data.log is not None
    assert data.log.sockets == ("ib0", "eth0")
    assert data.log.hops == (), "those of a larger group are not ours"
    assert "all_reduce 4194304 B: wait" in context.steps
    assert "%%h" in os.environ["NCCL_DEBUG_FILE"], "NCCL expands %h"


def test_without_a_log_the_rest_is_told(context: Alone, nccl: list[str]) -> None:
    data = transport.measure(context)  # type: ignore[arg-type]
    assert (data.log, data.gpu_uuid) == (None, None)
