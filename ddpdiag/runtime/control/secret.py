"""The secret of a run, which its ranks hold, but not other processes on the same hosts and network.

Sources in this order: DDPDIAG_TOKEN; a random secret that all ranks inherit from the process that starts them; the
user's key file (`key_file`); a random secret that rank 0 sends by munge, if the ranks are on several hosts of a Slurm
job without a key file. If no source has a secret, the run goes on without one, and the report says so.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from ddpdiag.errors import UsageError
from ddpdiag.probes.host.programs import port_user, run_until
from ddpdiag.probes.net.tcp_connect import resolve
from ddpdiag.runtime.control import key_file
from ddpdiag.runtime.control.join import SHARE_A_SECRET, Rank0Endpoint
from ddpdiag.runtime.control.wire import Wire

_SECRET_BYTES = 32
_KEY_FILE_SECONDS = 1.0
_KEY_FILE_TRIES = 3
# A file that another host has just written may appear this late, because NFS caches missing names (nfs(5), acdirmax).
_KEY_APPEARS_SECONDS = 5.0
_RESOLVE_SECONDS = 1.0


class Origin(Enum):
    """The source of a run's secret."""

    TOKEN = "token"
    INHERITED = "inherited"
    KEY_FILE = "key file"
    MUNGE = "munge"
    NONE = "none"


class RunSecret:
    """The secret of one run, in one of its processes.

    `starts_all_ranks`: this process starts all ranks. `is_local`: all ranks are on this host. Rank 0 is on `host`, and
    may send a secret by munge on one of `munge_ports`. With `is_required`, UsageError if no secret is found.
    """

    def __init__(
        self,
        run_id: str,
        environ: Mapping[str, str],
        *,
        starts_all_ranks: bool,
        is_local: bool,
        host: str = "",
        munge_ports: Sequence[int] = (),
        is_required: bool = False,
    ) -> None:
        self._run_id = run_id
        self._is_local = is_local
        self._is_required = is_required
        self._host = host
        self._munge_ports = munge_ports if "SLURM_JOB_ID" in environ and not is_local else ()
        self._secret = b""
        self._first_try_at: float | None = None
        self._server: SecretServer | None = None
        token = environ.get("DDPDIAG_TOKEN", "")
        if token:
            self.origin, self._secret = Origin.TOKEN, token.encode("utf-8", "surrogateescape")
        elif starts_all_ranks:
            self.origin, self._secret = Origin.INHERITED, secrets.token_bytes(_SECRET_BYTES)
        else:
            self.origin = Origin.KEY_FILE

    def wire_of_rank_0(self) -> Wire:
        """Find or create the secret of the run that this process leads. Returns a `Wire` with this secret."""
        if self.origin is Origin.KEY_FILE and not self._secret:
            # Several tries: key_file may be late on a busy host, and ranks with the key refuse a rank 0 without it.
            for _try in range(_KEY_FILE_TRIES):
                if not self._read_key_file(create=True) or self._secret:
                    break
            if self._switch_to_munge():
                offered = ask_by_munge(self._run_id, "127.0.0.1", self._munge_ports)
                self._secret = secrets.token_bytes(_SECRET_BYTES) if offered is None else offered[0]
        return self._wire()

    def offer(self, port: int) -> None:
        """If munge is used, start a thread that sends the secret and rank 0's port to other ranks."""
        if self.origin is Origin.MUNGE:
            self._server = SecretServer(self._run_id, self._secret, port, self._munge_ports)

    def find_rank_0(self) -> Rank0Endpoint | None:
        """A `Wire` with the secret, and rank 0's port if known. None if there is no secret yet, but one may appear."""
        if self.origin is Origin.KEY_FILE and not self._secret:
            self._first_try_at = time.monotonic() if self._first_try_at is None else self._first_try_at
            may_appear = (
                self._read_key_file(create=self._is_local)
                and time.monotonic() - self._first_try_at < _KEY_APPEARS_SECONDS
            )
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
        """In a Slurm job without a key file, switch to munge if munged works. Returns whether munge is used."""
        if not self._secret and self._munge_ports and _make_credential(b""):
            self.origin = Origin.MUNGE
        return self.origin is Origin.MUNGE

    def _read_key_file(self, *, create: bool) -> bool:
        """Read the key file. Returns whether a key may still appear later. UsageError if the file is invalid."""
        helper = (sys.executable, "-I", "-S", key_file.__file__)
        mode = f"{'create' if create else 'read'}{' here' if self._is_local else ''}"
        command = (*helper, os.path.expanduser("~"), mode)
        result = run_until(command, time.monotonic() + _KEY_FILE_SECONDS)
        if result is None or result.code != 0:
            return True
        key, shared, error = msgspec.json.decode(result.stdout, type=tuple[str, bool, str])
        if error:
            raise UsageError(error)
        self._secret = bytes.fromhex(key)
        return shared

    def _wire(self) -> Wire:
        if not self._secret:
            if self._is_required:
                raise UsageError(f"--require-auth: this process holds no secret; {SHARE_A_SECRET}")
            self.origin = Origin.NONE
        return Wire(self._run_id, self._secret)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class SecretServer:
    """A thread of rank 0 that sends each process that connects a munge credential with the secret and rank 0's `port`.

    The thread listens on the first free port of `ports`. UsageError if none is free.
    """

    def __init__(self, run_id: str, secret: bytes, port: int, ports: Sequence[int]) -> None:
        self._payload = msgspec.json.encode(_Payload(run_id, secret, port))
        self._listener = _listen_on_free_port(ports)
        threading.Thread(target=self._serve, name="secret", daemon=True).start()

    def _serve(self) -> None:
        made_at, credential = 0.0, b""
        with contextlib.suppress(OSError):  # closed
            while True:
                peer, _address = self._listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.setblocking(False)  # a credential fits into the socket's buffer
                    if time.monotonic() - made_at > _RENEW_AFTER_SECONDS or not credential:
                        made_at, credential = time.monotonic(), _make_credential(self._payload)
                    peer.sendall(credential)

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
_RENEW_AFTER_SECONDS = 60.0
# munge_err_t of munge.h. When a second rank of a host decodes the same credential, munged reports a replay. Expired and
# replayed credentials are accepted: an attacker who sends one again does not learn the secret in it.
_SUCCESS, _EXPIRED, _REPLAYED = 0, 15, 17


class _Payload(msgspec.Struct, frozen=True):
    run_id: str
    secret: bytes
    port: int


def ask_by_munge(run_id: str, address: str, ports: Sequence[int]) -> tuple[bytes, int] | None:
    """The secret and the port of this run's rank 0, or None if it does not answer on one of these ports."""
    for port in ports:
        with contextlib.suppress(OSError):
            offer = _decode_credential(_read_credential((address, port)))
            if offer is not None and offer.run_id == run_id:
                return offer.secret, offer.port
    return None


def _listen_on_free_port(ports: Sequence[int]) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=4096, family=socket.AF_INET6, dualstack_ipv6=True)
        with contextlib.suppress(OSError):  # a host without IPv6
            return socket.create_server(("", port), backlog=4096)
    holders = "; ".join(f"{port} is held by {port_user(port) or 'an unknown process'}" for port in ports)
    raise UsageError(f"no port is free on which rank 0 could offer this run's secret: {holders}; {SHARE_A_SECRET}")


def _read_credential(address: tuple[str, int]) -> bytes:
    text, end = b"", time.monotonic() + _READ_SECONDS  # for all reads, which may get one byte each
    with socket.create_connection(address, _READ_SECONDS) as connection:
        while len(text) < _CREDENTIAL_BYTES and time.monotonic() < end and (more := connection.recv(_CREDENTIAL_BYTES)):
            text += more
    return text


def _make_credential(payload: bytes) -> bytes:
    """Run munge, and return a credential that processes of this user on any host can decode, or b"" on failure."""
    command = ("munge", "--cipher=aes128", f"--restrict-uid={os.geteuid()}")
    with contextlib.suppress(OSError):
        result = run_until(command, time.monotonic() + _MUNGE_SECONDS, payload)
        if result is not None and result.code == 0:
            return result.stdout
    return b""


def _decode_credential(credential: bytes) -> _Payload | None:
    """Run unmunge, and return the content of a credential, or None unless a process of this user encoded it."""
    command = ("unmunge", "--numeric", "--keys=STATUS,UID")
    result = run_until(command, time.monotonic() + _MUNGE_SECONDS, credential) if credential else None
    if result is None or result.code not in (_SUCCESS, _EXPIRED, _REPLAYED):
        return None
    metadata, _empty, payload = result.stdout.partition(b"\n\n")
    fields = dict(line.split(b":", 1) for line in metadata.splitlines() if b":" in line)
    if fields.get(b"UID", b"").strip() != str(os.geteuid()).encode():
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(payload, type=_Payload)
    return None
