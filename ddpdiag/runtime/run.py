"""One rank's part in a run: rank 0 leads it, and every other rank follows. `start_ranks` starts several ranks."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from shlex import quote
from typing import Any, TypeVar

from msgspec import structs

import ddpdiag
from ddpdiag.checks.api import Check, Stage
from ddpdiag.errors import ExitCode, RunLost, UsageError
from ddpdiag.judgement.selection import is_selected
from ddpdiag.model import Arrival, Header, Place, RunOptions
from ddpdiag.model.news import Joined, Listener, LookingForRank0
from ddpdiag.model.recording import Line
from ddpdiag.probes.host.environment import job_step_id
from ddpdiag.probes.host.kernel import age_seconds
from ddpdiag.probes.host.programs import user_name, write_error_file
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.client import ControlClient
from ddpdiag.runtime.control.join import Endpoint, Rank0Endpoint, join, join_in_process
from ddpdiag.runtime.control.membership import PATIENCE
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.control.secret import RunSecret
from ddpdiag.runtime.control.server import ANY_PORT, ControlServer, control_ports, munge_ports
from ddpdiag.runtime.control.wire import Wire
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.deadlines import DEADLINES, LOST_AFTER_SECONDS, crowded_silence_seconds, frozen_seconds
from ddpdiag.runtime.launchers import own_arrival
from ddpdiag.runtime.launchers.launch import Launch, places, worker_variables
from ddpdiag.runtime.launchers.slurm import leaf_switch
from ddpdiag.runtime.lost_hosts import add_host_answers, rank_0_answers
from ddpdiag.runtime.record import Record, SharedRecord, is_locked, make_run_folder, remove_scratch
from ddpdiag.runtime.supervisor.processes import ForkedChildren, Signals, describe_end
from ddpdiag.runtime.supervisor.supervisor import Supervisor
from ddpdiag.sanitize import printable, without_commands

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Run:
    """The data of one run that each of its processes has. `port` is the job's MASTER_PORT.

    `may_use_any_port`: rank 0 may listen on any port, because all ranks are on one host and find the port in a file.
    """

    launch: Launch
    options: RunOptions
    checks: Sequence[Check[Any]]
    endpoint: Endpoint
    secret: RunSecret
    port: int
    may_use_any_port: bool

    def header(self, rank: int) -> Header:
        place = self.launch.place
        return Header(
            run_id=self.launch.run_id,
            world_size=place.world_size,
            launcher=place.launcher,
            options=self.options,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            version=ddpdiag.__version__,
            checks=tuple(check.code for check in self.checks),
            layout=self.launch.layout if rank == 0 else (),
            authentication=self.secret.origin.value if rank == 0 else "",
        )

    def shared_record(self, file: str) -> SharedRecord | None:
        """The record with this file name in `--shared-dir`, or None without that option."""
        shared_dir = self.options.shared_dir
        return None if shared_dir is None else SharedRecord(shared_dir, self.launch.run_id, file)

    def trains_model(self, options: RunOptions) -> bool:
        return any(check.stage is Stage.TRAINING and is_selected(check, options) for check in self.checks)


def prepare(
    launch: Launch,
    options: RunOptions,
    checks: Sequence[Check[Any]],
    *,
    join_wait: float,
    control_port: int | None,
    require_auth: bool,
) -> Run:
    """Choose the ports and the secret of a run. UsageError if /proc, which shows processes, is not mounted."""
    if not os.path.exists("/proc/self/stat"):
        raise UsageError("/proc is not mounted here, and ddpdiag needs it: run `mount -t proc proc /proc` as root")
    if launch.starts_all_ranks:
        # Three free ports, because another process may bind one of them before rank 0 does.
        ports: tuple[int, ...] = (
            (control_port,) if control_port is not None else tuple(free_port(LOOPBACK) for _ in range(3))
        )
        join_wait += crowded_silence_seconds(launch.place.local_world_size)
    else:
        ports = control_ports(launch.run_id, launch.port, control_port)
    host = LOOPBACK if launch.starts_all_ranks else launch.master_addr
    return Run(
        launch=launch,
        options=options,
        checks=checks,
        endpoint=Endpoint(host, ports, join_wait),
        secret=RunSecret(
            launch.run_id,
            os.environ,
            starts_all_ranks=launch.starts_all_ranks,
            is_local=launch.is_local,
            host=host,
            munge_ports=munge_ports(launch.run_id, launch.port, control_port),
            is_required=require_auth,
        ),
        port=launch.port if launch.port is not None else free_port(LOOPBACK),
        may_use_any_port=launch.is_local and not launch.starts_all_ranks and control_port is None,
    )


def follow(run: Run, place: Place, listener: Listener) -> int:
    """Run a rank other than 0, and return the exit code that rank 0 sent. RunLost if rank 0 is lost or not found."""
    signals = Signals()
    with _open_record(run, place, run.shared_record(f"rank-{place.rank}.jsonl")) as record:
        with _open_supervisor(run, place, record, signals) as supervisor:
            arrival = _arrival(run, place)
            record.write(arrival)
            shutdown = supervisor.run(_join(run, arrival, record, signals, listener))
        record.remove_files_of(shutdown.lost_nonces)
    return _report_exit_code(shutdown)


def _join(run: Run, arrival: Arrival, record: Record, signals: Signals, listener: Listener) -> ControlClient:
    """Connect to rank 0, report the search to `listener`, and close `listener`."""
    rank, host = arrival.place.rank, run.endpoint.host

    def find_rank_0() -> Rank0Endpoint | None:
        rank_0 = run.secret.find_rank_0()
        port = record.read_port_of_rank_0() if run.may_use_any_port else None
        return rank_0 if rank_0 is None or port is None else rank_0._replace(port=port)

    def report_search(left_seconds: float) -> None:
        listener.tell(LookingForRank0(rank=rank, host=host, left_seconds=left_seconds))

    try:
        client = join(run.endpoint, find_rank_0, arrival, lambda: signals.received, report_search)
        listener.tell(Joined(rank=rank, host=host))
        return client
    finally:
        listener.close()


@contextlib.contextmanager
def lead(run: Run, place: Place, listener: Listener) -> Iterator["Leader"]:
    """Run rank 0, and yield its `Leader`. Afterwards every rank gets the exit code, and rank 0 is the last to exit."""
    signals = Signals()
    wire = run.secret.wire_of_rank_0()
    shared = run.shared_record("run.jsonl")
    with _open_record(run, place, shared) as record:
        arrival = _arrival(run, place)
        # The server is bound before the supervisor starts, so that a second rank 0 of this run starts no process.
        ports = run.endpoint.ports
        if run.may_use_any_port and record.is_in_run_folder:
            ports = (*ports, ANY_PORT)
        server = ControlServer(ports, wire, arrival, local_only=run.launch.on_loopback)
        run.secret.offer(server.port)
        if server.port not in run.endpoint.ports:
            record.publish_port(server.port)
        if shared is not None:
            shared.open(arrival.nonce)
        with _open_supervisor(run, place, record, None) as supervisor:
            record.write(arrival)
            leader = Leader(run, server, supervisor, wire, arrival, signals, listener, shared)
            try:
                yield leader
            except BaseException as error:
                leader.shut_down(error)
                raise
            leader.shut_down(None)
        record.remove_files_of(leader.shutdown.lost_nonces)
    _report_exit_code(leader.shutdown)


class Leader:
    """Rank 0 of a run. Its coordinator runs in the main thread, and its supervisor in a second thread."""

    def __init__(
        self,
        run: Run,
        server: ControlServer,
        supervisor: Supervisor,
        wire: Wire,
        arrival: Arrival,
        signals: Signals,
        listener: Listener,
        shared: SharedRecord | None,
    ) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor()
        self._supervisor_end = self._threads.submit(
            lambda: supervisor.run(
                join_in_process(server.in_process_url, server.port, wire, arrival, run.endpoint.wait_seconds)
            )
        )
        patience = replace(PATIENCE, silence=PATIENCE.silence + crowded_silence_seconds(arrival.place.local_world_size))
        self._coordinator = Coordinator(
            server, run.header(0), run.checks, listener, lambda: signals.received, patience, shared, arrival
        )
        self._end = (int(ExitCode.BUG), "rank 0 met a bug of ddpdiag; its own output says more")
        self.shutdown = Shutdown(*self._end)

    def measure(self) -> list[Line]:
        """Run all checks, and return the lines of the recording. RunLost if the other ranks ended without rank 0."""
        self._coordinator.run(self._run.endpoint.wait_seconds)
        self._coordinator.membership.check_not_lost()
        return self.run_with_heartbeats(lambda: add_host_answers(self._coordinator.lines(), self._run.port))

    def run_with_heartbeats(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread, send heartbeats meanwhile, and return its result. RunLost if it takes over 30 s."""
        result = self._threads.submit(call)
        end = time.monotonic() + DEADLINES.write_report
        while not result.done():
            self._coordinator.membership.send_heartbeats()
            if time.monotonic() > end:
                limit = f"{DEADLINES.write_report:g} s"
                raise RunLost(f"the report could not be written within {limit}: a disk does not answer")
        return result.result()

    def late_signal(self) -> int | None:
        return self._coordinator.late_signal()

    def set_exit(self, exit_code: int, sentence: str) -> None:
        self._end = (exit_code, sentence)

    def shut_down(self, error: BaseException | None) -> None:
        """Send every rank the exit code. Raises an unexpected exception of the supervisor, unless `error` is set."""
        if isinstance(error, RunLost):
            self._end = (error.exit_code, str(error))
        self.shutdown = self._coordinator.membership.shut_down(*self._end)
        # The verdict does not depend on the supervisor's end; but an exception in the supervisor is a bug of ddpdiag.
        wait([self._supervisor_end], timeout=DEADLINES.end_of_supervisor)
        if error is None and self._supervisor_end.done():
            bug = self._supervisor_end.exception()
            if bug is not None and not isinstance(bug, RunLost):
                raise bug
        self._threads.shutdown(wait=False)


@contextlib.contextmanager
def _open_record(run: Run, place: Place, shared: SharedRecord | None) -> Iterator[Record]:
    """Open this rank's record, and remove it at the end. After RunLost, keep the record if it has outcomes."""
    copy = shared if place.rank != 0 else None  # the coordinator writes rank 0's lines to it
    record = Record(make_run_folder(run.launch.run_id), place.rank, run.header(place.rank), copy)
    try:
        yield record
    except RunLost as lost:
        raise _keep_record(lost, record, shared) from lost
    except BaseException:
        record.remove()
        raise
    else:
        record.remove()
        if shared is not None:
            shared.remove(all_files=place.rank == 0)
    finally:
        run.secret.close()


def _keep_record(lost: RunLost, record: Record, shared: SharedRecord | None) -> RunLost:
    """Keep a record that has outcomes, else remove it. Returns `lost`, with the command that judges a kept record."""
    write_error_file(os.environ, str(lost))
    record.remove_files_of_killed()
    folder = None if shared is None else shared.keep()
    if folder is not None:
        record.remove_files_of({0: record.nonce})
        record.remove()
        judge_hint = f"`ddpdiag judge {quote(str(folder))}` makes the report from the records of all ranks"
    elif record.outcome_count:
        record.keep()
        judge_hint = f"its record is kept for `ddpdiag judge` in {record.path}"
    else:
        record.remove()
        return lost
    return RunLost(f"{lost}; {judge_hint}", lost.exit_code)


@contextlib.contextmanager
def _open_supervisor(run: Run, place: Place, record: Record, signals: Signals | None) -> Iterator[Supervisor]:
    """Start this rank's supervisor, and kill its processes afterwards. Survivors are named on standard error."""
    supervisor = Supervisor(
        place,
        lambda at_place: worker_variables(run.launch, at_place, run.port),
        record,
        signals=signals,
        trains_model=run.trains_model,
        rank_0_answers=lambda: rank_0_answers(run.endpoint.host, run.port),
    )
    try:
        yield supervisor
    finally:
        for survivor in supervisor.end_children():
            sys.stderr.write(without_commands(printable(f"ddpdiag: {survivor}\n")))


def _arrival(run: Run, place: Place) -> Arrival:
    return structs.replace(
        own_arrival(place),
        master_addr=run.launch.master_addr,
        agent_store=run.launch.agent_store,
        unset_variables=run.launch.unset_variables,
        leaf_switch=leaf_switch(os.environ, place.host),
        slurm_step=job_step_id(os.environ),
        user=user_name(os.geteuid()),
        process_age_seconds=age_seconds(os.getppid() if run.launch.ranks else os.getpid()),
    )


def _report_exit_code(shutdown: Shutdown) -> int:
    """The exit code that rank 0 sent. Unless it is 0, write rank 0's sentence to the error file that torchrun shows."""
    if shutdown.exit_code != ExitCode.FIT:
        write_error_file(os.environ, shutdown.sentence)
    return shutdown.exit_code


def start_ranks(run: Run, run_rank: Callable[[Place], int]) -> int:
    """Fork one supervisor for each of the launch's ranks, wait for all, and return their combined exit code.

    A fork without exec is safe, because this process has no threads yet.
    """
    if len(run.launch.ranks) > 1:
        # As torchrun does. Otherwise each rank starts one thread per core, and the threads compete for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    children = ForkedChildren(Signals(children=True))
    for place in places(run.launch):
        children.fork(partial(run_rank, place), place.rank)
    codes = _wait_for_ranks(run, children)
    _remove_scratch_of_killed(run, codes)
    return combined_exit_code(codes)


def _wait_for_ranks(run: Run, children: ForkedChildren) -> dict[int, int]:
    """Wait for all ranks, and kill those that run too long. Returns the exit codes by rank, negative for a signal."""
    end = time.monotonic() + run.options.budget_seconds + run.endpoint.wait_seconds + DEADLINES.kill_after_budget
    while children.running:
        begin, ended = time.monotonic(), len(children.exit_codes)
        children.wait(0.5)
        end += frozen_seconds(begin, time.monotonic())
        if len(children.exit_codes) > ended:
            end = min(end, time.monotonic() + _max_more_seconds(run, children))
        if time.monotonic() > end:
            children.send(signal.SIGKILL)
        if time.monotonic() > end + DEADLINES.kill:
            break  # a process that is stuck in the kernel survives SIGKILL
    return children.exit_codes | dict.fromkeys(children.running, -signal.SIGKILL)


def _max_more_seconds(run: Run, children: ForkedChildren) -> float:
    """Seconds that the running ranks may still take, now that at least one rank has ended; may be infinite."""
    crowded = crowded_silence_seconds(len(run.launch.ranks))
    seconds = DEADLINES.straggler + crowded + (DEADLINES.file_server if run.options.shared_dir is not None else 0.0)
    if 0 in children.exit_codes:
        # If rank 0 was killed, the other ranks must first notice its silence and report the loss.
        return seconds + (LOST_AFTER_SECONDS + crowded if children.exit_codes[0] < 0 else 0.0)
    return seconds if set(children.running) == {0} else float("inf")


def _remove_scratch_of_killed(run: Run, codes: Mapping[int, int]) -> None:
    """Remove the scratch folders of killed ranks; their records stay as evidence."""
    killed = [rank for rank, code in codes.items() if code < 0]
    if not killed:
        return
    folder = make_run_folder(run.launch.run_id)
    for rank in killed:
        if not is_locked(folder / f"rank-{rank}.jsonl"):  # if locked, it belongs to another run with this run id
            remove_scratch(folder, rank)
    with contextlib.suppress(OSError):  # `make_run_folder` may have just made it, and then it is empty
        folder.rmdir()


def combined_exit_code(codes: Mapping[int, int]) -> int:
    """Rank 0's exit code, or without rank 0 the highest of the others. RunLost if rank 0 was killed by a signal."""
    if 0 not in codes:
        return max(abs(code) for code in codes.values())
    if codes[0] >= 0:
        return codes[0]
    raise RunLost(f"rank 0 was lost, and its report with it: its process was {describe_end(codes[0])}")
