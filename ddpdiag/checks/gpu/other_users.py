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
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, card_findings, cards_of
from ddpdiag.checks.hosts import MIB, leave_out, ranks_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.health import CONTEXT_BYTES
from ddpdiag.probes.gpu.nvml import EXCLUSIVE
from ddpdiag.text import begun

FINDINGS = {
    "in-use": FindingSpec.warning(
        "more than `used_mib` of memory in use: a process that was left over, or another job. In a container the pids "
        "are those of the host, or hidden. Less memory than any CUDA process takes, or what a desktop uses for "
        "graphics, is no finding."
    ),
    "prohibited": FindingSpec.error('compute mode "prohibited"; no CUDA process can start.'),
    "exclusive": FindingSpec.warning(
        'compute mode "exclusive process", and another process has the GPU (CUDA reports "all CUDA-capable devices are '
        'busy or unavailable", unless it is the server of MPS), or several ranks use it.'
    ),
    "mig": FindingSpec(
        "the GPU is split into slices (MIG), between which NCCL has no peer-to-peer transport. An error if ranks use "
        "the same slice: CUDA shows a process one slice only, and NCCL refuses that."
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
    # A single rank has no peer.
    elif card.health.mig and seen.world.size > 1:
        yield Fault(
            "mig",
            "a GPU is split into slices (MIG)",
            "MIG is on: ranks get slices of this GPU, and NCCL has no peer-to-peer transport between slices",
            Action.NONE,
            f"If the job needs whole GPUs, end all processes on it and run `nvidia-smi -i {card.smi_id} -mig 0` as "
            f"root on {card.host.name}.",
            {"mig": True},
            severity=Severity.WARNING,
        )


def _is_used(seen: Seen[Nothing], card: Card) -> bool:
    """Whether another process uses the GPU, and not a display or a monitoring tool."""
    used, processes = card.health.memory_used_bytes, card.health.processes
    # Of a GPU that is split into slices, the slices themselves take some, and those of others are none of the job's.
    if used is None or used <= seen.number("used_mib") * MIB or card.health.mig:
        return False
    return bool(processes) or (used > CONTEXT_BYTES and not card.health.has_graphics)


def _in_use(seen: Seen[Nothing], card: Card) -> Iterator[Fault]:
    if not _is_used(seen, card):
        return
    used, host = card.health.memory_used_bytes or 0, card.host.name
    holders = _holders(card) or "No visible process holds it; one in another container may"
    yield Fault(
        "in-use",
        "GPU memory is already in use",
        f"{used / MIB:.0f} MiB were in use before this job used it; at most {seen.number('used_mib'):g} MiB expected. "
        f"{holders}",
        Action.NONE,
        f"Find and end the other process on {host}, outside of any container: `nvidia-smi`, or as root `fuser -v "
        f"/dev/nvidia*`. If none is shown, or another user owns it, {leave_out([host])}.",
        {"used_bytes": used, "pids": [process.pid for process in card.health.processes or ()]},
    )


def _holders(card: Card) -> str:
    """Such as "Used by pid 4711 (19456 MiB)"; empty where no process is visible."""
    shown = [
        f"pid {process.pid}" + ("" if process.used_bytes is None else f" ({process.used_bytes / MIB:.0f} MiB)")
        for process in card.health.processes or ()
    ]
    return f"Used by {', '.join(shown)}" if shown else ""


def _mode(card: Card) -> Iterator[Fault]:
    mode, processes = card.health.compute_mode, card.health.processes or ()
    advice = f"Run `nvidia-smi -i {card.smi_id} -c DEFAULT` as root on {card.host.name}."
    if mode == _PROHIBITED:
        title, said = "a GPU allows no CUDA process", "its compute mode is 'prohibited'; 'default' is expected"
        yield Fault("prohibited", title, said, Action.NONE, advice, {"compute_mode": mode})
    # One rank for each GPU is fine.
    elif mode in EXCLUSIVE and (processes or len(card.takers) > 1):
        why = f"{_holders(card)}, so a rank can use it only through MPS"
        if not processes:
            why = f"{begun(ranks_text(card.takers))} all take it, and without MPS only the first one can start"
        yield Fault(
            "exclusive",
            # The server of MPS, through which others may use the GPU, looks the same.
            "another process has exclusive use of a GPU" if processes else "a GPU allows only one CUDA process",
            f"its compute mode is 'exclusive process'. {why}",
            Action.NONE,
            advice,
            {"compute_mode": mode, "pids": [process.pid for process in processes]},
        )


def not_free(seen: Seen[D], uuids: Iterable[str]) -> Iterator[str]:
    """Reasons why these GPUs may not be free, by what was seen before the job touched them (GPU003, GPU008)."""
    cards = {card.health.uuid: card for card in cards_of(seen)}
    found = [finding for finding in seen.of(CHECK).findings if finding.code == "GPU008.in-use"]
    users = {uuid for finding in found for uuid in finding.gpus}
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


skip = devices.skip
# GCM's limit: an idle driver holds a few MiB.
SETTINGS = {"used_mib": 15}
CHECK: Check[Nothing] = Check(__name__, "GPU008", "gpu-users", Stage.GPU, Scope.HOST)
