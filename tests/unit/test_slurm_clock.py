"""How long a job runs on, as Slurm says."""

import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.launchers.slurm import cut_budget, job_left_seconds

JOB = {"SLURM_JOB_ID": "7"}
# Of a job that began at 1,000,000 s and ends after 90,700 s, 90,600 s of which it has run.
ANSWER = "JobId=7 RunTime=1-01:10:00 TimeLimit=1-01:11:40 StartTime=1000000 EndTime=1090700 Deadline=N/A"


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """A program of that name, the only one on the PATH; it says which arguments and time format it got."""
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$* $SLURM_TIME_FORMAT" >>{folder}/asked\n{text}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "asked"


def test_the_variable_is_believed_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scontrol(tmp_path, monkeypatch, "true")
    left = job_left_seconds({**JOB, "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert left is not None
    assert 98 < left <= 100
    assert not asked.exists()


@pytest.mark.parametrize(("start", "end"), [(-7200, -3600), (3600, 7200)])
def test_a_clock_that_cannot_be_right_tells_nothing(start: int, end: int) -> None:
    now = int(time.time())
    times = {"SLURM_JOB_START_TIME": str(now + start), "SLURM_JOB_END_TIME": str(now + end)}
    assert job_left_seconds({**JOB, **times}) is None


def test_without_it_scontrol_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scontrol(tmp_path, monkeypatch, f'echo "{ANSWER}"')
    assert job_left_seconds(JOB) == 100
    assert asked.read_text() == "--oneliner show job 7 %s\n"


def test_of_a_job_array_only_the_task_of_this_job_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last task has the array's own number: asked for that, Slurm answers with all of them."""
    mine = ANSWER.replace("JobId=7", "JobId=7 ArrayJobId=7 ArrayTaskId=3")
    task = ANSWER.replace("JobId=7", "JobId=70 ArrayJobId=7 ArrayTaskId=1")
    other = task.replace("EndTime=1090700", "EndTime=1090605")
    scontrol(tmp_path, monkeypatch, f"echo '{other}'; echo '{mine}'; echo '{other}'")
    assert job_left_seconds(JOB) == 100


@pytest.mark.parametrize(
    "text",
    [
        f"echo '{ANSWER.replace('JobId=7', 'JobId=70')}'",
        f"echo '{ANSWER}'; echo '{ANSWER}'",
        "exit 1",
        "echo EndTime=Unknown",
        "printf '\\377\\0'",
        f"echo '{ANSWER.replace('EndTime=1090700', 'EndTime=2026-11-22T05:24:57')}'",
        f"echo '{ANSWER.replace('RunTime=1-01:10:00', 'RunTime=INVALID')}'",
    ],
)
def test_an_answer_without_an_end_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    scontrol(tmp_path, monkeypatch, text)
    assert job_left_seconds(JOB) is None


def test_without_scontrol_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_left_seconds(JOB) is None


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": "$(id)"}, {**JOB, "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}])
def test_outside_of_a_job_and_in_a_prolog_nobody_is_asked(tmp_path: Path, monkeypatch, env: dict[str, str]) -> None:
    asked = scontrol(tmp_path, monkeypatch, "true")
    assert job_left_seconds(env) is None
    assert not asked.exists()


def test_a_slurmctld_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "exec sleep 3000")
    assert job_left_seconds(JOB) is None


@given(st.floats(5, 1e6), st.none() | st.floats(-1e6, 1e6))
def test_a_budget_only_shrinks_and_ends_before_the_job(budget: float, left: float | None) -> None:
    own = cut_budget(budget, left)
    assert DEADLINES.min_budget <= own <= budget
    if left is None or left - DEADLINES.before_job_end >= budget:
        assert own == budget
    elif left >= DEADLINES.min_budget + DEADLINES.before_job_end:
        assert own <= left - DEADLINES.before_job_end
