"""A rendezvous for torchrun that admits only hosts that can train (`torchrun --rdzv-backend ddpdiag`).

`GuardedRendezvous` wraps torch's c10d rendezvous. At each start and restart an agent checks its own host before it
joins (`ddpdiag host`). When the agents have met, each starts the ranks of its host for `ddpdiag check`, with a port and
a secret that the agent of rank 0 sends through the store of the rendezvous. That agent also sends the verdict. A blamed
host leaves and keeps the rendezvous open, so the others meet again and train.

Keys in the store of a round (its prefix changes with each round): `ddpdiag/ranks/N` is the number of ranks that agent N
starts, `ddpdiag/plan` is a `_Plan`, `ddpdiag/verdict` is a `WorldVerdict` of rank 0 or of an agent that a signal ends,
`ddpdiag/read/N` says that agent N has read why the job stops. Keys for all rounds: `reason` is the sentence of the last
host that left or closed the rendezvous, `left` counts the hosts that left, `left/HOST` how often that host left,
`started` says that training has started once, and `lost` counts the hosts that left at a restart.
"""

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from msgspec import Struct
from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousExitOp,
    create_handler,
)
from torch.distributed.launcher.api import LaunchConfig

from ddpdiag.api import run_command
from ddpdiag.cli.edge import complain
from ddpdiag.codec import decode, encode, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.integrations.admission import (
    Action,
    OnUnfit,
    OnUnknown,
    Scope,
    Settings,
    WorldVerdict,
    decide,
    read_settings,
    too_few_text,
    world_verdict,
)
from ddpdiag.model import Report
from ddpdiag.probes.host.kernel import PROC, open_files, tcp_sockets
from ddpdiag.probes.host.programs import ERROR_FILE
from ddpdiag.runtime.launchers.launch import LAUNCHERS
from ddpdiag.sanitize import printable

# All in seconds. _HOST_BUDGET is the default of `ddpdiag host`.
_HOST_BUDGET = 10.0
# For processes to start and end, beyond the budget of a check: 15 s for ranks to join, and the imports of a busy host.
_SLACK = 30.0
# For all agents to read a message in the store. Agents poll it, and one may still start its processes.
_MESSAGE_WAIT = 15.0
_POLL = 1.0
_MAX_TEXT = 4096
# With these, the check would take this process for a rank of another launch.
_LAUNCHER_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_STEPID"}
for _names in LAUNCHERS:
    _LAUNCHER_VARIABLES |= {_names.rank, *_names.world_size, *_names.local_rank, *_names.local_world_size}


_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Plan(Struct, frozen=True):
    """Settings with which all hosts start the check of the world.

    `token` is the secret of its control channel. DDPDIAG_TOKEN in the environment of the hosts replaces it.
    """

    address: str
    port: int
    token: str
    ranks_per_host: int


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the handler. UsageError for a setting that does not exist, or that has another value."""
    sys.excepthook = _sentence_only(sys.excepthook)
    settings = read_settings(parameters.config)
    try:
        backend, store = create_backend(parameters)
    except RendezvousConnectionError:
        raise _lost_store(parameters) from None
    return GuardedRendezvous(create_handler(store, backend, parameters), store, parameters, settings)


class _EndedBySignal(SignalException):
    """A signal that torchrun raised while it waited for this rendezvous, with a sentence."""


class GuardedRendezvous(RendezvousHandler):
    """A c10d rendezvous whose `next_rendezvous` returns only after the checks, or raises RendezvousError."""

    def __init__(
        self, inner: DynamicRendezvousHandler, store: Store, parameters: RendezvousParameters, settings: Settings
    ) -> None:
        self._inner = inner
        self._store = store
        # Jobs with other run ids may use the same store.
        self._notes = PrefixStore(f"ddpdiag/{parameters.run_id}", store)
        self._parameters = parameters
        self._settings = settings
        self._host = readable(socket.gethostname())
        self._ranks_per_host = _configured_ranks()
        self._has_left = False
        self._trains = False
        self._lost_count = 0
        self._met_count = 1

    def get_backend(self) -> str:
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        if not self._has_left:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """The number of hosts for which torchrun must restart the ranks: hosts that wait, and hosts that were lost."""
        lost = 0
        with suppress(RuntimeError):  # the next call explains a lost store
            lost = self._notes.add("lost", 0) - self._lost_count
        return max(lost, self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous, but not if this host has left it: the others use it."""
        return True if self._has_left else self._inner.shutdown()

    def next_rendezvous(self) -> RendezvousInfo:
        """Check this host, meet the others, check the world, and repeat without the hosts that leave."""
        try:
            return self._admitted()
        except SystemExit:  # a signal ends this agent; torchrun does not close the rendezvous then
            self._has_left = True
            with suppress(RuntimeError):
                self._announce(_ended_text(signal.SIGTERM))
                self._notes.add("read", 1)
            raise
        except KeyboardInterrupt:
            self._close(_ended_text(signal.SIGINT))
            self._let_others_read()
            raise
        except SignalException as error:  # at a restart
            raise _EndedBySignal(_ended_text(error.sigval), error.sigval) from None
        except (DistError, RendezvousConnectionError):
            raise _lost_store(self._parameters) from None

    def _admitted(self) -> RendezvousInfo:
        if self._settings.check is not Scope.NONE:
            self._check_host()
        self._trains = False
        while True:
            info = self._meet()
            if self._settings.check in (Scope.NONE, Scope.HOST):
                return self._start(info)
            verdict = self._check_world(info)
            action, reason = decide(
                verdict,
                self._settings,
                node_rank=info.rank,
                node_count=info.world_size,
                min_nodes=self._parameters.min_nodes,
            )
            if info.rank == 0:
                complain(reason)
            match action:
                case Action.GO:
                    return self._start(info)
                case Action.LEAVE:
                    self._leave(f"{self._host} leaves the job: {reason}")
                case Action.STOP:
                    self._stop(info, reason)

    def _start(self, info: RendezvousInfo) -> RendezvousInfo:
        """Remember that training starts, which changes what the leaving of a host means.

        RendezvousError if a host has closed the rendezvous since, as one that is interrupted does.
        """
        if self._inner.is_closed() and (reason := self._reason()):
            self._let_others_read()
            raise RendezvousError(reason)
        self._notes.set("started", "")
        self._lost_count = self._notes.add("lost", 0)
        self._trains = True
        return info

    def _meet(self) -> RendezvousInfo:
        """Join the next round of the rendezvous. A RendezvousError says why another host closed it."""
        # torch keeps the address of rank 0 from the first round, although another host may be rank 0 now.
        for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if hasattr(self._inner, name):
                setattr(self._inner, name, None)
        try:
            info = self._inner.next_rendezvous()
            self._met_count = info.world_size
            return info
        except (RendezvousClosedError, RendezvousTimeoutError):
            if reason := self._reason():
                self._let_others_read()
                raise RendezvousError(reason) from None
            raise

    def _reason(self) -> str:
        with suppress(RuntimeError):
            if self._notes.check(["reason"]):
                return printable(self._notes.get("reason").decode(errors="replace"))
        return ""

    # The checks -------------------------------------------------------------------------------------------------------

    def _check_host(self) -> None:
        """Check this host alone. It leaves if it is UNFIT or UNKNOWN, as the settings say."""
        report = _report_of(("host", "--budget", f"{_HOST_BUDGET:g}"), os.environ, _HOST_BUDGET)
        if report is not None and report.exit_code == ExitCode.FIT:
            return
        is_unfit = report is not None and report.exit_code == ExitCode.UNFIT
        sentence = f"{self._host}: `ddpdiag host` made no report within {_HOST_BUDGET + _SLACK:g} s"
        if report is not None:
            sentence = f"{self._host}: {printable(report.sentence)}"
        if self._settings.on_unfit is OnUnfit.WARN if is_unfit else self._settings.on_unknown is OnUnknown.GO:
            complain(sentence)
            return
        if self._settings.on_unfit is OnUnfit.STOP or not is_unfit:
            self._close(sentence)
        self._leave(sentence)

    def _check_world(self, info: RendezvousInfo) -> WorldVerdict:
        """Run `ddpdiag check` with the ranks of all hosts. Returns the same verdict on all hosts."""
        info.store.set(f"ddpdiag/ranks/{info.rank}", str(self._ranks_per_host))
        try:
            if info.rank == 0:
                hosts = "1 host" if info.world_size == 1 else f"{info.world_size} hosts"
                complain(f"{hosts} met; the check of the world takes at most {self._settings.budget:g} s")
                info.store.set("ddpdiag/plan", encode(self._make_plan(info)).decode())
            plan = decode(_message(info.store, "ddpdiag/plan", 2 * _MESSAGE_WAIT), _Plan)
            try:
                report = self._run_check(info, plan)
            except (KeyboardInterrupt, SystemExit, SignalException):  # a signal ends this agent
                with suppress(RuntimeError):
                    _send_verdict(info, WorldVerdict(ExitCode.TERMINATED, f"a signal ended torchrun on {self._host}"))
                raise
            if info.rank == 0:
                verdict = WorldVerdict(ExitCode.UNKNOWN, f"the check on {self._host} made no report")
                if report is not None:
                    verdict = world_verdict(report, plan.ranks_per_host)
                _send_verdict(info, verdict)
            return decode(_message(info.store, "ddpdiag/verdict", self._settings.budget + 2 * _SLACK), WorldVerdict)
        except (RuntimeError, ValueError):
            rank_0 = readable(_rank_0_address(info))
            return WorldVerdict(ExitCode.UNKNOWN, f"{self._host} got no verdict from {rank_0}, the host of rank 0")

    def _make_plan(self, info: RendezvousInfo) -> _Plan:
        """Choose the port and the secret of the check, and as many ranks as every host has."""
        keys = [f"ddpdiag/ranks/{rank}" for rank in range(info.world_size)]
        ranks_per_host = min(int(_message(info.store, key, _MESSAGE_WAIT)) for key in keys)
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        return _Plan(_rank_0_address(info), port, secrets.token_hex(32), ranks_per_host)

    def _run_check(self, info: RendezvousInfo, plan: _Plan) -> Report | None:
        budget = self._settings.budget
        words = {
            "--nnodes": info.world_size,
            "--node-rank": info.rank,
            "--nproc-per-node": plan.ranks_per_host,
            "--master-addr": plan.address,
            "--master-port": plan.port,
            "--budget": f"{budget:g}",
            "--depth": self._settings.check.value,
        }
        env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
        options = (f"{name}={value}" for name, value in words.items())
        return _report_of(("check", *options), {"DDPDIAG_TOKEN": plan.token, **env}, budget)

    # The end ----------------------------------------------------------------------------------------------------------

    def _leave(self, sentence: str) -> NoReturn:
        """Leave the rendezvous and raise RendezvousError. The others go on if enough hosts are left.

        The host of the store waits until the rendezvous is closed, because the store ends with its process.
        """
        self._has_left = True
        self._inner._stop_heartbeats()
        with suppress(RendezvousError):
            self._inner._op_executor.run(_RendezvousExitOp(), time.monotonic() + _MESSAGE_WAIT)
        with suppress(RuntimeError):
            self._announce(sentence)
        if _listens_here(self._store):
            complain(f"{sentence} This host holds the store of the rendezvous and keeps it until the job ends.")
            self._keep_store()
        raise RendezvousError(sentence) from None

    def _announce(self, sentence: str) -> None:
        """Tell the others that this host leaves. Close the rendezvous if it then has too few hosts for a first start.

        After a first start, another host may take the place, so the others wait for their time-out.
        """
        self._notes.set("reason", sentence)
        self._notes.add("lost", int(self._trains))
        is_first = self._notes.add(f"left/{self._host}", 1) == 1
        left = self._parameters.max_nodes - self._notes.add("left", int(is_first))
        if left < self._parameters.min_nodes and not self._notes.check(["started"]):
            self._close(f"{sentence} Without it, {too_few_text(left, self._parameters.min_nodes)}")

    def _keep_store(self) -> None:
        """Wait until the rendezvous is closed, or has had no hosts for the time in which they must join."""
        idle_since = time.monotonic()
        with suppress(RendezvousError):
            while not self._inner.is_closed():
                if self._inner._state_holder.state.participants:
                    idle_since = time.monotonic()
                if time.monotonic() - idle_since > self._inner.settings.timeout.join.total_seconds():
                    return
                time.sleep(_POLL)
        time.sleep(2 * _POLL)  # the others read why it was closed

    def _let_others_read(self) -> None:
        """Keep the store, if this process serves it, until those who met have read why the rendezvous was closed."""
        with suppress(RuntimeError):
            self._notes.add("read", 1)
            if _listens_here(self._store):
                end = time.monotonic() + _MESSAGE_WAIT
                while self._notes.add("read", 0) < self._met_count and time.monotonic() < end:
                    time.sleep(_POLL / 10)
                time.sleep(2 * _POLL)  # others may wait for the next meeting

    def _stop(self, info: RendezvousInfo, sentence: str) -> NoReturn:
        """Close the rendezvous and raise RendezvousError. The host of the store waits for the other hosts."""
        with suppress(RuntimeError):
            self._close(sentence)
            info.store.set(f"ddpdiag/read/{info.rank}", "")
            if _listens_here(self._store):
                keys = [f"ddpdiag/read/{rank}" for rank in range(info.world_size)]
                info.store.wait(keys, timedelta(seconds=_MESSAGE_WAIT))
        raise RendezvousError(sentence) from None

    def _close(self, sentence: str) -> None:
        """Close the rendezvous, with the reason for hosts that wait or join later."""
        with suppress(RuntimeError, RendezvousError):
            self._notes.set("reason", sentence)
            self._inner.set_closed()


def _sentence_only(hook: _ExceptHook) -> _ExceptHook:
    """The excepthook of torchrun's process: errors whose sentence says all are shown without a traceback.

    torchrun lets them end its process. It has then written the sentence to its error file, if it has one. When ranks
    have started once, torchrun handles SIGINT itself, and no KeyboardInterrupt is raised.
    """

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind in (RendezvousError, UsageError, _EndedBySignal):
            complain(str(error))
        elif kind is KeyboardInterrupt:
            complain(_ended_text(signal.SIGINT))
        else:
            hook(kind, error, trace)

    return show


def _ended_text(signum: signal.Signals) -> str:
    return f"{signum.name} ended torchrun on {readable(socket.gethostname())} while it met the other hosts"


def _lost_store(parameters: RendezvousParameters) -> RendezvousError:
    host, endpoint = readable(socket.gethostname()), readable(parameters.endpoint)
    return RendezvousError(
        f"{host} does not reach the store of the rendezvous at {endpoint}: the torchrun of that host has ended, or its "
        "name, port or firewall is wrong; correct that, or start the job again with another --rdzv-endpoint"
    )


def _configured_ranks() -> int:
    """The value of --nproc-per-node.

    A handler is not told it, but torchrun, accelerate and others all start by `launch_agent(config, ...)`.
    """
    frame = sys._getframe()
    while caller := frame.f_back:
        if isinstance(config := caller.f_locals.get("config"), LaunchConfig):
            return config.nproc_per_node
        frame = caller
    return 1


def _rank_0_address(info: RendezvousInfo) -> str:
    assert info.bootstrap_store_info is not None  # only handlers that share no store have none
    return str(info.bootstrap_store_info.master_addr)


def _listens_here(store: Store) -> bool:
    """Whether this process serves the store. torch does not say which of several agents on a host does."""
    if not isinstance(store, TCPStore):
        return False
    sockets = {f"socket:[{sock.inode}]" for sock in tcp_sockets() if sock.listens and sock.port == store.port}
    return not sockets.isdisjoint(open_files(PROC / "self"))


def _message(store: Store, key: str, seconds: float) -> bytes:
    """Read a key of the store. RuntimeError if no agent writes it in time."""
    store.wait([key], timedelta(seconds=seconds))
    return store.get(key)


def _send_verdict(info: RendezvousInfo, verdict: WorldVerdict) -> None:
    """Send a verdict to all hosts, unless one was sent before: all hosts must read the same."""
    info.store.compare_set("ddpdiag/verdict", "", encode(verdict).decode())


def _report_of(arguments: tuple[str, ...], env: Mapping[str, str], budget: float) -> Report | None:
    """Run ddpdiag in a process of its own. Returns its report, or None if it wrote none, as on ranks other than 0."""
    # An error of the check is not yet the error of this torchrun, which may go on.
    env = {name: value for name, value in env.items() if name != ERROR_FILE}
    with tempfile.TemporaryDirectory(prefix="ddpdiag-", ignore_cleanup_errors=True) as folder, _exit_on_sigterm():
        path = Path(folder, "report.json")
        words = (arguments[0], "--quiet", f"--json={path}", *arguments[1:])
        if run_command(words, env, folder, seconds=budget + _SLACK) in (ExitCode.USAGE, ExitCode.BUG):
            text = Path(folder, "stderr").read_text(errors="replace")[:_MAX_TEXT]
            complain(f"`ddpdiag {arguments[0]}` failed: {printable(text)}")
        with suppress(OSError, ValueError):
            return decode(path.read_bytes(), Report)
    return None


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit. torchrun handles signals only after it has started the ranks once."""
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
