"""Every process could be ended.

A process that hangs is killed when its deadline has passed. One that survives SIGKILL is stuck inside the kernel, most
often in a driver or on a file server that does not answer: it cannot be ended, and it keeps what it holds (a GPU,
memory, a port) until the kernel releases it. The driver may need some seconds to take a GPU back from a process that
was killed, so one that held a GPU counts as a survivor only 20 s later.

Findings:

Fix: look at the kernel log of the host; reset the device that it waits for, or reboot the host.

Confirm by hand: `ps -o pid,stat,wchan:30,cmd -p PID` (D: it cannot be interrupted); as root `cat /proc/PID/stack`;
`dmesg -T | grep -A20 'blocked for more than'`.

Sources: signal(7); proc_pid_stack(5); Linux's hung task detector (kernel.hung_task_timeout_secs).
"""

from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.model import Finding

FINDINGS = {
    "survived": FindingSpec.error("a process survived SIGKILL. Its pid, and where in the kernel it waits, are named.")
}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each process that still exists, whichever rank was to blame for the trial."""
    for outcome in seen.recording.outcomes:
        survivors = [(process, "held a GPU and still exists long after SIGKILL") for process in outcome.survivors]
        if outcome.process is not None and outcome.process.survived:
            survivors.insert(0, (outcome.process, f"survived SIGKILL in {outcome.code}"))
        for process, what in survivors:
            node = seen.world.host_of(outcome.rank)
            where = f"; it waits in {process.wchan}" if process.wchan else ""
            yield seen.finding(
                "survived",
                f"process {process.pid} on {node} cannot be killed",
                f"Process {process.pid} of rank {outcome.rank} on {node} {what}{where}.",
                ranks=[outcome.rank],
                evidence={"pid": process.pid, "state": process.state, "wchan": process.wchan},
                fix=f"As root run `dmesg -T` and `cat /proc/{process.pid}/stack` on {node}, which show the device or "
                f"file system that the process waits for. Reset that device, or reboot {node}.",
            )


CHECK: Check[Nothing] = Check(__name__, "RUN005", "children", Stage.RUN, Scope.WORLD)
