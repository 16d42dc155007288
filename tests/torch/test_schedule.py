"""The training schedule reaches its accuracy at any number of ranks: simulated ones, and two real ones over gloo."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpdiag.checks.training.mnist import ACCURACY
from ddpdiag.codec import decode, encode
from ddpdiag.model import Depth
from ddpdiag.model.measurements import Training
from ddpdiag.workloads import mnist, training
from ddpdiag.workloads.training import SCHEDULES, Schedule

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")


class Simulated(msgspec.Struct):
    losses: list[float]
    accuracy: float


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def simulate(schedule: Schedule, ranks: int) -> Simulated:
    """The same training in one process: each rank's share by itself, gradients averaged, and BatchNorm as DDP has it:
    every rank starts a step from rank 0's statistics and normalises its own images alone."""
    digits = mnist.load()
    images, labels = training.prepare(digits.train_images, digits.train_labels, CPU)
    model = training.seeded_network(schedule, CPU)
    optimizer, scheduler = training.create_optimizer(model, schedule)
    shards: list[Iterator[list[int]]] = [training.batches(len(images), schedule, r, ranks) for r in range(ranks)]
    losses = []
    for _ in range(schedule.steps):
        optimizer.zero_grad()
        before, total = buffers_of(model), 0.0
        for rank in reversed(range(ranks)):  # rank 0 last, so that its statistics stay
            set_buffers(model, before)
            batch = next(shards[rank])
            loss = cross_entropy(model(images[batch]), labels[batch]) / ranks
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        losses.append(total)
    correct, _, tests = training.evaluate(model, digits, 0, 1, CPU).tolist()
    return Simulated(losses, correct / tests)


# Two ranks stand for the others; ddpdiag's own checks hold every run against the same bar.
@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        (2, 0),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in product((1, 2, 8, 64), (0, 1)) if case != (2, 0)),
    ],
)
def test_quick_reaches_its_bar(ranks: int, seed: int):
    result = simulate(structs.replace(SCHEDULES[Depth.QUICK], seed=seed), ranks)
    assert result.accuracy >= ACCURACY[Depth.QUICK]
    assert result.losses[-1] < result.losses[0] / 3


@pytest.mark.deep
def test_standard_reaches_its_bar():
    assert simulate(SCHEDULES[Depth.STANDARD], 2).accuracy >= ACCURACY[Depth.STANDARD]


def test_a_broken_gradient_stays_far_below_the_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tensor, "backward", lambda loss: None)
    assert simulate(structs.replace(SCHEDULES[Depth.QUICK], steps=5), 1).accuracy < 0.3


def test_every_rank_has_an_equal_share_and_at_least_one_image():
    schedule = SCHEDULES[Depth.QUICK]
    for ranks in (1, 3, 64, 65, 200):
        share = schedule.rank_batch(ranks)
        assert share >= 1
        assert schedule.global_batch <= share * ranks < schedule.global_batch + ranks
        assert len(next(training.batches(10_000, schedule, ranks - 1, ranks))) == share


def test_the_learning_rate_rises_once_and_falls_to_nearly_nothing():
    schedule = SCHEDULES[Depth.QUICK]
    rates = [schedule.learning_rate_share(step) for step in range(schedule.steps)]
    top = rates.index(max(rates))
    assert max(rates) <= 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 0.05


def test_checksum_sees_parameters_and_not_buffers():
    model = training.seeded_network(SCHEDULES[Depth.QUICK], CPU)
    before = training.checksum(model)
    next(model.buffers()).add_(1)
    assert training.checksum(model) == before
    with torch.no_grad():
        next(model.parameters()).view(-1)[0].nextafter_(torch.tensor(9.0))
    assert training.checksum(model) != before


class Quiet:
    """The context of a real rank: nobody listens to its steps."""

    def step(self, label: str) -> None: ...


def train_as_rank(rank: int, meeting_point: str, steps: int, *, poisoned: bool) -> tuple[tuple[float, ...], Training]:
    """What one of two real processes does; the images of a poisoned one hold a NaN from the second step on."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    schedule = structs.replace(SCHEDULES[Depth.QUICK], steps=steps)
    digits = mnist.load()
    assert training.is_true_on_all_ranks(True, CPU)
    assert not training.is_true_on_all_ranks(rank != 1, CPU)
    if poisoned:
        stream = training.batches(10_000, schedule, rank, 2)
        next(stream)
        images = digits.train_images.float()
        images[next(stream)] = float("nan")
        digits = digits._replace(train_images=images)
    data = training.train(Quiet(), digits, schedule, CPU)  # type: ignore[arg-type]
    dist.destroy_process_group()
    return data


class Trained(msgspec.Struct):
    """What a real process has of a training as it is meant, and of one in which rank 1 is poisoned."""

    clean: tuple[tuple[float, ...], Training]
    poisoned: tuple[tuple[float, ...], Training]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    """Two real ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, __file__, str(folder)]
    processes = [
        subprocess.Popen([*words, rank], env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
        for rank in "01"
    ]
    try:
        return [decode(process.communicate(timeout=180)[0], Trained) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.deep
def test_two_real_ranks_agree_with_each_other_and_with_the_simulation(trained: list[Trained]):
    (losses, one), (other_losses, two) = (own.clean for own in trained)
    assert one.checksum == two.checksum
    assert losses == other_losses
    assert one.accuracy == two.accuracy
    assert one.first_bad_step is two.first_bad_step is None
    assert one.samples == 11 * 32
    assert one.training_seconds > 0
    simulated = simulate(structs.replace(SCHEDULES[Depth.QUICK], steps=12), 2)
    # Sums are taken in another order, and training amplifies last bits from step to step.
    assert list(losses[:4]) == pytest.approx(simulated.losses[:4], rel=1e-3)
    assert one.accuracy == pytest.approx(simulated.accuracy, abs=0.05)


@pytest.mark.deep
def test_nan_is_first_seen_by_the_rank_where_it_began(trained: list[Trained]):
    assert [own.poisoned[1].first_bad_step for own in trained] == [2, 1]


if __name__ == "__main__":
    meet, own = sys.argv[1], int(sys.argv[2])
    clean = train_as_rank(own, f"{meet}/clean", 12, poisoned=False)
    bad = train_as_rank(own, f"{meet}/poisoned", 4, poisoned=own == 1)
    print(encode(Trained(clean, bad)).decode())
