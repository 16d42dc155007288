"""GPU errors that the NVIDIA driver wrote to the kernel log.

When a GPU or an NVSwitch fails, the driver writes a line there, with a number for the kind of failure: "NVRM: Xid
(PCI:0000:65:00): 79, ...", "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, ...". It is often the only trace
of why a job died. The lines of the last `window_hours` count, by the kernel's own clock. Lines written during the run
(after GPU003 read the GPUs) are marked, since they concern this run's own tests.

Findings, one for each device and number:

Causes: each number has its own; NVIDIA's list of them is at docs.nvidia.com/deploy/xid-errors. Fix: follow the finding;
as root, `dmesg | grep -i xid` shows the lines themselves.

Confirm by hand: As root, `dmesg -T | grep -E 'NVRM: Xid|SXid'`, or `journalctl -k`.

Sources: NVIDIA Xid errors (docs.nvidia.com/deploy/xid-errors); fabric manager user guide, NVSwitch SXid errors; Linux's
/dev/kmsg (ABI/testing/dev-kmsg).
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, cards_of, finding_of, fix_of
from ddpdiag.checks.hosts import Host, data_by_host, hosts_of, names_text
from ddpdiag.checks.known_errors import explain_line
from ddpdiag.model import Finding, Severity, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.health import GpuReading
from ddpdiag.probes.gpu.kernel_log import MAX_LINES, KernelLog, Xid, kernel_log, kmsg_path

FINDINGS = {
    **dict.fromkeys(
        ("xid", "sxid"),
        FindingSpec(
            "an error if the number requires a reboot or a repair. A GPU may have been reset meanwhile, so a number "
            "that requires a reset is a warning before the run and an error during it. A program's own fault is a note "
            "before the run, and an error during it. Where a process of the run died, Xid 31 and 145 are warnings that "
            "blame no GPU, since one that reads the memory of that process gets them. Unknown numbers are warnings, "
            "harmless ones and errors that are not fatal are notes."
        ),
    ),
    "unread": FindingSpec.note(
        "this user may not read the log, as is usual on clusters (kernel.dmesg_restrict); a note. If the check was "
        "selected by its code, the finding is `unreadable`, and the verdict UNKNOWN."
    ),
}

_HOUR_SECONDS = 3600
# A page fault and an NVLink error. They also occur on a GPU that reads the memory of a peer whose process has ended.
_AFTERMATH_CODES = frozenset({31, 145})


class XidGroup(NamedTuple):
    """The log lines with one device and one number: the newest, how many there are, and how many are of this run."""

    newest: Xid
    times: int
    recent_count: int
    age_seconds: float

    @property
    def text(self) -> str:
        """The group as text, such as 'Xid 79, 3 times, the last one 12 min ago: "GPU has fallen off the bus"'."""
        often = "" if self.times == 1 else f", {'at least ' if self.times >= MAX_LINES else ''}{self.times} times"
        when = f"the last one {_age(self.age_seconds)} ago" if self.times > 1 else f"{_age(self.age_seconds)} ago"
        quoted = f': "{self.newest.text.rstrip(".")}"' if self.newest.text else ""
        name = "SXid" if self.newest.switch else "Xid"
        return f"{name} {self.newest.code}{often}, {when}{', during this run' if self.recent_count else ''}{quoted}"


def measure(ctx: Context) -> KernelLog:
    ctx.step("kernel log")
    return kernel_log(kmsg_path(os.environ))


def plan(seen: Seen[KernelLog]) -> Sequence[Trial]:
    """Plan one trial after all other checks, with one rank of each host that has GPUs."""
    living = seen.world.living_ranks
    ranks = (next((rank for rank in host.ranks if rank in living), None) for host in hosts_of(seen) if host.gpu_count)
    groups = tuple((rank,) for rank in ranks if rank is not None)
    return (new_trial(seen, groups=groups),) if seen.is_last and groups and not seen.trials else ()


def judge(seen: Seen[KernelLog]) -> Iterator[Finding]:
    errors: dict[str, str] = {}
    readings = {host.ranks: tuple(found.values()) for host, found in data_by_host(seen.of(memory_errors.CHECK))}
    cards: dict[tuple[int, ...], list[Card]] = defaultdict(list)
    for card in cards_of(seen.of(memory_errors.CHECK)):
        cards[card.host.ranks].append(card)
    for host, answers in data_by_host(seen):
        log = next(iter(answers.values()))
        if log.error is not None:
            errors[host.name] = log.error
        else:
            yield from _host_findings(seen, host, log, readings.get(host.ranks, ()), cards[host.ranks])
    if errors:
        # Most clusters hide the log from users, so a missing answer matters only if this check was selected by code.
        was_selected = seen.check.code in seen.options.select
        name, error = next(iter(errors.items()))
        yield seen.finding(
            "unreadable" if was_selected else "unread",
            "the kernel log cannot be read",
            f"{names_text(list(errors))}: the kernel log cannot be read ({error}"
            f"{f', {name}' if len(errors) > 1 else ''}), so it is not known whether the driver logged GPU errors.",
            hosts=tuple(errors),
            evidence={"error": error},
            fix=f"As root run `dmesg -T | grep -i xid` on {names_text(list(errors))}: it shows the GPU errors, if any.",
        )


def _host_findings(
    seen: Seen[KernelLog], host: Host, log: KernelLog, readings: Collection[GpuReading], cards: Sequence[Card]
) -> Iterator[Finding]:
    ended_early = any(outcome.status in (Status.DIED, Status.HUNG) for outcome in seen.recording.outcomes)
    # The newest line of the host when GPU003 read its GPUs.
    start = min((reading.kernel_line for reading in readings if reading.kernel_line is not None), default=None)
    listed = {(gpu.pci or "").rpartition(".")[0] for reading in readings for gpu in reading.gpus}
    lost = any(gpu.error is not None for reading in readings for gpu in reading.gpus)
    # If not all GPUs of the job are known, an address that is not listed may be one of them.
    all_known = bool(cards) and not lost and len(cards) >= host.gpu_count
    for group in _groups(log, start, seen.setting("window_hours") * _HOUR_SECONDS):
        xid = group.newest
        card = next((card for card in cards if (card.health.pci or "").rpartition(".")[0] == xid.pci), None)
        if card is None and not xid.switch and (all_known or xid.pci in listed):
            continue  # a GPU of another job
        is_aftermath = ended_early and group.recent_count > 0 and xid.code in _AFTERMATH_CODES
        yield _finding(seen, host, card, group, is_aftermath=is_aftermath)


def _groups(log: KernelLog, start: int | None, window_seconds: float) -> Iterator[XidGroup]:
    """Group the log lines in the window. Lines after number `start` are of this run; none is if `start` is None."""
    groups: dict[tuple[str, int, bool], list[Xid]] = defaultdict(list)
    for xid in log.xids:
        if log.now_seconds - xid.seconds <= window_seconds:
            groups[xid.pci, xid.code, xid.is_nonfatal].append(xid)
    for xids in groups.values():
        newest = max(xids, key=lambda xid: xid.line)
        recent_count = sum(start is not None and xid.line > start for xid in xids)
        yield XidGroup(newest, len(xids), recent_count, max(0.0, log.now_seconds - newest.seconds))


def _finding(seen: Seen[KernelLog], host: Host, card: Card | None, group: XidGroup, *, is_aftermath: bool) -> Finding:
    xid, name = group.newest, "SXid" if group.newest.switch else "Xid"
    known = explain_line(xid.record)
    action, first, advice = Action(known.action or "none"), "", known.fix
    if known.is_harmless:
        severity = Severity.NOTE
    elif is_aftermath:
        severity, action = Severity.WARNING, Action.NONE
        advice = "A process of this run ended early (RUN003): fix that first. Without it, this line may not appear."
    elif action is Action.NONE:
        severity = Severity.ERROR if group.recent_count else Severity.NOTE
    elif action is Action.MONITOR:
        severity, advice = Severity.WARNING, "docs.nvidia.com/deploy/xid-errors explains the number."
    else:
        # The log begins at boot. So a fault that needs a reboot still exists, but a reset may have been done meanwhile.
        is_error = group.recent_count or action is not Action.RESET
        severity, advice = Severity.ERROR if is_error else Severity.WARNING, ""
        first = "" if is_error else "Nothing to do if it was reset since. Otherwise:"
    fault = Fault(
        name.lower(),
        f"{name} {xid.code} in the kernel log: {known.title}",
        group.text,
        action,
        advice,
        {
            "xid": xid.code,
            "text": xid.text,
            "count": group.times,
            "count_during_run": group.recent_count,
            "age_seconds": round(group.age_seconds),
        },
        severity,
        prefix=first,
    )
    if card is not None and not is_aftermath:
        return finding_of(seen, card, fault)
    what = "an NVSwitch" if xid.switch else "a GPU" if is_aftermath else "a GPU that could not be read"
    return seen.finding(
        fault.word,
        fault.title,
        f"{host.name}, {what} at PCI {xid.pci}: {fault.text}.",
        severity=severity,
        hosts=() if is_aftermath else (host.name,),
        evidence={"pci": xid.pci, "action": action.value, **fault.evidence},
        fix=fix_of(host.name, None if xid.switch else f"{xid.pci}.0", fault),
    )


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * _HOUR_SECONDS else f"{seconds / _HOUR_SECONDS:.0f} h"


def last_seconds(seen: Seen[KernelLog]) -> float:
    """Return the expected seconds of this check. Most of them start a worker; reading the log takes hundredths."""
    return 0.5


skip = devices.skip
Data = KernelLog
# Azure's window; a GPU that failed yesterday may have been repaired since.
SETTINGS = {"window_hours": 2}
CHECK: Check[Data] = Check(__name__, "GPU011", "kernel-log", Stage.GPU, Scope.HOST)
