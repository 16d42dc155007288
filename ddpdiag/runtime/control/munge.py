"""The secret by munge, which authenticates Slurm's own messages: every host of the cluster runs munged with one key.

Rank 0 sends a credential to each process that connects. Only processes of its user can decode it (`munge
--restrict-uid`), and decoding tells the uid that encoded it. Other users receive bytes that they cannot read.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from ddpdiag.errors import UsageError
from ddpdiag.probes.host.programs import holder_of, run_bounded

_HELPER_SECONDS = 2.0
_SECONDS = 1.0
_CREDENTIAL_BYTES = 4096
# Credentials are valid for 300 s (munge(1), --ttl).
_NEW_AFTER_SECONDS = 60.0
# munge_err_t of munge.h. When a second rank of a host decodes the same credential, munged reports a replay. Expired and
# replayed credentials are accepted: an attacker who sends one again does not learn the secret in it.
_SUCCESS, _EXPIRED, _REPLAYED = 0, 15, 17


class _Payload(msgspec.Struct, frozen=True):
    run_id: str
    secret: bytes
    port: int


def is_there() -> bool:
    """Does this host's munged make credentials?"""
    return bool(_credential(b""))


class Munge:
    """Rank 0's end, served by a thread until it is closed; UsageError where none of its ports is free."""

    def __init__(self, run_id: str, secret: bytes, port: int, ports: Sequence[int]) -> None:
        self._payload = msgspec.json.encode(_Payload(run_id, secret, port))
        self._made, self._text = 0.0, b""
        self._socket = _listening(ports)
        threading.Thread(target=self._serve, name="munge", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                peer, _address = self._socket.accept()
                with peer, contextlib.suppress(OSError):
                    peer.setblocking(False)  # a credential fits into the socket's buffer
                    peer.sendall(self._fresh())

    def _fresh(self) -> bytes:
        if time.monotonic() - self._made > _NEW_AFTER_SECONDS or not self._text:
            self._made, self._text = time.monotonic(), _credential(self._payload)
        return self._text

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ask(run_id: str, address: str, ports: Sequence[int]) -> tuple[bytes, int] | None:
    """Secret and port of this run's rank 0, if it listens there and is of the same user."""
    for port in ports:
        with contextlib.suppress(OSError):
            offer = _opened(_read((address, port)))
            if offer is not None and offer.run_id == run_id:
                return offer.secret, offer.port
    return None


def _listening(ports: Sequence[int]) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=4096, family=socket.AF_INET6, dualstack_ipv6=True)
        with contextlib.suppress(OSError):  # a host without IPv6
            return socket.create_server(("", port), backlog=4096)
    held = "; ".join(f"{port} is held by {holder_of(port) or 'an unknown process'}" for port in ports)
    raise UsageError(
        f"no port is free on which rank 0 could hand out this run's secret: {held}; "
        "set DDPDIAG_TOKEN to one secret on all hosts"
    )


def _read(where: tuple[str, int]) -> bytes:
    text, end = b"", time.monotonic() + _SECONDS  # of all: a stranger may send one byte at a time
    with socket.create_connection(where, _SECONDS) as asking:
        while len(text) < _CREDENTIAL_BYTES and time.monotonic() < end and (more := asking.recv(_CREDENTIAL_BYTES)):
            text += more
    return text


def _credential(payload: bytes) -> bytes:
    """What only processes of this user can open, on each host of the cluster; empty where that cannot be made."""
    command = ("munge", "--cipher=aes128", f"--restrict-uid={os.geteuid()}")
    with contextlib.suppress(OSError):
        said = run_bounded(command, time.monotonic() + _HELPER_SECONDS, payload)
        if said is not None and said.code == 0:
            return said.out
    return b""


def _opened(credential: bytes) -> _Payload | None:
    """What a process of this user put into it."""
    command = ("unmunge", "--numeric", "--keys=STATUS,UID")
    said = run_bounded(command, time.monotonic() + _HELPER_SECONDS, credential) if credential else None
    if said is None or said.code not in (_SUCCESS, _EXPIRED, _REPLAYED):
        return None
    metadata, _empty, payload = said.out.partition(b"\n\n")
    told = dict(line.split(b":", 1) for line in metadata.splitlines() if b":" in line)
    if told.get(b"UID", b"").strip() != str(os.geteuid()).encode():
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(payload, type=_Payload)
    return None
