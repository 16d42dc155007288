"""The secret of a run: its ranks have it, and other processes on the same hosts and network do not.

Sources in this order: DDPDIAG_TOKEN; a random secret that ranks inherit, if one process starts them all; the user's key
file (`key_file`); across the hosts of a Slurm job without a key file, a random secret that rank 0 sends by munge. If no
source has one, the run goes on without a secret, and the report says so.
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
# Until then a file that another host has just written may appear: NFS caches missing names (nfs(5), acdirmax).
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

    `whole`: one process starts all ranks. `local`: all ranks are on this host. Rank 0 is on `host`, and sends a secret
    by munge on one of `munge_ports`. UsageError if a secret is `required` and no source has one.
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
        self._secret = b""
        self._begin: float | None = None
        self._server: SecretServer | None = None
        token = environ.get("DDPDIAG_TOKEN", "")
        if token:
            self.origin, self._secret = Origin.TOKEN, token.encode("utf-8", "surrogateescape")
        elif whole:
            self.origin, self._secret = Origin.INHERITED, secrets.token_bytes(_BYTES)
        else:
            self.origin = Origin.KEY_FILE

    def of_rank_0(self) -> Wire:
        """Find or make the secret of the run that this process leads, and return a wire that uses it."""
        if self.origin is Origin.KEY_FILE and not self._secret:
            # Tried again, because key_file may be late on a busy host; ranks that have the key would refuse a rank 0
            # without it.
            for _try in range(_TRIES):
                if not self._read_key_file(create=True) or self._secret:
                    break
            if self._switch_to_munge():
                offered = ask_by_munge(self._run_id, "127.0.0.1", self._munge_ports)
                self._secret = secrets.token_bytes(_BYTES) if offered is None else offered[0]
        return self._wire()

    def offer(self, port: int) -> None:
        """If the secret is sent by munge, begin to send it to other ranks, with the port at which rank 0 listens."""
        if self.origin is Origin.MUNGE:
            self._server = offer_by_munge(self._run_id, self._secret, port, self._munge_ports)

    def of_rank(self) -> Rank0Endpoint | None:
        """The secret of the run that this process joins, and rank 0's port if known; None while it may still appear."""
        if self.origin is Origin.KEY_FILE and not self._secret:
            self._begin = time.monotonic() if self._begin is None else self._begin
            may_appear = self._read_key_file(create=self._local) and time.monotonic() - self._begin < _KEY_SECONDS
            if may_appear and not self._secret:
                return None
            self._switch_to_munge()
        if self.origin is not Origin.MUNGE:
            return Rank0Endpoint(self._wire())
        for address in resolve(self._host, self._munge_ports[0], _RESOLVE_SECONDS) or ():
            if (offered := ask_by_munge(self._run_id, address, self._munge_ports)) is not None:
                return Rank0Endpoint(Wire(self._run_id, offered[0]), offered[1])
        return None

    def _switch_to_munge(self) -> bool:
        """Use munge if there is no key file, but a job of Slurm and a munged that works; return whether it is used."""
        if not self._secret and self._munge_ports and _credential(b""):
            self.origin = Origin.MUNGE
        return self.origin is Origin.MUNGE

    def _read_key_file(self, *, create: bool) -> bool:
        """Read the key file; return whether a key may still appear: the home is shared, or did not answer in time."""
        helper = (sys.executable, "-I", "-S", key_file.__file__)
        word = f"{'create' if create else 'read'}{' here' if self._local else ''}"
        command = (*helper, os.path.expanduser("~"), word)
        result = run_bounded(command, time.monotonic() + _HELPER_SECONDS)
        if result is None or result.code != 0:
            return True
        key, shared, trouble = msgspec.json.decode(result.out, type=tuple[str, bool, str])
        if trouble:
            raise UsageError(trouble)
        self._secret = bytes.fromhex(key)
        return shared

    def _wire(self) -> Wire:
        if not self._secret:
            if self._required:
                raise UsageError(f"--require-auth: this process holds no secret; {SHARE_A_SECRET}")
            self.origin = Origin.NONE
        return Wire(self._run_id, self._secret)

    def close(self) -> None:
        """Stop sending the secret."""
        if self._server is not None:
            self._server.close()
            self._server = None


class SecretServer:
    """A thread of rank 0 that calls `answer` with each connection to `listener`, until it is closed."""

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


# munge authenticates Slurm's messages: all hosts of the cluster run munged with one key. Rank 0 sends a credential to
# each process that connects. Only processes of its user can decode it (`munge --restrict-uid`), and the decoder learns
# the uid of the encoder. Other users receive bytes that they cannot read.
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
    """Start a server that sends secret and port of rank 0 on one of `ports`; UsageError if none of these is free."""
    payload = msgspec.json.encode(_Payload(run_id, secret, port))
    made_at, text = 0.0, b""

    def answer(peer: socket.socket) -> None:
        nonlocal made_at, text
        peer.setblocking(False)  # a credential fits into the socket's buffer
        if time.monotonic() - made_at > _NEW_AFTER_SECONDS or not text:
            made_at, text = time.monotonic(), _credential(payload)
        peer.sendall(text)

    return SecretServer(_listener_on(ports), answer)


def ask_by_munge(run_id: str, address: str, ports: Sequence[int]) -> tuple[bytes, int] | None:
    """Secret and port of this run's rank 0; None if no rank 0 of this run and user answers at this address."""
    for port in ports:
        with contextlib.suppress(OSError):
            offer = _decoded(_read((address, port)))
            if offer is not None and offer.run_id == run_id:
                return offer.secret, offer.port
    return None


def _listener_on(ports: Sequence[int]) -> socket.socket:
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
    text, end = b"", time.monotonic() + _READ_SECONDS  # for all reads: some program may send one byte at a time
    with socket.create_connection(where, _READ_SECONDS) as connection:
        while len(text) < _CREDENTIAL_BYTES and time.monotonic() < end and (more := connection.recv(_CREDENTIAL_BYTES)):
            text += more
    return text


def _credential(payload: bytes) -> bytes:
    """Run munge, and return a credential that only processes of this user can decode, on any host; empty on failure."""
    command = ("munge", "--cipher=aes128", f"--restrict-uid={os.geteuid()}")
    with contextlib.suppress(OSError):
        result = run_bounded(command, time.monotonic() + _MUNGE_SECONDS, payload)
        if result is not None and result.code == 0:
            return result.out
    return b""


def _decoded(credential: bytes) -> _Payload | None:
    """Run unmunge, and return the content of a credential; None unless a process of this user encoded it."""
    command = ("unmunge", "--numeric", "--keys=STATUS,UID")
    result = run_bounded(command, time.monotonic() + _MUNGE_SECONDS, credential) if credential else None
    if result is None or result.code not in (_SUCCESS, _EXPIRED, _REPLAYED):
        return None
    metadata, _empty, payload = result.out.partition(b"\n\n")
    fields = dict(line.split(b":", 1) for line in metadata.splitlines() if b":" in line)
    if fields.get(b"UID", b"").strip() != str(os.geteuid()).encode():
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(payload, type=_Payload)
    return None
