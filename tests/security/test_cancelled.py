"""Runs on this host that are cancelled, at moments that are spread over them: no rank is blamed, and nothing is left.

A moment is a number of lines in rank 0's record, which grows with each trial and each outcome. On several hosts:
tests/hosts/test_cancelled_hosts.py, and scancel: tests/slurm/test_slurm_launch.py.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import CHECK, Job, accused

TWO = (*CHECK, "--nproc-per-node", "2", "--json", "{json}")
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
BOTH = pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """start(options): a run with two ranks."""
    jobs: list[Job] = []

    def starting(*options: str, stdout: int | None = None) -> Job:
        jobs.append(Job(tmp_path / f"job-{len(jobs)}", (*TWO, *options), {}, stdout))
        return jobs[-1]

    yield starting
    for job in jobs:
        job.destroy()


def cancelled(job: Job, moment: int, signum: int, *, group: bool) -> None:
    """The run, told to end at that moment: its launcher alone, or the whole process group as at a terminal."""
    job.wait_until(lambda: job.recorded() >= moment or job.json.exists() or job.is_over())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, signum) if group else job.process.send_signal(signum)
    code = job.wait()
    over = job.report["verdict"] == "fit"  # before the signal
    assert code in (CODES[signum], 0 if over else CODES[signum]), job.told()
    assert over or job.report["exit_code"] == code, job.told()
    assert accused(job.report) == set(), job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


@pytest.mark.parametrize(
    ("moment", "signum", "group"),
    [
        (1, signal.SIGTERM, False),
        (6, signal.SIGTERM, True),
        pytest.param(3, signal.SIGINT, True, marks=pytest.mark.deep),
        pytest.param(11, signal.SIGINT, False, marks=pytest.mark.deep),
    ],
)
def test_a_cancelled_run_blames_no_rank(start, moment, signum, group):
    cancelled(start("--select", "LCH003,RDZ001,COL001"), moment, signum, group=group)


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("moment", range(1, 31))
def test_a_cancelled_run_blames_no_rank_at_any_moment(start, moment, signum):
    cancelled(start(), moment, signum, group=bool(moment % 4 == 1))


@pytest.mark.deep
@BOTH
def test_one_rank_that_is_told_to_end_ends_the_run_and_is_not_blamed(start, signum):
    job = start("--select", "LCH003,RDZ001,COL001")
    job.wait_until(lambda: job.recorded() >= 6)
    job.supervisor(1).kill(signum)
    assert job.wait() == CODES[signum], job.told()
    assert (job.report["exit_code"], accused(job.report)) == (CODES[signum], set()), job.told()
    job.check_left_nothing()


@pytest.mark.deep
@BOTH
def test_a_signal_while_the_report_is_written_gives_its_exit_code(start, signum):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"\n" * 65536):
            pass
    os.set_blocking(writer, True)
    job = start("--select", "LCH003", stdout=writer)
    os.close(writer)
    job.wait_until(job.json.exists)  # before it is printed, for which there is no room
    job.process.send_signal(signum)
    job.wait_until(lambda: job.recorded(1, '"leaving"'))  # the launcher tells rank 0 first
    while os.read(reader, 65536):
        pass
    os.close(reader)
    assert job.wait() == CODES[signum], job.told()
    assert (job.report["verdict"], job.errors) == ("fit", [])
    job.check_left_nothing()
