"""One training in each way of starting it, in real processes."""

import json
import signal

from jobs import processes, torchrun

COMPARE = ("-m", "ddpdiag", "train", "--compare-launchers", "--nproc-per-node", "2", "--rounds", "1", "--steps", "6")
LEARNT = ["environment", "environment", "--local-rank", "environment", "spawn's argument", "environment"]


def test_every_way_starts_the_same_training(start):
    # OMP_NUM_THREADS is set for the job, so that all ways take the same, and no control is needed.
    job = start(*COMPARE, "--json", "{json}")
    assert job.wait(100) == 0, job.told()
    report = json.loads(job.json.read_text())
    assert [row["ended"] for row in report["rows"]] == ["works"] * 6, job.told()
    assert [row["learnt_from"] for row in report["rows"]] == LEARNT
    for row in report["rows"]:
        assert 0 < row["launcher_seconds"] < row["start_seconds"] < row["rounds"][0]["seconds"]
        assert row["step_seconds"] > 0
        assert row["threads"] == [1, 1]
    assert "6 of 6 ways of starting 2 ranks work" in job.stdout
    assert job.stderr == ""
    job.check_left_nothing()


def test_a_signal_ends_all(start):
    job = start(*COMPARE)
    job.wait_until(lambda: len(processes(job.mark)) > 2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(60) == 130, job.told()
    assert "of starting 2 ranks work" in job.stdout
    job.check_left_nothing()


def test_a_process_that_was_launched_starts_nothing(start):
    job = start(*torchrun(2), *COMPARE[:3], "--compare-launchers")
    assert job.wait(60) != 0
    assert "of 2 already (launcher: torchrun)" in job.stderr
    job.check_left_nothing()
