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

from collections.abc import Iterable, Iterator
from typing import TypeVar

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import cards
from ddpdiag.checks.gpu.cards import Action, Card, Fault, card_findings, cards_of
from ddpdiag.checks.hosts import MIB, leave_out, ranks_text
from ddpdiag.model import Finding
from ddpdiag.probes.gpu.health import CONTEXT_BYTES

FINDINGS = {
    "in-use": FindingSpec.warning(
        "more than `used_mib` of memory in use: a process that was left over, or another job. In a container the pids "
        "are those of the host, or hidden. Less memory than any CUDA process takes, or what a desktop uses for "
        "graphics, is no finding."
    ),
    "prohibited": FindingSpec.error('compute mode "prohibited"; no CUDA process can start.'),
    "mig": FindingSpec.warning("the GPU is split into slices (MIG), between which NCCL has no peer-to-peer transport."),
}

D = TypeVar("D")
# nvml.h, nvmlComputeMode_t.
_PROHIBITED = 2


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from card_findings(
        seen, lambda card: (*_usage_faults(seen, card), *_compute_mode_faults(card), *_slice_faults(seen, card))
    )


def _slice_faults(seen: Seen[Nothing], card: Card) -> Iterator[Fault]:
    # A single rank has no peer.
    if card.health.mig and seen.world.size > 1:
        yield Fault(
            "mig",
            "a GPU is split into slices (MIG)",
            "MIG is on: ranks get slices of this GPU, and NCCL has no peer-to-peer transport between slices",
            Action.NONE,
            f"If the job needs whole GPUs, end all processes on it and run `nvidia-smi -i {card.smi_id} -mig 0` as "
            f"root on {card.host.name}.",
            {"mig": True},
        )


def _compute_mode_faults(card: Card) -> Iterator[Fault]:
    if card.health.compute_mode == _PROHIBITED:
        yield Fault(
            "prohibited",
            "a GPU allows no CUDA process",
            "its compute mode is 'prohibited'; 'default' is expected",
            Action.NONE,
            f"Run `nvidia-smi -i {card.smi_id} -c DEFAULT` as root on {card.host.name}.",
            {"compute_mode": _PROHIBITED},
        )


def _is_used(seen: Seen[Nothing], card: Card) -> bool:
    """Whether a process outside of this job uses the GPU. A display or a monitoring tool does not count."""
    used, processes = card.health.memory_used_bytes, card.health.processes
    # On a GPU with slices (MIG) the slices themselves take memory, and other jobs may use other slices.
    if used is None or used <= seen.setting("used_mib") * MIB or card.health.mig:
        return False
    return bool(processes) or (used > CONTEXT_BYTES and not card.health.has_graphics)


def _usage_faults(seen: Seen[Nothing], card: Card) -> Iterator[Fault]:
    if not _is_used(seen, card):
        return
    used, host = card.health.memory_used_bytes or 0, card.host.name
    shown = [
        f"pid {process.pid}" + ("" if process.used_bytes is None else f" ({process.used_bytes / MIB:.0f} MiB)")
        for process in card.health.processes or ()
    ]
    holders = f"Used by {', '.join(shown)}" if shown else "No visible process holds it; one in another container may"
    yield Fault(
        "in-use",
        "GPU memory is already in use",
        f"{used / MIB:.0f} MiB were in use before this job used it; at most {seen.setting('used_mib'):g} MiB expected. "
        f"{holders}",
        Action.NONE,
        f"Find and end the other process on {host}, outside of any container: `nvidia-smi`, or as root `fuser -v "
        f"/dev/nvidia*`. If none is shown, or another user owns it, {leave_out([host])}.",
        {"used_bytes": used, "pids": [process.pid for process in card.health.processes or ()]},
    )


def not_free_reasons(seen: Seen[D], uuids: Iterable[str]) -> Iterator[str]:
    """Yield reasons why these GPUs may not be free, by GPU008 and by GPU003's reading before the job used them."""
    cards = {card.health.uuid: card for card in cards_of(seen)}
    findings = [finding for finding in seen.of(CHECK).findings if finding.code == "GPU008.in-use"]
    used_uuids = {uuid for finding in findings for uuid in finding.gpus}
    for uuid in uuids:
        card = cards.get(uuid)
        if card is None or (card.health.memory_used_bytes is None and card.health.processes is None):
            yield f"whether another process uses {card.label if card else uuid} is not known"
        elif uuid in used_uuids or card.health.processes:
            yield f"another process uses {card.label} (GPU008)"
        elif card.health.mig:
            yield f"{card.label} is cut into slices (MIG)"
        elif len(card.ranks) > 1:
            yield f"{ranks_text(card.ranks)} share {card.label}"


skip = cards.skip
# GCM's limit: an idle driver holds a few MiB.
SETTINGS = {"used_mib": 15}
CHECK: Check[Nothing] = Check(__name__, "GPU008", "gpu-users", Stage.GPU, Scope.HOST)
