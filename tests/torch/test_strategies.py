"""What strategies share, and those that one process can try; several processes are tried by the command itself."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from msgspec import Struct, structs

from ddpdiag.model import Place, RunOptions, Trial
from ddpdiag.model.train import TrainRequest
from ddpdiag.model.trial import BarrierResult, Kind
from ddpdiag.strategies import check as strategies
from ddpdiag.strategies.workloads import ddp, fsdp, model_parallel, pipeline, single, tensor_parallel
from ddpdiag.strategies.workloads.trainer import Task
from ddpdiag.workloads import mnist
from ddpdiag.workloads.training import checksum

CPU = torch.device("cpu")
TASK = Task(steps=6, batch_size=16)
DIGITS = mnist.load()


class Alone:
    """The context of one rank, whose gate is always open."""

    place = Place(rank=0, world_size=1, host="n0", launcher="hand", local_rank=0)
    trial = Trial(code="TRN002", groups=((0,),), kind=Kind.TORCH, deadline_seconds=30.0)
    options = RunOptions()
    group = (0,)
    group_rank = 0
    scratch = ""
    end = time.monotonic() + 60

    def step(self, label: str) -> None: ...

    def barrier(self, offer: str = "") -> BarrierResult:
        return BarrierResult("127.0.0.1", offer)

    def add_timing(self, name: str, seconds: float) -> None: ...

    def report(self, data: Struct, text: str) -> None: ...


@pytest.fixture(scope="module")
def reference():
    return single.train(Alone(), TASK, DIGITS, "gloo")


def test_single_learns_and_steps_after_the_warmup_are_timed(reference):
    assert len(reference.losses) == TASK.steps
    assert reference.losses[-1] < reference.losses[0]
    assert reference.timed_steps == 3
    assert reference.seconds > 0


def test_a_rank_holds_parameters_gradients_and_momentum(reference):
    size = sum(parameter.numel() for parameter in TASK.network().parameters())
    assert reference.state_bytes == 3 * 4 * size
    assert reference.peak_bytes > reference.state_bytes


@pytest.mark.parametrize("strategy", [ddp, fsdp, tensor_parallel, model_parallel])
def test_a_group_of_one_trains_as_one_process(strategy, reference):
    more = (2,) if strategy is model_parallel else ()
    trained = strategy.train(Alone(), TASK, DIGITS, "gloo", *more)
    assert trained.losses == pytest.approx(reference.losses, abs=1e-5)
    assert trained.state_bytes == reference.state_bytes
    assert not dist.is_initialized()


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_share_the_images_of_each_step(parts):
    whole = TASK.batches(DIGITS, 0, 1, CPU)
    shares = [TASK.batches(DIGITS, part, parts, CPU) for part in range(parts)]
    for _ in range(2):
        images, labels = next(whole)
        for part, share in enumerate(shares):
            own_images, own_labels = next(share)
            assert torch.equal(own_images, images[part::parts])
            assert torch.equal(own_labels, labels[part::parts])


def test_a_cut_network_gives_the_same():
    images, _ = next(TASK.batches(DIGITS, 0, 1, CPU))
    for parts in (2, 3, 4):
        cut = model_parallel.SplitNetwork(list(TASK.network()), model_parallel.devices_of("cpu", 0, parts))
        assert torch.equal(cut(images), TASK.network()(images))


@pytest.mark.parametrize(("batch", "pieces"), [(64, 8), (12, 6), (13, 1), (1, 1), (7, 7)])
def test_pieces_are_equal(batch, pieces):
    assert pipeline.piece_count(batch) == pieces


class Asked(Alone):
    """The same, in a trial of fsdp."""

    trial = structs.replace(Alone.trial, params={"strategy": "fsdp", "backend": "gloo", "batch": 8, "hidden": 128})
    options = RunOptions(train=TrainRequest(steps=2))


def test_what_torch_lacks_is_told(monkeypatch):
    # None in sys.modules makes an import fail, as where there is no such module.
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", None)
    monkeypatch.delitem(sys.modules, "ddpdiag.strategies.workloads.fsdp")
    monkeypatch.delattr("ddpdiag.strategies.workloads.fsdp")
    data = strategies.measure(Asked())
    assert "torch.distributed.fsdp.fully_shard" in data.not_possible
    assert data.losses == ()


def test_a_stream_without_events_cannot_shard(monkeypatch):
    # As in torch 2.6 on a CPU.
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    data = strategies.measure(Asked())
    assert "fully_shard raises AttributeError: 'Stream' object has no attribute 'record_event'" in data.not_possible
    assert data.losses == ()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("times", "lacks"), [(1, False), (2, True), (1.5, False)])
def test_gradients_that_are_added_and_not_averaged_are_what_torch_lacks(monkeypatch, times, lacks):
    # Values that are wrong in another way are no gap of torch, and the losses will show them.
    def shard(layer, mesh):
        layer.weight.register_hook(lambda gradient: gradient * times)

    monkeypatch.setattr(fsdp, "fully_shard", shard)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    lack = fsdp.why_impossible(SimpleNamespace(size=lambda: 2, device_type="cpu"))
    assert lack == ("over gloo fully_shard adds the ranks' gradients and does not average them" if lacks else "")


@pytest.mark.parametrize(("sent", "backend", "lacks"), [(8, "gloo", True), (4, "gloo", False), (8, "nccl", False)])
def test_stages_that_connect_by_messages_of_two_sizes_abort_over_gloo(monkeypatch, sent, backend, lacks):
    # As in torch 2.9: an int64 is sent, and a float32 is received.
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    sizes = [SimpleNamespace(tensor=SimpleNamespace(element_size=lambda size=size: size)) for size in (4, sent)]
    lack = pipeline.why_impossible(SimpleNamespace(_get_init_p2p_neighbors_ops=lambda: sizes))
    assert lack == ("PipelineStage sends 8 bytes where 4 are received, at which gloo aborts" if lacks else "")


def test_what_it_has_is_measured():
    data = strategies.measure(Asked())
    assert (data.device, len(data.losses), data.images, data.not_possible) == ("CPU", 2, 8, "")
    assert data.start_checksum == checksum(Task(steps=1, batch_size=1).network())
