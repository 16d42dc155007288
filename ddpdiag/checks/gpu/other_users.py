"""Other processes on a GPU, and GPUs that the job may not use.

Another process on a GPU takes memory and time from the job, and its rank becomes the slow one. The GPUs are read before
any worker of this run has a CUDA context, so all use that is found belongs to other processes.

Findings and their causes:

Fix: end the process (`nvidia-smi`, `fuser -v /dev/nvidia*`); `nvidia-smi -i UUID -c DEFAULT`; `nvidia-smi -i UUID
-mig 0`, when nothing uses the GPU.

Confirm by hand: `nvidia-smi` on the named host, before the job starts; `fuser -v /dev/nvidia*` as root; `nvidia-smi -q
-d COMPUTE`.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), nvmlDeviceGetComputeRunningProcesses,
nvmlDeviceGetGraphicsRunningProcesses and nvmlComputeMode_t; NVIDIA MIG user guide
(docs.nvidia.com/datacenter/tesla/mig-user-guide).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, card_findings, cards_of
from ddpdiag.checks.hosts import MIB, leave_out, ranks_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.health import CONTEXT_BYTES, GpuUsers, Process
from ddpdiag.probes.gpu.nvml import EXCLUSIVE
from ddpdiag.text import begun

FINDINGS = {
    "in-use": FindingSpec(
        "more than `used_mib` of memory in use: a process that was left over, or another job. In a container the pids "
        "are those of the host, or hidden. Less memory than any CUDA process takes, or what a desktop uses for "
        "graphics, is only a note."
    ),
    "prohibited": FindingSpec.error('compute mode "prohibited"; no CUDA process can start.'),
    "exclusive": FindingSpec(
        'compute mode "exclusive process". Harmless with one rank for each GPU (a note). A warning if another process '
        'has the GPU (CUDA reports "all CUDA-capable devices are busy or unavailable", unless it is the server of '
        "MPS), or several ranks use it."
    ),
    "mig": FindingSpec(
        "the GPU is split into slices (MIG), between which NCCL has no peer-to-peer transport. Harmless for a single "
        "rank. An error if ranks use the same slice: CUDA shows a process one slice only, and NCCL refuses that."
    ),
}

D = TypeVar("D")
# nvml.h, nvmlComputeMode_t.
_PROHIBITED = 2


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    # It is not known which GPU a shared slice belongs to; the first of the host's is reported.
    first = {card.host.name: card for card in reversed(cards_of(seen)) if card.health.mig}
    yield from card_findings(
        seen,
        lambda card: (
            *_in_use(seen, card),
            *_mode(card),
            *_sliced(seen, card, is_first=first.get(card.host.name) == card),
        ),
    )


def _sliced(seen: Seen[Nothing], card: Card, *, is_first: bool) -> Iterator[Fault]:
    sharing = devices.sharing_ranks(seen, card.host) if is_first and seen.options.backend != "gloo" else ()
    if sharing:
        yield Fault(
            "mig",
            "ranks share a slice of a GPU (MIG)",
            f"MIG is on, and {ranks_text(sharing)} use the same slice of a GPU. NCCL refuses two ranks on one slice",
            Action.NONE,
            devices.SLICES_FIX,
            {"mig": True, "ranks": [*sharing]},
            severity=Severity.ERROR,
        )
    elif card.health.mig:
        yield Fault(
            "mig",
            "a GPU is split into slices (MIG)",
            "MIG is on: ranks get slices of this GPU, and NCCL has no peer-to-peer transport between slices",
            Action.NONE,
            f"If the job needs whole GPUs, end all processes on it and run `nvidia-smi -i {card.smi_id} -mig 0` as "
            f"root on {card.host.name}.",
            {"mig": True},
            # A single rank has no peer.
            severity=Severity.NOTE if seen.world.size == 1 else Severity.WARNING,
        )


def _in_use(seen: Seen[Nothing], card: Card) -> Iterator[Fault]:
    used, most = card.health.memory_used_bytes, seen.number("used_mib")
    # Of a GPU that is split into slices, the slices themselves take some, and those of others are none of the job's.
    if used is None or used <= most * MIB or card.health.mig:
        return
    # Is most of it what graphics processes hold, and does no process use CUDA? A process that NVML shows in a
    # container or not at all is in neither list.
    held = [process.used_bytes for process in card.health.graphics or ()]
    told = sum(size for size in held if size is not None)
    drawn = bool(held) and not card.health.processes and (None in held or 2 * told >= used)
    small = used <= CONTEXT_BYTES and not card.health.processes
    holders = _holders(card)
    yield Fault(
        "in-use",
        "GPU memory is already in use",
        f"{used / MIB:.0f} MiB were in use before this job used it; at most {most:g} MiB expected. "
        f"{f'Used by {holders}' if holders else 'No visible process holds it; one in another container may'}",
        Action.NONE,
        "Nothing to do: a display or a monitoring tool uses as much."
        if small or drawn
        else f"Find and end the other process on {card.host.name}, outside of any container: `nvidia-smi`, or as root "
        f"`fuser -v /dev/nvidia*`. If none is shown, or another user owns it, {leave_out([card.host.name])}.",
        {"used_bytes": used, "pids": [process.pid for process in card.health.processes or ()]},
        severity=Severity.NOTE if small or drawn else Severity.WARNING,
    )


def _holders(card: Card) -> str:
    computing = [_shown(process) for process in card.health.processes or ()]
    pids = {process.pid for process in card.health.processes or ()}
    drawing = [f"{_shown(process)} for graphics" for process in card.health.graphics or () if process.pid not in pids]
    return ", ".join((*computing, *drawing))


def _shown(process: Process) -> str:
    return f"pid {process.pid}" + (f" ({process.used_bytes / MIB:.0f} MiB)" if process.used_bytes is not None else "")


def _mode(card: Card) -> Iterator[Fault]:
    mode, processes = card.health.compute_mode, card.health.processes or ()
    command = f"`nvidia-smi -i {card.smi_id} -c DEFAULT` as root on {card.host.name}."
    advice = f"Run {command}"
    if mode in EXCLUSIVE and not processes and len(card.takers) <= 1:
        advice = f"Nothing to do. For several ranks on one GPU run {command}"
    if mode == _PROHIBITED:
        title, said = "a GPU allows no CUDA process", "its compute mode is 'prohibited'; 'default' is expected"
        yield Fault("prohibited", title, said, Action.NONE, advice, {"compute_mode": mode})
    elif mode in EXCLUSIVE:
        then, severity = "That is fine with one rank per GPU", Severity.NOTE
        if processes:
            then, severity = f"{begun(_holders(card))} uses it, so a rank can use it only through MPS", Severity.WARNING
        elif len(card.takers) > 1:
            then = f"{begun(ranks_text(card.takers))} all take it, and without MPS only the first one can start"
            severity = Severity.WARNING
        yield Fault(
            "exclusive",
            # The server of MPS, through which others may use the GPU, looks the same.
            "another process has exclusive use of a GPU" if processes else "a GPU allows only one CUDA process",
            f"its compute mode is 'exclusive process'. {then}",
            Action.NONE,
            advice,
            {"compute_mode": mode, "pids": [process.pid for process in processes]},
            severity=severity,
        )


def not_free(seen: Seen[D], uuids: Iterable[str]) -> Iterator[str]:
    """Reasons why these GPUs may not be free, by what was seen before the job touched them (GPU003, GPU008)."""
    cards = {card.health.uuid: card for card in cards_of(seen)}
    users = {
        uuid
        for finding in seen.of(CHECK).findings
        if finding.code == "GPU008.in-use" and finding.severity is not Severity.NOTE
        for uuid in finding.gpus
    }
    for uuid in uuids:
        card = cards.get(uuid)
        if card is None or (card.health.memory_used_bytes is None and card.health.processes is None):
            yield f"whether another process uses {card.label if card else uuid} is not known"
        elif uuid in users or card.health.processes:
            yield f"another process uses {card.label} (GPU008)"
        elif card.health.mig:
            yield f"{card.label} is cut into slices (MIG)"
        elif len(card.takers) > 1:
            yield f"{ranks_text(card.takers)} share {card.label}"


def used_meanwhile(uses: Sequence[tuple[str, GpuUsers]]) -> Iterator[str]:
    """Reasons why GPUs, each with who used it right before a measurement, may not have been free."""
    for name, use in uses:
        if use.pids is None and use.used_bytes is None:
            yield f"whether another process uses {name} is not known"
        elif use.pids:
            yield f"{name} is used by pid {', '.join(map(str, use.pids))}"
        elif use.is_taken:
            yield f"{(use.used_bytes or 0) / MIB:.0f} MiB of {name} are in use"


skip = devices.skip
# GCM's limit: an idle driver holds a few MiB.
SETTINGS = {"used_mib": 15}
CHECK: Check[Nothing] = Check(__name__, "GPU008", "gpu-users", Stage.GPU, Scope.HOST)
