"""Dumps of torch's flight recorder: which ranks hold up a job, and files that are no dumps."""

import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest

from ddpdiag.evidence.attribution import Job, find_faults
from ddpdiag.evidence.dumps import read_dump, read_dumps
from ddpdiag.explain.command import run

RECORDED = Path(__file__).parents[1] / "data" / "flight_recorder"
WORLD = {"0": range(4)}
TWO_PAIRS = {"0": range(4), "1": (0, 1), "2": (2, 3)}


@pytest.mark.parametrize("name", ["gpu_error_1st", "gpu_error_2nd", "lock_gil_1st", "lock_gil_2nd"])
def test_the_ranks_with_an_injected_fault_are_named_and_no_other(tmp_path, name):
    with zipfile.ZipFile(RECORDED / f"{name}.zip") as files:
        files.extractall(tmp_path)
    truth = [int(rank) for rank in re.findall(r"^Rank (\d+)", (tmp_path / "fault_injection.log").read_text(), re.M)]
    job = read_job(tmp_path)
    assert len(job.witnesses) == 16
    faults = find_faults(job)
    assert sorted(rank for fault in faults for rank in fault.ranks) == truth
    assert {fault.code for fault in faults} == {"dump.stuck" if name.startswith("gpu") else "dump.behind"}


def test_explain_reads_a_folder_of_dumps(tmp_path, capsys, golden):
    with zipfile.ZipFile(RECORDED / "lock_gil_2nd.zip") as files:
        files.extractall(tmp_path)
    (tmp_path / "_dump_3").write_bytes(b"\x80\x02}")
    (tmp_path / "old_dump_4").write_bytes((tmp_path / "_dump_4").read_bytes())
    os.utime(tmp_path / "old_dump_4", (1, 1))
    assert run([str(tmp_path)]) == 0
    golden("".join(capsys.readouterr()).replace(f"{tmp_path}/", ""))


def read_job(folder: Path) -> Job:
    witnesses = [read_dump(path) for path in folder.iterdir() if path.name.rpartition("_")[2].isdigit()]
    return Job({witness.rank: witness for witness in witnesses if witness is not None})


def trace(posted: str, groups: dict, backend: str = "nccl") -> dict:
    """A dump: `posted` has a word for each operation, such as "0:all_reduce:done", "1:broadcast", "0:send0>2"."""
    entries, numbers = [], {}
    for created, word in enumerate(posted.split()):
        group, name, *end = word.split(":")
        is_p2p = name.startswith(("send", "recv"))
        numbers[group] = numbers.get(group, 0) + (not is_p2p)
        name = re.sub(
            r"^(send|recv)(\d)>(\d)$", lambda m: f"{m[1]} {m[2]}{'->' if m[1] == 'send' else '<-'}{m[3]}", name
        )
        size = int(end[0]) if end and end[0].isdigit() else 8
        entries.append(
            {
                "pg_id": int(group),
                "process_group": [group, "WORLD" if group == "0" else "PAIR"],
                "collective_seq_id": numbers[group],
                "profiling_name": f"{backend}:{name}",
                "time_created_ns": created,
                "input_sizes": [[size]],
                "input_dtypes": ["Float"],
                "state": "completed" if "done" in end and backend == "nccl" else "scheduled",
                "is_p2p": is_p2p,
                "frames": [{"name": "step", "filename": "train.py", "line": 7}],
            }
        )
    known = (
        {} if backend == "gloo" else {name: {"desc": "", "ranks": str(list(ranks))} for name, ranks in groups.items()}
    )
    return {"version": "2.10", "entries": entries, "pg_config": known}


DONE, OPEN = "0:all_reduce:done", "0:all_reduce"
# What ranks 0, 1, ... posted (None: no dump), the groups, and the findings with their ranks.
JOBS = {
    "behind": ([f"{DONE} {OPEN}", f"{DONE} {OPEN}", DONE, f"{DONE} {OPEN}"], WORLD, {"behind": (2,)}),
    "behind a chain of groups": ([OPEN, OPEN, "2:all_reduce", ""], TWO_PAIRS, {"behind": (3,)}),
    "two behind": ([OPEN, "", OPEN, ""], WORLD, {"behind": (1, 3)}),
    "no dump": ([OPEN, OPEN, None, OPEN], WORLD, {"no-dump": (2,)}),
    "most dumps are missing": ([OPEN, None, None, None], WORLD, {"no-dump": ()}),
    "behind, and another dump is missing": ([OPEN, "", None, OPEN], WORLD, {"behind": (1,)}),
    "other collective": ([OPEN, OPEN, OPEN, "0:broadcast"], WORLD, {"mismatch": (3,)}),
    "other size": ([OPEN, "0:all_reduce:9", OPEN, OPEN], WORLD, {"mismatch": (1,)}),
    "two of each": ([OPEN, OPEN, "0:broadcast", "0:broadcast"], WORLD, {"mismatch": ()}),
    "stuck GPU": ([f"{DONE} {OPEN}"] * 2 + [f"{OPEN} {OPEN}", f"{DONE} {OPEN}"], WORLD, {"stuck": (2,)}),
    "crosswise": (
        ["0:all_reduce 1:barrier", "2:all_reduce"],
        {"0": (0, 1), "1": (0,), "2": (0, 1)},
        {"deadlock": (0, 1)},
    ),
    "none is missing": ([OPEN] * 4, WORLD, {"unfinished": ()}),
    "receives nothing": (["0:recv0>2", "", "", ""], WORLD, {"behind": (2,)}),
    "receives too late": (["0:recv0>2", "", "0:send2>0", ""], WORLD, {}),
    "all is over": ([DONE] * 4, WORLD, {}),
}
GLOO = {
    "behind": ([f"{OPEN} {OPEN}", f"{OPEN} {OPEN}", OPEN, f"{OPEN} {OPEN}"], {"behind": (2,)}),
    "no dump": ([OPEN, OPEN, None, OPEN], {"no-dump": (2,)}),
    "no dump, in a pair": (["1:barrier 0:barrier"] * 2 + [None, "2:barrier"], {"no-dump": (2,)}),
    "no dump of the last rank": (["1:barrier 0:barrier"] * 2 + ["2:barrier", None], {"no-dump": (3,)}),
    "other collective than the other pair": (
        ["1:barrier 0:barrier"] * 2 + ["2:barrier", "2:broadcast"],
        {"mismatch": (3,)},
    ),
    "other order": (["1:barrier 0:barrier"] * 2 + ["0:barrier", "2:barrier"], {"deadlock": (2,)}),
    "a healthy job": ([f"{OPEN} 1:barrier", f"{OPEN} 1:barrier"], {}),
}


@pytest.mark.parametrize(
    ("backend", "posted", "groups", "expected"),
    [pytest.param("nccl", *row, id=name) for name, row in JOBS.items()]
    + [pytest.param("gloo", posted, WORLD, expected, id=f"gloo: {name}") for name, (posted, expected) in GLOO.items()],
)
def test_each_fault_names_its_ranks(tmp_path, backend, posted, groups, expected):
    for rank, words in enumerate(posted):
        if words is not None:
            data = trace(words, groups, backend)
            (tmp_path / f"trace_{rank}").write_bytes(json.dumps(data).encode() if rank % 2 else pickle.dumps(data, 2))
    faults = find_faults(read_job(tmp_path))
    assert {fault.code.removeprefix("dump."): fault.ranks for fault in faults} == expected


def test_dumps_of_another_job_or_rank_are_left_out(tmp_path, golden):
    for rank, groups in enumerate([WORLD, WORLD, {"0": range(8)}, WORLD, WORLD]):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(trace(OPEN, groups), 2))
    witnesses, problems = read_dumps([*map(str, tmp_path.iterdir()), str(tmp_path / "trace_0")])
    assert [*witnesses] == [0, 1, 3]
    golden("\n".join(sorted(problems)).replace(f"{tmp_path}/", ""))


def test_many_dumps_are_read_by_several_processes(tmp_path):
    for rank in range(80):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(trace("" if rank == 7 else OPEN, {"0": range(80)}), 2))
    witnesses, problems = read_dumps([*map(str, tmp_path.iterdir())])
    assert (len(witnesses), problems) == (80, [])
    assert [(fault.code, fault.ranks) for fault in find_faults(Job(witnesses))] == [("dump.behind", (7,))]


class Owned:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"version": "2.9", "entries": [Owned()]}, 2),
        pickle.dumps(trace(OPEN, WORLD), 2)[:-40],
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little"),
        b"\x80\x02" + b"]" * 100_000 + b".",
        b"{" * 100_000,
        b'{"version": 1, "entries": 3}',
        b"",
    ],
    ids=["class", "cut", "memo", "length", "deep", "deep JSON", "other JSON", "empty"],
)
def test_what_is_no_dump_is_refused_and_runs_no_code(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    Path("trace_0").write_bytes(data)
    assert read_dump(Path("trace_0")) is None
    assert not Path("owned").exists()
