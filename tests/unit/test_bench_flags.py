"""nccl-tests' options, read."""

from dataclasses import replace

import pytest
from msgspec import structs

from ddpdiag.bench.command import bench_of, size
from ddpdiag.bench.options import BenchOptions
from ddpdiag.errors import UsageError
from ddpdiag.model import Place
from ddpdiag.model.bench import Average, Bench, Blocking
from ddpdiag.runtime.launchers.launch import Launch

USUAL = BenchOptions()
FIRST = Launch(run_id="r", coordinator="c", port=None, place=Place(rank=0, world_size=4, node="n0", launcher="hand"))
LAUNCH = Launch(run_id="r", coordinator="c", port=None, place=Place(rank=1, world_size=4, node="n0", launcher="hand"))


def read(**flags) -> Bench:
    return structs.replace(bench_of(replace(USUAL, **flags))(LAUNCH), args=())


def test_the_defaults_are_ours():
    assert read() == Bench()
    assert len(Bench().sizes) == 25


@pytest.mark.parametrize(
    ("text", "expected"), [("8", 8), ("32K", 32 << 10), ("128M", 128 << 20), ("1.5g", 3 << 29), ("2T", 2 << 40)]
)
def test_sizes_are_powers_of_1024(text, expected):
    assert size("-b", text) == expected


@pytest.mark.parametrize("text", ["", "M", "0", "-8", "8X", "nan", "inf", "1e30"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="expected a number of bytes"):
        size("-b", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"minbytes": "1M", "maxbytes": "8"}, "-b 1M is above -e 8"),
        ({"stepfactor": 1.0}, "-f 1: expected a factor above 1"),
        ({"stepfactor": float("nan")}, "expected a factor above 1"),
        ({"stepfactor": 2.0, "stepbytes": "8"}, "exclude each other"),
        ({"stepbytes": "1", "maxbytes": "1G"}, "at most 1000 expected"),
        ({"stepfactor": 1.0000001}, "at most 1000 expected"),
        ({"datatype": ("float8",)}, "-d float8: expected int8"),
        ({"op": ("mean",)}, "-o mean: expected sum"),
        ({"collective": ("allreduce",)}, "--collective allreduce: expected all_reduce"),
        ({"collective": ("",)}, "--collective"),
        ({"backend": ("auto,gloo",)}, "auto cannot be combined"),
        ({"iters": 0}, "-n 0: expected 1 or more"),
        ({"warmup_iters": -1}, "-w -1"),
        ({"agg_iters": 0}, "-m 0"),
        ({"run_cycles": -1}, "-N -1"),
        ({"check": -1}, "-c -1"),
        ({"average": 4}, "-a 4: expected 0"),
        ({"blocking": 4}, "-z 4: expected 0"),
        ({"root": "4"}, "-r 4: expected a rank from 0 to 3"),
        ({"root": "x"}, "-r x"),
        ({"root": "9" * 5000}, "-r 9"),
        ({"per_iter_timing": 1, "iters": 2000}, "-I 1 keeps every call"),
        ({"min_busbw": 0.0}, "--min-busbw 0"),
        ({"per_iter_timing": 1, "iters": 100_000}, "-I 1 keeps every call"),
    ],
)
def test_bad_input_is_a_sentence(flags, words):
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        read(**flags)


def test_nccl_needs_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="--backend nccl: no GPU is visible on this host"):
        read(backend=("gloo,nccl",))


def test_torchs_names_of_dtypes_are_taken():
    assert read(datatype=("bf16,float16", "float32")).dtypes == ("bfloat16", "half", "float")


def test_lists_and_letters():
    found = read(collective=("all_reduce,broadcast",), root="all", average=0, blocking=3, min_busbw=2.5)
    assert found.collectives == ("all_reduce", "broadcast")
    assert found.roots == (-1,)
    assert (found.average, found.blocking) == (Average.RANK_0, Blocking.APART)
    assert found.min_busbw_bytes_per_s == 2.5e9


def test_what_is_no_utf8_is_taken_as_it_can_be_read():
    assert read(backend=("\udcff",)).backends == ("\\udcff",)


def test_the_first_run_that_keeps_its_own_past_has_none(tmp_path):
    file = str(tmp_path / "base.json")
    with pytest.raises(UsageError, match="no such file"):
        bench_of(replace(USUAL, baseline=file))(FIRST)
    assert bench_of(replace(USUAL, baseline=file), save_baseline=file)(FIRST).baseline is None


def test_sizes_by_a_step_and_by_a_factor():
    assert read(minbytes="1M", maxbytes="3M", stepbytes="1M").sizes == (1 << 20, 2 << 20, 3 << 20)
    assert read(minbytes="8", maxbytes="20", stepfactor=1.5).sizes == (8, 12, 18)
