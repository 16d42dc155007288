"""What Slurm tells a process: a task of a step, or the body of a batch script.

Only `srun` launches. In the body of a batch script Slurm sets SLURM_PROCID and the job's lists, but no SLURM_STEP_ID;
the shell of an interactive `salloc` runs in a pseudo step, whose id lies above those of true steps.
"""

import re
from itertools import islice, product

from msgspec import Struct

from ddpdiag.errors import UsageError
from ddpdiag.runtime.said import Environ, Said, check_below, needed, number, one_host

# slurm.h: SLURM_INTERACTIVE_STEP is 0xfffffffa, SLURM_BATCH_SCRIPT 0xfffffffb, SLURM_EXTERN_CONT 0xfffffffc;
# SLURM_MAX_NORMAL_STEP_ID is 0xfffffff0.
FIRST_PSEUDO_STEP = 0xFFFFFFF0
# More hosts than any cluster has: a list that claims more would only fill the memory.
_MOST_HOSTS = 1 << 16


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
    hosts: tuple[str, ...] = ()  # of each task, in rank 0 only; empty where the variables do not tell


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
        hosts=_hosts(env, tasks.value, per_node) if rank.value == 0 else (),
    )


def _hosts(env: Environ, tasks: int, per_node: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    if sum(count * repeated for count, repeated in per_node) != tasks:
        return ()
    return task_hosts(env.get("SLURM_STEP_NODELIST", ""), per_node, env.get("SLURM_DISTRIBUTION", "block"))


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


def task_hosts(nodelist: str, per_node: tuple[tuple[int, int], ...], distribution: str) -> tuple[str, ...]:
    """The host of each task: block by block, or in turn (srun -m cyclic). None for other ways (plane, arbitrary)."""
    counts = [count for count, repeated in per_node for _ in range(min(repeated, _MOST_HOSTS))]
    hosts = expanded(nodelist)
    method = distribution.partition(":")[0].partition(",")[0]
    if len(hosts) != len(counts) or method not in ("block", "cyclic", "unknown"):
        return ()
    if method == "cyclic":
        turns = range(max(counts, default=0))
        return tuple(host for turn in turns for host, count in zip(hosts, counts, strict=True) if turn < count)
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def expanded(nodelist: str) -> tuple[str, ...]:
    """All hosts of "z[9,1-3],a1" in Slurm's own order: z9 z1 z2 z3 a1; none if it cannot be read or is too long."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist.strip()):
        pieces = re.split(r"\[([^\]]*)\]", part)  # every second one stood in brackets
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        hosts += map("".join, islice(product(*choices), _MOST_HOSTS + 1))
        if not all(choices) or len(hosts) > _MOST_HOSTS:
            return ()
    return tuple(hosts)


def _numbers(text: str) -> list[str]:
    """ "08-10,12" as 08, 09, 10, 12; nothing if it is none such."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += (f"{number:0{len(match[1])}}" for number in range(first, min(last, first + _MOST_HOSTS) + 1))
    return numbers


def first_of(nodelist: str) -> str:
    """The first host of "z[9,1-3],a1", here "z9", in Slurm's own order: rank 0 runs there.

    Not with ClusterShell: a NodeSet is sorted, and would say "a1".
    """
    first = re.match(r"(?:[^\[\],]|\[[^\]]*\])*", nodelist.strip())
    name = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
    if not name:
        raise UsageError(f"SLURM_STEP_NODELIST={nodelist!r}: expected the hosts of the step.")
    return one_host(name, f"SLURM_STEP_NODELIST={nodelist}")


def leaf_of(env: Environ, host: str) -> str:
    """The switch above this host: "leaf3" of SLURM_TOPOLOGY_ADDR=root.leaf3.node7; empty where Slurm tells of none.

    The pattern (switch.switch.node) says where the host's name begins, which may have dots itself. A script that hands
    its own variables on to other hosts (mpirun -x) must not put all of them on its own leaf, so the name must be ours.
    """
    kinds = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = env.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(parts) != len(kinds) or len(kinds) < 2 or kinds[-1] != "node":
        return ""
    return parts[-2] if parts[-1].partition(".")[0] == host.partition(".")[0] else ""


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
