"""The options of `ddpdiag train`, read."""

import shlex

import pytest
from msgspec import json
from typer.testing import CliRunner

from ddpdiag.cli.app import app
from ddpdiag.errors import UsageError
from ddpdiag.model.train import Strategy, Train
from ddpdiag.strategies import command


@pytest.fixture
def read(monkeypatch):
    """The options of `ddpdiag train`, as for a run."""
    asked: list[Train] = []
    monkeypatch.setattr(command.check, "run", lambda _launch, _options, _outputs, *, train: asked.append(train) or 0)
    monkeypatch.setattr("ddpdiag.cli.app.leave", lambda _code: None)
    monkeypatch.setattr("ddpdiag.cli.app.guarded", lambda body: body())

    def parse(words: str = "") -> Train:
        done = CliRunner().invoke(app, ["train", *shlex.split(words)])
        if done.exception is not None:
            raise done.exception
        return asked[-1]

    return parse


def test_the_usual_is_the_default(read):
    assert read() == Train() == json.decode(json.encode(Train()), type=Train)


@pytest.mark.parametrize(
    ("words", "strategies"),
    [
        ("--strategy DDP,tensor_parallel --strategy ddp", (Strategy.DDP, Strategy.TENSOR_PARALLEL)),
        ("--strategy all", tuple(Strategy)),
    ],
)
def test_strategies_are_taken_once_in_their_order(read, words, strategies):
    assert read(words).strategy == strategies


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategy ddq", "--strategy ddq: expected single, dp, ddp,"),
        ("--strategy ddp,", "--strategy ddp,: expected"),
    ],
)
def test_an_unknown_name_is_refused(read, words, message):
    with pytest.raises(UsageError) as raised:
        read(words)
    assert message in str(raised.value)


@pytest.mark.parametrize("words", ["--steps 1", "--batch-size 0", "--group-size 5"])
def test_numbers_out_of_range_end_with_2(words):
    assert CliRunner().invoke(app, ["train", *words.split()]).exit_code == 2
