"""From a launch to an exit code: one rank's part in a run."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

import ddpdiag
from ddpdiag.checks.api import Check, Stage
from ddpdiag.errors import ExitCode, RunLost, UsageError
from ddpdiag.judgement.judged import selected
from ddpdiag.model import Arrival, Header, Options, Place, Report
from ddpdiag.model.news import Joined, Listener, Seeking
from ddpdiag.model.recording import Line
from ddpdiag.probes.host.environment import job_and_step
from ddpdiag.probes.host.kernel import age_seconds
from ddpdiag.probes.host.programs import write_error_file
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.client import ControlClient
from ddpdiag.runtime.control.join import Endpoint, Rank0Endpoint, join
from ddpdiag.runtime.control.membership import PATIENCE
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.control.secret import Origin, Secrets
from ddpdiag.runtime.control.server import ControlServer, control_ports, munge_ports
from ddpdiag.runtime.control.wire import Wire
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.deadlines import DEADLINES, crowded_silence_seconds
from ddpdiag.runtime.launchers import own_arrival
from ddpdiag.runtime.launchers.launch import Launch, worker_variables
from ddpdiag.runtime.launchers.slurm import leaf_of
from ddpdiag.runtime.record import Record, RecordCopy, folder_name, run_folder
from ddpdiag.runtime.record.failover import Handover, Published, Rank0Address, verdict_without_rank_0
from ddpdiag.runtime.record.shared_folder import NoteReader, NoteWriter, shared_folder
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.runtime.supervisor.supervisor import Rank0Lost, Supervisor
from ddpdiag.sanitize import printable, without_commands

LOOPBACK = "127.0.0.1"

Signalled = Callable[[], int | None]


@dataclass(frozen=True)
class Run:
    """What one run needs to know, the same in every process of it.

    `publish` judges the lines, writes and prints, in rank 0 or in the rank that takes its place, and is given what
    tells whether a signal came since the last line; `listener` makes the
    one who is told how the run goes on, in the rank's own process: in rank 0 of the whole run, in another one of its
    search for rank 0.
    """

    launch: Launch
    options: Options
    checks: Sequence[Check[Any]]
    endpoint: Endpoint
    secrets: Secrets
    port: int
    publish: Callable[[Sequence[Line], Signalled], Published]
    listener: Callable[[Place], Listener]

    @property
    def name(self) -> str:
        """Name of the run's folders."""
        return folder_name(self.launch.run_id)

    @property
    def rank_0(self) -> Rank0Address:
        """Where rank 0's host is, as this process knows it."""
        return Rank0Address(self.endpoint.host, self.port)

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
            layout=self.launch.layout if writer == 0 else (),
            secret=self.secrets.origin.value if writer == 0 else "",
        )


def prepare(
    launch: Launch,
    options: Options,
    checks: Sequence[Check[Any]],
    *,
    join_wait: float,
    control_port: int | None,
    require_auth: bool,
    publish: Callable[[Sequence[Line], Signalled], Published],
    listener: Callable[[Place], Listener],
) -> Run:
    """Settle the ports: where we start the whole world ourselves they are free ones of this host.

    UsageError where /proc is not mounted: without it no process can be looked at.
    """
    if not os.path.exists("/proc/self/stat"):
        raise UsageError("/proc is not mounted here, and ddpdiag needs it: run `mount -t proc proc /proc` as root")
    if launch.whole:
        # Several, because somebody may take one before rank 0 binds it.
        ports: tuple[int, ...] = (
            (control_port,) if control_port is not None else tuple(free_port(LOOPBACK) for _ in range(3))
        )
    else:
        ports = control_ports(launch.run_id, launch.port, control_port)
    host = LOOPBACK if launch.whole else launch.coordinator
    if launch.whole:
        join_wait += crowded_silence_seconds(launch.place.local_world_size)
    return Run(
        launch=launch,
        options=options,
        checks=checks,
        endpoint=Endpoint(host, ports, join_wait),
        secrets=Secrets(
            launch.run_id,
            os.environ,
            whole=launch.whole,
            local=launch.is_local,
            host=host,
            munge_ports=munge_ports(launch.run_id, launch.port, control_port),
            required=require_auth,
        ),
        port=launch.port if launch.port is not None else free_port(LOOPBACK),
        publish=publish,
        listener=listener,
    )


# One rank ------------------------------------------------------------------------------------------------------------


def run_rank(run: Run, place: Place) -> int:
    """This process's part in the run; the exit code. RunLost when the run goes on, or ends, without us."""
    begin = time.monotonic()
    signals = Signals()
    wire = run.secrets.of_rank_0() if place.rank == 0 else None
    header = run.header(place.rank)
    shared_dir = run.options.shared_dir if place.rank != 0 else None  # rank 0's coordinator shares its lines
    copy = None if shared_dir is None else RecordCopy(shared_dir, run.name, place.rank)
    record = Record(run_folder(run.launch.run_id), place.rank, header, copy)
    lost_ranks: Mapping[int, str] | None = {}  # None: the record stays
    try:
        try:
            shutdown = _take_part(run, place, wire, record, signals)
        except Rank0Lost as lost:
            shutdown = _verdict_without_rank_0(run, header, record, begin, lost)
        lost_ranks = shutdown.lost
        if shutdown.exit_code != ExitCode.FIT:
            # torchrun's own summary then shows the sentence instead of "error_file: <N/A>".
            write_error_file(os.environ, shutdown.sentence)
        return shutdown.exit_code
    except RunLost as lost:
        lost_ranks = None
        raise _left_alone(lost, record) from lost
    finally:
        run.secrets.close()
        if lost_ranks is not None:
            record.remove(lost_ranks)


def _verdict_without_rank_0(run: Run, header: Header, record: Record, begin: float, lost: RunLost) -> Shutdown:
    """The verdict that the living ranks make without rank 0; `lost`, as without a shared folder, if they cannot."""
    shared = record.copy.shared if record.copy is not None else None
    if shared is None:
        raise lost
    record.mark("ready")
    obtained = verdict_without_rank_0(shared, header, begin, run.rank_0, lambda lines: run.publish(lines, lambda: None))
    if obtained is None:
        raise lost
    shutdown, sentence = obtained
    sys.stderr.write(without_commands(printable(f"ddpdiag: {lost}; {sentence}\n")))
    return shutdown


def _take_part(run: Run, place: Place, wire: Wire | None, record: Record, signals: Signals) -> Shutdown:
    arrival = _arrival(run, place)
    # The control server comes first: a second rank 0 must not start anything.
    server = _open_server(run, wire, arrival) if wire is not None else None
    supervisor = Supervisor(
        place,
        lambda own: worker_variables(run.launch, own, run.port),
        record,
        signals=signals if server is None else None,
        trains=lambda options: any(c.stage is Stage.TRAINING and selected(c, options) for c in run.checks),
    )
    arrival = structs.replace(arrival, up_seconds=age_seconds(os.getppid() if run.launch.ranks else os.getpid()))
    try:
        record.write(arrival)
        if server is None or wire is None:
            return supervisor.run(_join(run, arrival, signals))
        return _lead(run, server, supervisor, wire, arrival, signals)
    finally:
        for survivor in supervisor.end_children():
            sys.stderr.write(without_commands(printable(f"ddpdiag: {survivor}\n")))


def _open_server(run: Run, wire: Wire, arrival: Arrival) -> ControlServer:
    ports = run.endpoint.ports
    # Where ranks are told the port, any one will do: a stranger may hold those that they would try.
    ports = (*ports, 0) if run.secrets.origin is Origin.SAME_HOST else ports
    here = run.launch.on_loopback
    server = ControlServer(ports, wire, arrival, local_only=here)
    run.secrets.offer(server.port)
    return server


def _join(run: Run, arrival: Arrival, signals: Signals) -> ControlClient:
    """Find rank 0; as long as that does not succeed, a note in the shared folder says what was met."""
    rank, host, shared_dir = arrival.place.rank, run.endpoint.host, run.options.shared_dir
    listener = run.listener(arrival.place)
    note = NoteWriter(shared_dir, run.name, arrival) if shared_dir is not None else None

    def seeking(left_seconds: float) -> None:
        listener.tell(Seeking(rank=rank, host=host, left_seconds=left_seconds))

    def troubled(sentence: str) -> None:
        if note is not None:
            note.write(sentence)

    try:
        client = join(run.endpoint, run.secrets.of_rank, arrival, lambda: signals.told, seeking, troubled)
        listener.tell(Joined(rank=rank, host=host))
        return client
    finally:
        if note is not None:
            note.remove()
        listener.close()


def _lead(
    run: Run, server: ControlServer, supervisor: Supervisor, wire: Wire, arrival: Arrival, signals: Signals
) -> Shutdown:
    """Rank 0: the coordinator in the main thread, its own supervisor beside it."""
    endpoint = Endpoint(LOOPBACK, (server.port,), run.endpoint.wait_seconds)
    threads = ThreadPoolExecutor(2)
    served: Future[Shutdown] = threads.submit(
        lambda: supervisor.run(join(endpoint, lambda: Rank0Endpoint(wire), arrival, lambda: signals.told))
    )
    patience = replace(PATIENCE, lost=PATIENCE.lost + crowded_silence_seconds(arrival.place.local_world_size))
    listener, header = run.listener(arrival.place), run.header(0)
    coordinator = Coordinator(server, header, run.checks, listener, lambda: signals.told, patience)
    shared_dir, size, seconds = run.options.shared_dir, run.launch.place.world_size, run.endpoint.wait_seconds
    handover = Handover(None, None, coordinator.lines)
    if shared_dir is not None:
        notes = NoteReader(shared_dir, run.name, world_size=size, wait_seconds=seconds)
        handover = Handover(shared_folder(shared_dir, run.name, arrival.nonce), notes, coordinator.lines)
    exit_code, sentence = int(ExitCode.BUG), "rank 0 met a bug of ddpdiag; its own output says more"
    try:
        coordinator.run(run.endpoint.wait_seconds)
        report = _published(run, coordinator, threads, handover)
        exit_code, sentence = report.exit_code, report.sentence
    except RunLost as lost:
        exit_code, sentence = lost.exit_code, str(lost)
        raise
    finally:
        shutdown = coordinator.shut_down(exit_code, sentence)
        handover.close(shutdown)
    # The verdict stands, whatever becomes of our own supervisor; but its bug is ours.
    wait([served], timeout=DEADLINES.own_supervisor)
    if served.done() and (error := served.exception()) is not None and not isinstance(error, RunLost):
        raise error
    threads.shutdown(wait=False)
    return shutdown


def _published(run: Run, coordinator: Coordinator, threads: ThreadPoolExecutor, handover: Handover) -> Report:
    """The report, judged and written while rank 0 keeps in touch: a large world must not look like a lost rank 0."""
    lines = coordinator.lines()
    published = threads.submit(lambda: run.publish(handover.explain(lines, run.rank_0), coordinator.late_signal))
    end = time.monotonic() + DEADLINES.publish
    while not published.done():
        coordinator.idle()
        if time.monotonic() > end:
            raise RunLost(f"the report could not be written within {DEADLINES.publish:g} s: a disk does not answer")
    return published.result().report


def _arrival(run: Run, place: Place) -> Arrival:
    return structs.replace(
        own_arrival(place),
        coordinator=run.launch.coordinator,
        agent_store=run.launch.agent_store,
        lacks=run.launch.lacks,
        leaf=leaf_of(os.environ, place.node),
        slurm=job_and_step(os.environ),
    )


def _left_alone(lost: RunLost, record: Record) -> RunLost:
    """Rank 0 will not tell what we saw, so our record stays; one that holds no outcome says nothing and goes."""
    write_error_file(os.environ, str(lost))
    record.remove_killed()
    if record.outcomes == 0:
        record.remove()
        return lost
    record.keep()
    return RunLost(f"{lost}; its record is kept for `ddpdiag judge` in {record.path}", lost.exit_code)
