"""Shared memory in /dev/shm.

NCCL connects GPUs of one host through files in /dev/shm if the GPUs have no direct path. Data loader workers pass their
batches through /dev/shm. When it is full, NCCL fails with "failed to extend /dev/shm/nccl-...", and SIGBUS ends a data
loader. NCCL 2.24 and newer may use pinned memory of CUDA instead. So less space is enough if NCCL's all-reduce passed.

Findings:

Causes: a container's default of 64 MiB; files that a killed job left behind. Fix: `docker run --shm-size=1g` or
`--ipc=host`; in Kubernetes an emptyDir with `medium: Memory` at /dev/shm; remove stale nccl-* and torch_* files.

Confirm by hand: `df -h /dev/shm; ls -l /dev/shm`; `fallocate -l 64M /dev/shm/probe && rm /dev/shm/probe` asks for real
pages, which `truncate` does not.

Sources: NCCL user guide, troubleshooting (docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html),
shared memory; docker run reference, --shm-size (64 MiB if not given); NCCL issue 342.
"""

import errno
import math
import os
from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import MIB, Host, data_by_host
from ddpdiag.checks.registry import check_by_code
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.limits import SharedMemory, shared_memory
from ddpdiag.text import count, size_text

FINDINGS = {
    "unusable": FindingSpec("no memory can be allocated there: it is missing, full, or not writable."),
    "small": FindingSpec(
        "less room than NCCL or data loaders will need: an error with GPUs, unless NCCL's all-reduce passed (COL001)."
    ),
}


class Data(Struct, frozen=True):
    """The state of /dev/shm on a host; None if /dev/shm does not exist or cannot be read."""

    shared_memory: SharedMemory | None


def measure(ctx: Context) -> Data:
    return Data(shared_memory())


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    all_reduces = seen.of(check_by_code("COL001")).rows
    passed_ranks = {row.place.rank for row in all_reduces if row.data.backend == "nccl" and not row.data.wrong}
    for host, rows in data_by_host(seen):
        memory = next(iter(rows.values())).shared_memory or SharedMemory(0, 0, os.strerror(errno.ENOENT))
        enough_mib, least_mib = seen.setting("enough_mib"), seen.setting("least_mib_per_rank") * len(host.ranks)
        expected_mib, free_mib = max(least_mib, enough_mib), memory.free_bytes / MIB
        # On a host without GPUs only data loader workers use shared memory, and they can pass file descriptors instead.
        is_short = host.gpu_count > 0 and free_mib < least_mib
        has_nccl_passed = passed_ranks >= {*host.ranks}
        evidence = {"size_bytes": memory.size_bytes, "free_bytes": memory.free_bytes}
        if memory.error:
            yield seen.finding(
                "unusable",
                f"/dev/shm on {host.name} cannot be used",
                f"On {host.name} a file of 1 MiB could not be allocated in /dev/shm: {memory.error} "
                f"({size_text(memory.free_bytes)} of {size_text(memory.size_bytes)} free). NCCL and data loader "
                f"workers need shared memory there; at least {expected_mib:.0f} MiB is expected.",
                severity=Severity.ERROR if host.gpu_count else Severity.WARNING,
                ranks=host.ranks,
                evidence=evidence | {"error": memory.error},
                fix=_fix(host, memory, expected_mib),
            )
        elif free_mib < enough_mib or is_short:
            usage = "NCCL and data loader workers use it"
            if has_nccl_passed:
                usage = "NCCL's all-reduce passed (COL001), but more process groups and data loader workers use it, too"
            yield seen.finding(
                "small",
                f"/dev/shm on {host.name} is small",
                f"/dev/shm on {host.name} has {free_mib:.0f} of {memory.size_bytes / MIB:.0f} MiB free. At least "
                f"{expected_mib:.0f} MiB is expected for {count(len(host.ranks), 'rank')}: {usage}.",
                severity=Severity.ERROR if is_short and not has_nccl_passed else Severity.WARNING,
                ranks=host.ranks,
                evidence=evidence,
                fix=_fix(host, memory, expected_mib),
            )


def _fix(host: Host, memory: SharedMemory, expected_mib: float) -> str:
    """The commands that make /dev/shm writable, or larger, or that remove old files from it."""
    if memory.error == os.strerror(errno.EACCES):
        return f"Run `ls -ld /dev/shm` on {host.name}; it should be drwxrwxrwt. As root: `chmod 1777 /dev/shm`."
    files = "`rm /dev/shm/nccl-* /dev/shm/torch_*`"
    remove = f"Remove files that ended jobs left behind, if no other job runs on {host.name}: {files}. "
    size = f"{math.ceil(expected_mib / 1024)}g"
    return (
        f"{remove if memory.free_bytes < memory.size_bytes else ''}Start a container with `docker run "
        f"--shm-size={size}`, or in Kubernetes mount an emptyDir with `medium: Memory` at /dev/shm. Otherwise, as root "
        f"on {host.name}: `mount -o remount,size={size} /dev/shm`."
    )


SETTINGS = {
    # A rule of ddpdiag: NCCL's buffers for neighbouring ranks take about 10 MB for each pair and channel. 64 MiB is
    # also the default of a container.
    "least_mib_per_rank": 64.0,
    # DeepSpeed warns if /dev/shm has less.
    "enough_mib": 512.0,
}
CHECK: Check[Data] = Check(__name__, "HST003", "shared-memory", Stage.HOST, Scope.HOST)
