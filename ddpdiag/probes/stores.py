"""Files that torch's FileStore wrote: what jobs leave behind that met over file:// and did not end well."""

import os
import stat
import time
from itertools import islice
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.holders import user_name

_MAX_ENTRIES = 1000
# What torch's FileStore (2.13) begins with: the length of a key, 4 bytes, and the key that counts the store's users.
_STORE = b"\t\0\0\0refcount/"


class Store(Struct, frozen=True):
    """A file that torch's FileStore wrote: its path, owner, bytes, and how long ago the last of these was written."""

    path: str
    owner: str
    bytes: int
    age_seconds: float


def stores(directory: Path) -> tuple[Store, ...]:
    """Files directly in a directory that torch's FileStore wrote, of the first thousand entries."""
    try:
        with os.scandir(directory) as entries:
            found = [_store(entry) for entry in islice(entries, _MAX_ENTRIES)]
    except OSError:
        return ()
    return tuple(sorted((store for store in found if store is not None), key=lambda store: store.path))


def _store(entry: os.DirEntry[str]) -> Store | None:
    try:
        if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_size < len(_STORE):
            return None
        # Not blocking: what was a file may be a pipe by now.
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            about, head = os.fstat(handle), os.read(handle, len(_STORE))
        finally:
            os.close(handle)
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode) or head != _STORE:
        return None
    return Store(entry.path, user_name(about.st_uid), about.st_size, max(0.0, time.time() - about.st_mtime))
