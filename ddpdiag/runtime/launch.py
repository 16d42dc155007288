"""From a launch to an exit code: one rank's part in a run."""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import ddpdiag
from ddpdiag.check import Check
from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.model import Arrival, Header, Options, Place, Report
from ddpdiag.model.recording import Line
from ddpdiag.probes.elastic import write_error_file
from ddpdiag.probes.gpus import pci_gpus, visible_gpus
from ddpdiag.probes.procfs import boot_id, proc_root
from ddpdiag.probes.sockets import free_port
from ddpdiag.probes.sysfs import sys_root
from ddpdiag.runtime.board import Desk, Hub, board_ports, join
from ddpdiag.runtime.coordinator import Coordinator, Listener
from ddpdiag.runtime.environment import worker_variables
from ddpdiag.runtime.launchers import Launch
from ddpdiag.runtime.messages import Farewell, Seal
from ddpdiag.runtime.record import Record, run_folder
from ddpdiag.runtime.signals import Signals
from ddpdiag.runtime.supervisor import Supervisor

LOOPBACK = "127.0.0.1"
# Our own supervisor kills its children within this time, or they cannot be killed.
_STRAGGLER_SECONDS = 3.0


@dataclass(frozen=True)
class Run:
    """What one run needs to know, the same in every process of it.

    `publish` judges the lines of rank 0, writes and prints, and returns the report; `listener` is made in rank 0 only.
    """

    launch: Launch
    options: Options
    checks: Sequence[Check[Any]]
    desk: Desk
    port: int
    publish: Callable[[Sequence[Line]], Report]
    listener: Callable[[], Listener]

    @property
    def alone(self) -> bool:
        """Is the whole world on this host, started by this process?"""
        return len(self.launch.ranks) == self.launch.place.world_size

    def header(self, writer: int) -> Header:
        """First line of a recording."""
        place = self.launch.place
        return Header(
            run_id=self.launch.run_id,
            world_size=place.world_size,
            launcher=place.launcher,
            options=self.options,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            version=ddpdiag.__version__,
            writer=writer,
            checks=tuple(check.code for check in self.checks),
        )


def prepare(
    launch: Launch,
    options: Options,
    checks: Sequence[Check[Any]],
    *,
    board_wait: float,
    board_port: int | None,
    publish: Callable[[Sequence[Line]], Report],
    listener: Callable[[], Listener],
) -> Run:
    """Settle the ports: where we start the whole world ourselves they are free ones of this host."""
    whole = len(launch.ranks) == launch.place.world_size
    if whole:
        # Several, because somebody may take one before rank 0 binds it.
        ports: tuple[int, ...] = (
            (board_port,) if board_port is not None else tuple(free_port(LOOPBACK) for _ in range(3))
        )
    else:
        ports = board_ports(launch.run_id, launch.port, board_port)
    host = LOOPBACK if whole else launch.coordinator
    return Run(
        launch=launch,
        options=options,
        checks=checks,
        desk=Desk(host, ports, board_wait),
        port=launch.port if launch.port is not None else free_port(LOOPBACK),
        publish=publish,
        listener=listener,
    )


# One rank ------------------------------------------------------------------------------------------------------------


def run_rank(run: Run, place: Place) -> int:
    """This process's part in the run; the exit code. RunLost when the run goes on, or ends, without us."""
    signals = Signals()
    seal = Seal(run.launch.run_id, os.environ.get("DDPDIAG_TOKEN", ""))
    record = Record(run_folder(run.launch.run_id), place.rank, run.header(place.rank))
    try:
        farewell = _take_part(run, place, seal, record, signals)
    except RunLost as lost:
        write_error_file(os.environ, str(lost))
        raise _with_record(lost, record) from lost
    except BaseException:
        record.remove()
        raise
    if farewell.exit_code != ExitCode.FIT:
        # torchrun's own summary then shows the sentence instead of "error_file: <N/A>".
        write_error_file(os.environ, farewell.sentence)
    record.remove(farewell.lost)
    return farewell.exit_code


def _take_part(run: Run, place: Place, seal: Seal, record: Record, signals: Signals) -> Farewell:
    arrival = _arrival(run, place)
    # The Board comes first: a second rank 0 must not start anything.
    hub = Hub(run.desk.ports, seal, arrival, local_only=run.alone) if place.rank == 0 else None
    supervisor = Supervisor(
        place,
        lambda own: worker_variables(run.launch, own, run.port),
        record,
        signals=signals if hub is None else None,
    )
    try:
        record.write(arrival)
        if hub is None:
            return supervisor.run(join(run.desk, seal, arrival, lambda: signals.told))
        return _lead(run, hub, supervisor, seal, arrival, signals)
    finally:
        for survivor in supervisor.end_children():
            sys.stderr.write(f"ddpdiag: {survivor}\n")


def _lead(run: Run, hub: Hub, supervisor: Supervisor, seal: Seal, arrival: Arrival, signals: Signals) -> Farewell:
    """Rank 0: the coordinator in the main thread, its own supervisor beside it."""
    desk = Desk(LOOPBACK, (hub.port,), run.desk.wait_seconds)
    threads = ThreadPoolExecutor(2)
    served: Future[Farewell] = threads.submit(lambda: supervisor.run(join(desk, seal, arrival, lambda: signals.told)))
    coordinator = Coordinator(hub, run.header(0), run.checks, run.listener(), lambda: signals.told)
    try:
        coordinator.conduct(run.desk.wait_seconds)
        published = threads.submit(run.publish, coordinator.lines())
        while not published.done():
            coordinator.idle()  # a slow disk or a large world must not look like a lost rank 0
        report = published.result()
    except BaseException:
        coordinator.farewell(ExitCode.BUG, "rank 0 met a bug of ddpdiag; its own output says more")
        raise
    farewell = coordinator.farewell(report.exit_code, report.sentence)
    # The verdict stands, whatever becomes of our own supervisor; but its bug is ours.
    wait([served], timeout=_STRAGGLER_SECONDS)
    if served.done() and (error := served.exception()) is not None and not isinstance(error, RunLost):
        raise error
    threads.shutdown(wait=False)
    return farewell


def _arrival(run: Run, place: Place) -> Arrival:
    return Arrival(
        place=place,
        host_id=boot_id(),
        pid=os.getpid(),
        address="",
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        pci_gpus=pci_gpus(sys_root(os.environ)),
        coordinator=run.launch.coordinator,
        agent_store=run.launch.agent_store,
        nonce=secrets.token_hex(4),
    )


def _with_record(lost: RunLost, record: Record) -> RunLost:
    """Rank 0 will not tell what we saw, so our record stays; one that holds no outcome says nothing and goes."""
    if record.outcomes == 0:
        record.remove()
        return lost
    record.keep()
    return RunLost(f"{lost}; its record is kept in {record.path}", lost.exit_code)
