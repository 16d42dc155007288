"""A run on one host: rank 0 hands secret and port to processes of the same user, and each end knows the other's uid.

The kernel tells it (SO_PEERCRED of unix(7)). The sockets are abstract, so nothing lies in a directory that others can
write to; a stranger who takes a name only makes rank 0 take the next one.
"""

import contextlib
import os
import socket
import struct
import threading

from ddpdiag.errors import UsageError
from ddpdiag.runtime.launchers.launch import digest

_NAMES = 8
_SECONDS = 0.5
_PORT_BYTES = 2
_UCRED = struct.Struct("3i")  # pid, uid, gid


class SameHost:
    """Rank 0's end, served by a thread until it is closed; UsageError where strangers hold all of its names."""

    def __init__(self, run_id: str, secret: bytes, port: int) -> None:
        self._offer = port.to_bytes(_PORT_BYTES, "big") + secret
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for name in _names(run_id):
            with contextlib.suppress(OSError):
                self._socket.bind(name)
                break
        else:
            self._socket.close()
            raise UsageError(
                "other processes hold every name under which rank 0 could hand out this run's secret; "
                "set DDPDIAG_TOKEN to one secret for all ranks"
            )
        self._socket.listen(128)
        threading.Thread(target=self._serve, name="same host", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                peer, _address = self._socket.accept()
                with peer, contextlib.suppress(OSError):
                    if _uid(peer) == os.geteuid():
                        peer.sendall(self._offer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ask(run_id: str) -> tuple[bytes, int] | None:
    """Secret and port of this run's rank 0, if that is here and of the same user."""
    for name in _names(run_id):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, contextlib.suppress(OSError):
            asking.settimeout(_SECONDS)
            asking.connect(name)
            if _uid(asking) == os.geteuid() and (offer := asking.recv(64)):
                return offer[_PORT_BYTES:], int.from_bytes(offer[:_PORT_BYTES], "big")
    return None


def _names(run_id: str) -> list[str]:
    return [f"\0ddpdiag-{os.geteuid()}-{digest(run_id)}-{number}" for number in range(_NAMES)]


def _uid(peer: socket.socket) -> int:
    """Of the process at the other end; for one that listens, of whoever called listen()."""
    _pid, uid, _gid = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)
