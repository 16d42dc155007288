"""The user's key file, `~/.local/state/ddpdiag/key`, which is the only file that ddpdiag leaves behind.

Hosts with a common home have a common key file, and other users cannot read it (mode 0600). If the home is not
writable, a run on one host uses a key file in `/tmp/ddpdiag-key-UID`, a folder of mode 0700. A supervisor runs this
module as a separate program, because a home on a dead file server must not hang the supervisor. The program imports
nothing of ddpdiag, and prints the result of `find_key` as JSON.
"""

import json
import os
import secrets
import stat
import sys
import time

_KEY_BYTES = 32
# Not $TMPDIR, because it may differ between shells of one user.
_TEMPORARY = "/tmp"
_FOLDER, _NAME = os.path.join(".local", "state", "ddpdiag"), "key"
# File systems that several hosts share (names of /proc/self/mounts). On any other, only one host sees a new key.
_SHARED_FILE_SYSTEMS = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "wekafs"),
    *("fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
)


def find_key(home: str, mode: str) -> tuple[str, bool, str]:
    """The key in hex (empty if there is none), whether several hosts may share its folder, and an error or "".

    Mode "read" creates no key file. "create" creates a missing one on a file system that hosts share. A run on one host
    uses "read here" and "create here", which work on any file system, and without a writable home use /tmp.
    """
    folder = os.path.join(home, _FOLDER)
    shared = _is_shared(home)
    if mode.endswith(" here") and not os.path.exists(os.path.join(folder, _NAME)) and not _is_writable(folder):
        shared, folder = False, os.path.join(_TEMPORARY, f"ddpdiag-key-{os.geteuid()}")
        if not _is_private(folder, create=mode == "create here"):
            return "", shared, ""
    path = os.path.join(folder, _NAME)
    try:
        key = _read_key(path)
        if not key and (mode == "create here" or (mode == "create" and shared)):
            _create_key(folder)
            key = _read_key(path)
    except ValueError as error:
        return "", shared, f"{path}: {error}"
    except OSError:
        return "", shared, ""
    return key, shared, ""


def _is_writable(folder: str) -> bool:
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK)


def _is_private(folder: str, *, create: bool) -> bool:
    """Whether only this user has access to the folder. With `create`, create a missing folder first."""
    try:
        if create:
            os.mkdir(folder, mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _read_key(path: str) -> str:
    """The key in hex, or "" without a file. ValueError if other users can read the file, or if it holds no key."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"mode {status.st_mode & 0o7777:04o}, owner {status.st_uid}: expected mode 0600 and your own uid"
            )
        text = os.read(descriptor, 4 * _KEY_BYTES).decode("ascii", "replace").strip()
        if len(text) != 2 * _KEY_BYTES or set(text) - set("0123456789abcdef"):
            raise ValueError(f"expected {2 * _KEY_BYTES} hexadecimal digits")
        return text
    finally:
        os.close(descriptor)


def _create_key(folder: str) -> None:
    """Create the key file in one step, so that no reader sees a part of it. An existing file stays unchanged."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    temporary = os.path.join(folder, f".{_NAME}-{os.getpid()}-{time.time_ns()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(_KEY_BYTES).encode() + b"\n")
        os.fsync(descriptor)
        os.link(temporary, os.path.join(folder, _NAME))
    except FileExistsError:
        pass  # another host was first
    finally:
        os.close(descriptor)
        os.unlink(temporary)


def _is_shared(home: str) -> bool:
    """Whether the home is on a file system that several hosts may mount."""
    home, longest_mount, file_system = os.path.realpath(home), "", ""
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _device, point, its_file_system = line.split(" ")[:3]
            point = point.replace("\\040", " ")
            if (home + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(longest_mount):
                longest_mount, file_system = point, its_file_system
    return file_system in _SHARED_FILE_SYSTEMS


if __name__ == "__main__":
    json.dump(find_key(sys.argv[1], sys.argv[2]), sys.stdout)
