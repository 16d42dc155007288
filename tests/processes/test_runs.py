"""Healthy runs in every way of starting one, and what is reported when ranks are missing, doubled or alone."""

import json

import pytest
from jobs import CHECK, Job, free_port, torchrun


def check_fit(job: Job, ranks: int, launcher: str) -> None:
    """A healthy run: one report, FIT, and nothing left."""
    assert job.wait() == 0, job.told()
    report = job.report
    assert (report["verdict"], report["exit_code"]) == ("fit", 0), job.told()
    assert (report["world"]["size"], report["world"]["launcher"]) == (ranks, launcher)
    assert [row["rank"] for row in report["ranks"]] == list(range(ranks))
    assert job.errors == []
    assert job.reports == 1, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def statuses(job: Job, code: str) -> dict[str, int]:
    """How the trials of a check ended, by status."""
    return next(check["statuses"] for check in job.report["checks"] if check["code"] == code)


def by_hand(rank: int, size: int, port: int, *options: str) -> tuple[str, ...]:
    """One rank, as a user starts it in a shell."""
    place = ("--rank", str(rank), "--world-size", str(size), "--master-addr", "127.0.0.1", "--master-port", str(port))
    return (*CHECK, *place, "--json", "{json}", *options)


def test_standalone_tests_everything(start):
    job = start(*CHECK, "--nproc-per-node", "2", "--json", "{json}")
    check_fit(job, 2, "standalone")
    # A warning is done, too: where others use the cores, a rank may hold the other one back.
    assert {"rendezvous", "collective", "training"} <= {
        s["name"] for s in job.report["stages"] if s["status"] in ("done", "warning")
    }


def test_torchrun_tests_everything(start):
    job = start(*torchrun(2), *CHECK, "--json", "{json}")
    check_fit(job, 2, "torchrun")
    # One of the two says how far the run is, once for each stage.
    said = [line.partition("] ")[2].strip() for line in job.progress]
    assert said[0] == "2 ranks on 1 host", job.told()
    assert sorted(said[1:]) == sorted(f"{s['name']} done" for s in job.report["stages"] if s["status"] != "skipped")


def test_torch_distributed_launch_passes_a_local_rank(start):
    launch = ("-m", "torch.distributed.launch", "--nproc-per-node", "2", "--master-port", str(free_port()))
    job = start(*launch, *CHECK, "--select", "COL001", "--json", "{json}", "--quiet")
    check_fit(job, 2, "torchrun")
    assert job.progress == []


def test_twenty_rendezvous_in_a_row_through_torchruns_own_store(start):
    job = start(*torchrun(2), *CHECK, "--select", "RDZ001", "--set", "RDZ001.repeat=7", "--json", "{json}")
    check_fit(job, 2, "torchrun")
    assert statuses(job, "RDZ001") == {"done": 2 * 3 * 7}


def test_two_shells(start):
    port = free_port()
    jobs = [start(*by_hand(rank, 2, port, "--select", "COL001")) for rank in (1, 0)]
    check_fit(jobs[1], 2, "hand")
    assert jobs[0].wait() == 0
    assert jobs[0].stdout == ""
    jobs[0].check_left_nothing()


def test_one_rank_alone_says_what_is_not_known(start):
    job = start(*CHECK, "--nproc-per-node", "1", "--json", "{json}")
    check_fit(job, 1, "standalone")
    assert "nothing is known about communication" in job.report["sentence"]
    skipped = {check["code"]: check["skipped_because"] for check in job.report["checks"]}
    assert "one rank" in skipped["COL001"]


@pytest.mark.parametrize("order", [(0, 1, 1), (1, 1, 0)])
def test_two_processes_with_one_rank_are_told_so(start, order):
    port = free_port()
    jobs = [start(*by_hand(rank, 2, port, "--select", "COL001", "--board-wait", "5")) for rank in order]
    codes = [job.wait() for job in jobs]
    told = "\n".join(job.told() for job in jobs)
    assert 2 in [code for rank, code in zip(order, codes, strict=True) if rank == 1], told
    assert "rank 1 came twice" in told
    assert not any(job.has_traceback for job in jobs), told
    for job in jobs:
        job.check_left_nothing()


def test_two_processes_with_rank_0_are_told_so(start):
    port = free_port()
    first = start(*by_hand(0, 2, port, "--board-wait", "5"))
    first.wait_until(lambda: list(first.temporary.glob("ddpdiag-*")))
    second = start(*by_hand(0, 2, port, "--board-wait", "5"))
    assert second.wait() == 2, second.told()
    assert "rank 0" in second.stderr
    assert second.stdout == ""
    assert first.wait() == 1, first.told()
    assert "LCH001.duplicate" in [finding["code"] for finding in first.errors]
    for job in (first, second):
        assert not job.has_traceback
        job.check_left_nothing()


def test_a_rank_that_never_comes_is_named(start):
    job = start(*by_hand(0, 2, free_port(), "--board-wait", "2"))
    assert job.wait() == 3, job.told()
    assert job.report["verdict"] == "unknown"
    assert job.blamed == {1}
    assert [finding["code"] for finding in job.errors] == ["RUN001.absent"]
    assert "rank 1 never came" in job.report["sentence"]
    assert job.progress[0].endswith("] 1 rank on 1 host; rank 1 did not come\n"), job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_a_rank_that_cannot_reach_rank_0_says_what_it_met(start):
    job = start(*by_hand(1, 2, free_port(), "--board-wait", "2"))
    assert job.wait() == 3, job.told()
    (sentence,) = job.stderr.splitlines()
    assert sentence.startswith("ddpdiag: rank 1 ")
    assert "refused" in sentence
    assert job.stdout == ""
    job.check_left_nothing()


def test_a_recording_is_judged_again_the_same(start, tmp_path):
    record = tmp_path / "run.jsonl"
    job = start(
        *CHECK,
        "--nproc-per-node",
        "2",
        "--select",
        "LCH",
        "--select",
        "COL",
        "--json",
        "{json}",
        "--record",
        str(record),
        "--html",
        str(tmp_path / "check.html"),
        "--timings",
    )
    check_fit(job, 2, "standalone")
    page = ("--html", str(tmp_path / "judge.html"))
    again = start("-m", "ddpdiag", "judge", str(record), "--json", "{json}", "--timings", *page)
    assert again.wait() == 0
    assert (tmp_path / "judge.html").read_text() == (tmp_path / "check.html").read_text()
    assert again.report == job.report
    assert again.stdout == job.stdout
    check_timings(job)


def check_timings(job: Job) -> None:
    """Its timings add up, are no longer than the command ran, and leave little of that out."""
    timings = job.report["timings"]
    kinds = {row["stage"]: row["kinds"] for row in timings["stages"]}
    assert sum(row["seconds"] for row in timings["stages"]) == pytest.approx(timings["seconds"])
    assert all(sum(row["kinds"].values()) == pytest.approx(row["seconds"]) for row in timings["stages"])
    assert job.report["seconds"] < timings["seconds"] < job.end - job.begin
    assert "unknown" not in {kind for row in kinds.values() for kind in row}
    assert sum(row.get("import", 0.0) for row in kinds.values()) > 0.1
    assert kinds["collective"]["measure"] > 0
    assert kinds["collective"]["group"] > 0
    assert kinds["judgement"]["own"] > 0
    assert f"where {timings['seconds']:.3g}"[:7] in job.stdout


def test_a_failed_run_is_judged_again_the_same(start, tmp_path):
    record = tmp_path / "run.jsonl"
    options = ("--select", "COL001", "--json", "{json}", "--record", str(record))
    job = start(*CHECK, "--nproc-per-node", "2", *options, DDPDIAG_TEST_FAULT="raise 1")
    assert job.wait() == 1
    assert all(json.loads(line) for line in record.read_text().splitlines())
    again = start("-m", "ddpdiag", "judge", str(record), "--json", "{json}")
    assert again.wait() == 1, again.told()
    assert again.report == job.report
    assert again.stdout == job.stdout
    job.check_left_nothing()


def test_a_slow_import_is_no_hang(start):
    """The deadline of a short check does not count what torch needs to come."""
    options = ("--select", "RDZ001", "--set", "RDZ001.deadline_seconds=3", "--json", "{json}")
    check_fit(start(*CHECK, "--nproc-per-node", "2", *options, DDPDIAG_TEST_FAULT="slow-import 1"), 2, "standalone")
