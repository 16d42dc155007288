"""Limits of the processes: open files, locked memory, processes.

What counts are the limits of the rank that the launcher starts; a login shell may have higher ones. Too few open files
lead to "Too many open files" or "received 0 items of ancdata" from a data loader, or to a rendezvous that never
completes; too little locked memory leads to "ibv_reg_mr failed: Cannot allocate memory"; too few processes lead to
"Resource temporarily unavailable".

Findings:

Causes: limits of a service (slurmd, docker) that the job inherits. Fix: raise them there (LimitNOFILE=, LimitMEMLOCK=,
`docker --ulimit memlock=-1`, Slurm's PropagateResourceLimits), or call `ulimit -n` in the job script.

Confirm by hand: In the job, not in a login shell: `ulimit -n -l -u; cat /proc/self/limits; cat
/sys/fs/cgroup/pids.max`.

Sources: getrlimit(2); NCCL user guide, troubleshooting
(docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html), InfiniBand (memlock) and limits of open files;
PyTorch issue 973 (ancdata).
"""

import os
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import GIB, Host, data_by_host, names_text, ranks_text
from ddpdiag.model import Finding, Outcome, Severity, Status
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import proc_root, rdma_devices, sys_root
from ddpdiag.probes.host.limits import LimitUse, ResourceLimits, cgroup, rlimits, user_processes
from ddpdiag.text import begun, count, size_text

FINDINGS = {
    "open-files": FindingSpec.warning("too few open files are allowed."),
    "locked-memory": FindingSpec.warning("too little locked memory is allowed for the InfiniBand ports of this host."),
    "processes": FindingSpec(
        "too few processes or threads are allowed, by the user's limit or the control group's: a warning, and an error "
        "where a rank failed because it could not start one."
    ),
    "unreadable": FindingSpec.unchecked("the limits of a host could not be read."),
}

# Error texts if no process or thread can be started: glibc's for EAGAIN, then Python's and libgomp's for a thread.
_START_ERRORS = ("Resource temporarily unavailable", "can't start new thread", "Thread creation failed")


class Data(Struct, frozen=True, kw_only=True):
    """The limits of a rank, and what they apply to. A field is None if it cannot be read; `tasks` is None without a
    limit. `limits` are the rank's resource limits. `tasks` is the limit of processes and threads in the control group,
    with the number in use. `user_processes` is the number of processes that the rank's user runs. `rdma` names the
    RDMA devices."""

    limits: ResourceLimits | None
    tasks: LimitUse | None = None
    user_processes: int | None = None
    rdma: tuple[str, ...] | None = ()


def measure(ctx: Context) -> Data:
    proc, sys = proc_root(os.environ), sys_root(os.environ)
    tasks = cgroup(proc, sys).pids
    return Data(limits=rlimits(), tasks=tasks, user_processes=user_processes(proc), rdma=rdma_devices(sys))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in data_by_host(seen):
        answers = rows.values()
        file_limit = _lowest(row.limits.nofile for row in answers if row.limits)
        needed = int(seen.setting("files") + seen.setting("files_per_peer") * seen.world.size)
        if file_limit is not None and file_limit < needed:
            yield seen.finding(
                "open-files",
                f"{host.name} allows too few open files",
                f"A process on {host.name} may open {file_limit} files (soft limit). {needed} are expected for "
                f"{count(seen.world.size, 'rank')}, because the connections between ranks count as open files.",
                ranks=host.ranks,
                evidence={"soft": file_limit, "expected": needed},
                fix=f"Run `ulimit -n {needed}` in the job script before the launcher. If that fails, ask the "
                "administrator for a higher hard limit (LimitNOFILE= of slurmd); for a container use `docker run "
                f"--ulimit nofile={max(needed, 65536)}`.",
            )
        locked = _lowest(row.limits.memlock for row in answers if row.limits)
        is_too_low = locked is not None and locked < seen.setting("locked_gib") * GIB
        if is_too_low and (devices := sorted({device for row in answers for device in row.rdma or ()})):
            yield seen.finding(
                "locked-memory",
                f"{host.name} allows too little locked memory for RDMA",
                f"NCCL locks its buffers in memory for the RDMA adapters of {host.name} ({names_text(devices, 4)}). A "
                f"process there may lock {size_text(locked or 0)}; {seen.setting('locked_gib'):g} GiB or no limit is "
                "expected.",
                ranks=host.ranks,
                evidence={"soft_bytes": locked, "rdma": list(devices)},
                fix="Ask the administrator to set LimitMEMLOCK=infinity for slurmd, or `* - memlock unlimited` in "
                "/etc/security/limits.conf. For a container: `docker run --ulimit memlock=-1`. Until then train "
                "without RDMA, which is slower: `export NCCL_IB_DISABLE=1`.",
            )
        yield from _process_limit(seen, host, answers)
        unread = ["limits"] if any(row.limits is None for row in answers) else []
        if any(row.limits and row.limits.nproc and row.user_processes is None for row in answers):
            unread.append("processes")
        # NCCL needs no RDMA within one host.
        if is_too_low and len(seen.world.hosts) > 1 and any(row.rdma is None for row in answers):
            unread.append("RDMA devices")
        if unread:
            yield seen.finding(
                "unreadable",
                f"the limits on {host.name} cannot be read",
                f"The {' and '.join(unread)} of {host.name} cannot be read. So it is not known whether the limits are "
                "high enough.",
                ranks=host.ranks,
                fix=f"Run `ulimit -n -l -u` in the job on {host.name}. At least {needed} open files, "
                f"{seen.setting('tasks_per_rank'):g} processes for each rank and, with RDMA, "
                f"{seen.setting('locked_gib'):g} GiB of locked memory are expected. In a container mount /proc and "
                "/sys, and allow getrlimit and prlimit64 in the seccomp profile.",
            )


def _lowest(limits: Iterable[int | None]) -> int | None:
    """The lowest limit, or None if there is no limit or all limits are None (unlimited)."""
    return min((limit for limit in limits if limit is not None), default=None)


def failed_to_start_process(outcome: Outcome) -> bool:
    """Whether a rank failed because the kernel refused to start a process or thread (EAGAIN)."""
    has_failed = outcome.status in (Status.RAISED, Status.DIED)
    return has_failed and any(text in f"{outcome.error}\n{outcome.detail}" for text in _START_ERRORS)


def _process_limit(seen: Seen[Data], host: Host, rows: Collection[Data]) -> Iterator[Finding]:
    """The finding if the ranks need more new processes and threads than a limit leaves: that of the user or that of the
    control group, whichever leaves fewer."""
    needed = int(seen.setting("tasks_per_rank")) * len(host.ranks)
    group_limits = [(row.tasks.unused, row.tasks.limit, "its control group") for row in rows if row.tasks]
    user_limits = [
        (max(0, row.limits.nproc - row.user_processes), row.limits.nproc, "this user (ulimit -u)")
        for row in rows
        if row.limits is not None and row.limits.nproc is not None and row.user_processes is not None
    ]
    left, limit, owner = min((*group_limits, *user_limits), default=(needed, needed, ""))
    if left >= needed:
        return
    # The number in use now, plus the number that the ranks need.
    higher_limit = limit - left + needed
    failed = [o.rank for o in seen.recording.outcomes if o.rank in host.ranks and failed_to_start_process(o)]
    failure = f" {begun(ranks_text(sorted({*failed})))} could not start one." if failed else ""
    yield seen.finding(
        "processes",
        f"{host.name} allows too few processes",
        f"{left:,} more processes or threads may be started on {host.name}: the limit of {owner} is {limit}. {needed} "
        f"are expected to be free for {count(len(host.ranks), 'rank')}.{failure}",
        severity=Severity.ERROR if failed else Severity.WARNING,
        ranks=host.ranks,
        evidence={"left": left, "expected": needed},
        fix=f"Run `ulimit -u {higher_limit}` in the job script before the launcher (hard limit: nproc in "
        f"/etc/security/limits.conf), or end other processes of this user on {host.name}."
        if "user" in owner
        else f"Ask for a higher limit: `docker run --pids-limit={higher_limit}`, or, as root, TasksMax={higher_limit} "
        f"for the service that starts the job. Or end other processes on {host.name}.",
    )


def report(seen: Seen[Data]) -> Contribution:
    """Contribute "RDMA: none" for each rank whose host has no RDMA device. HST007 contributes the other hosts."""
    return Contribution(inventory={rank: {"RDMA": NONE} for rank, row in seen.by_rank.items() if row.rdma == ()})


SETTINGS = {
    # A rule of ddpdiag: sockets to every other rank on several channels, in addition to the files of an idle process
    # with a data loader. A limit of 1024 is enough for 8 ranks; NCCL's documentation names 32 thousand for 144 ranks.
    "files": 512.0,
    "files_per_peer": 64.0,
    # The health checks of AWS require this on hosts with RDMA, because NCCL registers all its buffers.
    "locked_gib": 16.0,
    # A rule of ddpdiag: a rank starts about 50 threads, and its data loader starts workers.
    "tasks_per_rank": 128.0,
}
CHECK: Check[Data] = Check(__name__, "HST004", "limits", Stage.HOST, Scope.RANK)
