"""Xid numbers of NVIDIA's driver: what each means, and what to do."""

import re
from enum import Enum
from typing import NamedTuple

from ddpdiag.checks.gpu.cards import Action
from ddpdiag.checks.gpu.nvswitch import recovery_of
from ddpdiag.probes.gpu.kernel_log import Xid


class Kind(Enum):
    """Whose fault it is: the GPU's (or its link's), a program's, neither's; or it is open what it means for a job."""

    DEVICE = "device"
    PROGRAM = "program"
    HARMLESS = "harmless"
    OPEN = "open"


class Meaning(NamedTuple):
    """What a number means."""

    kind: Kind
    action: Action
    text: str


# Meanings after NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, catalogue of driver 590); actions after its
# resolution buckets, as AWS's and Azure's health checks sort them. One that is not here is shown with its own text.
_TEXTS = {
    (Kind.DEVICE, Action.ISOLATE): {54: "auxiliary power is not connected to the board"},
    (Kind.DEVICE, Action.REBOOT): {
        79: "the GPU has fallen off the bus",
        151: "key rotation error",
        168: "errors in write-protected memory",
    },
    (Kind.DEVICE, Action.RESET): {
        46: "the GPU stopped processing",
        48: "uncorrectable (double bit) ECC error",
        62: "the GPU's micro-controller halted",
        64: "a bad row or page could not be replaced",
        95: "uncontained memory error",
        109: "context switch timed out",
        110: "security fault",
        119: "the GPU's GSP firmware did not answer in time",
        120: "error in the GPU's GSP firmware",
        136: "training of a link failed",
        140: "uncorrected ECC error that was not contained",
        143: "initialization failed",
        155: "an NVLink went down",
        156: "a part of the GPU was retired",
        158: "fatal timeout",
    },
    # Reset or monitor: at one end of a link it may be the other end's fault.
    (Kind.DEVICE, Action.MONITOR): {
        74: "NVLink error",
        **{
            code: f"NVLink error ({part})"
            for code, part in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), 144)
        },
    },
    (Kind.PROGRAM, Action.NONE): {
        8: "a program stopped",
        13: "exception of a program on the GPU",
        25: "invalid commands of a program",
        31: "page fault of a program on the GPU",
        32: "corrupted commands of a program",
        69: "invalid call of a program",
        94: "memory error contained to one program",
        137: "access of a program over NVLink that is not allowed",
        **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "error of a copy engine"),
    },
    (Kind.HARMLESS, Action.NONE): {
        **dict.fromkeys((37, 38), "error of the driver's firmware"),
        43: "a program stopped after a fault of its own",
        44: "fault during a context switch",
        # A SIGKILL is enough, so a worker that is killed at its deadline leaves one.
        45: "a program was ended while it used the GPU",
        63: "a bad row or page was marked for replacement",
        **dict.fromkeys((66, 67), "illegal access by the driver"),
        92: "many correctable ECC errors",
        **dict.fromkeys((106, 107), "test message"),
        121: "corrected errors on the link to the CPU",
    },
}

XIDS = {code: Meaning(kind, action, text) for (kind, action), texts in _TEXTS.items() for code, text in texts.items()}

# Blackwell's NVLinks mark fatal errors themselves; a marginal link writes thousands of lines that are not fatal: error
# correction handles them (NCCL issue 2241; leptonai/gpud 1160 and 1174).
_NVLINK_5 = range(144, 151)
_RECOVERY = 154

_CHANGED = re.compile(r"to 0x([0-9a-fA-F]+) \(([^)]*)\)")


def meaning_of(xid: Xid, model: str | None) -> Meaning:
    """What a line means on a GPU of that model."""
    if xid.switch:
        # NVIDIA's Fabric Manager guide: traffic goes on after what is not fatal.
        if xid.text.startswith("Fatal"):
            return Meaning(Kind.DEVICE, Action.RESET, "fatal error of an NVSwitch")
        return Meaning(Kind.OPEN, Action.MONITOR, "error of an NVSwitch that is not fatal")
    if xid.code in _NVLINK_5 and xid.is_nonfatal:
        return Meaning(Kind.HARMLESS, Action.NONE, f"{XIDS[xid.code].text} that is not fatal")
    if xid.code == _RECOVERY:
        return _recovery(xid)
    if xid.code == 64 and "A100" in (model or ""):
        # AWS: the row remapper of an A100 needs the reboot.
        return XIDS[64]._replace(action=Action.REBOOT)
    return XIDS.get(xid.code, Meaning(Kind.OPEN, Action.MONITOR, "a number that this version does not know"))


def _recovery(xid: Xid) -> Meaning:
    """Xid 154 contains the requested recovery; the number counts, since drivers word it differently."""
    found = _CHANGED.search(xid.text)
    if found is None:
        return Meaning(Kind.OPEN, Action.MONITOR, "the recovery action changed")
    wanted = int(found[1], 16)
    if wanted == 0:
        return Meaning(Kind.HARMLESS, Action.NONE, "the driver requests no recovery any more")
    return Meaning(Kind.DEVICE, recovery_of(wanted)[1], f"the driver requests a recovery: {found[2]}")
