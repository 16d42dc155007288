"""Slurm's variables: the task of a step or the body of a batch script, the job's remaining time, and the topology.

Only `srun` launches ranks. In the body of a batch script Slurm sets SLURM_PROCID and the job's lists, but not
SLURM_STEP_ID; the shell of an interactive `salloc` runs in a pseudo step, whose id is above those of true steps.
"""

import re
import time
from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.codec import read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.probes.host.environment import FIRST_PSEUDO_STEP, MOST_HOSTS, count_at, expanded, tasks_per_node
from ddpdiag.probes.host.programs import run_bounded
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.launchers.launch import Environ, Given, check_below, needed, number, one_host

_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


class Step(Struct, frozen=True, kw_only=True):
    """One task of a job step."""

    job_id: int
    step_id: int
    rank: Given
    tasks: Given
    local_rank: Given | None
    local_tasks: Given | None
    node_rank: Given | None
    nodes: Given | None
    one_task_per_node: bool
    first_node: str
    hosts: tuple[str, ...] = ()  # the host of each task, in rank 0 only; empty if the variables do not tell


def in_step(env: Environ) -> bool:
    """Whether `srun` started this process as a task."""
    step = number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step.value < FIRST_PSEUDO_STEP


def read_step(env: Environ) -> Step:
    """The task that this process is, from the step's variables and not the job's lists. Call it only if `in_step`."""
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
        local_tasks = Given("tasks on this node by SLURM_STEP_TASKS_PER_NODE", count_at(per_node, node_rank.value))
        check_below(local_rank, local_tasks)
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    known = rank.value == 0 and sum(count * repeated for count, repeated in per_node) == tasks.value
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
        first_node=first_of(nodelist),
        hosts=task_hosts(nodelist, per_node, env.get("SLURM_DISTRIBUTION", "block")) if known else (),
    )


def task_hosts(nodelist: str, per_node: tuple[tuple[int, int], ...], distribution: str) -> tuple[str, ...]:
    """The host of each task: block by block, or in turn (srun -m cyclic); empty for other ways (plane, arbitrary)."""
    counts = [count for count, repeated in per_node for _ in range(min(repeated, MOST_HOSTS))]
    hosts = expanded(nodelist)
    method = distribution.partition(":")[0].partition(",")[0]
    if len(hosts) != len(counts) or method not in ("block", "cyclic", "unknown"):
        return ()
    if method == "cyclic":
        turns = range(max(counts, default=0))
        return tuple(host for turn in turns for host, count in zip(hosts, counts, strict=True) if turn < count)
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def node_name(env: Environ, host: str, *, foreign: bool = False) -> str:
    """Slurm's name of this host, which calls itself `host`: --exclude and scontrol know only Slurm's name.

    NodeName and NodeHostname of slurm.conf may differ by a domain, or wholly. A name without its domain counts only if
    it means one node. Else SLURMD_NODENAME counts, unless a `foreign` launcher may have copied it from another host
    (hydra passes all variables of mpiexec on).
    """
    slurmd_name = env.get("SLURMD_NODENAME", "").strip()
    if host == slurmd_name or (slurmd_name and not _NODE_NAME.fullmatch(slurmd_name)):
        return host
    nodes = expanded(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_STEP_NODELIST", "")) or (slurmd_name,)
    alike = tuple(dict.fromkeys(name for name in nodes if _short(name) == _short(host)))
    if host in nodes or len(alike) == 1:
        return host if host in nodes else alike[0]
    possible = alike or (() if foreign else nodes)
    return slurmd_name if slurmd_name and slurmd_name in possible else host


def _short(name: str) -> str:
    return name.partition(".")[0]


def first_of(nodelist: str) -> str:
    """The first host of a list in Slurm's order, "z9" of "z[9,1-3],a1": rank 0 runs there.

    ClusterShell does not help: a NodeSet is sorted, and would give "a1".
    """
    first = re.match(r"(?:[^\[\],]|\[[^\]]*\])*", nodelist.strip())
    name = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
    if not name:
        raise UsageError(f"SLURM_STEP_NODELIST={nodelist!r}: expected the hosts of the step")
    return one_host(name, f"SLURM_STEP_NODELIST={nodelist}")


def leaf_of(env: Environ, host: str) -> str:
    """The switch above this host, "leaf3" of SLURM_TOPOLOGY_ADDR=root.leaf3.node7; empty if Slurm names none.

    The pattern (switch.switch.node) tells the position of the host's name, which may contain dots. The name must be
    this host's: a script that passes its variables on to other hosts (mpirun -x) must not put all of them on one leaf.
    """
    kinds = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = env.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(parts) != len(kinds) or len(kinds) < 2 or kinds[-1] != "node":
        return ""
    return parts[-2] if _short(parts[-1]) == _short(host) else ""


def check_master(env: Environ, address: str, step: Step) -> None:
    """UsageError for a MASTER_ADDR that is a node of the job but not of the step: rank 0 of the step cannot be there.

    Scripts export such an address if they take the first node of SLURM_JOB_NODELIST, and all ranks would wait for a
    host on which no process listens. A name that Slurm does not know (an address, another network) is accepted.
    """
    job, step_nodes = expanded(env.get("SLURM_JOB_NODELIST", "")), expanded(env.get("SLURM_STEP_NODELIST", ""))
    short = _short(address)
    if short in job and step_nodes and short not in step_nodes:
        raise UsageError(
            f"MASTER_ADDR={address} is a node of job {step.job_id}, but not of its step {step.job_id}.{step.step_id} "
            f"({env['SLURM_STEP_NODELIST']}), so no rank runs there: expected {step.first_node}, the first node of the "
            "step; unset MASTER_ADDR, or take it from SLURM_STEP_NODELIST within the step"
        )


def exported_note(env: Environ, rank: Given, world: Given) -> str:
    """A note if the batch script exported RANK=0 for all tasks (SLURM_PROCID is 0 there): all would join as rank 0."""
    if "TORCHELASTIC_RUN_ID" in env or not in_step(env):
        return ""
    task, tasks = number(env, "SLURM_PROCID"), number(env, "SLURM_STEP_NUM_TASKS")
    if rank.value != 0 or not task or not tasks or task.value == 0 or tasks.value != world.value:
        return ""
    return (
        f"{rank}, but {task} of {tasks.value} tasks: a RANK that is exported before srun is 0 in every task; unset "
        "RANK and WORLD_SIZE, or set them within the task: srun bash -c 'RANK=$SLURM_PROCID exec ...'"
    )


def batch_note(env: Environ, host: str) -> str:
    """A note for a process in a job but outside its steps: it tests this host alone, and how to test all hosts."""
    job = number(env, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return ""
    nodes = number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    hosts = nodes.value if nodes else 1
    # slurmd sets SLURMD_NODENAME on the hosts of the job; a plain `salloc` shell stays on the login host.
    if hosts == 1 and "SLURMD_NODENAME" in env:
        return ""
    line = f"srun {_whole_job_options(env, hosts)} ddpdiag check"
    job_hosts = "host" if hosts == 1 else f"{hosts} hosts"
    return f"This tests {host} alone, not the {job_hosts} of Slurm job {job.value}; to test all of them: {line}"


def terminal_note(env: Environ, step: Step) -> str:
    """A note for the shell of `srun --pty bash`, which is a step itself: the command that tests the whole job.

    Since Slurm 20.11 steps share no resources by default: without --overlap a second step waits for the shell to end.
    """
    nodes = number(env, "SLURM_JOB_NUM_NODES")
    if "SLURM_PTY_PORT" not in env or step.tasks.value != 1 or nodes is None or nodes.value == 1:
        return ""
    return (
        f"This tests the one task of this shell, not the {nodes.value} hosts of Slurm job {step.job_id}; to test all "
        f"of them: srun --overlap --nodes={nodes.value} --ntasks={nodes.value} ddpdiag check"
    )


def _whole_job_options(env: Environ, hosts: int) -> str:
    """srun's options for all nodes of the job, with its tasks, CPUs and GPUs.

    Both --nodes and --ntasks are needed: in a job of more tasks than nodes srun ignores --ntasks-per-node. Since Slurm
    22.05 srun does not take --cpus-per-task from sbatch, so it is repeated.
    """
    tasks = number(env, "SLURM_NTASKS", "SLURM_NPROCS")
    words = [f"--nodes={hosts}", f"--ntasks={max(hosts, tasks.value if tasks else 1)}"]
    for option, name in (("--cpus-per-task", "SLURM_CPUS_PER_TASK"), ("--gpus-per-node", "SLURM_GPUS_PER_NODE")):
        if re.fullmatch(r"[A-Za-z0-9_.:,-]+", env.get(name, "")):
            words.append(f"{option}={env[name]}")
    return " ".join(words)


# Slurm kills a job some KillWait (30 s) after its end; a clock that differs by more than this is wrong.
_SKEW_SECONDS = 60.0


def job_left_seconds(env: Environ) -> float | None:
    """Seconds until the job's time limit; None outside of Slurm, or if Slurm does not report it. May run `scontrol`.

    Slurm 23.02 and later set the end in SLURM_JOB_END_TIME. With an older one only rank 0 runs `scontrol`, once:
    thousands of tasks, or a prolog on each host, would slow slurmctld down.
    """
    job = env.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", job):
        return None
    if end := _epoch(env.get("SLURM_JOB_END_TIME", "")):
        start = _epoch(env.get("SLURM_JOB_START_TIME", ""))
        now = time.time()
        # Otherwise this host's clock is wrong: the job has begun, and did not end long ago.
        if now - end > _SKEW_SECONDS or (start is not None and start - now > _SKEW_SECONDS):
            return None
        return end - now
    return None if "SLURM_SCRIPT_CONTEXT" in env else _by_slurms_clock(job)


def within(budget_seconds: float, left_seconds: float | None) -> float:
    """The budget, cut so that the run ends before the job does; at least the smallest budget."""
    if left_seconds is None:
        return budget_seconds
    return min(budget_seconds, max(DEADLINES.least_budget, left_seconds - DEADLINES.leave_job))


def _epoch(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _by_slurms_clock(job: str) -> float | None:
    """Run `scontrol`, and return the job's limit less the time it ran; None if it does not answer in time.

    This host's clock is not used.
    """
    command = ("env", "SLURM_TIME_FORMAT=%s", "scontrol", "--oneliner", "show", "job", job)
    try:
        result = run_bounded(command, time.monotonic() + DEADLINES.scontrol)
    except OSError:
        return None
    # Only the line of this job: the first number of a job array gets the lines of all its tasks.
    lines = result.out.decode(errors="replace").splitlines() if result is not None else []
    matching = [line for line in lines if re.match(rf"JobId={job}\b", line)]
    fields = dict(re.findall(r"\b(RunTime|StartTime|EndTime)=(\S+)", matching[0])) if len(matching) == 1 else {}
    start, end = (_epoch(fields.get(name, "")) for name in ("StartTime", "EndTime"))
    ran = re.fullmatch(r"(?:([0-9]{1,5})-)?([0-9]{2}):([0-9]{2}):([0-9]{2})", fields.get("RunTime", ""))
    if start is None or end is None or ran is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in ran.groups())
    return float(end - start - (days * 86_400 + hours * 3600 + minutes * 60 + seconds))


# A line of 100 bytes for each of 65,536 hosts.
_MOST_BYTES = 8 << 20
_HOST_NAME = re.compile(r"[\w.:-]+")
# Parameters of Slurm's topology.conf, in any case. A line without Nodes is an upper level.
_SWITCHES = ("switchname", "blockname")
_KNOWN = (*_SWITCHES, "nodes", "switches", "linkspeed", "blocksizes")


def read_topology(path: str) -> dict[str, str]:
    """Leaf of each host, from lines "host leaf" or Slurm's "SwitchName=leaf Nodes=n[0-31]"; "#" begins a comment."""
    leaves: dict[str, str] = {}
    for line_number, line in _lines(path):
        where = f"--topology {path}, line {line_number}"
        words = line.split()
        if "=" in words[0]:
            for host, leaf in _switch(words, where).items():
                leaves.setdefault(host, leaf)  # Slurm lets a host hang on several leaves
            continue
        if len(words) != 2:
            raise UsageError(f"{where}: {readable(line)!r}: expected HOST LEAF, or SwitchName=LEAF Nodes=HOSTS")
        for host in _hosts_in(words[0], where):
            if leaves.setdefault(host, words[1]) != words[1]:
                raise UsageError(f"{where}: {host} is on {words[1]} here and on {leaves[host]} above")
    if not leaves:
        raise UsageError(f"--topology {path}: it names no host; expected HOST LEAF, one host per line")
    return leaves


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line with text, without comments; a backslash at its end continues a line."""
    try:
        text = read_bytes(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise UsageError(f"--topology {path}: {reason}") from error
    continued = ""
    for line_number, line in enumerate(text.splitlines(), 1):
        whole = continued + line.partition("#")[0].strip()
        continued = whole.removesuffix("\\") if whole.endswith("\\") else ""
        if whole and not continued:
            yield line_number, whole


def _switch(words: list[str], where: str) -> dict[str, str]:
    """The leaf of each host of one switch; empty for an upper level."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name.lower() not in _KNOWN:
            raise UsageError(f"{where}: {readable(word)!r}: expected SwitchName=LEAF Nodes=HOSTS")
        values[name.lower()] = value
    leaf = next((values[name] for name in _SWITCHES if name in values), None)
    if leaf is None and "nodes" in values:
        raise UsageError(f"{where}: Nodes without SwitchName: expected SwitchName=LEAF Nodes=HOSTS")
    return dict.fromkeys(_hosts_in(values["nodes"], where), leaf) if leaf and "nodes" in values else {}


def _hosts_in(nodelist: str, where: str) -> tuple[str, ...]:
    """The hosts of "n[0-31]". Slurm's grammar is used: no name means a group, and no list can fill the memory."""
    hosts = expanded(nodelist) if nodelist.count("[") == nodelist.count("]") else ()
    if not hosts or not all(map(_HOST_NAME.fullmatch, hosts)):
        raise UsageError(f"{where}: {readable(nodelist)!r}: expected a host, or a list of hosts such as n[0-31,40]")
    return hosts
