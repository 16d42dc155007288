"""The benchmark, however it is started: what it prints and writes, whom it names, what a short run keeps."""

import csv
import io
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from jobs import Job, Start, torchrun

BENCH = ("-m", "ddpdiag", "allreduce-bench", "--json", "{json}")
SHORT = ("-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-w", "1")
DTYPES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
# With more ranks than cores nobody is called slow, whatever else runs here, and only then is a run kept as a baseline.
ON_ONE_CORE = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
# What a sweep has computed by then: more than the half second after which results are handed over.
ENOUGH_CORE_SECONDS = 1.5


def rows(job: Job) -> list[list[str]]:
    """The data rows, as scripts that read nccl-tests' output find them."""
    words = [line.split() for line in job.stdout.splitlines() if line.startswith("   ")]
    return [row for row in words if len(row) >= 13 and row[0].isdigit() and row[1].isdigit()]


def codes(job: Job) -> set[str]:
    """What was found of the benchmark itself."""
    return {finding["code"] for finding in job.report["findings"] if finding["code"].startswith("COL002")}


def check_whole(job: Job, ranks: int) -> dict:
    """It measured three sizes on all ranks, without a wrong value, and left nothing; its JSON."""
    assert job.wait(120) == 0, job.told()
    report = job.report
    assert report["exit_code"] == 0
    bench = report["bench"]
    assert [row["size_bytes"] for row in bench["rows"]] == [1 << 10, 1 << 15, 1 << 20]
    assert bench["wrong"] == 0
    assert {line["rank"] for line in bench["ranks"]} == {*range(ranks)}
    for row in bench["rows"]:
        assert row["wrong"] == 0
        assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"] * 2 * (ranks - 1) / ranks)
        assert row["algbw_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["seconds"])
    assert [len(row) for row in rows(job)] == [13] * 3, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()
    return report


@pytest.fixture(scope="module")
def kept(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A healthy run, and the folder of its files."""
    folder = tmp_path_factory.mktemp("bench")
    files = ("--csv", f"{folder}/b.csv", "--record", f"{folder}/r.jsonl")
    job = start_shared(*BENCH, *SHORT, *files, prefix=ON_ONE_CORE)
    job.wait(120)
    return job, folder


def test_alone_it_prints_its_rows_and_writes_its_files(kept, start):
    job, folder = kept
    report = check_whole(job, 2)
    assert report["verdict"] == "fit"
    assert len(list(csv.DictReader(io.StringIO((folder / "b.csv").read_text())))) == 3
    again = start("-m", "ddpdiag", "judge", str(folder / "r.jsonl"))
    assert again.wait() == 0, again.told()
    assert rows(again) == rows(job)


def test_a_gate_that_is_not_reached_fails_and_a_recording_is_a_baseline(kept, start):
    gate = ("--baseline", str(kept[1] / "r.jsonl"), "--min-busbw", "10000")
    job = start(*BENCH, *SHORT, *gate, prefix=ON_ONE_CORE)
    assert job.wait(120) == 1, job.told()
    assert job.report["verdict"] == "unfit"
    # Beside other processes CMP001 may find it slower than it was.
    assert codes(job) == {"COL002.below"}, job.told()


@pytest.mark.deep
def test_a_baseline_of_another_world_is_refused_with_the_reason(kept, start):
    several = ("--collective", "all_reduce,all_to_all", "-d", "float,int8")
    job = start(*BENCH, *SHORT, *several, "--nproc-per-node", "3", "--baseline", str(kept[1] / "r.jsonl"))
    assert job.wait(120) == 3, job.told()
    assert "CMP001.incomparable" in {finding["code"] for finding in job.report["findings"]}, job.told()
    assert codes(job) <= {"COL002.slow-rank"}, job.told()
    kinds = {(row["collective"], row["dtype"]) for row in job.report["bench"]["rows"]}
    assert kinds == {(name, dtype) for name in ("all_reduce", "all_to_all") for dtype in ("float", "int8")}
    assert job.report["bench"]["wrong"] == 0


@pytest.mark.deep
def test_one_corrupted_element_is_found_and_what_does_not_fit_into_memory_is_left_out(start):
    sizes = ("-b", "1K", "-e", "256G", "-f", "268435456", "-n", "3")
    job = start(*BENCH, *sizes, DDPDIAG_TEST_FAULT="corrupt 1")
    assert job.wait(120) == 1, job.told()
    report = job.report
    assert report["verdict"] == "unfit"
    (row,) = report["bench"]["rows"]
    assert (row["size_bytes"], row["wrong"] > 0) == (1 << 10, True)
    assert any("256 GiB" in note for note in report["bench"]["omissions"]), report["bench"]["omissions"]


@pytest.mark.deep
def test_rows_are_printed_when_they_are_measured_and_only_once(start):
    options = ("-b", "1K", "-e", "64M", "-f", "16", "--collective", "all_reduce,broadcast")
    job = start(*BENCH, *options)
    job.wait_until(lambda: rows(job), 100)
    before = job.stdout
    job.wait(120)
    assert job.stdout.startswith(before)
    assert "Avg bus bandwidth" not in before
    assert [int(row[0]) for row in rows(job)] == [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26] * 2, job.told()
    assert job.stdout.count("# Collective test concluded") == 2


@pytest.mark.deep
def test_ctrl_c_prints_what_was_measured(start):
    job = start(*BENCH, "-b", "64K", "-e", "60M", "-f", "1.01", "-T", "120")
    job.wait_until(lambda: core_seconds(job) > ENOUGH_CORE_SECONDS, 100)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(150) == 130, job.told()
    assert rows(job), job.told()
    assert job.report["bench"]["rows"]
    assert not job.report["bench"]["complete"]
    job.check_left_nothing()


def core_seconds(job: Job) -> float:
    """What rank 0's newest worker has used; none while there is no worker."""
    try:
        return sum(psutil.Process(job.worker(0).pid).cpu_times()[:2])
    except (StopIteration, ValueError, psutil.NoSuchProcess):
        return 0.0


@pytest.mark.deep
def test_an_unknown_backend_is_one_sentence(start):
    job = start(*BENCH, "-e", "8", "--backend", "nosuch")
    assert job.wait(90) == 2, job.told()
    assert "nosuch" in job.told()
    assert not job.has_traceback


# In the deep tier -----------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_every_collective_in_every_dtype(start):
    options = ("-b", "4K", "-e", "4K", "-n", "1", "-w", "0", "-d", ",".join(DTYPES))
    job = start(*torchrun(3), *BENCH, *options, "--collective", ",".join(COLLECTIVES))
    assert job.wait(120) == 0, job.told()
    found = job.report["bench"]["rows"]
    assert len({(row["collective"], row["dtype"]) for row in found}) == len(COLLECTIVES) * len(DTYPES)
    assert [row for row in found if row["wrong"]] == []


@pytest.mark.deep
def test_a_time_limit_leaves_out_what_it_must(start):
    job = start(*BENCH, "-b", "8", "-e", "1G", "-T", "14")
    assert job.wait(60) == 3, job.told()
    bench = job.report["bench"]
    assert bench["rows"], job.told()
    assert bench["omissions"], job.told()
    assert bench["rows"][-1]["size_bytes"] < 1 << 30
    assert "not measured" in job.report["sentence"], job.told()


class Slowed(threading.Thread):
    """Stops a process half of the time, from outside: it is twice as slow."""

    def __init__(self, kill) -> None:
        super().__init__(daemon=True)
        self.kill, self.over = kill, threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.kill(signal.SIGSTOP)
                time.sleep(0.004)
                self.kill(signal.SIGCONT)
                time.sleep(0.004)
        except ProcessLookupError:
            pass


@pytest.mark.deep
@pytest.mark.alone
def test_a_rank_that_is_made_slow_from_outside_is_named(start):
    job = start(*BENCH, "-b", "64K", "-e", "16M", "-n", "20", DDPDIAG_TEST_FAULT="pause 1")
    job.wait_until(job.reached.exists)
    slowed = Slowed(job.worker(1).kill)
    slowed.start()
    try:
        assert job.wait(120) == 0, job.told()
    finally:
        slowed.over.set()
    report = job.report
    assert {line["rank"]: bool(line["slow_reason"]) for line in report["bench"]["ranks"]} == {0: False, 1: True}, (
        job.told()
    )
    assert "rank 1" in report["sentence"], job.told()
    assert "rank 1" in job.stdout.splitlines()[-1] + job.stdout.splitlines()[-2], job.told()
