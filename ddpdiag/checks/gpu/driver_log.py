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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, cards_of, finding_of, fix_of
from ddpdiag.checks.gpu.xids import Kind, Meaning, meaning_of
from ddpdiag.checks.hosts import Host, answers_by_host, hosts_of, names_text
from ddpdiag.model import Finding, Severity, Status, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.health import Look
from ddpdiag.probes.gpu.kernel_log import MOST_LINES, KernelLog, Xid, kernel_log, kmsg_path

FINDINGS = {
    **dict.fromkeys(
        ("xid", "sxid"),
        Explained(
            "an error if the number requires a reboot or a repair. A GPU may have been reset meanwhile, so a number "
            "that requires a reset is a warning before the run and an error during it, and so are errors of links. A "
            "program's own fault is a note before the run, and an error during it. Numbers that this version does not "
            "know, and errors that an NVSwitch calls not fatal, are warnings. Harmless numbers are notes, such as Xid "
            "144 to 150 whose text contains Nonfatal."
        ),
    ),
    "aftermath": Explained.warning(
        "Xid 31 or 145 in a run in which a process died or was killed: a GPU that reads a dead peer's memory gets it."
    ),
    "elsewhere": Explained.note("lines about GPUs that do not belong to this job."),
    "unread": Explained.note(
        "this user may not read the log, as is usual on clusters (kernel.dmesg_restrict); a note. If the check was "
        "selected by its code, the finding is `unreadable`, and the verdict UNKNOWN."
    ),
}

_HOUR_SECONDS = 3600
# A page fault, and an error of an NVLink: also what a GPU meets that reads a peer's memory whose process has ended.
_AFTER_A_DEATH = frozenset({31, 145})
# The whole log of a host is read in hundredths of a second; a worker may have to be started for it.
_READ_SECONDS = 0.5


class XidGroup(NamedTuple):
    """The lines of one device and one number within the window, the newest one, and how many are of the run."""

    newest: Xid
    times: int
    recent: int
    age_seconds: float

    @property
    def text(self) -> str:
        """Such as "Xid 79 (GPU has fallen off the bus.), 3 times, the last one 12 min before the end of this run"."""
        often = "" if self.times == 1 else f", {'at least ' if self.times >= MOST_LINES else ''}{self.times} times"
        when = f"the last one {_age(self.age_seconds)} ago" if self.times > 1 else f"{_age(self.age_seconds)} ago"
        quoted = f" ({self.newest.text})" if self.newest.text else ""
        name = "SXid" if self.newest.switch else "Xid"
        return f"{name} {self.newest.code}{quoted}{often}, {when}{', during this run' if self.recent else ''}"


def measure(ctx: Context) -> KernelLog:
    ctx.step("kernel log")
    return kernel_log(kmsg_path(os.environ))


def plan(seen: Seen[KernelLog]) -> Sequence[Trial]:
    """One rank of each host that has GPUs."""
    living = seen.world.living
    ranks = (next((rank for rank in host.ranks if rank in living), None) for host in hosts_of(seen) if host.gpus)
    groups = tuple((rank,) for rank in ranks if rank is not None)
    return (new_trial(seen, groups=groups),) if seen.is_last and groups and not seen.trials else ()


def judge(seen: Seen[KernelLog]) -> Iterator[Finding]:
    unread: dict[str, str] = {}
    looks = {host.ranks: tuple(found.values()) for host, found in answers_by_host(seen.of(memory_errors.CHECK))}
    cards: dict[tuple[int, ...], list[Card]] = defaultdict(list)
    for card in cards_of(seen.of(memory_errors.CHECK)):
        cards[card.host.ranks].append(card)
    for host, answers in answers_by_host(seen):
        log = next(iter(answers.values()))
        if log.error is not None:
            unread[host.name] = log.error
        else:
            yield from _of_host(seen, host, log, looks.get(host.ranks, ()), cards[host.ranks])
    if unread:
        yield _unread(seen, unread)


def _of_host(
    seen: Seen[KernelLog], host: Host, log: KernelLog, looks: Collection[Look], cards: Sequence[Card]
) -> Iterator[Finding]:
    elsewhere: list[str] = []
    aftermath: list[str] = []
    ended_early = any(outcome.status in (Status.DIED, Status.HUNG) for outcome in seen.recording.outcomes)
    # The newest line of the host when GPU003 asked its GPUs.
    start = min((look.kernel_line for look in looks if look.kernel_line is not None), default=None)
    for group in _groups(log, start, seen.number("window_hours") * _HOUR_SECONDS):
        xid = group.newest
        card = next((card for card in cards if (card.health.pci or "").rpartition(".")[0] == xid.pci), None)
        if card is None and not xid.switch and _is_elsewhere(host, cards, looks, xid):
            elsewhere.append(f"{xid.pci}: {group.text}")
        elif xid.code in _AFTER_A_DEATH and group.recent and ended_early:
            aftermath.append(f"{xid.pci}: {group.text}")
        else:
            yield _finding(seen, host, card, group)
    if elsewhere:
        yield seen.finding(
            "elsewhere",
            "the kernel log has errors of GPUs that do not belong to this job",
            f"{host.name}: {names_text(elsewhere, 4)}. None of these GPUs belongs to this job.",
            nodes=(host.name,),
            evidence={"lines": list(elsewhere[:16])},
        )
    if aftermath:
        yield seen.finding(
            "aftermath",
            f"errors of GPUs on {host.name} in the kernel log, after a process of this run ended",
            f"{host.name}: {names_text(aftermath, 4)}. A process of this run died, or hung and was killed (RUN003). A "
            "GPU that reads its memory gets such errors. They do not prove that these GPUs are faulty.",
            evidence={"lines": list(aftermath[:16])},
            fix="See RUN003's finding first. If the lines return in a run in which no process ends, the GPU is faulty.",
        )


def _groups(log: KernelLog, start: int | None, window_seconds: float) -> Iterator[XidGroup]:
    """What was logged within the window; without a start, nothing is known to be of the run."""
    groups: dict[tuple[str, int, bool], list[Xid]] = defaultdict(list)
    for xid in log.xids:
        if log.now_seconds - xid.seconds <= window_seconds:
            groups[xid.pci, xid.code, xid.is_nonfatal].append(xid)
    for xids in groups.values():
        newest = max(xids, key=lambda xid: xid.line)
        recent = sum(start is not None and xid.line > start for xid in xids)
        yield XidGroup(newest, len(xids), recent, max(0.0, log.now_seconds - newest.seconds))


def _is_elsewhere(host: Host, cards: Sequence[Card], looks: Collection[Look], xid: Xid) -> bool:
    """Is it another GPU than the job's? Where GPUs of the job are not known, it may be one of them."""
    listed = {(gpu.pci or "").rpartition(".")[0] for look in looks for gpu in look.gpus}
    lost = any(gpu.error is not None for look in looks for gpu in look.gpus)
    return xid.pci in listed or (bool(cards) and not lost and len(cards) >= host.gpus)


def _severity_and_advice(meaning: Meaning, *, recent: bool) -> tuple[Severity, str]:
    match meaning.kind:
        case Kind.HARMLESS:
            return Severity.NOTE, ""
        case Kind.OPEN:
            return Severity.WARNING, "Look the number up at docs.nvidia.com/deploy/xid-errors."
        case Kind.PROGRAM:
            advice = "Run the program under compute-sanitizer; if every program gets the error, the GPU is faulty."
            return Severity.ERROR if recent else Severity.NOTE, advice
        case Kind.DEVICE:
            # The log begins with the boot: a fault that needs a reboot is not repaired yet.
            lasting = meaning.action in (Action.REBOOT, Action.ISOLATE)
            advice = "Skip this if it was reset since." if meaning.action is Action.RESET and not recent else ""
            return Severity.ERROR if recent or lasting else Severity.WARNING, advice


def _finding(seen: Seen[KernelLog], host: Host, card: Card | None, group: XidGroup) -> Finding:
    xid = group.newest
    meaning = meaning_of(xid, card.health.name if card else None)
    severity, advice = _severity_and_advice(meaning, recent=bool(group.recent))
    fault = Fault(
        "sxid" if xid.switch else "xid",
        f"{'NVSwitch error in the kernel log' if xid.switch else f'Xid {xid.code} in the kernel log'}: {meaning.text}",
        f"{group.text}: {meaning.text}",
        meaning.action,
        advice,
        {
            "xid": xid.code,
            "text": xid.text,
            "count": group.times,
            "count_during_run": group.recent,
            "age_seconds": round(group.age_seconds),
        },
        severity=severity,
    )
    if card is not None:
        return finding_of(seen, card, fault)
    what = "NVSwitch" if xid.switch else "a GPU that could not be read"
    return seen.finding(
        fault.word,
        fault.title,
        f"{host.name}, {what} (PCI {xid.pci}): {fault.said}.",
        severity=severity,
        nodes=(host.name,),
        evidence={"pci": xid.pci, "action": meaning.action.value, **fault.evidence},
        fix=" ".join(filter(None, [fix_of(host.name, None, meaning.action), advice])),
    )


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * _HOUR_SECONDS else f"{seconds / _HOUR_SECONDS:.0f} h"


def _unread(seen: Seen[KernelLog], errors: Mapping[str, str]) -> Finding:
    """Closed to users on most clusters: an answer is missing only where this very check was selected."""
    asked = seen.check.code in seen.options.select
    name, error = next(iter(errors.items()))
    return seen.finding(
        "unreadable" if asked else "unread",
        "the kernel log cannot be read",
        f"{names_text(list(errors))}: the kernel's log cannot be read ({error}{f', {name}' if len(errors) > 1 else ''})"
        ", so it is not known whether the driver reported errors of GPUs.",
        nodes=tuple(errors),
        evidence={"error": error},
        fix="Read it as root: `dmesg | grep -i xid`.",
    )


CHECK = Check(
    "GPU011",
    "kernel-log",
    Stage.GPU,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=KernelLog,
    plan=plan,
    ground=devices.ground,
    last=lambda seen: _READ_SECONDS,
    settings={
        # Azure's window; a GPU that failed yesterday may have been repaired since.
        "window_hours": 2,
    },
)
