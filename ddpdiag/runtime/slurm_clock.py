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
# What is left for the launcher to end, and for the files to reach the disk.
LEAVE_SECONDS = 5.0
LEAST_BUDGET_SECONDS = 5.0


def job_left_seconds(env: Environ) -> float | None:
    """Seconds until the time limit of the job; None outside of Slurm, or where nobody says."""
    job = env.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", job):
        return None
    end = env.get("SLURM_JOB_END_TIME") or ("" if "SLURM_SCRIPT_CONTEXT" in env else _asked_end(job))
    return int(end) - time.time() if re.fullmatch(r"[0-9]{1,12}", end) else None


def within(budget_seconds: float, left_seconds: float | None) -> float:
    """The budget, or what of it ends before the job does; at least the smallest one."""
    if left_seconds is None:
        return budget_seconds
    return min(budget_seconds, max(LEAST_BUDGET_SECONDS, left_seconds - LEAVE_SECONDS))


def _asked_end(job: str) -> str:
    """The job's end in seconds since 1970, as `scontrol` has it; empty if it does not answer in time."""
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
    found = re.search(r"\sEndTime=([0-9]+)\s", told)
    return found[1] if found else ""
