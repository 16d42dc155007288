"""The secret of a run: what its ranks share, and strangers on the same hosts and network lack.

In this order: DDPDIAG_TOKEN; a random one that ranks inherit from the process that starts them all; on one host a
random one that rank 0 hands to processes of its user (`same_host`); across hosts the user's key file (`key_file`), and
in a job of Slurm without one a random one that rank 0 hands out by `munge`. Where there is none, a run across hosts
goes on without, and its report says so.
"""

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from ddpdiag.errors import UsageError
from ddpdiag.probes.host.programs import run_bounded
from ddpdiag.probes.net.tcp_connect import resolve
from ddpdiag.runtime.control import key_file, munge
from ddpdiag.runtime.control.client import SHARE_A_SECRET, Found
from ddpdiag.runtime.control.munge import Munge
from ddpdiag.runtime.control.same_host import SameHost, ask
from ddpdiag.runtime.control.wire import Wire

_BYTES = 32
_HELPER_SECONDS = 1.0
_TRIES = 3
# A file that another host has just written appears so late: NFS caches that a name does not exist (nfs(5), acdirmax).
_KEY_SECONDS = 5.0
_RESOLVE_SECONDS = 1.0


class Origin(Enum):
    """Where the secret of a run comes from."""

    TOKEN = "token"
    INHERITED = "inherited"
    SAME_HOST = "same host"
    KEY_FILE = "key file"
    MUNGE = "munge"
    NONE = "none"


class Secrets:
    """How the processes of one run come by its secret.

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
        self._required = required
        self._host = host
        self._munge_ports = munge_ports if "SLURM_JOB_ID" in environ else ()
        self._found = b""
        self._since: float | None = None
        self._server: SameHost | Munge | None = None
        token = environ.get("DDPDIAG_TOKEN", "")
        if token:
            self.origin, self._found = Origin.TOKEN, token.encode("utf-8", "surrogateescape")
        elif whole:
            self.origin, self._found = Origin.INHERITED, secrets.token_bytes(_BYTES)
        else:
            self.origin = Origin.SAME_HOST if local else Origin.KEY_FILE

    def of_rank_0(self) -> Wire:
        """The secret of a run that this process leads."""
        if self.origin is Origin.SAME_HOST:
            # A second rank 0 takes the first one's, so that they recognize each other.
            there = ask(self._run_id)
            self._found = secrets.token_bytes(_BYTES) if there is None else there[0]
        elif self.origin is Origin.KEY_FILE and not self._found:
            # On a busy host the helper itself may be late, and ranks that have the key would not talk without it.
            for _try in range(_TRIES):
                if not self._take_key_file(create=True) or self._found:
                    break
            if self._turns_to_munge():
                there = munge.ask(self._run_id, "127.0.0.1", self._munge_ports)
                self._found = secrets.token_bytes(_BYTES) if there is None else there[0]
        return self._settled()

    def offer(self, port: int) -> None:
        """Hand it to the other ranks, with the port at which rank 0 listens, where they do not have it."""
        if self.origin is Origin.SAME_HOST:
            self._server = SameHost(self._run_id, self._found, port)
        elif self.origin is Origin.MUNGE:
            self._server = Munge(self._run_id, self._found, port, self._munge_ports)

    def of_rank(self) -> Found | None:
        """The secret of a run that this process joins; None as long as it may still appear."""
        if self.origin is Origin.SAME_HOST:
            there = ask(self._run_id)
            return None if there is None else Found(Wire(self._run_id, there[0]), there[1])
        if self.origin is Origin.KEY_FILE and not self._found:
            self._since = time.monotonic() if self._since is None else self._since
            may_appear = self._take_key_file(create=False) and time.monotonic() - self._since < _KEY_SECONDS
            if may_appear and not self._found:
                return None
            self._turns_to_munge()
        if self.origin is Origin.MUNGE:
            return self._handed_by_munge()
        return Found(self._settled())

    def _turns_to_munge(self) -> bool:
        """Whether the hosts share no key file but, as hosts of Slurm, munged's key."""
        if not self._found and self._munge_ports and munge.is_there():
            self.origin = Origin.MUNGE
        return self.origin is Origin.MUNGE

    def _handed_by_munge(self) -> Found | None:
        for address in resolve(self._host, self._munge_ports[0], _RESOLVE_SECONDS) or ():
            there = munge.ask(self._run_id, address, self._munge_ports)
            if there is not None:
                return Found(Wire(self._run_id, there[0]), there[1])
        return None

    def _take_key_file(self, *, create: bool) -> bool:
        """Whether there may still be a key: another host has made it just now, or the home did not answer in time."""
        helper = (sys.executable, "-I", "-S", key_file.__file__)
        command = (*helper, os.path.expanduser("~"), "create" if create else "read")
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
        """Hand it to nobody else."""
        if self._server is not None:
            self._server.close()
            self._server = None
