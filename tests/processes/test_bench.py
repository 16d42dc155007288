"""The benchmark, however it is started: what it prints and writes, whom it names, what a short run keeps."""

import csv
import io
import json
import signal
import threading
import time

import pytest
from jobs import Job, free_port, torchrun

BENCH = ("-m", "ddpdiag", "allreduce-bench")
SHORT = ("-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-w", "1", "--json", "{json}")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")


def rows(job: Job) -> list[list[str]]:
    """The data rows, as scripts that read nccl-tests' output find them."""
    return [line.split() for line in job.stdout.splitlines() if line.startswith("   ") and line.split()[0].isdigit()]


def check_whole(job: Job, ranks: int, columns: int = 13) -> dict:
    """It measured three sizes in both modes, on all ranks, without a wrong value, and left nothing; its JSON."""
    assert job.wait(90) == 0, job.told()
    report = job.report
    assert report["exit_code"] == 0
    assert [row["size"] for row in report["results"]] == [1 << 10, 1 << 15, 1 << 20]
    assert report["out_of_bounds"] == {"count": 0, "okay": True}
    assert len(report["config"]["devices"]) == ranks
    for row in report["results"]:
        for mode in (row["out_of_place"], row["in_place"]):
            assert mode["nwrong"] == 0
            assert mode["bus_bw"] == pytest.approx(mode["alg_bw"] * 2 * (ranks - 1) / ranks)
            assert mode["alg_bw"] == pytest.approx(row["size"] / mode["time"] / 1e3)
    assert [len(row) for row in rows(job)] == [columns] * 3, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()
    return report


def test_alone(start, tmp_path):
    files = ("--csv", str(tmp_path / "b.csv"), "--plot", str(tmp_path / "b.svg"), "--record", str(tmp_path / "r.jsonl"))
    job = start(*BENCH, *SHORT, *files)
    report = check_whole(job, 2)
    assert report["verdict"]["status"] == "fit"
    table = list(csv.DictReader(io.StringIO((tmp_path / "b.csv").read_text())))
    assert len(table) == 6
    assert (tmp_path / "b.svg").read_text().startswith("<?xml")
    again = start("-m", "ddpdiag", "judge", str(tmp_path / "r.jsonl"))
    assert again.wait() == 0, again.told()
    assert rows(again) == rows(job)


def test_torchrun_with_four_ranks(start):
    report = check_whole(start(*torchrun(4), *BENCH, *SHORT), 4)
    assert {line["rank"] for line in report["per_rank"]} == {0, 1, 2, 3}


def test_two_shells(start):
    port = str(free_port())
    place = ("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    jobs = [start(*BENCH, *SHORT, "--rank", rank, *place) for rank in ("1", "0")]
    check_whole(jobs[1], 2)
    assert jobs[0].wait() == 0
    assert jobs[0].stdout == ""


def test_every_collective_in_every_dtype_and_op(start):
    options = ("-b", "4K", "-e", "4K", "-n", "1", "-w", "0", "-d", "all", "-o", "all", "--nproc-per-node", "3")
    job = start(*BENCH, *options, "--collective", ",".join(COLLECTIVES), "--json", "{json}", "-r", "all")
    assert job.wait(120) == 0, job.told()
    found = job.report["results"]
    kinds = {(row["collective"], row["type"], row["redop"]) for row in found}
    reducing = 3 * (8 * 5 - 4)  # gloo has no average of whole numbers
    assert len(kinds) == reducing + 4 * 8
    wrong = [row for row in found for mode in ("in_place", "out_of_place") if row[mode] and row[mode]["nwrong"]]
    assert wrong == []


@pytest.mark.parametrize("blocking", ["0", "1", "2", "3"])
def test_ways_of_waiting(start, blocking):
    job = start(*BENCH, *SHORT, "-z", blocking, "-m", "3", "-I", "1")
    report = check_whole(job, 2, columns=21)
    assert len(report["results"][0]["in_place_per_iter"]["times_us"]) == 5


def test_one_corrupted_element_is_found(start):
    job = start(*BENCH, *SHORT, DDPDIAG_TEST_FAULT="corrupt 1")
    assert job.wait(90) == 1, job.told()
    report = job.report
    assert report["verdict"]["status"] == "unfit"
    assert not report["out_of_bounds"]["okay"]
    assert "FAILED" in job.stdout
    assert all(row["in_place"]["nwrong"] for row in report["results"])


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


@pytest.mark.alone
def test_a_rank_that_is_made_slow_from_outside_is_named(start):
    options = ("-b", "64K", "-e", "16M", "-n", "20", "--json", "{json}")
    job = start(*BENCH, *options, DDPDIAG_TEST_FAULT="pause 1")
    job.wait_until(job.reached.exists)
    slowed = Slowed(job.worker(1).kill)
    slowed.start()
    try:
        assert job.wait(120) == 0, job.told()
    finally:
        slowed.over.set()
    report = job.report
    slow = {line["rank"]: line["slow"] for line in report["per_rank"]}
    assert slow[1], job.told()
    assert not slow[0], job.told()
    assert "rank 1" in report["verdict"]["sentence"], job.told()
    assert "holds the others back" in job.stdout.splitlines()[-1] + job.stdout.splitlines()[-2], job.told()


def test_ctrl_c_prints_what_was_measured(start):
    options = ("-b", "64K", "-e", "64K", "-n", "50", "-N", "0", "-T", "60", "--json", "{json}")
    job = start(*BENCH, *options, DDPDIAG_TEST_FAULT="pause 0")
    job.wait_until(job.reached.exists)
    time.sleep(6)  # the pause is of 2 s, and results are handed over every half second
    job.process.send_signal(signal.SIGINT)
    assert job.wait(60) == 130, job.told()
    assert rows(job), job.told()
    assert "cut short" in job.stdout
    assert job.report["results"]
    job.check_left_nothing()


def test_a_time_limit_leaves_out_what_it_must(start):
    job = start(*BENCH, "-b", "8", "-e", "1G", "-T", "14", "--json", "{json}")
    assert job.wait(40) == 0, job.told()
    assert job.report["results"], job.told()
    assert any("want of time" in text or "time was over" in text for text in job.report["remarks"]), job.told()


def test_what_does_not_fit_into_memory_is_left_out(start):
    job = start(*BENCH, "-b", "1K", "-e", "256G", "-f", "268435456", "-n", "3", "--json", "{json}")
    assert job.wait(60) == 0, job.told()
    assert job.report["results"][0]["size"] == 1 << 10
    assert "left out, for want of memory" in " ".join(job.stdout.split()), job.told()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-b", "1M", "-e", "8"), "-b 1M is above -e 8"),
        (("-f", "1"), "expected a factor above 1"),
        (("-d", "float7"), "-d float7: expected int8"),
        (("-o", "mean"), "-o mean: expected sum"),
        (("--backend", "nosuch", "-e", "8"), "knows no backend nosuch"),
        (("-d", "int32", "-o", "avg", "-e", "8"), "gloo cannot do all_reduce of int32 with avg"),
    ],
)
def test_bad_input_is_one_sentence(start, options, words):
    job = start(*BENCH, *options)
    assert job.wait(60) == 2, job.told()
    assert words in " ".join(job.told().split())
    assert not job.has_traceback


def test_a_baseline_of_another_world_is_refused_with_the_reason(start, tmp_path):
    file = str(tmp_path / "base.json")
    assert start(*BENCH, *SHORT, "--save-baseline", file).wait(60) == 0
    assert json.loads((tmp_path / "base.json").read_text())["series"]
    same = start(*BENCH, *SHORT, "--baseline", file)
    assert same.wait(60) == 0, same.told()
    other = start(*BENCH, *SHORT, "--nproc-per-node", "3", "--baseline", file)
    assert other.wait(60) == 3, other.told()
    assert "the baseline is of 2 ranks" in " ".join(other.stdout.split()), other.told()


def test_a_gate_that_is_not_reached_fails(start):
    job = start(*BENCH, *SHORT, "--min-busbw", "10000")
    assert job.wait(60) == 1, job.told()
    assert job.report["verdict"]["status"] == "unfit"
