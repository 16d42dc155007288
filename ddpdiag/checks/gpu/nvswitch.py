"""NVSwitch fabric, and recoveries that the driver requests.

On boards with NVSwitches every GPU must have joined the fabric, by the fabric manager, before CUDA starts there (error
802, "system not yet initialized"). From driver 570 on, a GPU also reports which recovery it needs.

Findings and their causes:

Fix: run `systemctl status nvidia-fabricmanager`, then follow the finding. `nvidia-smi -q` shows both under "Fabric" and
"GPU Recovery Action".

Confirm by hand: `systemctl status nvidia-fabricmanager`; `nvidia-smi -q | grep -A4 -E 'Fabric|Recovery'`; the fabric
manager's version must be the driver's.

Sources: Fabric manager user guide (docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide); NVML API reference
(docs.nvidia.com/deploy/nvml-api), nvmlDeviceGetGpuFabricInfoV; CUDA runtime API, cudaErrorSystemNotReady (802).
"""

from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import cards, devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, card_findings
from ddpdiag.checks.hosts import xid_fix
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.links import FABRIC_JOINED
from ddpdiag.probes.gpu.nvml import BrokenState

FINDINGS = {
    "fabric": FindingSpec(
        "the GPU has not joined, or joining failed: nvidia-fabricmanager does not run, has another version than the "
        "driver, or a switch is down. A warning where torch's CUDA started on a GPU that has not joined yet, as it "
        "does on one that was given to a virtual machine without its switches."
    ),
    "fabric-health": FindingSpec(
        "the GPU has joined, but NVML calls its fabric unhealthy (an error) or its capacity limited (a warning)."
    ),
    "recovery": FindingSpec(
        "the driver requests a reset, a reboot or a drain after an error (Xid 154 reports the same in `dmesg`)."
    ),
    **dict.fromkeys(("lost", "reset-required"), FindingSpec.error("NVML returned that code for the GPU.")),
}

# nvml.h: nvmlGpuFabricState_t, nvmlDeviceGpuRecoveryAction_t.
_JOINING = {1: "not started", 2: "in progress"}
REPLACE_LOST = "If it happens again, have the GPU replaced."
_RECOVERY = {
    1: ("GPU reset", Action.RESET),
    2: ("node reboot", Action.REBOOT),
    3: ("drain of peer-to-peer traffic", Action.RESET),
    4: ("drain and reset", Action.RESET),
    5: ("recovery of the IMEX domain", Action.REBOOT),
    6: ("bus reset", Action.RESET),
    7: ("system reboot", Action.REBOOT),
}
# nvml.h, NVML_GPU_FABRIC_HEALTH_SUMMARY_*.
_UNHEALTHY = 2
_SUMMARIES = {_UNHEALTHY: "unhealthy", 3: "limited capacity"}
_BROKEN = {
    BrokenState.RESET_REQUIRED: ("reset-required", "a GPU must be reset", Action.RESET),
    BrokenState.LOST: ("lost", "a GPU is lost", Action.REBOOT),
}
_WATCH = Watch("nvidia-smi -q -i {gpu} | grep -i recovery", "it shows another action than None")
_WATCH_FABRIC = Watch("nvidia-smi -q -i {gpu} | grep -A 12 Fabric", "Summary or Health is still not Healthy")


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    rows = seen.of(devices.CHECK).by_rank.values()
    started = {gpu.uuid for row in rows for gpu in row.gpus if gpu.uuid}
    yield from card_findings(
        seen,
        lambda card: (*joined(card, started=card.health.uuid in started), *_degraded(card), *requested(card)),
    )


def requested(card: Card) -> Iterator[Fault]:
    """The fault if the driver requests a recovery of this GPU, by a number or by a return code."""
    wanted, broken, cause = card.health.recovery_action, card.health.broken, xid_fix(card.host.name)
    if wanted:
        unknown = (f"action {wanted}, which this version does not know", Action.MONITOR)
        name, action = _RECOVERY.get(wanted, unknown)
        yield Fault(
            "recovery",
            "the driver requests a recovery of a GPU",
            f"the driver requests this recovery: {name}. A healthy GPU needs none",
            action,
            evidence={"recovery_action": wanted},
            severity=Severity.ERROR if wanted in _RECOVERY else Severity.WARNING,
            watch=_WATCH,
            first=cause,
        )
    elif broken is not None:
        word, title, action = _BROKEN[broken]
        said = f"NVML reports {broken.value!r}"
        yield Fault(word, title, said, action, REPLACE_LOST if broken is BrokenState.LOST else "", first=cause)


def joined(card: Card, *, started: bool = False) -> Iterator[Fault]:
    """The fault if this GPU has not joined its NVSwitch fabric. `started`: torch's CUDA shows the GPU nevertheless."""
    fabric = card.health.fabric
    state = _JOINING.get(fabric.state or 0)
    if state is not None:
        but = "but CUDA starts without it" if started else "so CUDA does not start on it"
        said = f"it has not joined the NVSwitch fabric yet (state: {state}), {but}"
    elif fabric.state == FABRIC_JOINED and fabric.status:
        said = f"joining the NVSwitch fabric failed (status {fabric.status}; 0 expected)"
    else:
        return
    yield Fault(
        "fabric",
        "a GPU has not joined the NVSwitch fabric",
        said,
        Action.REBOOT,
        "",
        {"fabric_state": fabric.state, "fabric_status": fabric.status},
        severity=Severity.WARNING if started and state is not None else Severity.ERROR,
        first="1. If the host booted a few minutes ago, wait and run again. 2. End all processes on its GPUs and, as "
        "root, run `systemctl restart nvidia-fabricmanager` (its version must equal the driver's). 3.",
    )


def _degraded(card: Card) -> Iterator[Fault]:
    fabric = card.health.fabric
    if fabric.state != FABRIC_JOINED or fabric.status or fabric.health not in _SUMMARIES:
        return
    is_unhealthy = fabric.health == _UNHEALTHY
    yield Fault(
        "fabric-health",
        "the NVSwitch fabric of a GPU is not healthy",
        f"NVML calls its fabric health {_SUMMARIES[fabric.health]!r}; 'healthy' is expected",
        Action.REBOOT if is_unhealthy else Action.MONITOR,
        "",
        {"fabric_health": fabric.health},
        severity=Severity.ERROR if is_unhealthy else Severity.WARNING,
        watch=_WATCH_FABRIC,
        first="As root run `journalctl -u nvidia-fabricmanager` and `dmesg -T | grep -i sxid` on "
        f"{card.host.name} for the cause.",
    )


skip = cards.skip
CHECK: Check[Nothing] = Check(__name__, "GPU007", "fabric", Stage.GPU, Scope.HOST)
