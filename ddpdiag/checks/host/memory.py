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
from ddpdiag.checks.hosts import GIB, MIB, answers_by_host, leave_out
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import cgroup
from ddpdiag.text import count, size_text

FINDINGS = {
    "short": FindingSpec("less memory is left than the ranks of this host need to start."),
    "oom-kills": FindingSpec.warning("the kernel has killed processes in this control group."),
    "unreadable": FindingSpec.not_seen("the memory of a host could not be read."),
}

_IN_GROUP = "left in its control group (the limit of the job or container)"


class Data(Struct, frozen=True, kw_only=True):
    """The memory of a host (None: not readable), and the limit and room of the control group (None: no limit)."""

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
        # One rank of a host measures for all of its ranks.
        row, ranks = next(iter(rows.values())), len(host.ranks)
        enough = seen.number("gpu_mib" if host.gpus else "cpu_mib")
        rooms = [(row.left_bytes, _IN_GROUP), (row.available_bytes, "available")]
        known = [(room, why) for room, why in rooms if room is not None]
        if not known:
            yield seen.finding(
                "unreadable",
                f"the available memory of {host.name} is not known",
                f"On {host.name} /proc/meminfo does not show how much memory is available, and no control group sets a "
                f"limit. At least {size_text(enough * MIB)} for each rank is expected.",
                ranks=host.ranks,
                fix="In a container mount /proc, and run again. Or run `grep MemAvailable /proc/meminfo` on "
                f"{host.name} outside of the container.",
            )
        elif (room := min(known)[0]) < ranks * enough * MIB:
            why, expected = min(known)[1], round(enough * MIB) * ranks
            yield seen.finding(
                "short",
                f"too little memory on {host.name}",
                f"{host.name} has {size_text(room)} of memory {why} for {count(ranks, 'rank')}. At least "
                f"{size_text(enough * MIB)}{' for each' if ranks > 1 else ''} is expected.",
                severity=Severity.ERROR if room < ranks * seen.number("least_mib") * MIB else Severity.WARNING,
                ranks=host.ranks,
                evidence={"bytes": room, "ranks": ranks, "expected_bytes": expected},
                fix="Ask for more memory: `sbatch --mem=0` (all of the host's memory), or `docker run --memory=SIZE` "
                f"with {math.ceil((expected - room) / GIB)} GiB more than now."
                if why == _IN_GROUP
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
    """The part of the report on each host's memory, and on the share that the control group allows."""
    inventory = {}
    for host, rows in answers_by_host(seen):
        row = next(iter(rows.values()))
        is_limited = row.limit_bytes is not None and (row.total_bytes is None or row.limit_bytes < row.total_bytes)
        sizes = (row.limit_bytes if is_limited else None, row.total_bytes)
        if texts := [size_text(size) for size in sizes if size is not None]:
            inventory[host.ranks[0]] = {"memory": " of ".join(texts)}
    return Contribution(inventory=inventory)


SETTINGS = {
    # Our own rule: torch, a small model with its optimizer, and a data loader; with CUDA, its libraries and NCCL's
    # pinned buffers as well.
    "cpu_mib": 1024.0,
    "gpu_mib": 4096.0,
    # A process that imported torch 2.13 (CPU) and did nothing else holds 210 MiB (measured). With less than this
    # for each rank not even the smallest job starts.
    "least_mib": 256.0,
}
# A control group that limits memory holds a job or a container, not one rank of it.
CHECK: Check[Data] = Check(__name__, "HST002", "memory", Stage.HOST, Scope.HOST)
