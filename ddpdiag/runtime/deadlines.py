"""The time-outs of a run, with their reasons. `membership.Patience` holds those of rank 0 for other ranks.

Waits within a run end with its budget. Only the time for evidence, for a report and for the end of processes is added.
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
    min_trial: float = 1.0
    # Replaces `late_outcome` for a trial that the budget cuts short.
    outcome_after_budget: float = 1.5
    # From a trial's deadline until rank 0 has its outcome: 0.6 s for evidence, 2 s for the kill, the rest is slack.
    late_outcome: float = 6.5
    # No group counts as late before this time, however fast the other groups are.
    late_group: float = 5.0

    # Wait for the host's relay. Ranks of a host start within seconds of each other, even from a busy file server.
    find_relay: float = 10.0
    # A rank requests an answer of its relay every `ask_relay` seconds. Without one after `relay_answer` seconds, it
    # connects to rank 0 directly, after 2.5 s at most. Rank 0 waits 6 s for a rank, a rank at least 4 s for rank 0.
    ask_relay: float = 0.5
    relay_answer: float = 1.5
    # Replaces `relay_answer` after a signal to end: Open MPI sends SIGKILL after 1 s (odls_base_sigkill_timeout).
    relay_answer_leaving: float = 0.25

    # A fork takes 25 ms. A fork server that is stopped (SIGSTOP) is replaced after this time.
    fork: float = 2.0

    # A worker is stuck if for this time it is stopped, or in uninterruptible sleep. A healthy disk or file server
    # answers within a second; the kernel repeats a request after 30 s (SCSI) or 60 s (nfs(5), timeo).
    stuck_worker: float = 10.0
    dump_stacks: float = 0.5  # wait for the Python stacks of a process
    # Ten clock ticks: a process that computes uses one of them, even if many others compete for the cores.
    busy_sample: float = 0.1
    kill: float = 2.0  # wait for the end of a process after SIGKILL
    # When a CUDA process ends, the driver ends kernels, unmaps peers and, without persistence mode, stops the GPUs:
    # about a second each (docs.nvidia.com/deploy/driver-persistence); twice that for eight. Only the next worker of an
    # exclusive GPU waits.
    kill_gpu: float = 20.0
    reap: float = 1.0  # wait for the exit code of a process that has closed its channel

    # Wait for ranks in single_rank.py, where the only rank has joined before the wait begins.
    single_rank_hello: float = 1.0
    # Reserved at the end of the budget for judgement, report and shutdown.
    reserve: float = 3.0
    # Limit of judging and writing the report, which take a few seconds for a large world: a disk may not answer.
    write_report: float = 30.0
    # At the end rank 0 waits for its supervisor. It needs less to kill its children, unless they survive SIGKILL.
    end_of_supervisor: float = 3.0
    # Rank 0 exits last, within a second or two of the others; a rank that stays longer is stopped or stuck.
    straggler: float = 3.0
    # The process that started the ranks kills them this long after the budget and the wait for ranks (--join-timeout).
    kill_after_budget: float = 30.0
    # A rank that got a signal to end waits this long for rank 0 to end the run.
    end_after_signal: float = 2.0

    # A late call (single_rank.call_with_deadline) gets SIGTERM, then SIGKILL. After SIGTERM it may still report.
    call_term: float = 0.25
    # A process that survives SIGKILL this long is stuck in the kernel. No more time is spent on it.
    call_kill: float = 0.25
    # A slow reader gets this much time for the output, even if the time of the call is over.
    call_read: float = 0.25

    # A process locks the run's folder briefly to open its record. If it is stopped just then, others wait this long.
    open_record: float = 1.0
    # Wait for a thread that writes or removes files on a file server.
    file_server: float = 2.0
    # A host answers within milliseconds, with a refusal if the port is closed.
    host_answer: float = 1.0
    # slurmctld answers within milliseconds. If it is busy, the run goes on without its answer.
    scontrol: float = 2.0
    # Reserved before the end of a Slurm job, so that the launcher can end and the files can reach the disk.
    before_job_end: float = 5.0
    min_budget: float = 5.0  # even if the Slurm job ends earlier


DEADLINES = Deadlines()


# Rank 0 counts as lost after this silence. It sends a heartbeat every second, less often in a world of more than 5,000
# ranks. On an overloaded machine a healthy rank 0 was once silent for 3 s.
LOST_AFTER_SECONDS = 8.0
LOST_AFTER_BUDGET_SECONDS = 4.0  # once the budget is spent
_FROZEN_SECONDS = 2.0
# With 32 ranks on one core, all importing torch, healthy ranks joined after 15 s, or were silent for more than 6 s.
_EXTRA_SECONDS_PER_RANK_ON_CORE = 0.5


# With 10,000 ranks a heartbeat every second delayed the ranks that were still joining.
HEARTBEAT_SECONDS_PER_RANK = 2e-4
_MISSED_HEARTBEATS = 5


def silence_seconds(world_size: int, *, budget_spent: bool = False) -> float:
    """Seconds of silence after which rank 0 counts as lost. They are fewer if the run's budget is spent."""
    return max(
        LOST_AFTER_BUDGET_SECONDS if budget_spent else LOST_AFTER_SECONDS,
        _MISSED_HEARTBEATS * HEARTBEAT_SECONDS_PER_RANK * world_size,
    )


def hello_answer_seconds(world_size: int) -> float:
    """Seconds within which rank 0 answers a hello. A handshake takes 0.35 ms, and those of all ranks may come first."""
    return 1e-3 * world_size


def relay_seconds(world_size: int) -> float:
    """Seconds that a rank waits for its host's relay (local rank 0) before it connects to rank 0 itself."""
    return max(DEADLINES.find_relay, hello_answer_seconds(world_size))


def crowded_silence_seconds(local_world_size: int | None) -> float:
    """Extra seconds for which a healthy process may be silent, or start late, if so many ranks share the cores."""
    cores = len(os.sched_getaffinity(0)) or 1
    return _EXTRA_SECONDS_PER_RANK_ON_CORE * max(0.0, (local_world_size or 1) / cores - USUAL_RANKS_PER_CORE)


def frozen_seconds(before: float, after: float) -> float:
    """Seconds for which this process was stopped in a turn of its loop (`before` to `after`). 2 s or less count as 0.

    A turn waits for half a second at most. A process that was stopped (Ctrl-Z, a suspended job) received nothing in
    that time, so the silence of the other ranks proves nothing.
    """
    gap = after - before
    return gap if gap > _FROZEN_SECONDS else 0.0
