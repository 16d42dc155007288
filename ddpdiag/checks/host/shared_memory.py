"""Shared memory in /dev/shm.

NCCL connects GPUs of one host through files in /dev/shm where it has no direct path, and data loader workers hand over
their batches there. When it is full, NCCL fails with "failed to extend /dev/shm/nccl-...", a loader dies of SIGBUS.

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
from ddpdiag.checks.hosts import MIB, Host, answers_by_host
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.limits import SharedMemory, shared_memory

FINDINGS = {
    "missing": Explained("there is no /dev/shm."),
    "unusable": Explained("no page can be had there: it is full, or may not be written to."),
    "small": Explained("less room than NCCL, or data loaders, will want."),
}

# DeepSpeed warns below this.
ENOUGH_MIB = 512.0
# Our own rule: NCCL's buffers towards its neighbours, about 10 MB per pair and channel, and a container's default.
LEAST_MIB_PER_RANK = 64.0

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
        views = [row.shared_memory for row in rows.values()]
        present = [view for view in views if view is not None]
        if len(present) < len(views):
            yield _missing(seen, host)
        elif failed := next((view for view in present if view.error), None):
            yield _unusable(seen, host, failed)
        else:
            yield from _room(seen, host, min(present, key=lambda view: view.free_bytes))


def _missing(seen: Seen[Data], host: Host) -> Finding:
    return seen.finding(
        "missing",
        "no /dev/shm",
        f"{host.name}: /dev/shm is missing or unreadable; at least {ENOUGH_MIB:.0f} MiB expected.",
        severity=_serious(host),
        ranks=host.ranks,
        fix="Mount a tmpfs at /dev/shm.",
    )


def _unusable(seen: Seen[Data], host: Host, view: SharedMemory) -> Finding:
    return seen.finding(
        "unusable",
        "/dev/shm gives no memory",
        f"{host.name}: a file of 1 MiB in /dev/shm could not be allocated: {view.error} "
        f"({view.free_bytes / MIB:.0f} of {view.size_bytes / MIB:.0f} MiB free).",
        severity=_serious(host),
        ranks=host.ranks,
        evidence={"size_bytes": view.size_bytes, "free_bytes": view.free_bytes, "error": view.error},
        fix=FIX,
    )


def _room(seen: Seen[Data], host: Host, view: SharedMemory) -> Iterator[Finding]:
    free = view.free_bytes / MIB
    least = seen.number("least_mib_per_rank", LEAST_MIB_PER_RANK) * len(host.ranks)
    enough = seen.number("enough_mib", ENOUGH_MIB)
    fatal = host.gpus > 0 and free < least
    if free >= enough and not fatal:
        return
    yield seen.finding(
        "small",
        "/dev/shm is small",
        f"{host.name}: {free:.0f} of {view.size_bytes / MIB:.0f} MiB free in /dev/shm; "
        f"{max(least, enough):.0f} MiB expected for {len(host.ranks)} ranks.",
        severity=Severity.ERROR if fatal else Severity.WARNING,
        ranks=host.ranks,
        evidence={"size_bytes": view.size_bytes, "free_bytes": view.free_bytes},
        fix=FIX,
    )


def _serious(host: Host) -> Severity:
    # Without a GPU only data loader workers need it, and they can hand over file descriptors instead.
    return Severity.ERROR if host.gpus else Severity.WARNING


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
    settings={"least_mib_per_rank": LEAST_MIB_PER_RANK, "enough_mib": ENOUGH_MIB},
)
