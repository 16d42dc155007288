"""How long Slurm lets this job run on, and the budget within it.

Slurm 23.02 and later tell the end in SLURM_JOB_END_TIME. Older ones know it only in slurmctld, so rank 0 asks
`scontrol` once, with a deadline: thousands of tasks that ask at once would slow the cluster down, and a prolog would as
well.
"""

import contextlib
import os
import re
import subprocess
import time

from ddpdiag.runtime.said import Environ

# slurmctld answers within milliseconds; one that is busy is not worth waiting for.
_ASK_SECONDS = 2.0
# Slurm kills a job some KillWait (30 s) after its end; clocks that differ by more are wrong.
_SKEW_SECONDS = 60.0
# What is left for the launcher to end, and for the files to reach the disk.
LEAVE_SECONDS = 5.0
LEAST_BUDGET_SECONDS = 5.0


def job_left_seconds(env: Environ) -> float | None:
    """Seconds until the time limit of the job; None outside of Slurm, or where nobody says."""
    job = env.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", job):
        return None
    if end := _epoch(env.get("SLURM_JOB_END_TIME", "")):
        return _by_our_clock(_epoch(env.get("SLURM_JOB_START_TIME", "")), end)
    return None if "SLURM_SCRIPT_CONTEXT" in env else _by_slurms_clock(_record(job, _asked(job)))


def within(budget_seconds: float, left_seconds: float | None) -> float:
    """The budget, or what of it ends before the job does; at least the smallest one."""
    if left_seconds is None:
        return budget_seconds
    return min(budget_seconds, max(LEAST_BUDGET_SECONDS, left_seconds - LEAVE_SECONDS))


def _epoch(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _by_our_clock(start: int | None, end: int) -> float | None:
    """None where this host's clock cannot be right: the job has begun, and is not over for long."""
    now = time.time()
    if now - end > _SKEW_SECONDS or (start is not None and start - now > _SKEW_SECONDS):
        return None
    return end - now


def _record(job: str, told: str) -> str:
    """The line of this very job, or nothing: a job array's first number gets the lines of all its tasks."""
    lines = [line for line in told.splitlines() if re.match(rf"JobId={job}\b", line)]
    return lines[0] if len(lines) == 1 else ""


def _by_slurms_clock(told: str) -> float | None:
    """From what `scontrol show job` says, with no use of this host's clock: the limit less the time that it ran."""
    fields = dict(re.findall(r"\b(RunTime|StartTime|EndTime)=(\S+)", told))
    start, end = (_epoch(fields.get(name, "")) for name in ("StartTime", "EndTime"))
    ran = re.fullmatch(r"(?:([0-9]{1,5})-)?([0-9]{2}):([0-9]{2}):([0-9]{2})", fields.get("RunTime", ""))
    if start is None or end is None or ran is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in ran.groups())
    return float(end - start - (days * 86_400 + hours * 3600 + minutes * 60 + seconds))


def _asked(job: str) -> str:
    """What `scontrol` says of the job, times in seconds since 1970; empty if it does not answer in time."""
    command = ("scontrol", "--oneliner", "show", "job", job)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except OSError:
        return ""
    try:
        told, _ = process.communicate(timeout=_ASK_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in the kernel
            process.wait(0.5)
        return ""
    return told
