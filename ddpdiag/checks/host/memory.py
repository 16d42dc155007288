"""Memory for every rank.

A rank that runs into the limit of its control group is killed with SIGKILL, and the others report "connection closed".

Findings:

Causes: a job that asked for too little memory (Slurm --mem, a pod's limit), leftovers of another job, too many ranks on
one host. Fix: ask for more memory; look for other processes; look at `dmesg` for lines of the OOM killer.

Confirm by hand: In the job, `free -m; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.current
/sys/fs/cgroup/memory.events`; as root, `dmesg -T | grep -i 'killed process'`.

Sources: proc_meminfo(5), MemAvailable; control groups v2, memory.max and memory.events
(docs.kernel.org/admin-guide/cgroup-v2.html).
"""

import math
import os
from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import GIB, MIB, data_by_host, leave_out
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import cgroup
from ddpdiag.text import count, size_text

FINDINGS = {
    "short": FindingSpec("less memory is left than the ranks of this host need to start."),
    "oom-kills": FindingSpec.warning("the kernel has killed processes in this control group."),
    "unreadable": FindingSpec.unchecked("the memory of a host could not be read."),
}

_LEFT_IN_GROUP = "left in its control group (the limit of the job or container)"


class Data(Struct, frozen=True, kw_only=True):
    """The memory of a host, and that of the control group: `limit_bytes` and its unused part, `left_bytes`. `oom_kills`
    counts processes of the control group that the kernel killed for lack of memory. A value is None if it cannot be
    read, or if the control group has no limit."""

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
        left_bytes=group.memory.unused if group.memory else None,
        oom_kills=group.oom_kills,
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in data_by_host(seen):
        # Only one rank of each host measures.
        row, ranks = next(iter(rows.values())), len(host.ranks)
        needed_mib = seen.setting("gpu_mib" if host.gpu_count else "cpu_mib")
        amounts = ((row.left_bytes, _LEFT_IN_GROUP), (row.available_bytes, "available"))
        free_bytes, meaning = min(((free, text) for free, text in amounts if free is not None), default=(None, ""))
        if free_bytes is None:
            yield seen.finding(
                "unreadable",
                f"the available memory of {host.name} is not known",
                f"On {host.name} /proc/meminfo does not show how much memory is available, and no control group sets a "
                f"limit. At least {size_text(needed_mib * MIB)} for each rank is expected.",
                ranks=host.ranks,
                fix="In a container mount /proc, and run again. Or run `grep MemAvailable /proc/meminfo` on "
                f"{host.name} outside of the container.",
            )
        elif free_bytes < ranks * needed_mib * MIB:
            expected = round(needed_mib * MIB) * ranks
            yield seen.finding(
                "short",
                f"too little memory on {host.name}",
                f"{host.name} has {size_text(free_bytes)} of memory {meaning} for {count(ranks, 'rank')}. At least "
                f"{size_text(needed_mib * MIB)}{' for each' if ranks > 1 else ''} is expected.",
                severity=Severity.ERROR if free_bytes < ranks * seen.setting("least_mib") * MIB else Severity.WARNING,
                ranks=host.ranks,
                evidence={"bytes": free_bytes, "ranks": ranks, "expected_bytes": expected},
                fix="Ask for more memory: `sbatch --mem=0` (all of the host's memory), or `docker run --memory=SIZE` "
                f"with {math.ceil((expected - free_bytes) / GIB)} GiB more than now."
                if meaning == _LEFT_IN_GROUP
                else f"`ps aux --sort=-rss | head` on {host.name} shows which processes use the memory. End them, or "
                f"{leave_out([host.name])}.",
            )
        if row.oom_kills:
            yield seen.finding(
                "oom-kills",
                f"processes on {host.name} were killed for lack of memory",
                f"The kernel killed {row.oom_kills} of the processes in the control group of this job on {host.name}, "
                "because memory ran out. None is expected.",
                ranks=host.ranks,
                evidence={"oom_kills": row.oom_kills},
                fix="Ask for more memory: `sbatch --mem=0` (all of the host's memory), or a larger `docker run "
                f"--memory=SIZE`. `dmesg -T | grep -i 'killed process'`, as root on {host.name}, shows which processes "
                "were killed.",
            )


def report(seen: Seen[Data]) -> Contribution:
    """Add each host's memory to the report, with the control group's limit if it is lower ("16 GiB of 64 GiB")."""
    inventory = {}
    for host, rows in data_by_host(seen):
        row = next(iter(rows.values()))
        is_limited = row.limit_bytes is not None and (row.total_bytes is None or row.limit_bytes < row.total_bytes)
        sizes = (row.limit_bytes if is_limited else None, row.total_bytes)
        if texts := [size_text(size) for size in sizes if size is not None]:
            inventory[host.ranks[0]] = {"memory": " of ".join(texts)}
    return Contribution(inventory=inventory)


SETTINGS = {
    # A rule of ddpdiag: torch, a small model with its optimizer, and a data loader. With CUDA also its libraries and
    # NCCL's pinned buffers.
    "cpu_mib": 1024.0,
    "gpu_mib": 4096.0,
    # A process that imported torch 2.13 (CPU) and did nothing else holds 210 MiB (measured). With less for each rank
    # than `least_mib` not even the smallest job starts.
    "least_mib": 256.0,
}
# One rank of each host is enough: a control group with a memory limit holds a whole job or container, not one rank.
CHECK: Check[Data] = Check(__name__, "HST002", "memory", Stage.HOST, Scope.HOST)
