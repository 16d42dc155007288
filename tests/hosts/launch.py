"""A command, started on the hosts of a network as users start it: by torchrun, with variables, with options, alone.

    bed = Bed(ranks=(2, 2))                                   # two hosts with two ranks each, by torchrun
    running = launch(network, bed, ("script.py",), folder)

What is started may be `-m ddpdiag check` or any training script: a `Launched` knows processes by their mark, their RANK
and who started them, never by what they run.
"""

import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from jobs import Job, Process, processes
from network import Host, Network

PORT = 29500


class Launcher(Enum):
    """How ranks come to be.

    torchrun (one agent per host, static rendezvous), env (RANK and its like in each process's environment), hand
    (--rank and its like on each command line), node (one process per host, with --nnodes and its like), alone (one
    process on the first host). Only ddpdiag's own command takes part in the last three.
    """

    TORCHRUN = "torchrun"
    ENV = "env"
    HAND = "hand"
    HOST = "host"
    ALONE = "alone"


@dataclass(frozen=True)
class Bed:
    """Ranks on each host, and how they are started.

    `on_rank` sets variables of single ranks (env, hand), in place of the launcher's own; None unsets. Ranks in `absent`
    (torchrun, node: all ranks of their host) are not started. `coordinator` is the name by which rank 0's host is
    known, h0 if nothing else is said; `torchrun` is appended to torchrun's own options.
    """

    ranks: tuple[int, ...] = (2,)
    launcher: Launcher = Launcher.TORCHRUN
    on_rank: Mapping[int, Mapping[str, str | None]] = field(default_factory=dict)
    absent: Set[int] = frozenset()
    coordinator: str = "h0"
    torchrun: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks that are meant to be there."""
        return sum(self.ranks)

    def of_host(self, index: int) -> range:
        """The ranks of a host: they are numbered host by host."""
        first = sum(self.ranks[:index])
        return range(first, first + self.ranks[index])

    def host_of(self, rank: int) -> int:
        """The index of a rank's host."""
        return next(index for index in range(len(self.ranks)) if rank in self.of_host(index))


class Launched:
    """A run: one job for each command line. `reached` appears when an injected fault begins (see tests/inject)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.reached = folder / "reached"
        self.json = folder / "report.json"
        self.jobs: dict[str, Job] = {}
        self.begin = time.monotonic()

    def start(
        self,
        name: str,
        host: Host,
        arguments: Sequence[str],
        variables: Mapping[str, str | None],
        python: str = sys.executable,
    ) -> None:
        """Start one command line of a Python on a host."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        own = {
            "DDPDIAG_TOKEN": "what the hosts share",
            **host.variables,
            **variables,
            "DDPDIAG_TEST_REACHED": str(self.reached),
        }
        words = [argument.replace("{json}", str(self.json)) for argument in arguments]
        unset = [f"--unset={variable}" for variable, value in own.items() if value is None]
        self.jobs[name] = Job(
            folder,
            words,
            {variable: value for variable, value in own.items() if value is not None},
            prefix=[*host.enter(folder), "env", *unset],
            mark=self.mark,
            python=python,
        )

    # What becomes of it ----------------------------------------------------------------------------------------------

    def is_over(self, seconds: float = 0.0) -> bool:
        """Do all jobs end within so many seconds from now?"""
        end = time.monotonic() + seconds
        return all(job.is_over(max(0.0, end - time.monotonic())) for job in self.jobs.values())

    def wait_until_reached(self, seconds: float) -> bool:
        """Does an injected fault begin within so many seconds, before the run is over?"""
        end = time.monotonic() + seconds
        while not self.reached.exists() or self.reached.stat().st_size == 0:
            if time.monotonic() > end or self.is_over():
                return False
            time.sleep(0.02)
        return True

    @property
    def seconds(self) -> float:
        """From the start to the end of the last job; of a run that is over."""
        return max(job.end for job in self.jobs.values()) - self.begin

    def told(self) -> str:
        """Everything that was written, job by job."""
        return "\n".join(f"===== {name}\n{job.told()}" for name, job in self.jobs.items())

    def destroy(self) -> None:
        """End what is left of it."""
        for job in self.jobs.values():
            job.destroy()

    # Who is who ------------------------------------------------------------------------------------------------------

    def of_rank(self, rank: int) -> list[Process]:
        """Living processes of a rank."""
        return [p for p in processes(self.mark) if p.rank == str(rank)]

    def launched(self, rank: int) -> Process:
        """The process that a launcher (torchrun, env) started for a rank, whatever that started in turn."""
        own = [process for process in self.of_rank(rank) if not process.command.startswith("nsenter ")]
        pids = {process.pid for process in own}
        return next(process for process in own if process.parent not in pids)

    def in_fault(self, rank: int) -> Process:
        """The process in which an injected fault began."""
        begun = [line.split() for line in self.reached.read_text().splitlines()]
        return next(p for p in self.of_rank(rank) if [str(rank), str(p.inner_pid)] in begun)


def launch(network: Network, bed: Bed, command: Sequence[str], folder: Path) -> Launched:
    """Start a command (a script or `-m module`, and its arguments) as the bed says; {json} is one file for all."""
    run = Launched(folder)
    try:
        _START[bed.launcher](network, bed, command, run)
    except BaseException:
        run.destroy()
        raise
    return run


def report_of(run: Launched, *, clean: bool = False) -> dict:
    """The JSON report of a run, once it is over; whatever happens, nothing of it goes on. `clean`: by itself, too."""
    try:
        assert run.is_over(180.0), run.told()
        for job in run.jobs.values() if clean else ():
            job.check_left_nothing()
        return json.loads(run.json.read_text())
    finally:
        run.destroy()


def _torchrun(network: Network, bed: Bed, command: Sequence[str], run: Launched) -> None:
    for host, count in zip(network, bed.ranks, strict=True):
        if bed.absent.issuperset(bed.of_host(host.index)):
            continue
        options = ["--nnodes", len(bed.ranks), "--node-rank", host.index, "--nproc-per-node", count]
        options += ["--master-addr", bed.coordinator, "--master-port", PORT, *bed.torchrun]
        run.start(host.name, host, ["-m", "torch.distributed.run", *map(str, options), *command], {})


def _env(network: Network, bed: Bed, command: Sequence[str], run: Launched) -> None:
    for host in network:
        ranks = bed.of_host(host.index)
        for local_rank, rank in enumerate(ranks):
            values = {"RANK": rank, "WORLD_SIZE": bed.size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": len(ranks)}
            values |= {"MASTER_ADDR": bed.coordinator, "MASTER_PORT": PORT}
            if rank not in bed.absent:
                own = {name: str(value) for name, value in values.items()}
                run.start(f"rank{rank}", host, command, own | dict(bed.on_rank.get(rank, {})))


def _hand(network: Network, bed: Bed, command: Sequence[str], run: Launched) -> None:
    for rank in range(bed.size):
        place = ["--rank", rank, "--world-size", bed.size, "--master-addr", bed.coordinator, "--master-port", PORT]
        if rank not in bed.absent:
            host = network[bed.host_of(rank)]
            run.start(f"rank{rank}", host, [*command, *map(str, place)], bed.on_rank.get(rank, {}))


def _node(network: Network, bed: Bed, command: Sequence[str], run: Launched) -> None:
    for host, count in zip(network, bed.ranks, strict=True):
        place = ["--nnodes", len(bed.ranks), "--node-rank", host.index, "--nproc-per-node", count]
        place += ["--master-addr", bed.coordinator, "--master-port", PORT]
        if not bed.absent.issuperset(bed.of_host(host.index)):
            run.start(host.name, host, [*command, *map(str, place)], {})


def _alone(network: Network, bed: Bed, command: Sequence[str], run: Launched) -> None:
    run.start("h0", network[0], [*command, "--nproc-per-node", str(bed.size)], {})


_START = {
    Launcher.TORCHRUN: _torchrun,
    Launcher.ENV: _env,
    Launcher.HAND: _hand,
    Launcher.HOST: _node,
    Launcher.ALONE: _alone,
}
