"""What Slurm tells a process: a task of a step, or the body of a batch script.

Only `srun` launches. In the body of a batch script Slurm sets SLURM_PROCID and the job's lists, but no SLURM_STEP_ID;
the shell of an interactive `salloc` runs in a pseudo step, whose id lies above those of true steps.
"""

import re

from msgspec import Struct

from ddpdiag.errors import UsageError
from ddpdiag.runtime.said import Environ, Said, check_below, needed, number, one_host

# slurm.h: SLURM_INTERACTIVE_STEP is 0xfffffffa, SLURM_BATCH_SCRIPT 0xfffffffb, SLURM_EXTERN_CONT 0xfffffffc;
# SLURM_MAX_NORMAL_STEP_ID is 0xfffffff0.
FIRST_PSEUDO_STEP = 0xFFFFFFF0


class Step(Struct, frozen=True, kw_only=True):
    """One task of a job step."""

    job_id: int
    step_id: int
    rank: Said
    tasks: Said
    local_rank: Said | None
    local_tasks: Said | None
    node_rank: Said | None
    nodes: Said | None
    one_task_per_node: bool
    first_node: str


def in_step(env: Environ) -> bool:
    """Whether `srun` started this process as a task."""
    step = number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step.value < FIRST_PSEUDO_STEP


def read_step(env: Environ) -> Step:
    """The task that this process is; call it only `in_step`. Reads the step's variables, never the job's lists."""
    step = needed(number(env, "SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_STEP_ID", "srun is the launcher", "a step")
    job = needed(number(env, "SLURM_JOB_ID", "SLURM_JOBID"), "SLURM_JOB_ID", step, "the job's number")
    tasks = needed(number(env, "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS", step, "the number of tasks")
    rank = needed(number(env, "SLURM_PROCID"), "SLURM_PROCID", step, f"0 to {tasks.value - 1}")
    check_below(rank, tasks)
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    nodes, node_rank = number(env, "SLURM_STEP_NUM_NODES"), number(env, "SLURM_NODEID")
    check_below(node_rank, nodes)
    local_rank, local_tasks = number(env, "SLURM_LOCALID"), None
    if per_node and node_rank:
        local_tasks = Said("tasks on this node by SLURM_STEP_TASKS_PER_NODE", count_at(per_node, node_rank.value))
        check_below(local_rank, local_tasks)
    return Step(
        job_id=job.value,
        step_id=step.value,
        rank=rank,
        tasks=tasks,
        local_rank=local_rank,
        local_tasks=local_tasks,
        node_rank=node_rank,
        nodes=nodes,
        one_task_per_node=bool(per_node) and all(count == 1 for count, _ in per_node),
        first_node=first_of(env.get("SLURM_STEP_NODELIST", "")),
    )


def tasks_per_node(text: str) -> tuple[tuple[int, int], ...]:
    """SLURM_STEP_TASKS_PER_NODE, "2(x3),1", as (tasks, nodes) pairs: ((2, 3), (1, 1)); empty if unreadable."""
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in text.split(",")]
    found = tuple((int(part[1]), int(part[2] or 1)) for part in parts if part)
    return found if len(found) == len(parts) else ()


def count_at(per_node: tuple[tuple[int, int], ...], node: int) -> int:
    """Tasks on the node with that number; 0 if there is none."""
    for count, repeated in per_node:
        if node < repeated:
            return count
        node -= repeated
    return 0


def first_of(nodelist: str) -> str:
    """The first host of "z[9,1-3],a1", here "z9", in Slurm's own order: rank 0 runs there.

    Not with ClusterShell: a NodeSet is sorted, and would say "a1".
    """
    first = re.match(r"(?:[^\[\],]|\[[^\]]*\])*", nodelist.strip())
    name = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
    if not name:
        raise UsageError(f"SLURM_STEP_NODELIST={nodelist!r}: expected the hosts of the step.")
    return one_host(name, f"SLURM_STEP_NODELIST={nodelist}")


def batch_note(env: Environ, host: str) -> str:
    """In a job but outside its steps: what a bare run leaves out, and the line that tests all hosts."""
    job = number(env, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return ""
    nodes = number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    hosts = nodes.value if nodes else 1
    # slurmd sets SLURMD_NODENAME on the hosts of the job; a plain `salloc` shell stays on the login host.
    if hosts == 1 and "SLURMD_NODENAME" in env:
        return ""
    tasks = number(env, "SLURM_NTASKS", "SLURM_NPROCS")
    line = f"srun --nodes={hosts} --ntasks={max(hosts, tasks.value if tasks else 1)} ddpdiag check"
    return f"This tests {host} alone, not the {hosts} host(s) of Slurm job {job.value}; to test all of them: {line}"
