"""The options of `ddpdiag train`, read."""

from dataclasses import replace

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.model.train import Strategy, Train
from ddpdiag.strategies.command import train_of
from ddpdiag.strategies.options import TrainOptions

USUAL = TrainOptions()


def read(**flags) -> Train:
    return train_of(replace(USUAL, **flags))


def test_the_usual_is_the_default():
    assert read() == Train()


def test_strategies_are_taken_once_in_their_order_and_however_they_are_spelt():
    asked = read(strategy=("DDP, tensor_parallel", "ddp")).strategies
    assert asked == (Strategy.DDP, Strategy.TENSOR_PARALLEL)


def test_all_are_all():
    assert read(strategy=("all",)).strategies == tuple(Strategy)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"strategy": ("ddq",)}, "--strategy ddq: expected single, dp, ddp,"),
        ({"strategy": ("ddp,",)}, "--strategy : expected"),
        ({"steps": 1}, "--steps 1: expected 2 to 2,000"),
        ({"batch_size": 0}, "--batch-size 0: expected 1 to"),
        ({"group_size": 5}, "--group-size 5: expected 2 to 4"),
        ({"dtype": "half"}, "--dtype half: expected float64, float32, bfloat16"),
    ],
)
def test_what_makes_no_sense_is_told(flags, words):
    with pytest.raises(UsageError) as told:
        read(**flags)
    assert words in str(told.value)
