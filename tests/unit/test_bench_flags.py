"""nccl-tests' options, read."""

import shlex

import pytest
from msgspec import json
from typer.testing import CliRunner

from ddpdiag.bench import command
from ddpdiag.cli.app import app
from ddpdiag.errors import UsageError
from ddpdiag.model.bench import Bench, size


@pytest.fixture
def read(monkeypatch):
    """The options of `ddpdiag allreduce-bench`, checked as for a run."""
    asked: list[Bench] = []
    monkeypatch.setattr(command.check, "run", lambda _launch, _options, _outputs, *, bench: asked.append(bench) or 0)
    monkeypatch.setattr("ddpdiag.cli.app.leave", lambda _code: None)
    monkeypatch.setattr("ddpdiag.cli.app.guarded", lambda body: body())

    def parse(words: str = "", **environment: str) -> Bench:
        done = CliRunner().invoke(app, ["allreduce-bench", *shlex.split(words)], env=environment)
        if done.exception is not None:
            raise done.exception
        return asked[-1]

    return parse


def test_the_defaults_are_those_of_the_options(read):
    assert read() == Bench() == json.decode(json.encode(Bench()), type=Bench)
    assert len(Bench().sizes) == 25


@pytest.mark.parametrize(
    ("text", "expected"), [("8", 8), ("32K", 32 << 10), ("128M", 128 << 20), ("1.5g", 3 << 29), ("2T", 2 << 40)]
)
def test_sizes_are_powers_of_1024(text, expected):
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "M", "0", "-8", "8X", "nan", "inf", "1e30"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="expected a number of bytes"):
        size(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-b 1M -e 8", "-b 1048576 is above -e 8"),
        ("-e 8X", "-e 8X: expected a number of bytes"),
        ("-f 1", "-f 1: expected a factor above 1"),
        ("-f x", "expected a factor above 1"),
        ("-f 1.0000001", "at most 1000 sizes expected"),
        ("-d float8", "-d float8: expected int8"),
        ("--collective allreduce", "--collective allreduce: expected all_reduce"),
        ("--backend auto,gloo", "auto cannot be combined"),
        ("--min-busbw 0", "--min-busbw 0: expected GB/s"),
    ],
)
def test_bad_input_is_a_sentence(read, words, message):
    with pytest.raises(UsageError) as raised:
        read(words)
    assert message in str(raised.value)


@pytest.mark.parametrize("words", ["-n 0", "-w -1", "-c 2", "-T 1", "-z 1", "-N 2", "-g 2", "-i 8", "-o max", "-r 1"])
def test_numbers_out_of_range_and_flags_that_are_not_here_end_with_2(words):
    assert CliRunner().invoke(app, ["allreduce-bench", *words.split()]).exit_code == 2


def test_nccl_needs_a_gpu(read, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="--backend nccl: no GPU is visible on this host"):
        read("--backend gloo,nccl")


def test_lists_names_of_torch_and_variables(read):
    found = read(
        "--collective all_reduce,broadcast --min-busbw 2.5 -d bf16,float16 -d float32", DDPDIAG_WARMUP_ITERS="3"
    )
    assert (found.collective, found.warmup_iters, found.min_busbw) == (("all_reduce", "broadcast"), 3, 2.5)
    assert found.datatype == ("bfloat16", "half", "float")
    assert (read("--backend auto").backend, read("--backend gloo").backend) == ((), ("gloo",))


def test_sizes_grow_by_a_factor(read):
    assert read("-b 8 -e 20 -f 1.5").sizes == (8, 12, 18)
