"""The secret of a run: what its ranks share, and strangers on the same hosts and network lack.

In this order: DDPDIAG_TOKEN; a random one that ranks inherit from the process that starts them all; the user's key file
(`key_file`); across the hosts of a Slurm job without one, a random one that rank 0 hands out by munge. Where there is
none, a run goes on without, and its report says so.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import msgspec

from ddpdiag.errors import UsageError
from ddpdiag.probes.host.programs import holder_of, run_bounded
from ddpdiag.probes.net.tcp_connect import resolve
from ddpdiag.runtime.control import key_file
from ddpdiag.runtime.control.join import SHARE_A_SECRET, Rank0Endpoint
from ddpdiag.runtime.control.wire import Wire

_BYTES = 32
_HELPER_SECONDS = 1.0
_TRIES = 3
# A file that another host has just written appears so late: NFS caches that a name does not exist (nfs(5), acdirmax).
_KEY_SECONDS = 5.0
_RESOLVE_SECONDS = 1.0


class Origin(Enum):
    """The source of a run's secret."""

    TOKEN = "token"
    INHERITED = "inherited"
    KEY_FILE = "key file"
    MUNGE = "munge"
    NONE = "none"


class Secrets:
    """The secret of one run, for each of its processes.

    `whole` says that one process starts all ranks; `local`, that all are on this host; rank 0 is on `host`, and hands
    out a secret by munge on one of `munge_ports`. UsageError where a secret is `required`, and none can be had.
    """

    def __init__(
        self,
        run_id: str,
        environ: Mapping[str, str],
        *,
        whole: bool,
        local: bool,
        host: str = "",
        munge_ports: Sequence[int] = (),
        required: bool = False,
    ) -> None:
        self._run_id = run_id
        self._local = local
        self._required = required
        self._host = host
        self._munge_ports = munge_ports if "SLURM_JOB_ID" in environ and not local else ()
        self._found = b""
        self._since: float | None = None
        self._server: SecretServer | None = None
        token = environ.get("DDPDIAG_TOKEN", "")
        if token:
            self.origin, self._found = Origin.TOKEN, token.encode("utf-8", "surrogateescape")
        elif whole:
            self.origin, self._found = Origin.INHERITED, secrets.token_bytes(_BYTES)
        else:
            self.origin = Origin.KEY_FILE

    def of_rank_0(self) -> Wire:
        """The secret of a run that this process leads."""
        if self.origin is Origin.KEY_FILE and not self._found:
            # On a busy host the helper itself may be late, and ranks that have the key would not talk without it.
            for _try in range(_TRIES):
                if not self._take_key_file(create=True) or self._found:
                    break
            if self._turns_to_munge():
                there = ask_by_munge(self._run_id, "127.0.0.1", self._munge_ports)
                self._found = secrets.token_bytes(_BYTES) if there is None else there[0]
        return self._settled()

    def offer(self, port: int) -> None:
        """Hand it to the other ranks, with the port at which rank 0 listens, where they do not have it."""
        if self.origin is Origin.MUNGE:
            self._server = offer_by_munge(self._run_id, self._found, port, self._munge_ports)

    def of_rank(self) -> Rank0Endpoint | None:
        """The secret of a run that this process joins; None as long as it may still appear."""
        if self.origin is Origin.KEY_FILE and not self._found:
            self._since = time.monotonic() if self._since is None else self._since
            may_appear = self._take_key_file(create=self._local) and time.monotonic() - self._since < _KEY_SECONDS
            if may_appear and not self._found:
                return None
            self._turns_to_munge()
        if self.origin is not Origin.MUNGE:
            return Rank0Endpoint(self._settled())
        for address in resolve(self._host, self._munge_ports[0], _RESOLVE_SECONDS) or ():
            if (there := ask_by_munge(self._run_id, address, self._munge_ports)) is not None:
                return Rank0Endpoint(Wire(self._run_id, there[0]), there[1])
        return None

    def _turns_to_munge(self) -> bool:
        """Whether the hosts share no key file but, as hosts of Slurm, munged's key: this host's makes credentials."""
        if not self._found and self._munge_ports and _credential(b""):
            self.origin = Origin.MUNGE
        return self.origin is Origin.MUNGE

    def _take_key_file(self, *, create: bool) -> bool:
        """Whether a key may still appear: another host has made it just now, or the home did not answer in time."""
        helper = (sys.executable, "-I", "-S", key_file.__file__)
        word = f"{'create' if create else 'read'}{' here' if self._local else ''}"
        command = (*helper, os.path.expanduser("~"), word)
        said = run_bounded(command, time.monotonic() + _HELPER_SECONDS)
        if said is None or said.code != 0:
            return True
        key, shared, trouble = msgspec.json.decode(said.out, type=tuple[str, bool, str])
        if trouble:
            raise UsageError(trouble)
        self._found = bytes.fromhex(key)
        return shared

    def _settled(self) -> Wire:
        if not self._found:
            if self._required:
                raise UsageError(f"--require-auth: this process holds no secret; {SHARE_A_SECRET}")
            self.origin = Origin.NONE
        return Wire(self._run_id, self._found)

    def close(self) -> None:
        """Offer it no longer."""
        if self._server is not None:
            self._server.close()
            self._server = None


class SecretServer:
    """Rank 0's end: a thread gives `answer` to each process that connects to `listener`, until it is closed."""

    def __init__(self, listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._answer = answer
        threading.Thread(target=self._serve, name="secret", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                peer, _address = self._listener.accept()
                with peer, contextlib.suppress(OSError):
                    self._answer(peer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


# munge authenticates Slurm's own messages: every host of the cluster runs munged with one key. Rank 0 sends a
# credential to each process that connects. Only processes of its user can decode it (`munge --restrict-uid`), and
# decoding tells the uid that encoded it. Other users receive bytes that they cannot read.
_MUNGE_SECONDS = 2.0
_READ_SECONDS = 1.0
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


def offer_by_munge(run_id: str, secret: bytes, port: int, ports: Sequence[int]) -> SecretServer:
    """Hands out secret and port of rank 0 on one of `ports`; UsageError where none of them is free."""
    payload = msgspec.json.encode(_Payload(run_id, secret, port))
    made, text = 0.0, b""

    def answer(peer: socket.socket) -> None:
        nonlocal made, text
        peer.setblocking(False)  # a credential fits into the socket's buffer
        if time.monotonic() - made > _NEW_AFTER_SECONDS or not text:
            made, text = time.monotonic(), _credential(payload)
        peer.sendall(text)

    return SecretServer(_listening(ports), answer)


def ask_by_munge(run_id: str, address: str, ports: Sequence[int]) -> tuple[bytes, int] | None:
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
        f"no port is free on which rank 0 could offer this run's secret: {held}; "
        "set DDPDIAG_TOKEN to one secret on all hosts"
    )


def _read(where: tuple[str, int]) -> bytes:
    text, end = b"", time.monotonic() + _READ_SECONDS  # of all: a stranger may send one byte at a time
    with socket.create_connection(where, _READ_SECONDS) as asking:
        while len(text) < _CREDENTIAL_BYTES and time.monotonic() < end and (more := asking.recv(_CREDENTIAL_BYTES)):
            text += more
    return text


def _credential(payload: bytes) -> bytes:
    """A credential that only processes of this user can open, on each host; empty if it cannot be made."""
    command = ("munge", "--cipher=aes128", f"--restrict-uid={os.geteuid()}")
    with contextlib.suppress(OSError):
        said = run_bounded(command, time.monotonic() + _MUNGE_SECONDS, payload)
        if said is not None and said.code == 0:
            return said.out
    return b""


def _opened(credential: bytes) -> _Payload | None:
    """The content that a process of this user put into the credential."""
    command = ("unmunge", "--numeric", "--keys=STATUS,UID")
    said = run_bounded(command, time.monotonic() + _MUNGE_SECONDS, credential) if credential else None
    if said is None or said.code not in (_SUCCESS, _EXPIRED, _REPLAYED):
        return None
    metadata, _empty, payload = said.out.partition(b"\n\n")
    fields = dict(line.split(b":", 1) for line in metadata.splitlines() if b":" in line)
    if fields.get(b"UID", b"").strip() != str(os.geteuid()).encode():
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(payload, type=_Payload)
    return None
