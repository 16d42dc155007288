"""Shared memory in /dev/shm.

NCCL connects GPUs of one host through files in /dev/shm where it has no direct path, and data loader workers hand over
their batches there. When it is full, NCCL fails with "failed to extend /dev/shm/nccl-...", and SIGBUS ends a loader.

Findings:

Causes: a container's default of 64 MiB; files that a killed job left behind. Fix: `docker run --shm-size=1g` or
`--ipc=host`; in Kubernetes an emptyDir with `medium: Memory` at /dev/shm; remove stale nccl-* and torch_* files.

Confirm by hand: `df -h /dev/shm; ls -l /dev/shm`; `fallocate -l 64M /dev/shm/probe && rm /dev/shm/probe` asks for real
pages, which `truncate` does not.

Sources: NCCL user guide, troubleshooting (docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html),
shared memory; docker run reference, --shm-size (64 MiB if not given); NCCL issue 342.
"""

from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import MIB, answers_by_host
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.limits import SharedMemory, shared_memory
from ddpdiag.text import count

FINDINGS = {
    "missing": Explained("there is no /dev/shm."),
    "unusable": Explained("no memory can be allocated there: it is full, or not writable."),
    "small": Explained("less room than NCCL or data loaders will need."),
}

# DeepSpeed warns below this.
ENOUGH_MIB = 512.0
FIX = (
    "Enlarge /dev/shm (docker --shm-size=1g or --ipc=host; Kubernetes: an emptyDir with medium Memory), "
    "and remove stale nccl-* and torch_* files there."
)


class Data(Struct, frozen=True):
    """/dev/shm of a host; None if there is none."""

    shared_memory: SharedMemory | None


def measure(ctx: Context) -> Data:
    return Data(shared_memory())


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for host, rows in answers_by_host(seen):
        present = [row.shared_memory for row in rows.values() if row.shared_memory is not None]
        # Without a GPU only data loader workers need it, and they can hand over file descriptors instead.
        serious = Severity.ERROR if host.gpus else Severity.WARNING
        if len(present) < len(rows):
            yield seen.finding(
                "missing",
                "/dev/shm is missing",
                f"{host.name}: /dev/shm is missing or unreadable; at least {ENOUGH_MIB:.0f} MiB expected.",
                severity=serious,
                ranks=host.ranks,
                fix="Mount a tmpfs at /dev/shm.",
            )
        elif memory := next((memory for memory in present if memory.error), None):
            yield seen.finding(
                "unusable",
                "no memory can be allocated in /dev/shm",
                f"{host.name}: a file of 1 MiB in /dev/shm could not be allocated: {memory.error} "
                f"({memory.free_bytes / MIB:.0f} of {memory.size_bytes / MIB:.0f} MiB free).",
                severity=serious,
                ranks=host.ranks,
                evidence={"size_bytes": memory.size_bytes, "free_bytes": memory.free_bytes, "error": memory.error},
                fix=FIX,
            )
        else:
            memory = min(present, key=lambda memory: memory.free_bytes)
            free, enough = memory.free_bytes / MIB, seen.number("enough_mib")
            least = seen.number("least_mib_per_rank") * len(host.ranks)
            fatal = host.gpus > 0 and free < least
            if free < enough or fatal:
                yield seen.finding(
                    "small",
                    "/dev/shm is small",
                    f"{host.name}: {free:.0f} of {memory.size_bytes / MIB:.0f} MiB free in /dev/shm; "
                    f"{max(least, enough):.0f} MiB expected for {count(len(host.ranks), 'rank')}.",
                    severity=Severity.ERROR if fatal else Severity.WARNING,
                    ranks=host.ranks,
                    evidence={"size_bytes": memory.size_bytes, "free_bytes": memory.free_bytes},
                    fix=FIX,
                )


CHECK = Check(
    "HST003",
    "shared-memory",
    Stage.HOST,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    settings={
        # Our own rule: NCCL's buffers towards its neighbours, about 10 MB per pair and channel, and a container's
        # default.
        "least_mib_per_rank": 64.0,
        "enough_mib": ENOUGH_MIB,
    },
)
