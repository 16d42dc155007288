"""Every time-out of a run, with its reason; those of the control channel are with it.

The budget of the run and the deadline of each trial bound all of them.
"""

import os
from dataclasses import dataclass

from ddpdiag.checks.world import USUAL_RANKS_PER_CORE


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Time-outs in seconds."""

    # The first trial with torch waits for its import: 1-2 s from a local disk, more than 10 s from a busy file server.
    import_torch: float = 30.0
    # With less than this, no trial is begun.
    least_trial: float = 1.0
    # What a trial that the budget cuts short may take beyond its deadline.
    cut_short: float = 1.5
    # What a supervisor needs after its deadline: 3 s for dump and NCCL's report, 2 s for the kill, and the way here.
    outcome: float = 6.5
    # No group is late sooner than this, however quick others are.
    late_group: float = 5.0

    # Ranks of one host start within seconds of each other, also where Python is on a busy file server.
    find_relay: float = 10.0
    # A rank asks it so often for an answer. With half a second until the supervisor looks, a rank behind one that was
    # stopped sends to rank 0 again after 2.5 s: rank 0 waits 6 s for it, and it waits at least 4 s for rank 0.
    ask_relay: float = 0.5
    relay: float = 1.5
    # After a signal: Open MPI sends SIGKILL 1 s after SIGTERM (odls_base_sigkill_timeout).
    relay_leaving: float = 0.25

    # A fork takes 25 ms. A server that is stopped (SIGSTOP) is replaced after this time.
    fork: float = 2.0

    # A worker that is stopped, or in uninterruptible sleep without a moment on a core, at every look. A healthy disk or
    # file server answers within a second; the kernel repeats a request after 30 s (SCSI) or 60 s (nfs(5), timeo).
    stuck: float = 10.0
    dump: float = 0.5
    # Ten clock ticks: a process that computes uses one of them, even beside many others.
    busy: float = 0.1
    kill: float = 2.0
    # For a CUDA process the driver ends kernels, unmaps peers and, without persistence mode, stops the GPUs: about a
    # second each (docs.nvidia.com/deploy/driver-persistence); twice that for eight. Only the next worker of an
    # exclusive GPU waits meanwhile.
    kill_gpu: float = 20.0
    reap: float = 1.0

    # A rank alone has joined already.
    own_hello: float = 1.0
    # Kept back from trials for judgement, report and shutdown.
    reserve: float = 3.0
    # A large world is judged and written within a few seconds.
    publish: float = 30.0
    # Rank 0's supervisor kills its children within this time, or they cannot be killed.
    own_supervisor: float = 3.0
    # Rank 0 exits last, within a second or two of the others; a rank that stays longer is stopped or stuck.
    straggler: float = 3.0
    # Beyond the budget and the wait for ranks (--join-timeout): time to judge, to report and to leave.
    beyond_budget: float = 30.0
    # A rank that got a signal to end waits for rank 0's end of the run.
    leave: float = 2.0

    # TERM, then KILL: the first half may still say something.
    call_term: float = 0.25
    # A process that survives SIGKILL is stuck in the kernel, and is not waited for any longer.
    call_kill: float = 0.25
    # A reader that is only slow is given so much, also at the end of the time.
    call_read: float = 0.25

    # A process that opens a record locks the folder for a moment; one that is stopped there must delay no other.
    open_record: float = 1.0
    # The end of what a thread still writes to a file server, or removes there.
    tidy: float = 2.0
    # A kernel answers within milliseconds, for closed ports, too.
    host_answer: float = 1.0
    # slurmctld answers within milliseconds; one that is busy is not worth waiting for.
    scontrol: float = 2.0
    # Left before the end of a Slurm job for the launcher to end, and for the files to reach the disk.
    leave_job: float = 5.0
    least_budget: float = 5.0


DEADLINES = Deadlines()


# Rank 0 beats every second, and more slowly in a world of more than 5,000 ranks; on an overloaded machine a healthy one
# was seen silent for 3 s.
LOST_AFTER_SECONDS = 8.0
LOST_LATE_SECONDS = 4.0  # once the budget is spent
_FROZEN_SECONDS = 2.0
# 32 ranks on a core, all of them importing torch: healthy ones came after 15 s, or were silent for more than 6 s.
_SILENT_PER_RANK_ON_CORE = 0.5


# With 10,000 ranks a beat every second held up those who were still arriving.
BEAT_PER_RANK = 2e-4
_BEATS = 5


def silence_seconds(world_size: int, *, late: bool = False) -> float:
    """After which silence rank 0 is lost; `late`: once the budget is spent."""
    return max(LOST_LATE_SECONDS if late else LOST_AFTER_SECONDS, _BEATS * BEAT_PER_RANK * world_size)


def answer_seconds(world_size: int) -> float:
    """Seconds in which rank 0 answers a hello: a handshake takes 0.35 ms, and those of other ranks may precede it."""
    return 1e-3 * world_size


def relay_seconds(world_size: int) -> float:
    """Seconds until a rank whose host's relay, local rank 0, has not joined connects to rank 0 itself."""
    return max(DEADLINES.find_relay, answer_seconds(world_size))


def crowded_silence_seconds(ranks_here: int | None) -> float:
    """Extra seconds of silence, and of delay at the start, of a healthy process where so many ranks share the cores."""
    cores = len(os.sched_getaffinity(0)) or 1
    return _SILENT_PER_RANK_ON_CORE * max(0.0, (ranks_here or 1) / cores - USUAL_RANKS_PER_CORE)


def frozen_seconds(before: float, after: float) -> float:
    """Seconds in which this process did not run during a wait of half a second at most; short delays count as none.

    A process that was stopped (Ctrl-Z, a suspended job) received nothing meanwhile: the other ranks were not silent.
    """
    gap = after - before
    return gap if gap > _FROZEN_SECONDS else 0.0
