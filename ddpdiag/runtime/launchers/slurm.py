"""The variables and commands of Slurm: the task of a step, the job's remaining time, and the topology of its hosts.

Only `srun` launches ranks. In the body of a batch script Slurm sets SLURM_PROCID and the job's lists, but not
SLURM_STEP_ID. The shell of an interactive `salloc` runs in a pseudo step, whose id is above those of true steps.
"""

import re
import time
from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.codec import read_bytes, readable
from ddpdiag.errors import UsageError
from ddpdiag.probes.host.environment import FIRST_PSEUDO_STEP, MAX_HOSTS, expand_hosts, tasks_on_node, tasks_per_node
from ddpdiag.probes.host.programs import run_until
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.launchers.launch import Environ, Setting, check_below, one_host, require, variable_number

_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


class Step(Struct, frozen=True, kw_only=True):
    """This process's task in a job step. `host_of_task` is the host of each task; empty if unknown or not task 0."""

    job_id: int
    step_id: int
    rank: Setting
    task_count: Setting
    local_rank: Setting | None
    local_task_count: Setting | None
    node_rank: Setting | None
    node_count: Setting | None
    one_task_per_node: bool
    first_node: str
    host_of_task: tuple[str, ...] = ()


def in_step(env: Environ) -> bool:
    """Whether `srun` started this process as a task."""
    step = variable_number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step.value < FIRST_PSEUDO_STEP


def read_step(env: Environ) -> Step:
    """This process's task, from the variables of the step, not those of the job. Call it only if `in_step`."""
    step = variable_number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    step = require(step, "SLURM_STEP_ID", "srun is the launcher", "a step")
    job = require(variable_number(env, "SLURM_JOB_ID", "SLURM_JOBID"), "SLURM_JOB_ID", step, "the job's number")
    task_count = variable_number(env, "SLURM_STEP_NUM_TASKS")
    task_count = require(task_count, "SLURM_STEP_NUM_TASKS", step, "the number of tasks")
    rank = require(variable_number(env, "SLURM_PROCID"), "SLURM_PROCID", step, f"0 to {task_count.value - 1}")
    check_below(rank, task_count)
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node_count, node_rank = variable_number(env, "SLURM_STEP_NUM_NODES"), variable_number(env, "SLURM_NODEID")
    check_below(node_rank, node_count)
    local_rank, local_task_count = variable_number(env, "SLURM_LOCALID"), None
    if per_node and node_rank:
        count = tasks_on_node(per_node, node_rank.value)
        local_task_count = Setting("tasks on this node by SLURM_STEP_TASKS_PER_NODE", count)
        check_below(local_rank, local_task_count)
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    knows_hosts = rank.value == 0 and sum(count * repeated for count, repeated in per_node) == task_count.value
    return Step(
        job_id=job.value,
        step_id=step.value,
        rank=rank,
        task_count=task_count,
        local_rank=local_rank,
        local_task_count=local_task_count,
        node_rank=node_rank,
        node_count=node_count,
        one_task_per_node=bool(per_node) and all(count == 1 for count, _ in per_node),
        first_node=first_host(nodelist),
        host_of_task=task_hosts(nodelist, per_node, env.get("SLURM_DISTRIBUTION", "block")) if knows_hosts else (),
    )


def task_hosts(nodelist: str, per_node: tuple[tuple[int, int], ...], distribution: str) -> tuple[str, ...]:
    """The host of each task, for the block and cyclic distributions of `srun -m`; empty for any other."""
    counts = [count for count, repeated in per_node for _ in range(min(repeated, MAX_HOSTS))]
    hosts = expand_hosts(nodelist)
    method = distribution.partition(":")[0].partition(",")[0]
    if len(hosts) != len(counts) or method not in ("block", "cyclic", "unknown"):
        return ()
    if method == "cyclic":
        turns = range(max(counts, default=0))
        return tuple(host for turn in turns for host, count in zip(hosts, counts, strict=True) if turn < count)
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def node_name(env: Environ, host: str, *, may_be_copied: bool = False) -> str:
    """Slurm's name of this host, or `host`, its own name, if Slurm's is not known. scontrol accepts only Slurm's name.

    The two names may differ by a domain, or completely (NodeName and NodeHostname in slurm.conf). A node that differs
    only by its domain is this host if there is exactly one. If not, SLURMD_NODENAME is the name, but not if it may be
    that of another host (`may_be_copied`): an MPI launcher such as hydra passes on all variables of mpiexec.
    """
    slurmd_name = env.get("SLURMD_NODENAME", "").strip()
    if host == slurmd_name or (slurmd_name and not _NODE_NAME.fullmatch(slurmd_name)):
        return host
    nodes = expand_hosts(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_STEP_NODELIST", "")) or (slurmd_name,)
    same_names = tuple(dict.fromkeys(name for name in nodes if _without_domain(name) == _without_domain(host)))
    if host in nodes or len(same_names) == 1:
        return host if host in nodes else same_names[0]
    possible_names = same_names or (() if may_be_copied else nodes)
    return slurmd_name if slurmd_name and slurmd_name in possible_names else host


def _without_domain(name: str) -> str:
    return name.partition(".")[0]


def first_host(nodelist: str) -> str:
    """The host of rank 0: the first host of a list in Slurm's order, such as "z9" of "z[9,1-3],a1".

    ClusterShell's NodeSet is of no use, because it is sorted, and would give "a1".
    """
    first = re.match(r"(?:[^\[\],]|\[[^\]]*\])*", nodelist.strip())
    name = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
    if not name:
        raise UsageError(f"SLURM_STEP_NODELIST={nodelist!r}: expected the hosts of the step")
    return one_host(name, f"SLURM_STEP_NODELIST={nodelist}")


def leaf_switch(env: Environ, host: str) -> str:
    """The switch above this host, such as "leaf3" if SLURM_TOPOLOGY_ADDR=root.leaf3.node7; empty if Slurm names none.

    SLURM_TOPOLOGY_ADDR_PATTERN (switch.switch.node) gives the number of parts, as the host's name may contain dots. The
    address must name this host, because a script may pass the variables of one host on to others (mpirun -x).
    """
    kinds = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = env.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(parts) != len(kinds) or len(kinds) < 2 or kinds[-1] != "node":
        return ""
    return parts[-2] if _without_domain(parts[-1]) == _without_domain(host) else ""


def check_master_addr(env: Environ, address: str, step: Step) -> None:
    """UsageError if MASTER_ADDR is a node of the job but not of the step, because rank 0 of the step cannot run there.

    Scripts export such an address if they take the first node of SLURM_JOB_NODELIST, and all ranks would wait for a
    host on which no process listens. A name that Slurm does not know (an address, another network) is accepted.
    """
    job, step_nodes = expand_hosts(env.get("SLURM_JOB_NODELIST", "")), expand_hosts(env.get("SLURM_STEP_NODELIST", ""))
    short = _without_domain(address)
    if short in job and step_nodes and short not in step_nodes:
        raise UsageError(
            f"MASTER_ADDR={address} is a node of job {step.job_id}, but not of its step {step.job_id}.{step.step_id} "
            f"({env['SLURM_STEP_NODELIST']}), so no rank runs there: expected {step.first_node}, the first node of the "
            "step; unset MASTER_ADDR, or take it from SLURM_STEP_NODELIST within the step"
        )


def exported_rank_notice(env: Environ, rank: Setting, world: Setting) -> str:
    """A warning if the batch script exported RANK=0 for all tasks, which would all join as rank 0; else empty."""
    if "TORCHELASTIC_RUN_ID" in env or not in_step(env):
        return ""
    task, tasks = variable_number(env, "SLURM_PROCID"), variable_number(env, "SLURM_STEP_NUM_TASKS")
    if rank.value != 0 or not task or not tasks or task.value == 0 or tasks.value != world.value:
        return ""
    return (
        f"{rank}, but {task} of {tasks.value} tasks: a RANK that is exported before srun is 0 in every task; unset "
        "RANK and WORLD_SIZE, or set them within the task: srun bash -c 'RANK=$SLURM_PROCID exec ...'"
    )


def batch_notice(env: Environ, host: str) -> str:
    """For a process of a job outside of any step: a sentence with the command that tests all hosts; else empty."""
    job = variable_number(env, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return ""
    nodes = variable_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    hosts = nodes.value if nodes else 1
    # slurmd sets SLURMD_NODENAME on the hosts of the job; a plain `salloc` shell stays on the login host.
    if hosts == 1 and "SLURMD_NODENAME" in env:
        return ""
    line = f"srun {_srun_options_for_job(env, hosts)} ddpdiag check"
    job_hosts = "host" if hosts == 1 else f"{hosts} hosts"
    return f"This tests {host} alone, not the {job_hosts} of Slurm job {job.value}; to test all of them: {line}"


def terminal_notice(env: Environ, step: Step) -> str:
    """For the shell of `srun --pty bash`, which is a step: a sentence with the command that tests the job; else empty.

    Since Slurm 20.11 steps share no resources by default: without --overlap a second step waits for the shell to end.
    """
    nodes = variable_number(env, "SLURM_JOB_NUM_NODES")
    if "SLURM_PTY_PORT" not in env or step.task_count.value != 1 or nodes is None or nodes.value == 1:
        return ""
    return (
        f"This tests the one task of this shell, not the {nodes.value} hosts of Slurm job {step.job_id}; to test all "
        f"of them: srun --overlap --nodes={nodes.value} --ntasks={nodes.value} ddpdiag check"
    )


def _srun_options_for_job(env: Environ, hosts: int) -> str:
    """The options of an srun that uses all nodes, tasks, CPUs and GPUs of the job.

    Both --nodes and --ntasks are needed: in a job of more tasks than nodes srun ignores --ntasks-per-node. Since Slurm
    22.05 srun ignores sbatch's --cpus-per-task, so the option is repeated.
    """
    tasks = variable_number(env, "SLURM_NTASKS", "SLURM_NPROCS")
    words = [f"--nodes={hosts}", f"--ntasks={max(hosts, tasks.value if tasks else 1)}"]
    for option, name in (("--cpus-per-task", "SLURM_CPUS_PER_TASK"), ("--gpus-per-node", "SLURM_GPUS_PER_NODE")):
        if re.fullmatch(r"[A-Za-z0-9_.:,-]+", env.get(name, "")):
            words.append(f"{option}={env[name]}")
    return " ".join(words)


# Slurm kills a job KillWait (30 s) after its time limit. A clock that differs from Slurm's by more than this is wrong.
_MAX_SKEW_SECONDS = 60.0


def job_left_seconds(env: Environ) -> float | None:
    """Seconds until the job's time limit, or None outside of Slurm, or if it is unknown. May run `scontrol`.

    Slurm 23.02 and later set the end in SLURM_JOB_END_TIME. An older Slurm is asked by `scontrol`. Only rank 0 calls
    this function, and it does not ask in a prolog, because thousands of calls would slow slurmctld down.
    """
    job = env.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", job):
        return None
    if end := _parse_epoch(env.get("SLURM_JOB_END_TIME", "")):
        start = _parse_epoch(env.get("SLURM_JOB_START_TIME", ""))
        now = time.time()
        # The job has begun, and did not end long ago. If the times disagree, this host's clock is wrong.
        if now - end > _MAX_SKEW_SECONDS or (start is not None and start - now > _MAX_SKEW_SECONDS):
            return None
        return end - now
    return None if "SLURM_SCRIPT_CONTEXT" in env else _left_seconds_by_scontrol(job)


def cut_budget(budget_seconds: float, left_seconds: float | None) -> float:
    """The budget, reduced so that the run ends before the job does, but not below the smallest budget."""
    if left_seconds is None:
        return budget_seconds
    return min(budget_seconds, max(DEADLINES.min_budget, left_seconds - DEADLINES.before_job_end))


def _parse_epoch(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _left_seconds_by_scontrol(job: str) -> float | None:
    """The job's time limit minus its run time, both from `scontrol`, not from this host's clock. None on failure."""
    command = ("env", "SLURM_TIME_FORMAT=%s", "scontrol", "--oneliner", "show", "job", job)
    try:
        result = run_until(command, time.monotonic() + DEADLINES.scontrol)
    except OSError:
        return None
    # Only the line of this job: the first number of a job array gets the lines of all its tasks.
    lines = result.stdout.decode(errors="replace").splitlines() if result is not None else []
    matching = [line for line in lines if re.match(rf"JobId={job}\b", line)]
    fields = dict(re.findall(r"\b(RunTime|StartTime|EndTime)=(\S+)", matching[0])) if len(matching) == 1 else {}
    start, end = (_parse_epoch(fields.get(name, "")) for name in ("StartTime", "EndTime"))
    run_time = re.fullmatch(r"(?:([0-9]{1,5})-)?([0-9]{2}):([0-9]{2}):([0-9]{2})", fields.get("RunTime", ""))
    if start is None or end is None or run_time is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in run_time.groups())
    return float(end - start - (days * 86_400 + hours * 3600 + minutes * 60 + seconds))


# A line of 100 bytes for each of 65,536 hosts.
_MAX_TOPOLOGY_BYTES = 8 << 20
_HOST_NAME = re.compile(r"[\w.:-]+")
# Parameters of Slurm's topology.conf, in upper or lower case. A line without Nodes is a switch of an upper level.
_SWITCH_NAME_KEYS = ("switchname", "blockname")
_TOPOLOGY_KEYS = (*_SWITCH_NAME_KEYS, "nodes", "switches", "linkspeed", "blocksizes")


def read_topology(path: str) -> dict[str, str]:
    """The leaf switch of each host, from lines "HOST LEAF", or "SwitchName=LEAF Nodes=n[0-31]" as Slurm's file has."""
    leaves: dict[str, str] = {}
    for line_number, line in _joined_lines(path):
        where = f"--topology {path}, line {line_number}"
        words = line.split()
        if "=" in words[0]:
            for host, leaf in _leaf_of_hosts(words, where).items():
                leaves.setdefault(host, leaf)  # in Slurm's file a host may be on several leaves
            continue
        if len(words) != 2:
            raise UsageError(f"{where}: {readable(line)!r}: expected HOST LEAF, or SwitchName=LEAF Nodes=HOSTS")
        for host in _hosts_in(words[0], where):
            if leaves.setdefault(host, words[1]) != words[1]:
                raise UsageError(f"{where}: {host} is on {words[1]} here and on {leaves[host]} above")
    if not leaves:
        raise UsageError(f"--topology {path}: it names no host; expected HOST LEAF, one host per line")
    return leaves


def _joined_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty, without its comment. A backslash joins the next line."""
    try:
        text = read_bytes(path, _MAX_TOPOLOGY_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise UsageError(f"--topology {path}: {reason}") from error
    joined_line, lines = "", text.splitlines()
    for line_number, line in enumerate(lines, 1):
        part = line.partition("#")[0].strip()
        joined_line += part.removesuffix("\\")
        if joined_line and (not part.endswith("\\") or line_number == len(lines)):
            yield line_number, joined_line
            joined_line = ""


def _leaf_of_hosts(words: list[str], where: str) -> dict[str, str]:
    """The leaf of each host in a line of Slurm's file; empty if the line is a switch of an upper level."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name.lower() not in _TOPOLOGY_KEYS:
            raise UsageError(f"{where}: {readable(word)!r}: expected SwitchName=LEAF Nodes=HOSTS")
        values[name.lower()] = value
    leaf = next((values[name] for name in _SWITCH_NAME_KEYS if name in values), None)
    if leaf is None and "nodes" in values:
        raise UsageError(f"{where}: Nodes without SwitchName: expected SwitchName=LEAF Nodes=HOSTS")
    return dict.fromkeys(_hosts_in(values["nodes"], where), leaf) if leaf and "nodes" in values else {}


def _hosts_in(nodelist: str, where: str) -> tuple[str, ...]:
    """The hosts of a list such as "n[0-31]", in Slurm's grammar: no name is a group, and the length is limited."""
    hosts = expand_hosts(nodelist) if nodelist.count("[") == nodelist.count("]") else ()
    if not hosts or not all(map(_HOST_NAME.fullmatch, hosts)):
        raise UsageError(f"{where}: {readable(nodelist)!r}: expected a host, or a list of hosts such as n[0-31,40]")
    return hosts
