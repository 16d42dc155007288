"""NVSwitch fabric, and recoveries that the driver requests.

On boards with NVSwitches the fabric manager must have joined every GPU to the fabric. Before that CUDA does not start
on the GPU: error 802, "system not yet initialized". From driver 570 on, a GPU also reports which recovery it needs.

Findings and their causes:

Fix: run `systemctl status nvidia-fabricmanager`, then follow the finding. In `nvidia-smi -q`, "Fabric" shows whether
the GPU has joined, and "GPU Recovery Action" the recovery that it needs.

Confirm by hand: `systemctl status nvidia-fabricmanager`; `nvidia-smi -q | grep -A4 -E 'Fabric|Recovery'`; the fabric
manager's version must be the driver's.

Sources: Fabric manager user guide (docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide); NVML API reference
(docs.nvidia.com/deploy/nvml-api), nvmlDeviceGetGpuFabricInfoV; CUDA runtime API, cudaErrorSystemNotReady (802).
"""

from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import cards, devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Recheck, card_findings
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
_RECHECK = Recheck("nvidia-smi -q -i {gpu} | grep -i recovery", "it shows another action than None")
_RECHECK_FABRIC = Recheck("nvidia-smi -q -i {gpu} | grep -A 12 Fabric", "Summary or Health is still not Healthy")


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    rows = seen.of(devices.CHECK).by_rank.values()
    started = {gpu.uuid for row in rows for gpu in row.gpus if gpu.uuid}
    yield from card_findings(
        seen,
        lambda card: (
            *joining_faults(card, started=card.health.uuid in started),
            *_health_faults(card),
            *recovery_faults(card),
        ),
    )


def recovery_faults(card: Card) -> Iterator[Fault]:
    """Yield a fault if the driver requests a recovery of this GPU, or returns an error code that requires one."""
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
            recheck=_RECHECK,
            prefix=cause,
        )
    elif broken is not None:
        word, title, action = _BROKEN[broken]
        text = f"NVML reports {broken.value!r}"
        yield Fault(word, title, text, action, REPLACE_LOST if broken is BrokenState.LOST else "", prefix=cause)


def joining_faults(card: Card, *, started: bool = False) -> Iterator[Fault]:
    """Yield a fault if this GPU has not joined its NVSwitch fabric. `started`: torch shows the GPU nevertheless."""
    fabric = card.health.fabric
    state = _JOINING.get(fabric.state or 0)
    if state is not None:
        but = "but CUDA starts without it" if started else "so CUDA does not start on it"
        text = f"it has not joined the NVSwitch fabric yet (state: {state}), {but}"
    elif fabric.state == FABRIC_JOINED and fabric.status:
        text = f"joining the NVSwitch fabric failed (status {fabric.status}; 0 expected)"
    else:
        return
    yield Fault(
        "fabric",
        "a GPU has not joined the NVSwitch fabric",
        text,
        Action.REBOOT,
        "",
        {"fabric_state": fabric.state, "fabric_status": fabric.status},
        severity=Severity.WARNING if started and state is not None else Severity.ERROR,
        prefix="1. If the host booted a few minutes ago, wait and run again. 2. End all processes on its GPUs and, as "
        "root, run `systemctl restart nvidia-fabricmanager` (its version must equal the driver's). 3.",
    )


def _health_faults(card: Card) -> Iterator[Fault]:
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
        recheck=_RECHECK_FABRIC,
        prefix="As root run `journalctl -u nvidia-fabricmanager` and `dmesg -T | grep -i sxid` on "
        f"{card.host.name} for the cause.",
    )


skip = cards.skip
CHECK: Check[Nothing] = Check(__name__, "GPU007", "fabric", Stage.GPU, Scope.HOST)
