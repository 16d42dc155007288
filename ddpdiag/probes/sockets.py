"""Plain TCP: can this host resolve a name, and does anybody answer there? No torch, and nothing waits longer than told.

torch raises the same exception for an unknown name, a closed port and a firewall that drops packets; a connect of our
own tells them apart.
"""

import contextlib
import errno
import ipaddress
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path

from msgspec import Struct

from ddpdiag.model import Options

# Column 4 of /proc/net/tcp, from include/net/tcp_states.h.
TCP_LISTEN = "0A"


class Reach(Enum):
    """How a connect ended, from best to worst as evidence that the host is there."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # the host is there, nobody listens
    DROPPED = "dropped"  # no answer at all: a firewall, a full backlog, or a host that is down
    UNREACHABLE = "unreachable"  # no route, or something on the way says that there is no such host
    UNKNOWN_NAME = "unknown name"  # the resolver says that there is no such name
    SLOW_NAME = "slow name"  # the resolver did not answer in time


class Reached(Struct, frozen=True, kw_only=True):
    """What came of `reach`; `address` was tried, `source` is our own end of an accepted connection."""

    reach: Reach
    address: str | None = None
    source: str | None = None
    seconds: float = 0.0


def resolve(host: str, port: int, seconds: float) -> tuple[str, ...] | None:
    """Numeric addresses of a name, in the resolver's order; none if it is unknown, `None` if nothing came in time."""
    found: list[tuple[str, ...]] = []
    # getaddrinfo has no time-out; a thread that is stuck in it dies with the process.
    thread = threading.Thread(target=lambda: found.append(_lookup(host, port)), name="resolve", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    return found[0] if found else None


def _lookup(host: str, port: int) -> tuple[str, ...]:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: what cannot be a name, such as a label of 64 letters
        return ()
    return tuple(dict.fromkeys(str(info[4][0]) for info in infos))


def reach(host: str, port: int, seconds: float) -> Reached:
    """Connect to `host` within `seconds`, and hang up; of several addresses the best answer counts."""
    start = time.monotonic()
    addresses = resolve(host, port, seconds)
    if addresses is None:
        return Reached(reach=Reach.SLOW_NAME, seconds=time.monotonic() - start)
    tries: list[Reached] = []
    for index, address in enumerate(addresses):
        left = seconds - (time.monotonic() - start)
        tries.append(_connect(address, port, left / (len(addresses) - index)))
        if tries[-1].reach is Reach.ACCEPTED:
            break
    order = list(Reach)
    best = min(tries, key=lambda tried: order.index(tried.reach), default=Reached(reach=Reach.UNKNOWN_NAME))
    return Reached(reach=best.reach, address=best.address, source=best.source, seconds=time.monotonic() - start)


def _connect(address: str, port: int, seconds: float) -> Reached:
    """One numeric address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            code = sock.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                code = _wait(sock, seconds)
            # A connect to a free ephemeral port of this host can meet itself; nobody listens there.
            if code == 0 and sock.getsockname() == sock.getpeername():
                code = errno.ECONNREFUSED
            source = str(sock.getsockname()[0]) if code == 0 else None
    except OSError as error:
        code, source = error.errno or errno.EIO, None
    return Reached(reach=_meaning(code), address=address, source=source)


def _wait(sock: socket.socket, seconds: float) -> int:
    """The errno with which a connect in progress ends; ETIMEDOUT when it does not."""
    poll = select.poll()  # not select: it fails on descriptors over 1023
    poll.register(sock, select.POLLOUT)
    if not poll.poll(max(seconds, 0.0) * 1000):
        return errno.ETIMEDOUT
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _meaning(code: int) -> Reach:
    match code:
        case 0:
            return Reach.ACCEPTED
        case errno.ECONNREFUSED | errno.ECONNRESET:
            return Reach.REFUSED
        case errno.ETIMEDOUT:
            return Reach.DROPPED
        case _:
            return Reach.UNREACHABLE


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves its host."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def free_port(host: str = "", ports: Iterable[int] = (0,)) -> int:
    """The first of `ports` (0 is any) on which nobody listens now; the caller must bind it soon, or lose it.

    OSError, as bind gives it, if none is free.
    """
    error = OSError(errno.EADDRINUSE, "no port was given")
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
            # A listener on the port still stands in the way; the remains of an earlier connection do not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1 if port else 0)
            try:
                sock.bind((host, port))
            except OSError as taken:
                error = taken
                continue
            return int(sock.getsockname()[1])
    raise error


def allowed_ports(options: Options) -> tuple[int, ...]:
    """Ports on which a store may listen: any (0), or the range of `--port-range` for sites with a firewall."""
    low, _, high = (options.port_range or "").partition("-")
    return tuple(range(int(low), int(high) + 1)) if low and high else (0,)


def holder_of(port: int) -> str | None:
    """Who listens on a port of this host, as "pid 8123 (torchrun train.py)"; `None` if nobody does."""
    listeners = dict(_listeners(port))
    for inode in listeners:
        if (pid := _owner(inode)) is not None:
            return f"pid {pid} ({_command(pid)})"
    if not listeners:
        return None
    uid = next(iter(listeners.values()))
    return "a process that cannot be seen from here" if uid == os.getuid() else f"another user's process (uid {uid})"


def _listeners(port: int) -> Iterator[tuple[str, int]]:
    """Inode and uid of every socket that listens on the port; the columns are those of proc(5)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9], int(fields[7])


def _owner(inode: str) -> int | None:
    """A process that has the socket open; only our own user's can be seen, unless we are root."""
    for process in Path("/proc").glob("[0-9]*"):
        if f"socket:[{inode}]" in _open_files(process / "fd"):
            return int(process.name)
    return None


def _open_files(directory: Path) -> Iterator[str]:
    """Targets of the links in /proc/<pid>/fd that can be read; none of a process that is not ours, or gone."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # closed since
            yield os.readlink(directory / name)


def _command(pid: int) -> str:
    """The command line, shortened, without what looks like a secret."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return "gone by now"
    return re.sub(r"(?i)(\S*(?:token|secret|passw|key)[^\s=]*[= ])\S+", r"\1***", words)[:120]
