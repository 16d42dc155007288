"""Limits of the processes: open files, locked memory, number of processes.

The limits inside the launched rank count, and they may be lower than those of a login shell. Too few open files end in
"Too many open files" or "received 0 items of ancdata" from a data loader, or in a rendezvous that never completes; too
little locked memory in "ibv_reg_mr failed: Cannot allocate memory"; too few processes in "Resource temporarily
unavailable".

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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import GIB, Host, answers_by_host
from ddpdiag.model import Finding
from ddpdiag.model.context import Context
from ddpdiag.probes.host.kernel import proc_root, rdma_devices, sys_root
from ddpdiag.probes.host.limits import Limit, Limits, Share, cgroup, limits, user_processes

FINDINGS = {
    "open-files": Explained.warning("too few open files."),
    "locked-memory": Explained.warning("too little locked memory for the InfiniBand ports of this host."),
    "processes": Explained.warning("too few processes or threads, by the user's limit or the control group's."),
    "unreadable": Explained.not_seen("the limits of a host could not be read."),
}

# Our own rule: sockets to every peer on several channels, on top of a quiet process with a data loader. A limit of 1024
# is enough for 8 ranks; NCCL's documentation speaks of 32 thousand for 144.
FILES = 512.0
FILES_PER_PEER = 64.0
# The AWS health checks ask for this much where there is RDMA: NCCL registers all its buffers.
LOCKED_GIB = 16.0
# Our own rule: a rank starts some 50 threads, and a data loader its workers.
TASKS_PER_RANK = 128.0


class Data(Struct, frozen=True, kw_only=True):
    """Limits of this rank, tasks of its control group (None: no limit), this user's processes, and RDMA devices.

    Otherwise None means that it could not be read.
    """

    limits: Limits | None
    tasks: Share | None = None
    user_processes: int | None = None
    rdma: tuple[str, ...] | None = ()


def measure(ctx: Context) -> Data:
    proc, sys = proc_root(os.environ), sys_root(os.environ)
    return Data(
        limits=limits(), tasks=cgroup(proc, sys).pids, user_processes=user_processes(proc), rdma=rdma_devices(sys)
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in answers_by_host(seen):
        known = [row.limits for row in rows.values() if row.limits is not None]
        yield from _open_files(seen, host, known)
        yield from _locked_memory(seen, host, rows, known)
        yield from _tasks(seen, host, rows)
        yield from _unreadable(seen, host, rows)


def _unreadable(seen: Seen[Data], host: Host, rows: Mapping[int, Data]) -> Iterator[Finding]:
    """What could not be looked at, as far as it could have mattered."""
    files = [row for row in rows.values() if row.limits is None]
    counted = [row for row in rows.values() if row.limits is not None and row.limits.nproc.soft is not None]
    users = [row for row in counted if row.user_processes is None]
    locked = _lowest(row.limits.memlock for row in rows.values() if row.limits is not None)
    bus = [row for row in rows.values() if row.rdma is None]
    what = ["the limits of open files, locked memory and processes (getrlimit)"] if files else []
    if users:
        what.append("how many processes the user has (/proc), of whom the number is limited")
    # Within one host no job talks over RDMA.
    if bus and len(seen.world.hosts) > 1 and locked is not None and locked < _locked_bytes(seen):
        what.append("whether there are RDMA devices (/sys/class), for which locked memory would be too little")
    if what:
        yield seen.finding(
            "unreadable",
            "limits cannot be read",
            f"{host.name} does not say {' or '.join(what)}: UNKNOWN whether limits suffice.",
            ranks=host.ranks,
            fix="Mount /proc and /sys into the container, and let its seccomp profile pass getrlimit.",
        )


def _lowest(limits: Iterable[Limit]) -> int | None:
    """The tightest of the soft limits; None if there is no limit."""
    return min((limit.soft for limit in limits if limit.soft is not None), default=None)


def _open_files(seen: Seen[Data], host: Host, known: Sequence[Limits]) -> Iterator[Finding]:
    soft = _lowest(own.nofile for own in known)
    needed = int(seen.number("files", FILES) + seen.number("files_per_peer", FILES_PER_PEER) * seen.world.size)
    if soft is None or soft >= needed:
        return
    yield seen.finding(
        "open-files",
        "few open files allowed",
        f"{host.name}: {soft} open files allowed (soft limit), {needed} expected for {seen.world.size} ranks.",
        ranks=host.ranks,
        evidence={"soft": soft, "expected": needed},
        fix=f"Call `ulimit -n {needed}` before the launcher, or raise LimitNOFILE of the service behind it.",
    )


def _locked_bytes(seen: Seen[Data]) -> float:
    return seen.number("locked_gib", LOCKED_GIB) * GIB


def _locked_memory(
    seen: Seen[Data], host: Host, rows: Mapping[int, Data], known: Sequence[Limits]
) -> Iterator[Finding]:
    devices = sorted({device for row in rows.values() for device in row.rdma or ()})
    soft = _lowest(own.memlock for own in known)
    needed = _locked_bytes(seen)
    if not devices or soft is None or soft >= needed:
        return
    yield seen.finding(
        "locked-memory",
        "little locked memory allowed",
        f"{host.name}: {soft // 1024} KiB of locked memory allowed, {needed / GIB:g} GiB or unlimited expected "
        f"because of {', '.join(devices[:4])}.",
        ranks=host.ranks,
        evidence={"soft_bytes": soft, "rdma": list(devices)},
        fix="Set memlock to unlimited (limits.conf, LimitMEMLOCK=infinity for slurmd, docker --ulimit memlock=-1).",
    )


def _tasks(seen: Seen[Data], host: Host, rows: Mapping[int, Data]) -> Iterator[Finding]:
    rooms = [(row.tasks.left, f"limit {row.tasks.limit} of the control group") for row in rows.values() if row.tasks]
    for row in rows.values():
        if row.limits is not None and row.limits.nproc.soft is not None and row.user_processes is not None:
            left = max(0, row.limits.nproc.soft - row.user_processes)
            rooms.append((left, f"limit {row.limits.nproc.soft} of the user (ulimit -u)"))
    needed = int(seen.number("tasks_per_rank", TASKS_PER_RANK)) * len(host.ranks)
    if not rooms or min(rooms)[0] >= needed:
        return
    left, why = min(rooms)
    yield seen.finding(
        "processes",
        "few more processes allowed",
        f"{host.name}: {left} more tasks allowed ({why}), {needed} expected for {len(host.ranks)} ranks.",
        ranks=host.ranks,
        evidence={"left": left, "expected": needed},
        fix="Raise the limit (ulimit -u, the container's --pids-limit, TasksMax=), or end what else runs there.",
    )


CHECK = Check(
    "HST004",
    "limits",
    Stage.HOST,
    Scope.RANK,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    settings={
        "files": FILES,
        "files_per_peer": FILES_PER_PEER,
        "locked_gib": LOCKED_GIB,
        "tasks_per_rank": TASKS_PER_RANK,
    },
)
