"""LCH004: steps of Slurm, from the variables that it sets (as seen under 22.05, GPUs as srun(1) has them)."""

import pytest
from msgspec import structs
from seen import seen_of, skip_text, with_arrivals, with_events

from ddpdiag.checks.launch.slurm_step import CHECK, Data
from ddpdiag.model import Event, EventKind, RunOptions, Severity
from ddpdiag.probes.host.environment import SLURM_VARIABLES, job_step_id, slurm_variables

STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4"}


def seen(*, cpus=2, launcher="slurm", size=4, gpus=0, options=None, ranks_per_node=2, **variables):
    rows = {rank: Data(variables={**STEP, **variables}, cpus=cpus) for rank in range(size)}
    made = seen_of(CHECK, rows, gpus=gpus, options=options, ranks_per_node=ranks_per_node)
    return _started_by(made, launcher)


def _started_by(made, launcher):
    world = structs.replace(made.world, launcher=launcher)
    return type(made)(world, made.check, made.recording)


def found(made, *severities):
    wanted = severities or (Severity.ERROR, Severity.WARNING)
    return [finding for finding in CHECK.judge(made) if finding.severity in wanted]


ALONE = {"launcher": "torchrun", "GROUP_WORLD_SIZE": "1"}
PER_HOST = ALONE | {"SLURM_STEP_NUM_TASKS": "2"}
# The step, and the severity of its finding.
STEPS = {
    "torchruns that met": (PER_HOST | {"GROUP_WORLD_SIZE": "2"}, None),
    "several torchruns on a host that do not meet": (ALONE, ("torchruns", Severity.ERROR)),
    "a torchrun for each host": (PER_HOST, ("torchruns", Severity.WARNING)),
    "torchruns with GPUs of their own": (ALONE | {"SLURM_GPUS_PER_TASK": "1"}, ("torchruns", Severity.WARNING)),
    "the same since Slurm 23.11": (ALONE | {"SLURM_TRES_PER_TASK": "gres/gpu=1"}, ("torchruns", Severity.WARNING)),
    "a group size that no torchrun set": ({"GROUP_WORLD_SIZE": "1"}, None),
    "fewer processors": ({"cpus": 1, "SLURM_CPUS_PER_TASK": "8"}, ("cpus", Severity.WARNING)),
    "as many processors": ({"cpus": 8, "SLURM_CPUS_PER_TASK": "8"}, None),
    "more processors": ({"cpus": 16, "SLURM_CPUS_PER_TASK": "8"}, None),
    "tasks that are no number": ({"SLURM_STEP_NUM_TASKS": "many"}, None),
    "no tasks": ({"SLURM_STEP_NUM_TASKS": "0"}, None),
    "the shell of salloc": ({"SLURM_STEP_ID": "4294967290"}, None),
    "a job that is no number": ({"SLURM_JOB_ID": "\ud800"}, None),
    "a huge number of hosts": ({"SLURM_STEP_NUM_NODES": "9" * 99}, None),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_breaks_a_job_is_a_finding_that_blames_no_rank(golden, step):
    variables, expected = STEPS[step]
    findings = list(CHECK.judge(seen(**variables)))
    words = [(finding.code.removeprefix("LCH004."), finding.severity) for finding in findings]
    assert words == ([] if expected is None else [expected])
    assert all(finding.ranks == () for finding in findings)
    if findings:
        golden(*findings)


def test_a_world_that_is_larger_than_the_step_is_an_error():
    made = seen(launcher="env", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1")
    made = with_arrivals(made, {rank: made.world.arrivals[rank] for rank in (0, 1)})
    absent = [Event(kind=EventKind.ABSENT, rank=rank, seconds=15.0) for rank in (2, 3)]
    codes = [finding.code for finding in found(with_events(made, *absent))]
    assert codes == ["LCH004.few-tasks"]
    assert found(made) == []


@pytest.mark.parametrize(("left", "severity"), [(40.0, Severity.WARNING), (9.0, Severity.ERROR)], ids=["40 s", "9 s"])
def test_a_job_that_ends_early_is_told(golden, left, severity):
    options = RunOptions(job_left_seconds=left, wanted_budget_seconds=120.0, budget_seconds=left - 5)
    (finding,) = found(seen(options=options))
    assert (finding.code, finding.severity, finding.is_about_run) == ("LCH004.time-left", severity, True)
    golden(finding)


def test_an_end_that_may_have_been_put_off_is_a_warning():
    """scontrol update TimeLimit does not renew the variable."""
    options = RunOptions(job_left_seconds=4.0, wanted_budget_seconds=120.0)
    (finding,) = found(seen(options=options, SLURM_JOB_END_TIME="1000000"))
    assert finding.severity is Severity.WARNING


def test_enough_time_is_silent():
    assert found(seen(options=RunOptions(job_left_seconds=3600.0))) == []


def test_outside_of_a_step_only_the_time_is_judged():
    rows = {0: Data(variables={"SLURM_JOB_ID": "12"}, cpus=2)}
    options = RunOptions(job_left_seconds=40.0, wanted_budget_seconds=120.0)
    assert [f.code for f in CHECK.judge(seen_of(CHECK, rows, options=options))] == ["LCH004.time-left"]


def test_without_slurm_the_check_has_no_ground(golden):
    made = seen()
    golden(skip_text(CHECK, made.world))
    arrivals = {0: structs.replace(made.world.arrivals[0], slurm_step="12.0")}
    assert skip_text(CHECK, with_arrivals(made, arrivals).world) is None


def test_only_listed_variables_are_recorded():
    env = {**STEP, "SLURM_JOB_USER": "ada", "SLURM_SUBMIT_DIR": "/home/ada", "AWS_SECRET_ACCESS_KEY": "x"}
    assert slurm_variables(env) == dict(sorted(STEP.items()))
    assert len(slurm_variables({"SLURM_TRES_PER_TASK": "h" * 99_999})["SLURM_TRES_PER_TASK"]) == 4096
    assert not any("USER" in name or "DIR" in name or "KEY" in name for name in SLURM_VARIABLES)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "12.3"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "4294967290"}, "12"),
        ({"SLURM_JOB_ID": "x; rm", "SLURM_STEP_ID": "3"}, ""),
    ],
)
def test_a_job_and_its_step_have_a_name(env, name):
    assert job_step_id(env) == name
