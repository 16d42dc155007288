"""Healthy runs in every way of starting one, and what is reported when ranks are doubled or alone."""

import os
import shlex
import subprocess
import sys

import pytest
from jobs import CHECK, Job, by_hand, free_port, torchrun

FILES = ("html", "markdown", "prometheus", "write-failing-hosts", "write-healthy-hosts", "write-workaround")


def check_fit(job: Job, ranks: int, launcher: str) -> None:
    """A healthy run: one report, FIT, and nothing left."""
    assert job.wait(90) == 0, job.told()
    report = job.report
    assert (report["verdict"], report["exit_code"]) == ("fit", 0), job.told()
    assert (report["world"]["size"], report["world"]["launcher"]) == (ranks, launcher)
    assert [row["rank"] for row in report["ranks"]] == list(range(ranks))
    assert job.errors == []
    assert job.reports == 1, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


@pytest.mark.deep
def test_a_temporary_folder_may_have_any_name(start, tmp_path):
    folder = tmp_path / "what? #1;%20\n"
    folder.mkdir()
    job = start(*CHECK, "--nproc-per-node", "2", "--select", "RDZ001", "--json", "{json}", TMPDIR=str(folder))
    check_fit(job, 2, "standalone")
    assert list(folder.iterdir()) == []


def test_standalone_tests_everything_and_its_recording_is_judged_again_the_same(start, tmp_path):
    shared, record = tmp_path / "shared", tmp_path / "run.jsonl"
    for folder in (shared, tmp_path / "check", tmp_path / "judge"):
        folder.mkdir()

    def files(command: str) -> list[str]:
        return [word for name in FILES for word in (f"--{name}", str(tmp_path / command / name))]

    options = ("--json", "{json}", "--record", str(record), "--shared-dir", str(shared), *files("check"))
    job = start(*CHECK, "--nproc-per-node", "2", *options)
    check_fit(job, 2, "standalone")
    assert list(shared.iterdir()) == []
    # A warning is done, too: where others use the cores, a rank may hold the other one back.
    assert {"rendezvous", "collective", "training"} <= {
        s["name"] for s in job.report["stages"] if s["status"] in ("done", "warning")
    }

    again = start("-m", "ddpdiag", "judge", str(record), "--json", "{json}", *files("judge"))
    assert again.wait() == 0, again.told()
    assert again.report == job.report
    assert again.stdout == job.stdout
    written, judged = ({name: (tmp_path / of / name).read_text() for name in FILES} for of in ("check", "judge"))
    assert written == judged
    begins = {"html": "<!DOCTYPE html>", "markdown": "**FIT:**", "prometheus": "# HELP ddpdiag_"}
    assert {name: text for name, text in begins.items() if not written[name].startswith(text)} == {}
    assert (written["write-failing-hosts"], written["write-healthy-hosts"]) == ("", f"{os.uname().nodename}\n")
    assert [line for line in written["write-workaround"].splitlines() if not line.startswith("#")] == []


@pytest.mark.deep
def test_torchrun_meets_twenty_times_through_its_own_store_and_says_how_far_it_is(start):
    options = ("--select", "LCH,RDZ001,COL001", "--set", "RDZ001.repeat=7", "--json", "{json}")
    job = start(*torchrun(2), *CHECK, *options)
    check_fit(job, 2, "torchrun")
    (rendezvous,) = [check for check in job.report["checks"] if check["code"] == "RDZ001"]
    assert rendezvous["statuses"] == {"done": 2 * 3 * 7}
    # One of the two says how far the run is, once for each stage.
    said = [line.partition("] ")[2].strip() for line in job.progress]
    assert said[0] == "2 ranks on 1 host", job.told()
    assert sorted(said[1:]) == sorted(f"{s['name']} done" for s in job.report["stages"] if s["status"] != "skipped")


@pytest.mark.deep
def test_torch_distributed_launch_passes_a_local_rank_and_a_slow_import_is_no_hang(start):
    """The deadline of a short check does not count what torch needs to come."""
    launch = ("-m", "torch.distributed.launch", "--nproc-per-node", "2", "--master-port", str(free_port()))
    options = ("--select", "RDZ001", "--set", "RDZ001.deadline_seconds=4", "--json", "{json}", "--quiet")
    slow = {"DDPDIAG_TEST_FAULT": "slow-import 1", "DDPDIAG_TEST_IMPORT_SECONDS": "4"}
    job = start(*launch, *CHECK, *options, **slow)
    assert job.wait(90) == 0, job.told()
    assert job.stdout.count("\n") == 1, job.told()
    assert (job.report["world"]["launcher"], job.errors, job.progress) == ("torchrun", [], [])


@pytest.mark.deep
def test_two_shells_that_spell_the_coordinator_differently_meet(start):
    port = free_port()
    second, first = (
        start(*by_hand(rank, 2, port, "--select", "COL001", address=address))
        for rank, address in ((1, "127.0.0.1"), (0, "localhost"))
    )
    check_fit(first, 2, "hand")
    assert second.wait() == 0
    assert second.stdout == ""
    second.check_left_nothing()


@pytest.mark.deep
@pytest.mark.parametrize("skip", ["training", pytest.param("host", marks=pytest.mark.deep)])
def test_one_rank_alone_says_what_is_not_known(start, skip):
    job = start(*CHECK, "--nproc-per-node", "1", "--skip-stage", skip, "--json", "{json}")
    check_fit(job, 1, "standalone")
    assert "COL001" in {check["code"] for check in job.report["checks"] if check["skipped_because"]}


@pytest.mark.deep
def test_processes_that_come_twice_are_told_so(start):
    """A rank 1 before rank 0 and one after it, and another rank 0; rank 2 lets those who may stay begin."""
    port, wait = free_port(), ("--select", "LCH001", "--join-timeout", "60")
    early, first = (start(*by_hand(rank, 3, port, *wait)) for rank in (1, 0))
    first.wait_until(lambda: list(first.temporary.glob("ddpdiag-*")))
    late, other = (start(*by_hand(rank, 3, port, *wait)) for rank in (1, 0))
    first.wait_until(lambda: other.is_over() and (early.is_over() or late.is_over()), 60)
    refused, second = (early, late) if early.is_over() else (late, early)
    for rank, job in ((1, refused), (0, other)):
        assert job.wait() == 2, job.told()
        (sentence,) = job.stderr.splitlines()
        assert sentence.startswith("ddpdiag: ")
        assert f"rank {rank} " in sentence
        assert job.stdout == ""
    third = start(*by_hand(2, 3, port, *wait))
    assert [job.wait() for job in (first, second, third)] == [1, 1, 1], first.told()
    assert {(f["code"], *f["ranks"]) for f in first.errors} == {("LCH001.duplicate", 0), ("LCH001.duplicate", 1)}
    for job in (early, first, late, other, third):
        assert not job.has_traceback, job.told()
        job.check_left_nothing()


def test_a_wrong_world_size_is_told_and_nothing_else(start):
    port = free_port()
    jobs = [start(*by_hand(rank, size, port, "--select", "LCH001")) for rank, size in enumerate((3, 3, 4))]
    assert [job.wait() for job in jobs] == [1, 1, 1], jobs[0].told()
    (finding,) = jobs[0].errors
    assert (finding["code"], finding["ranks"]) == ("LCH001.world-size", [2])
    assert "4 on rank 2, but 3 on ranks 0-1" in finding["message"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to hide /proc")
def test_a_host_without_proc_is_one_sentence():
    words = "mount -t tmpfs none /proc && exec " + shlex.join([sys.executable, *CHECK, "--nproc-per-node", "2"])
    done = subprocess.run(["unshare", "-m", "sh", "-c", words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "/proc" in done.stderr
