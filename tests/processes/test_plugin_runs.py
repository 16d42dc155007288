"""`ddpdiag check --nagios`: one line, one of four exit codes, and the files as ever."""

import pytest
from jobs import CHECK, Job, free_port

ALONE = (*CHECK, "--nproc-per-node", "2", "--nagios", "--select", "LCH001,LCH002")


def line_of(job: Job, state: str) -> str:
    (line,) = job.stdout.splitlines()
    assert line.startswith(f"DDPDIAG {state} - "), job.told()
    return line


def test_a_healthy_host_is_ok_and_the_report_keeps_its_own_code(start):
    job = start(*ALONE, "--json", "{json}")
    assert job.wait() == 0, job.told()
    assert " | seconds=" in line_of(job, "OK")
    assert job.report["exit_code"] == 0
    job.check_left_nothing()


@pytest.mark.parametrize(
    ("options", "code", "state", "own"),
    [
        (("--select", "GPU001", "--expect-gpus", "64"), 2, "CRITICAL", 1),
        (("--rank", "0", "--world-size", "2", "--board-wait", "1"), 3, "UNKNOWN", 3),
    ],
    ids=["gpus missing", "rank missing"],
)
def test_what_is_wrong_is_a_state_of_its_own(start, options, code, state, own):
    alone = () if "--rank" in options else ("--nproc-per-node", "2")
    ours = ("--master-addr", "127.0.0.1", "--master-port", str(free_port())) if "--rank" in options else ()
    job = start(*CHECK, *alone, *ours, "--nagios", "--select", "LCH001", *options, "--json", "{json}")
    assert job.wait() == code, job.told()
    line_of(job, state)
    assert job.report["exit_code"] == own


def test_a_file_that_cannot_be_written_is_no_critical_state(start):
    job = start(*ALONE, "--prometheus", "/nowhere/metrics.prom")
    assert job.wait() == 3, job.told()
    assert "cannot write /nowhere/metrics.prom" in line_of(job, "UNKNOWN")
