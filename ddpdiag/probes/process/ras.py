"""What NCCL knows of a job that hangs: its RAS service (NCCL 2.24 and newer).

A thread of NCCL in each process listens on localhost:28028 (or $NCCL_RAS_ADDR); all processes of a user on a host share
that port. Any of them collects from all others what each communicator is at, and names ranks that lag behind, or do not
answer. The protocol is text (src/ras/client.cc and client_support.cc of NCCL): "CLIENT PROTOCOL 2" is answered by
"SERVER PROTOCOL n", "TIMEOUT seconds" by "OK", "VERBOSE STATUS" by the report, at whose end the connection is closed.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ddpdiag.probes.host.files import read_text
from ddpdiag.probes.process.port_holders import TCP_LISTEN

PORT = 28028
MAX_BYTES = 16 << 10
CUT = "[no more was said in time: some process may not answer]"
# Which process takes a call is up to the kernel; one that is stopped takes it, too, and never answers.
_GREETING_SECONDS = 0.4
_PROC = Path("/proc/self")


class Address(NamedTuple):
    """Where a socket of ours listens."""

    family: socket.AddressFamily
    host: str
    port: int


def own_service(env: Mapping[str, str]) -> Address | None:
    """Where NCCL's thread in this process listens; None if there is none. Strangers on that port are left alone."""
    port = _port(env.get("NCCL_RAS_ADDR", ""))
    return None if port is None else next(_listening(port), None)


def _port(address: str) -> int | None:
    """The port of "host:port" or "[::1]:port"; NCCL's own one if nothing is said."""
    if not address:
        return PORT
    digits = address.rpartition(":")[2]
    return int(digits) if digits.isascii() and digits.isdigit() and 0 < int(digits) < 1 << 16 else None


def _listening(port: int) -> Iterator[Address]:
    own = frozenset(_open_sockets())
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for fields in map(str.split, (read_text(_PROC / "net" / table) or "").splitlines()[1:]):
            host, _, number = fields[1].rpartition(":")
            if int(number, 16) == port and fields[3] == TCP_LISTEN and fields[9] in own:
                yield Address(family, _text(family, host), port)


def _open_sockets() -> Iterator[str]:
    """Inodes of this process's sockets."""
    for name in os.listdir(_PROC / "fd"):
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(_PROC / "fd" / name)
            if target.startswith("socket:["):
                yield target.removeprefix("socket:[").removesuffix("]")


def _text(family: socket.AddressFamily, digits: str) -> str:
    """An address of proc(5): words of 32 bits in the machine's order of bytes, each as 8 hexadecimal digits."""
    words = (int(digits[start : start + 8], 16) for start in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def status(address: Address, end: float) -> str:
    """NCCL's report; what has come until `end` (monotonic) if it is not all, and nothing if nobody answers."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.socket(address.family, socket.SOCK_STREAM) as sock:
            greeted = min(end, time.monotonic() + _GREETING_SECONDS)
            sock.settimeout(max(0.01, greeted - time.monotonic()))
            sock.connect((address.host, address.port))
            if not _said(sock, "CLIENT PROTOCOL 2", greeted).startswith("SERVER PROTOCOL "):
                return ""
            # NCCL's processes wait no longer than that for each other; by itself it is 5 s.
            _said(sock, "TIMEOUT 1", end)
            sock.sendall(b"VERBOSE STATUS\n")
            return _report(sock, end)
    return ""


def _said(sock: socket.socket, line: str, end: float) -> str:
    """The line that answers ours; TimeoutError if none does."""
    sock.sendall(f"{line}\n".encode())
    answer = b""
    while not answer.endswith(b"\n") and len(answer) < 256:
        got = _received(sock, 256, end)
        if not got:
            break
        answer += got
    return answer.decode(errors="replace")


def _report(sock: socket.socket, end: float) -> str:
    got, whole = b"", False
    with contextlib.suppress(OSError):
        while len(got) < MAX_BYTES and not whole:
            more = _received(sock, MAX_BYTES - len(got), end)
            got, whole = got + more, not more
    text = got.decode(errors="replace").strip()
    return text if whole or not text else f"{text}\n{CUT}"


def _received(sock: socket.socket, size: int, end: float) -> bytes:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    sock.settimeout(left)
    return sock.recv(size)
