"""The options of the commands that measure: those of nccl-tests, and those of `ddpdiag train`."""

import shlex

import pytest
from msgspec import json
from typer.testing import CliRunner

from ddpdiag.cli import check
from ddpdiag.cli.app import app
from ddpdiag.errors import UsageError
from ddpdiag.model.bench import BenchRequest, parse_size
from ddpdiag.model.train import Strategy, TrainRequest

BENCH, TRAIN = "allreduce-bench", "train"


@pytest.fixture
def read(monkeypatch):
    """The options of a command, checked as for a run."""
    asked: list[BenchRequest | TrainRequest] = []
    monkeypatch.setattr(check, "run", lambda *_, **options: asked.extend(options.values()) or 0)
    monkeypatch.setattr("ddpdiag.cli.app.exit_at_once", lambda _code: None)
    monkeypatch.setattr("ddpdiag.cli.app.guarded", lambda body: body())

    def parse(words: str, **environment: str) -> BenchRequest | TrainRequest:
        done = CliRunner().invoke(app, shlex.split(words), env=environment)
        if done.exception is not None:
            raise done.exception
        return asked[-1]

    return parse


@pytest.mark.parametrize(("command", "kind"), [(BENCH, BenchRequest), (TRAIN, TrainRequest)])
def test_the_defaults_are_those_of_the_options(read, command, kind):
    assert read(command) == kind() == json.decode(json.encode(kind()), type=kind)


@pytest.mark.parametrize(
    ("text", "expected"), [("8", 8), ("32K", 32 << 10), ("128M", 128 << 20), ("1.5g", 3 << 29), ("2T", 2 << 40)]
)
def test_sizes_are_powers_of_1024(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "M", "0", "-8", "8X", "nan", "inf", "1e30"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="expected a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{BENCH} -b 1M -e 8", "-b 1048576 is above -e 8"),
        (f"{BENCH} -e 8X", "-e 8X: expected a number of bytes"),
        (f"{BENCH} -f 1", "-f 1: expected a factor above 1"),
        (f"{BENCH} -f x", "expected a factor above 1"),
        (f"{BENCH} -f 1.0000001", "at most 1000 sizes expected"),
        (f"{BENCH} -d float8", "-d float8: expected int8"),
        (f"{BENCH} --collective allreduce", "--collective allreduce: expected all_reduce"),
        (f"{BENCH} --backend auto,gloo", "auto cannot be combined"),
        (f"{BENCH} --backend gloo,nccl", "--backend nccl: no GPU is visible on this host"),
        (f"{BENCH} --min-busbw 0", "--min-busbw 0: expected GB/s"),
        (f"{TRAIN} --strategy ddq", "--strategy ddq: expected single, dp, ddp,"),
        (f"{TRAIN} --strategy ddp,", "--strategy ddp,: expected"),
    ],
)
def test_bad_input_is_a_sentence(read, monkeypatch, words, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError) as raised:
        read(words)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        *(f"{BENCH} {flag}" for flag in ("-n 0", "-w -1", "-c 2", "-T 1")),
        *(f"{BENCH} {flag}" for flag in ("-z 1", "-N 2", "-g 2", "-i 8", "-o max", "-r 1")),
        *(f"{TRAIN} {flag}" for flag in ("--steps 1", "--batch-size 0", "--group-size 5")),
    ],
)
def test_numbers_out_of_range_and_flags_that_are_not_here_end_with_2(words):
    assert CliRunner().invoke(app, words.split()).exit_code == 2


def test_lists_names_of_torch_and_variables(read):
    words = f"{BENCH} --collective all_reduce,broadcast --min-busbw 2.5 -d bf16,float16 -d float32"
    found = read(words, DDPDIAG_WARMUP_ITERS="3")
    assert (found.collective, found.warmup_iters, found.min_busbw) == (("all_reduce", "broadcast"), 3, 2.5)
    assert found.datatype == ("bfloat16", "half", "float")
    assert (read(f"{BENCH} --backend auto").backend, read(f"{BENCH} --backend gloo").backend) == ((), ("gloo",))
    strategies = read(f"{TRAIN} --strategy DDP,tensor_parallel --strategy ddp").strategy
    assert strategies == (Strategy.DDP, Strategy.TENSOR_PARALLEL)
    assert read(f"{TRAIN} --strategy all").strategy == tuple(Strategy)


def test_sizes_grow_by_a_factor(read):
    assert read(f"{BENCH} -b 8 -e 20 -f 1.5").sizes == (8, 12, 18)
    assert len(BenchRequest().sizes) == 25
