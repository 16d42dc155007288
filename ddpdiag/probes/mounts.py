"""File systems: what a directory lies on, and the room there."""

import os
import re
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.files import read_text


class Mount(Struct, frozen=True):
    """The file system under a directory, as proc(5) mountinfo has it; `read_only` on this host."""

    kind: str
    source: str
    read_only: bool


class Space(Struct, frozen=True):
    """Room for our user; None where the file system does not count."""

    free_bytes: int
    free_inodes: int | None


def mount_of(directory: Path, mountinfo: str | None = None) -> Mount | None:
    """The mount that a directory lies on, or None if /proc does not tell; `directory` must not hold links."""
    best: tuple[int, Mount] | None = None
    for line in (mountinfo or read_text(Path("/proc/self/mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 6 or len(right) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left[4])
        # Of two mounts on one point the later one counts: it hides the other.
        if directory.is_relative_to(point) and (best is None or len(point) >= best[0]):
            options = {*left[5].split(","), *right[2].split(",")}
            best = len(point), Mount(right[0], right[1], "ro" in options)
    return best[1] if best else None


def space(directory: Path) -> Space | None:
    """What is free, or None if it cannot be told."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return None
    return Space(room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None)
