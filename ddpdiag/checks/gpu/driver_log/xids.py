"""NVIDIA's Xid numbers: what each means, and what it asks for.

Meanings after NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, catalogue of driver 590); actions after its
resolution buckets, as AWS's and Azure's health checks sort them. A number that is not here is told with its own text.
"""

import re
from enum import Enum
from typing import NamedTuple

from ddpdiag.checks.gpu.cards import Action
from ddpdiag.checks.gpu.nvswitch import recovery_of
from ddpdiag.probes.gpu.kernel_log import Xid


class Kind(Enum):
    """Whose fault it is: the GPU's (or its link's), a program's, nobody's; or it is open what it means for a job."""

    DEVICE = "device"
    PROGRAM = "program"
    HARMLESS = "harmless"
    OPEN = "open"


class Meaning(NamedTuple):
    """What a number means."""

    kind: Kind
    action: Action
    text: str


def _of(kind: Kind, action: Action, texts: dict[int, str]) -> dict[int, Meaning]:
    return {code: Meaning(kind, action, text) for code, text in texts.items()}


XIDS = {
    **_of(Kind.DEVICE, Action.ISOLATE, {54: "auxiliary power is not connected to the board"}),
    **_of(
        Kind.DEVICE,
        Action.REBOOT,
        {
            79: "the GPU has fallen off the bus",
            151: "key rotation error",
            168: "errors in write-protected memory",
        },
    ),
    **_of(
        Kind.DEVICE,
        Action.RESET,
        {
            46: "the GPU stopped processing",
            48: "uncorrectable (double bit) ECC error",
            62: "its micro-controller halted",
            64: "a bad row or page could not be replaced",
            95: "uncontained memory error",
            109: "context switch timed out",
            110: "security fault",
            119: "its GSP firmware did not answer in time",
            120: "error in its GSP firmware",
            136: "training of a link failed",
            140: "uncorrected ECC error that got away",
            143: "initialization failed",
            155: "an NVLink went down",
            156: "a part of it was retired",
            158: "fatal timeout",
        },
    ),
    # Reset or monitor: at one end of a link it may be the other end's fault.
    **_of(
        Kind.DEVICE,
        Action.MONITOR,
        {
            74: "NVLink error",
            144: "NVLink error (SAW)",
            145: "NVLink error (RLW)",
            146: "NVLink error (TLW)",
            147: "NVLink error (TREX)",
            148: "NVLink error (NVLPW_CTRL)",
            149: "NVLink error (NETIR)",
            150: "NVLink error (MSE)",
        },
    ),
    **_of(
        Kind.PROGRAM,
        Action.NONE,
        {
            8: "a program stopped",
            13: "exception of a program on the GPU",
            25: "invalid commands of a program",
            31: "page fault of a program on the GPU",
            32: "corrupted commands of a program",
            69: "invalid call of a program",
            94: "memory error contained to one program",
            137: "access of a program over NVLink that is not allowed",
        }
        | dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "error of a copy engine"),
    ),
    **_of(
        Kind.HARMLESS,
        Action.NONE,
        {
            37: "error of the driver's firmware",
            38: "error of the driver's firmware",
            43: "a program stopped after a fault of its own",
            44: "fault during a context switch",
            # A SIGKILL is enough, so that a deadline of our own leaves one.
            45: "a program was ended while it used the GPU",
            63: "a bad row or page was marked for replacement",
            66: "illegal access by the driver",
            67: "illegal access by the driver",
            92: "many correctable ECC errors",
            106: "test message",
            107: "test message",
            121: "corrected errors on the link to the CPU",
        },
    ),
}
_RECOVERY = 154
_CHANGED = re.compile(r"to 0x([0-9a-fA-F]+) \(([^)]*)\)")


def meaning_of(xid: Xid, model: str | None) -> Meaning:
    """What a line asks for on a GPU of that model."""
    if xid.switch:
        # NVIDIA's Fabric Manager guide: traffic goes on after what is not fatal.
        if xid.text.startswith("Fatal"):
            return Meaning(Kind.DEVICE, Action.RESET, "fatal error of an NVSwitch")
        return Meaning(Kind.OPEN, Action.MONITOR, "error of an NVSwitch that is not fatal")
    if xid.code == _RECOVERY:
        return _recovery(xid)
    if xid.code == 64 and "A100" in (model or ""):
        # AWS: the row remapper of an A100 needs the reboot.
        return XIDS[64]._replace(action=Action.REBOOT)
    return XIDS.get(xid.code, Meaning(Kind.OPEN, Action.MONITOR, "a number that this version does not know"))


def _recovery(xid: Xid) -> Meaning:
    """Xid 154 says by itself what the driver asks for; the number counts, since drivers word it differently."""
    found = _CHANGED.search(xid.text)
    if found is None:
        return Meaning(Kind.OPEN, Action.MONITOR, "the recovery action changed")
    wanted = int(found[1], 16)
    if wanted == 0:
        return Meaning(Kind.HARMLESS, Action.NONE, "the driver asks for no recovery any more")
    return Meaning(Kind.DEVICE, recovery_of(wanted)[1], f"the driver asks for a recovery: {found[2]}")
