"""`ddpdiag watch --attach` on several hosts: rank 0 of the step merges the looks of all hosts, and judges them once.

The processes are started by `srun --overlap --jobid JOB`, or any launcher of `ddpdiag check`, and meet by its control
channel. One process of each host looks at the job's ranks there. Each sends two looks, because only a comparison shows
progress. Rank 0 waits for them for a limited time, and names the processes that did not answer.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import structs

from ddpdiag.errors import ExitCode, RunLost, UsageError
from ddpdiag.model import RunOptions
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.runtime.control.client import ControlClient
from ddpdiag.runtime.control.join import join
from ddpdiag.runtime.control.messages import Hello, HelloAck, PartialData, Pong, Shutdown
from ddpdiag.runtime.control.server import ControlServer
from ddpdiag.runtime.launchers import own_arrival, read_own_launch
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.run import Run, prepare
from ddpdiag.text import fold_hosts, ranks_text
from ddpdiag.watch import WatchArgs, attach
from ddpdiag.watch.look import Look

# How long rank 0 waits for the looks of all hosts, and the others for rank 0, its wait and its report.
GATHER_SECONDS, _END_SECONDS = 20.0, 60.0
_POLL_SECONDS, _DISMISS_SECONDS = 0.2, 1.0
_PAUSE_SECONDS = 2.5  # between the two looks


class Looks(NamedTuple):
    """Two looks of one host at the same job, the earlier one first."""

    first: Look
    last: Look


def run(options: WatchArgs) -> int:
    """Look at the ranks of this host. Rank 0 of this launch reports on those of all hosts. Returns the exit code."""
    launch = read_own_launch(LaunchArgs())
    place = launch.place
    if launch.ranks or place.world_size == 1:  # no launcher started this process, or it is the only one
        return attach.run(options)
    if options.every is not None:
        raise UsageError("--every: works on one host only; --attach on several hosts makes one report")
    gathering = Gathering(launch) if place.rank == 0 else None
    # Other processes on this host only keep the launcher from waiting for them.
    pids = attach.local_pids(os.environ, is_required=False) if not place.local_rank else []
    attachment = attach.Attachment(options, pids)
    first = attachment.observe()
    time.sleep(_PAUSE_SECONDS if pids else 0.0)
    looks = Looks(first, attachment.observe())
    if gathering is None:
        return send(launch, looks)
    before, now = gathering.gather(looks)
    look = attach.compare(attach.compare(None, before), now)
    attachment.report(look)
    code = attach.exit_code(look)
    gathering.dismiss(code)
    return code


def _prepare(launch: Launch) -> Run:
    return prepare(launch, RunOptions(), (), join_wait=GATHER_SECONDS, control_port=None, require_auth=False)


def send(launch: Launch, looks: Looks) -> int:
    """Send looks to rank 0, and return the exit code that it answers. RunLost if it does not."""
    run = _prepare(launch)
    client = join(run.endpoint, run.secret.find_rank_0, own_arrival(launch.place), lambda: None)
    client.send(PartialData(0, msgspec.Raw(msgspec.json.encode(looks))))
    try:
        return _exit_code_of(client)
    finally:
        client.close()


class Gathering:
    """Rank 0's part: it receives the looks of all processes of its launch, and sends them an exit code."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        run = _prepare(launch)
        self._server = ControlServer(run.endpoint.ports, run.secret.wire_of_rank_0(), own_arrival(launch.place))
        run.secret.offer(self._server.port)
        self._ranks: dict[bytes, int] = {}  # by the sender's identity

    def gather(self, own_looks: Looks, seconds: float = GATHER_SECONDS) -> Looks:
        """The merged looks of all processes that sent theirs in time. `last` says which did not."""
        looks, size = {0: own_looks}, self._launch.place.world_size
        end = time.monotonic() + seconds
        while len(looks) < size and time.monotonic() < end:
            for identity, message in self._server.receive(_POLL_SECONDS):
                match message:
                    case Hello(arrival):
                        self._ranks[identity] = arrival.place.rank
                        self._server.send(identity, HelloAck())
                    case PartialData(data=data) if identity in self._ranks:
                        with contextlib.suppress(msgspec.DecodeError):
                            looks[self._ranks[identity]] = msgspec.json.decode(data, type=Looks)
        merged = Looks(*(merge([looks[rank][index] for rank in sorted(looks)]) for index in range(2)))
        absent = [rank for rank in range(size) if rank not in looks]
        if not absent:
            return merged
        hosts = f", on {fold_hosts([self._launch.layout[rank] for rank in absent])}" if self._launch.layout else ""
        note = f"No look within {seconds:g} s from {ranks_text(absent)} of this launch{hosts}."
        return Looks(merged.first, structs.replace(merged.last, missing_evidence=(*merged.last.missing_evidence, note)))

    def dismiss(self, exit_code: int) -> None:
        """Send the exit code to all others, and wait shortly until they have it, since this process exits at once."""
        for identity in self._ranks:
            self._server.send(identity, Shutdown(exit_code, ""))
        waiting, end = set(self._ranks), time.monotonic() + _DISMISS_SECONDS
        while waiting and time.monotonic() < end:
            waiting -= {identity for identity, message in self._server.receive(0.05) if isinstance(message, Pong)}
        self._server.close()


def _exit_code_of(client: ControlClient) -> int:
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end:
        client.socket.poll(round(1000 * _POLL_SECONDS))
        for message in client.receive():
            if isinstance(message, Shutdown):
                client.send(Pong())
                return message.exit_code
    raise RunLost(f"process {os.getpid()} sent its look, but got no answer within {_END_SECONDS:g} s", ExitCode.UNKNOWN)


def merge(looks: Sequence[Look]) -> Look:
    """One look at the ranks of several hosts. GPUs are left out, because pids of two hosts may be equal."""
    with_ranks = [look for look in looks if look.ranks] or looks[:1]
    states = {state.rank: state for look in with_ranks for state in look.ranks}
    ranks_by_host = {look.host: [state.rank for state in look.ranks] for look in with_ranks}
    places = (
        [f"On {host}: {ranks_text(ranks)}." for host, ranks in ranks_by_host.items()] if len(with_ranks) > 1 else []
    )
    return structs.replace(
        with_ranks[0],
        host=fold_hosts([look.host for look in with_ranks]),
        world_size=max((look.world_size for look in with_ranks if look.world_size is not None), default=None),
        ranks_are_guessed=any(look.ranks_are_guessed for look in with_ranks),
        ranks=tuple(states[rank] for rank in sorted(states)),
        gpus=with_ranks[0].gpus if len(with_ranks) == 1 else (),
        pitfalls=tuple({pitfall.message: pitfall for look in with_ranks for pitfall in look.pitfalls}.values()),
        missing_evidence=(*dict.fromkeys(note for look in with_ranks for note in look.missing_evidence), *places),
    )
