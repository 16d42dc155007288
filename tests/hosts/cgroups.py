"""Limits of a control group on all that starts on a host, as a job's or a container's are."""

import contextlib
import os
import uuid
from pathlib import Path

from network import Host, Network

_MOUNT = Path("/sys/fs/cgroup")


class Unavailable(Exception):
    """This machine does not let us make such a group; the text says why."""


def limit_memory(network: Network, host: Host, limit_bytes: int) -> None:
    """The kernel kills the largest process of the host when all together hold more."""
    group = _new_group(network, "memory")
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    _write(group / name, limit_bytes)
    _start_in(host, group)


def limit_tasks(network: Network, host: Host, count: int) -> None:
    """No more processes and threads than that."""
    group = _new_group(network, "pids")
    _write(group / "pids.max", count)
    _start_in(host, group)


def _start_in(host: Host, group: Path) -> None:
    # 0 is whoever writes it.
    host.prefix = ["sh", "-c", f'echo 0 > {group}/cgroup.procs && exec "$@"', "sh", *host.prefix]


def _new_group(network: Network, controller: str) -> Path:
    """A group below our own (version 1) or below the root, where that hands the controller down (version 2)."""
    parent = _own_group(controller)
    if parent is None:
        parent = _MOUNT
        if controller not in _read(parent / "cgroup.subtree_control").split():
            raise Unavailable(f"no control group hands down {controller}")
    group = parent / f"ddpdiag-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        raise Unavailable(str(error)) from error
    network.undo.callback(_remove, group)
    return group


def _own_group(controller: str) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _MOUNT / controller / path.lstrip("/")
    return None


def _remove(group: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(group)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise Unavailable(str(error)) from error


def _write(path: Path, value: int) -> None:
    try:
        path.write_text(str(value))
    except OSError as error:
        raise Unavailable(str(error)) from error
