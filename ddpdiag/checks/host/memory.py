"""Memory for every rank.

Every rank holds torch, its libraries and its buffers in the host's memory; with a GPU also the memory that CUDA and
NCCL pin. A rank that runs into the limit of its control group is killed with SIGKILL, and the others report "connection
closed".

Findings:

Causes: a job that asked for too little memory (Slurm --mem, a pod's limit), leftovers of another job, too many ranks on
one host. Fix: ask for more memory; look for other processes; look at `dmesg` for lines of the OOM killer.

Confirm by hand: In the job, `free -m; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.current
/sys/fs/cgroup/memory.events`; as root, `dmesg -T | grep -i 'killed process'`.

Sources: proc_meminfo(5), MemAvailable; control groups v2, memory.max and memory.events
(docs.kernel.org/admin-guide/cgroup-v2.html).
"""

import os
from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import MIB, answers_by_host
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import cgroup
from ddpdiag.text import count

FINDINGS = {
    "short": Explained("less memory is left than the ranks of this host need to start."),
    "oom-kills": Explained.warning("the kernel has killed processes in this control group."),
    "unreadable": Explained.not_seen("the memory of a host could not be read."),
}


class Data(Struct, frozen=True, kw_only=True):
    """Memory in bytes: the host's (None: not readable), and what the control group leaves (None: no limit)."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    left_bytes: int | None = None
    oom_kills: int | None = None


def measure(ctx: Context) -> Data:
    host = memory(proc_root(os.environ))
    group = cgroup(proc_root(os.environ), sys_root(os.environ))
    return Data(
        total_bytes=host.total_bytes if host else None,
        available_bytes=host.available_bytes if host else None,
        limit_bytes=group.memory.limit if group.memory else None,
        left_bytes=group.memory.left if group.memory else None,
        oom_kills=group.oom_kills,
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in answers_by_host(seen):
        rooms = [(row.left_bytes, "left by the control group") for row in rows.values() if row.left_bytes is not None]
        rooms += [(row.available_bytes, "available") for row in rows.values() if row.available_bytes is not None]
        ranks, enough = count(len(host.ranks), "rank"), seen.number("gpu_mib" if host.gpus else "cpu_mib")
        room, why = min(rooms, default=(0, ""))
        share = room / MIB / len(host.ranks)
        if not rooms:
            yield seen.finding(
                "unreadable",
                "the available memory of a host is not known",
                f"{host.name}: /proc/meminfo does not show how much memory is available, and no cgroup sets a limit, "
                f"so it is not known whether there is enough for {ranks}.",
                ranks=host.ranks,
                fix=f"Run `grep MemAvailable /proc/meminfo` on {host.name}; if this is a container, mount /proc into "
                "it.",
            )
        elif share < enough:
            expected = round(enough * MIB) * len(host.ranks)
            yield seen.finding(
                "short",
                "too little memory",
                f"{host.name}: {room / MIB:.0f} MiB {why} for {ranks}, {share:.0f} MiB each; "
                f"{enough:.0f} MiB each expected.",
                severity=Severity.ERROR if share < seen.number("least_mib") else Severity.WARNING,
                ranks=host.ranks,
                evidence={"bytes": room, "ranks": len(host.ranks), "expected_bytes": expected},
                fix="Ask for more memory (Slurm --mem, the container's limit), or end other processes on the host.",
            )
        if kills := max((row.oom_kills or 0 for row in rows.values()), default=0):
            yield seen.finding(
                "oom-kills",
                "processes were killed for lack of memory",
                f"{host.name}: the kernel has killed {'1 process' if kills == 1 else f'{kills} processes'} of this "
                "control group, 0 expected.",
                ranks=host.ranks,
                evidence={"oom_kills": kills},
                fix=f"Raise the memory limit of the job; `dmesg` on {host.name} shows which processes were killed.",
            )


CHECK = Check(
    "HST002",
    "memory",
    Stage.HOST,
    # A control group that limits memory holds a job or a container, not one rank of it.
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    settings={
        # Our own rule: torch, a small model with its optimizer, and a data loader; with CUDA, its libraries and NCCL's
        # pinned buffers as well.
        "cpu_mib": 1024.0,
        "gpu_mib": 4096.0,
        # A process that imported torch 2.13 (CPU) and did nothing else holds 210 MiB (measured). With less than this
        # for each rank not even the smallest job starts.
        "least_mib": 256.0,
    },
)
