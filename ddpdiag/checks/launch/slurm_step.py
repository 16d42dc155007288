"""The job step, as Slurm laid it out.

Only `srun` launches tasks; sbatch and salloc only allocate. This check reads Slurm's variables in every task, and
reports layouts that break a job.

Findings:

Other checks report: more ranks than GPUs, or idle GPUs (LCH001); GPUs that --gpus-per-task and --gpu-bind hide from
other ranks, so that NCCL cannot copy between them (GPU001.isolated); tasks that never joined, by host (RUN001).

Fix: give --nodes, --ntasks and --cpus-per-task to srun itself, and take rank, size and coordinator from the step
(SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST), never from the job.

Confirm by hand: `srun -N 2 -n 4 env | grep ^SLURM_ | sort` in the job, `scontrol show job $SLURM_JOB_ID` and
`scontrol show step $SLURM_JOB_ID`; `srun taskset -pc 0` for the processors of each task.

Sources: srun(1), output environment variables and --cpus-per-task; the release notes of Slurm 20.11 (--overlap) and
22.05 (SRUN_CPUS_PER_TASK); all of it observed with Slurm 22.05.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, optional
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.model import EventKind, Finding, Scalar, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.environment import job_step_id, slurm_variables
from ddpdiag.text import count

FINDINGS = {
    "torchruns": FindingSpec(
        "srun started several tasks, and each task started a torchrun that is not connected to the others. "
        "--ntasks-per-node=1 does not help in a job with more tasks than nodes: srun ignores it there."
    ),
    "cpus": FindingSpec.warning(
        "since Slurm 22.05 srun does not take --cpus-per-task from sbatch or salloc (srun(1)), so every task is bound "
        "to fewer processors than the job asked for; data loaders and threads then share them."
    ),
    "few-tasks": FindingSpec.error(
        "WORLD_SIZE was exported from the job's size, but the step has fewer tasks: they wait forever for ranks that "
        "do not exist."
    ),
    "time-left": FindingSpec(
        "the job ends before the budget is used up; the budget was shortened, so that the report is ready in time. "
        "With less than 10 s left this is an error, except if the time comes from SLURM_JOB_END_TIME, which does not "
        "follow a changed time limit."
    ),
}

# The smallest budget plus the time to exit. With less time no check can run.
_TOO_LATE_SECONDS = 10.0


class Data(Struct, frozen=True, kw_only=True):
    """Slurm's variables in this rank's environment, and the number of processors that the rank may use."""

    variables: dict[str, str]
    cpus: int


def measure(ctx: Context) -> Data:
    return Data(variables=slurm_variables(os.environ), cpus=len(os.sched_getaffinity(0)))


class SlurmStep(NamedTuple):
    """A job step, as the `variables` of one task describe it. `name` is "JOB.STEP"; `tasks` and `hosts` are counts."""

    name: str
    tasks: int
    hosts: int
    variables: Mapping[str, str]


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip if no rank runs in a Slurm job. This is no failure, even if the launch stage was requested."""
    in_job = any(arrival.slurm_step for arrival in seen.world.arrivals.values())
    return optional(None if in_job else "no rank runs in a job of Slurm")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    yield from _time_left(seen)
    if (step := _first_step(seen)) is not None:
        yield from _separate_torchruns(seen, step)
        yield from _few_tasks(seen, step)
        yield from _too_few_cpus(seen)


def _first_step(seen: Seen[Data]) -> SlurmStep | None:
    """The step of the first rank that runs in a step of known size; None if there is no such rank."""
    for row in seen.by_rank.values():
        name, tasks = job_step_id(row.variables), _number(row.variables, "SLURM_STEP_NUM_TASKS")
        hosts = _number(row.variables, "SLURM_STEP_NUM_NODES")
        if "." in name and tasks and hosts:
            return SlurmStep(name, tasks, hosts, row.variables)
    return None


def _few_tasks(seen: Seen[Data], step: SlurmStep) -> Iterator[Finding]:
    """The finding if all tasks of the step joined, but WORLD_SIZE, which the job script exports, is larger."""
    has_absent_ranks = any(event.kind is EventKind.ABSENT for event in seen.recording.events)
    if has_absent_ranks and seen.world.launcher == "env" and len(seen.world.arrivals) == step.tasks < seen.world.size:
        yield seen.finding(
            "few-tasks",
            "WORLD_SIZE is larger than the number of tasks",
            f"WORLD_SIZE is {seen.world.size}, but step {step.name} has only {count(step.tasks, 'task')}, and all of "
            "them joined. The job would wait for ranks that do not exist until its time-out.",
            evidence={"world_size": seen.world.size, "tasks": step.tasks},
            fix=f"Start {seen.world.size} tasks: `srun --ntasks={seen.world.size} ...`. Or set the variables in each "
            "task, not in the batch script: `srun bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID "
            "WORLD_SIZE=$SLURM_STEP_NUM_TASKS; exec python train.py'`.",
            is_about_run=True,
        )


def _separate_torchruns(seen: Seen[Data], step: SlurmStep) -> Iterator[Finding]:
    """The finding if each task started a torchrun, and not all of these torchruns are in one rendezvous."""
    torchruns = _number(step.variables, "GROUP_WORLD_SIZE")  # the torchruns in this run's rendezvous
    if seen.world.launcher != "torchrun" or torchruns is None or torchruns >= step.tasks:
        return
    # If each task has its own GPUs, a torchrun for each task may be intended, as in a sweep.
    is_bound = "SLURM_GPUS_PER_TASK" in step.variables or "gpu" in step.variables.get("SLURM_TRES_PER_TASK", "")
    is_shared = step.tasks > step.hosts
    effect = "those on one host use the same GPUs and ports" if is_shared else "this run tests only a part of the hosts"
    ranks_per_host = "gpu" if seen.world.gpu_count else max(1, step.tasks // step.hosts)
    options = f"--nnodes={step.hosts} --nproc-per-node={ranks_per_host}"
    if step.hosts > 1:
        options += f" --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint={seen.world.host_name(0)}:29500"
    yield seen.finding(
        "torchruns",
        "each srun task started a torchrun of its own",
        f"Step {step.name} has {step.tasks} tasks on {count(step.hosts, 'host')}, and each task started a torchrun. "
        f"Only {torchruns} of the {step.tasks} joined this rendezvous, so the torchruns train separately, and "
        f"{effect}. One torchrun per host is expected, all in one rendezvous.",
        severity=Severity.ERROR if is_shared and not is_bound else Severity.WARNING,
        evidence={"tasks": step.tasks, "hosts": step.hosts, "torchruns_that_met": torchruns},
        fix=f"Start one torchrun per host: `srun --nodes={step.hosts} --ntasks={step.hosts} torchrun {options} -m "
        "ddpdiag check`, and your script in the same way. Or start it without torchrun: `srun ddpdiag check`.",
        is_about_run=True,
    )


def _too_few_cpus(seen: Seen[Data]) -> Iterator[Finding]:
    """The finding on ranks that may use fewer processors than SLURM_CPUS_PER_TASK."""
    cpus_per_task = {rank: _number(row.variables, "SLURM_CPUS_PER_TASK") for rank, row in seen.by_rank.items()}
    requested = {rank: cpus for rank, cpus in cpus_per_task.items() if cpus and seen.by_rank[rank].cpus < cpus}
    if not requested:
        return
    first = min(requested)
    cpus = seen.by_rank[first].cpus
    yield seen.finding(
        "cpus",
        "tasks have fewer CPUs than --cpus-per-task",
        f"The job asked for {count(requested[first], 'CPU')} per task (SLURM_CPUS_PER_TASK), but rank {first} on "
        f"{seen.world.host_name(first)} may use only {count(cpus, 'CPU')}. Since Slurm 22.05 srun does not take "
        "--cpus-per-task from sbatch.",
        ranks=tuple(requested) if len(requested) < len(seen.by_rank) else (),
        evidence={"cpus": cpus, "cpus_per_task": requested[first]},
        fix=f"Give the option to srun as well: `srun --cpus-per-task={requested[first]} ...`. Or add this line to the "
        "batch script before srun: `export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK`.",
        is_about_run=True,
    )


def _time_left(seen: Seen[Data]) -> Iterator[Finding]:
    """The finding if the budget was shortened because the job ends sooner."""
    left_seconds, wanted_seconds = seen.options.job_left_seconds, seen.options.wanted_budget_seconds
    if left_seconds is None or wanted_seconds is None:
        return
    # The variable keeps the first time limit even after `scontrol update TimeLimit`. If unset, scontrol gave the time.
    is_current = not any("SLURM_JOB_END_TIME" in row.variables for row in seen.by_rank.values())
    is_too_late = left_seconds < _TOO_LATE_SECONDS and is_current
    yield seen.finding(
        "time-left",
        "the job ends before it can train" if is_too_late else "too little job time left for all checks",
        f"The job had {max(0.0, left_seconds):.0f} s left when ddpdiag started, less than the {wanted_seconds:g} s "
        f"that ddpdiag may take (--budget). ddpdiag limited itself to {seen.options.budget_seconds:.0f} s, so some "
        "checks may be missing.",
        severity=Severity.ERROR if is_too_late else Severity.WARNING,
        evidence={"left_seconds": round(left_seconds, 1), "budget_seconds": wanted_seconds},
        fix="Submit the job with a time limit that is at least "
        f"{math.ceil(wanted_seconds - left_seconds)} s longer (`sbatch --time=HH:MM:SS`)."
        + ("" if is_too_late else " If this report is enough, there is nothing to do."),
        is_about_run=True,
    )


def report(seen: Seen[Data]) -> Contribution:
    """Contribute the job's remaining seconds and the step's numbers of tasks and hosts, each only if it is known."""
    left_seconds = seen.options.job_left_seconds
    figures: dict[str, Scalar] = {"slurm.left_seconds": left_seconds} if left_seconds else {}
    if (step := _first_step(seen)) is not None:
        figures |= {"slurm.tasks": step.tasks, "slurm.hosts": step.hosts}
    return Contribution(figures=figures)


CHECK: Check[Data] = Check(__name__, "LCH004", "slurm", Stage.LAUNCH, Scope.RANK)
