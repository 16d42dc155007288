"""Read the NVIDIA driver's lines from the kernel's log: Xid lines of GPUs, SXid lines of NVSwitches.

A read of /dev/kmsg returns one record, "priority,sequence,microseconds,flags;text", with continuation lines that begin
with a blank (the kernel's Documentation/ABI/testing/dev-kmsg). The microseconds are those of the kernel's local clock.
This clock stops while the host is suspended, as CLOCK_MONOTONIC does. It is not adjusted, so it may be minutes off
after months. If kernel.dmesg_restrict is set, only processes with CAP_SYSLOG may read the log.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

KMSG = Path("/dev/kmsg")
# Above the size of any record: the kernel refuses smaller buffers (PRINTKRB_RECORD_MAX, CONSOLE_EXT_LOG_MAX).
_RECORD_BYTES = 16384
# The largest log buffer that a kernel can be built with has 32 MiB (CONFIG_LOG_BUF_SHIFT 25).
_MAX_BYTES = 64 << 20
_MAX_CHARACTERS = 300
# The limit of lines for each device and Xid, with fatal and non-fatal lines counted separately: a program that fails in
# a loop causes thousands of lines, and a marginal link causes thousands of non-fatal lines.
MAX_LINES = 20

_RECORD = re.compile(r"\d+,(\d+),(\d+),[^;]*;(.*)")
_ADDRESS = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
# For a MIG slice, its name follows the address ("GPU-I:05"). Old drivers do not write "PCI:".
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_ADDRESS}[^)]*\): (\d+)(?:, *(.*))?$")
# The lines that follow an SXid ("Severity ...", "Data ...") are details for NVIDIA's engineers, and are not parsed.
_SXID = re.compile(rf"nvidia-nvswitch\d+: SXid \(PCI:{_ADDRESS}\): (\d+), ((?:Non-fatal|Fatal).*)$")
# Matches text such as "RLW_RXPIPE Nonfatal XC0 i0 Link 03 (...)", also after "pid=..., name=..., " (leptonai/gpud 1160)
_NONFATAL = re.compile(r"(?:pid=[^,]*, *name=[^,]*, *)?(?:[A-Z][A-Z0-9_/]*\s+)?Non-?fatal\b")


class Xid(Struct, frozen=True, kw_only=True):
    """An Xid line (or SXid, if `switch`): the device ("0000:65:00", without function), the Xid's number, and its text.

    `line` is the record's sequence number since boot, `seconds` its time on the kernel's clock.
    """

    pci: str
    code: int
    text: str
    line: int
    seconds: float
    switch: bool = False

    @property
    def record(self) -> str:
        """The line as the driver writes it."""
        function = f"SXid (PCI:{self.pci}.0)" if self.switch else f"NVRM: Xid (PCI:{self.pci})"
        return f"{function}: {self.code}, {self.text}"

    @property
    def is_nonfatal(self) -> bool:
        """Whether the text says that the error is not fatal. NVSwitches and NVLinks of Blackwell GPUs may write so."""
        return _NONFATAL.match(self.text) is not None


class KernelLog(Struct, frozen=True, kw_only=True):
    """The driver's lines in the kernel's log, oldest first, at most MAX_LINES for each device and Xid; or `error`.

    `last` is the sequence number of the newest record of any kind. `now_seconds` is the time of CLOCK_MONOTONIC.
    """

    xids: tuple[Xid, ...] = ()
    last: int | None = None
    now_seconds: float = 0.0
    error: str | None = None


def kmsg_path(env: Mapping[str, str]) -> Path:
    """The path of the kernel's log: $DDPDIAG_KMSG (for containers with the host's log, and tests), or /dev/kmsg."""
    return Path(env.get("DDPDIAG_KMSG") or KMSG)


def kernel_log(path: Path) -> KernelLog:
    """Read all records that the kernel still has, without waiting for new ones. A failure is returned as `error`."""
    try:
        content = _content(path)
    except OSError as error:
        return KernelLog(error=f"{path}: {error.strerror}")
    records = [found for line in content.split("\n") if (found := _RECORD.match(line))]
    kept: dict[tuple[str, int, bool], int] = defaultdict(int)
    newest_first: list[Xid] = []
    for record in reversed(records):
        xid = parse_xid(record[3], int(record[1]), int(record[2]) / 1e6)
        if xid is not None and kept[xid.pci, xid.code, xid.is_nonfatal] < MAX_LINES:
            kept[xid.pci, xid.code, xid.is_nonfatal] += 1
            newest_first.append(xid)
    return KernelLog(
        xids=tuple(reversed(newest_first)),
        last=int(records[-1][1]) if records else None,
        now_seconds=time.clock_gettime(time.CLOCK_MONOTONIC),
    )


def newest_line_number(path: Path) -> int | None:
    """Read the sequence number of the newest record; None if the log is empty or cannot be read."""
    return kernel_log(path).last


def _content(path: Path) -> str:
    content = bytearray()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while len(content) < _MAX_BYTES:
            try:
                part = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the kernel has overwritten the next record; the following read skips it
            if not part:
                break
            content += part
    finally:
        os.close(descriptor)
    return content.decode(errors="replace")


def parse_xid(text: str, line: int = 0, seconds: float = 0.0) -> Xid | None:
    """Parse the Xid or SXid in a record's text; None if there is none. `line` and `seconds` are those of the record."""
    gpu, switch = _XID.search(text), _SXID.search(text)
    found = gpu or switch
    if found is None:
        return None
    domain, rest, code, message = found.groups()
    return Xid(
        pci=f"{int(domain, 16):04x}:{rest.lower()}",
        code=int(code),
        text=(message or "").strip()[:_MAX_CHARACTERS],
        line=line,
        seconds=seconds,
        switch=gpu is None,
    )
