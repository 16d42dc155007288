"""All time-outs of a run, with their reasons; the control channel has some more (membership.Patience).

None of them can extend a run: the budget of the run and the deadline of each trial are the limits.
"""

import os
from dataclasses import dataclass

from ddpdiag.checks.world import USUAL_RANKS_PER_CORE


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Time-outs in seconds."""

    # The first trial with torch waits for the import: 1-2 s from a local disk, more than 10 s from a busy file server.
    import_torch: float = 30.0
    # No trial begins with less time left.
    least_trial: float = 1.0
    # A trial that the budget cuts short may go on this long after its deadline.
    cut_short: float = 1.5
    # Time until a supervisor has reported a late trial: 0.6 s for evidence, 2 s for the kill, the way to rank 0, slack.
    outcome: float = 6.5
    # No group counts as late before this time, however fast the other groups are.
    late_group: float = 5.0

    # Ranks of one host start within seconds of each other, even if Python is on a busy file server.
    find_relay: float = 10.0
    # Interval at which a rank asks its relay for an answer. After `relay` seconds without one, noticed within 0.5 s
    # more, it connects to rank 0: after 2.5 s in all. Rank 0 waits 6 s for a rank, and a rank at least 4 s for rank 0.
    ask_relay: float = 0.5
    relay: float = 1.5
    # `relay` after a signal to end: Open MPI sends SIGKILL 1 s after SIGTERM (odls_base_sigkill_timeout).
    relay_leaving: float = 0.25

    # A fork takes 25 ms. A fork server that is stopped (SIGSTOP) is replaced after this time.
    fork: float = 2.0

    # A worker is stuck if at every look it is stopped, or in uninterruptible sleep and never on a core. A healthy disk
    # or file server answers within a second; the kernel repeats a request after 30 s (SCSI) or 60 s (nfs(5), timeo).
    stuck: float = 10.0
    dump: float = 0.5
    # Ten clock ticks: a process that computes uses one of them, even if many others compete for the cores.
    busy: float = 0.1
    kill: float = 2.0
    # When a CUDA process ends, the driver ends kernels, unmaps peers and, without persistence mode, stops the GPUs:
    # about a second each (docs.nvidia.com/deploy/driver-persistence); twice that for eight. Only the next worker of an
    # exclusive GPU waits.
    kill_gpu: float = 20.0
    reap: float = 1.0

    # A single rank (single_rank.py) has joined before the wait begins.
    own_hello: float = 1.0
    # Reserved at the end of the budget for judgement, report and shutdown.
    reserve: float = 3.0
    # Judging a large world and writing its report takes a few seconds.
    publish: float = 30.0
    # Rank 0's supervisor needs less to kill its children, unless they cannot be killed.
    own_supervisor: float = 3.0
    # Rank 0 exits last, within a second or two of the others; a rank that stays longer is stopped or stuck.
    straggler: float = 3.0
    # Added to the budget and to the wait for ranks (--join-timeout): time to judge, to report and to exit.
    beyond_budget: float = 30.0
    # A rank that got a signal to end waits for rank 0's end of the run.
    leave: float = 2.0

    # A call gets SIGTERM, then SIGKILL: after SIGTERM it may still report.
    call_term: float = 0.25
    # A process that survives SIGKILL this long is stuck in the kernel. No more time is spent on it.
    call_kill: float = 0.25
    # A slow reader gets this much time for the output, even if the time of the call is over.
    call_read: float = 0.25

    # A process locks the run's folder briefly to open its record; one that is stopped then must not delay the others.
    open_record: float = 1.0
    # Wait for a thread that still writes to a file server, or removes files there.
    tidy: float = 2.0
    # A host answers within milliseconds, with a refusal if the port is closed.
    host_answer: float = 1.0
    # slurmctld answers within milliseconds. If it is busy, the run goes on without its answer.
    scontrol: float = 2.0
    # Kept before the end of a Slurm job, for the launcher to end and for the files to reach the disk.
    leave_job: float = 5.0
    least_budget: float = 5.0


DEADLINES = Deadlines()


# Rank 0 sends a heartbeat every second, less often in a world of more than 5,000 ranks; on an overloaded machine a
# healthy rank 0 was once silent for 3 s.
LOST_AFTER_SECONDS = 8.0
LOST_LATE_SECONDS = 4.0  # once the budget is spent
_FROZEN_SECONDS = 2.0
# With 32 ranks on one core, all importing torch, healthy ranks joined after 15 s, or were silent for more than 6 s.
_SILENT_PER_RANK_ON_CORE = 0.5


# With 10,000 ranks a heartbeat every second delayed the ranks that were still joining.
BEAT_PER_RANK = 2e-4
_BEATS = 5


def silence_seconds(world_size: int, *, late: bool = False) -> float:
    """Seconds of silence after which rank 0 counts as lost; `late`: the budget is spent."""
    return max(LOST_LATE_SECONDS if late else LOST_AFTER_SECONDS, _BEATS * BEAT_PER_RANK * world_size)


def answer_seconds(world_size: int) -> float:
    """Seconds in which rank 0 answers a hello: a handshake takes 0.35 ms, and those of other ranks may precede it."""
    return 1e-3 * world_size


def relay_seconds(world_size: int) -> float:
    """Seconds that a rank waits for its host's relay (local rank 0) before it connects to rank 0 itself."""
    return max(DEADLINES.find_relay, answer_seconds(world_size))


def crowded_silence_seconds(ranks_here: int | None) -> float:
    """Extra seconds that a healthy process may be silent, or late at the start, if so many ranks share the cores."""
    cores = len(os.sched_getaffinity(0)) or 1
    return _SILENT_PER_RANK_ON_CORE * max(0.0, (ranks_here or 1) / cores - USUAL_RANKS_PER_CORE)


def frozen_seconds(before: float, after: float) -> float:
    """Seconds between the two times if this process was stopped meanwhile; a gap of 2 s or less counts as 0.

    The process meant to wait for half a second at most. While it was stopped (Ctrl-Z, a suspended job) it received
    nothing, so that the silence of the other ranks proves nothing.
    """
    gap = after - before
    return gap if gap > _FROZEN_SECONDS else 0.0
