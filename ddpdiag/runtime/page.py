"""The step page: where a worker writes how far it came, and its supervisor reads it even when the worker cannot speak.

Shared memory, because a process that holds the GIL, is stopped or is stuck in a driver answers no message.
"""

import mmap
import os
import struct
import tempfile
import time

_STEP = struct.Struct("<qd")
_LABEL_BYTES = 120
_SIZE = mmap.PAGESIZE


def nameless_file(name: str) -> int:
    """A descriptor of an empty file without a name, in memory: on a full disk a mapped page would end us by SIGBUS."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class StepPage:
    """A step's number, time and name. One writer; a torn label is possible and harmless."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def create(cls) -> "StepPage":
        """A fresh page, whose descriptor can be handed to a worker."""
        descriptor = nameless_file("ddpdiag-steps")
        os.truncate(descriptor, _SIZE)
        return cls(descriptor)

    def write(self, step: int, label: str) -> None:
        """Announce a step."""
        text = label.encode(errors="replace")[:_LABEL_BYTES]
        self._map[: _STEP.size + _LABEL_BYTES] = _STEP.pack(step, time.monotonic()) + text.ljust(_LABEL_BYTES, b"\0")

    def read(self) -> tuple[int, str]:
        """The last step announced, and its label."""
        step, _at = _STEP.unpack(self._map[: _STEP.size])
        label = self._map[_STEP.size : _STEP.size + _LABEL_BYTES].rstrip(b"\0")
        return step, label.decode(errors="replace")

    def seconds(self) -> float:
        """How long ago the last step was announced; the monotonic clock is that of all processes of a host."""
        _step, at = _STEP.unpack(self._map[: _STEP.size])
        return max(0.0, time.monotonic() - float(at))

    def close(self) -> None:
        """Unmap and close."""
        self._map.close()
        os.close(self.descriptor)
