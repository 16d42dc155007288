"""What the NVIDIA driver said of its GPUs in the kernel's log.

A GPU or a NVSwitch that fails leaves a line there, with a number that says how: "NVRM: Xid (PCI:0000:65:00): 79, ...",
"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, ...". It is often the only trace of why a job died. The lines
of the last `window_hours` count, on the kernel's own clock. What came during the run (after GPU003 asked the GPUs) is
told apart, since our own tests met it.

Findings, one for each device and number:

Causes: each number has its own; NVIDIA's list of them is at docs.nvidia.com/deploy/xid-errors. Fix: what the finding
says; as root, `dmesg | grep -i xid` shows the lines themselves.

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
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, cards_of, finding_of, todo
from ddpdiag.checks.gpu.driver_log.xids import Kind, Meaning, meaning_of
from ddpdiag.checks.hosts import Host, answers_by_host, hosts_of, names_text
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.health import Look
from ddpdiag.probes.gpu.kernel_log import MOST_LINES, KernelLog, Xid, kernel_log, kmsg_path

FINDINGS = {
    **dict.fromkeys(
        ("xid", "sxid"),
        Explained(
            "an error for what asks for a reboot or a repair; a GPU may have been reset meanwhile, so what asks for a "
            "reset is a warning before the run and an error during it, and so are errors of links. A program's own "
            "fault is good to know before the run, and an error during it. Numbers that this version does not know, "
            "and what a NVSwitch calls not fatal, are warnings. What does no harm is good to know."
        ),
    ),
    "elsewhere": Explained.note("lines of GPUs that are none of this job's."),
    "unread": Explained.note(
        "the log is closed to this user, as is usual on clusters (kernel.dmesg_restrict); good to know. `unreadable`, "
        "and the verdict UNKNOWN, where the check was selected by its code."
    ),
}

_HOUR_SECONDS = 3600
# The whole log of a host is read in hundredths of a second; a worker may have to be started for it.
_READ_SECONDS = 0.5


class Said(NamedTuple):
    """The lines of one device and one number within the window, the newest one, and how many came during the run."""

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
    cards = _cards(seen)
    for host, answers in answers_by_host(seen):
        log = next(iter(answers.values()))
        if log.error is not None:
            unread[host.name] = log.error
            continue
        own = cards.get(host.ranks, ())
        elsewhere: list[str] = []
        for said in _said(log, _start(looks.get(host.ranks, ())), seen.number("window_hours") * _HOUR_SECONDS):
            card = next((card for card in own if _is_at(card, said.newest)), None)
            if (
                card is None
                and not said.newest.switch
                and _is_elsewhere(host, own, looks.get(host.ranks, ()), said.newest)
            ):
                elsewhere.append(f"{said.newest.pci}: {said.text}")
            else:
                yield _finding(seen, host, card, said)
        yield from _elsewhere(seen, host, elsewhere)
    yield from _unread(seen, unread)


def _start(looks: Collection[Look]) -> int | None:
    """The newest line of a host when GPU003 asked its GPUs."""
    return min((look.kernel_line for look in looks if look.kernel_line is not None), default=None)


def _cards(seen: Seen[KernelLog]) -> Mapping[tuple[int, ...], Sequence[Card]]:
    cards: dict[tuple[int, ...], list[Card]] = defaultdict(list)
    for card in cards_of(seen.of(memory_errors.CHECK)):
        cards[card.host.ranks].append(card)
    return cards


def _said(log: KernelLog, start: int | None, window_seconds: float) -> Iterator[Said]:
    """What was said within the window; without a start, nothing is known to be of the run."""
    groups: dict[tuple[str, int], list[Xid]] = defaultdict(list)
    for xid in log.xids:
        if log.now_seconds - xid.seconds <= window_seconds:
            groups[xid.pci, xid.code].append(xid)
    for xids in groups.values():
        newest = max(xids, key=lambda xid: xid.line)
        recent = sum(start is not None and xid.line > start for xid in xids)
        yield Said(newest, len(xids), recent, max(0.0, log.now_seconds - newest.seconds))


def _is_at(card: Card, xid: Xid) -> bool:
    return (card.health.pci or "").rpartition(".")[0] == xid.pci


def _is_elsewhere(host: Host, own: Sequence[Card], looks: Collection[Look], xid: Xid) -> bool:
    """Is it another GPU than the job's? Where GPUs of the job are not known, it may be one of them."""
    listed = {(gpu.pci or "").rpartition(".")[0] for look in looks for gpu in look.gpus}
    lost = any(gpu.error is not None for look in looks for gpu in look.gpus)
    return xid.pci in listed or (bool(own) and not lost and len(own) >= host.gpus)


def _severity(meaning: Meaning, *, recent: bool) -> Severity:
    match meaning.kind:
        case Kind.HARMLESS:
            return Severity.NOTE
        case Kind.OPEN:
            return Severity.WARNING
        case Kind.PROGRAM:
            return Severity.ERROR if recent else Severity.NOTE
        case Kind.DEVICE:
            # The log begins with the boot: what a reboot mends is not mended yet.
            lasting = meaning.action in (Action.REBOOT, Action.ISOLATE)
            return Severity.ERROR if recent or lasting else Severity.WARNING


def _finding(seen: Seen[KernelLog], host: Host, card: Card | None, said: Said) -> Finding:
    xid = said.newest
    meaning = meaning_of(xid, card.health.name if card else None)
    fault = Fault(
        "sxid" if xid.switch else "xid",
        f"{'NVSwitch error in the kernel log' if xid.switch else f'Xid {xid.code} in the kernel log'}: {meaning.text}",
        f"{said.text}: {meaning.text}",
        meaning.action,
        _hint(meaning, recent=bool(said.recent)),
        _evidence(said),
        severity=_severity(meaning, recent=bool(said.recent)),
    )
    if card is not None:
        return finding_of(seen, card, fault)
    what = "NVSwitch" if xid.switch else "a GPU that could not be looked at"
    return seen.finding(
        fault.word,
        fault.title,
        f"{host.name}, {what} (PCI {xid.pci}): {fault.said}.",
        severity=fault.severity,
        nodes=(host.name,),
        evidence={"pci": xid.pci, "action": meaning.action.value, **fault.evidence},
        fix=" ".join(filter(None, [todo(host.name, None, meaning.action), fault.hint])),
    )


def _hint(meaning: Meaning, *, recent: bool) -> str:
    match meaning.kind:
        case Kind.PROGRAM:
            return "Run it under compute-sanitizer; on a GPU where it comes back with every program, the GPU is sick."
        case Kind.DEVICE if meaning.action is Action.RESET and not recent:
            return "No need if it was reset since."
        case Kind.OPEN:
            return "Look the number up at docs.nvidia.com/deploy/xid-errors."
        case _:
            return ""


def _evidence(said: Said) -> dict[str, Scalar | list[Scalar]]:
    return {
        "xid": said.newest.code,
        "text": said.newest.text,
        "count": said.times,
        "count_during_run": said.recent,
        "age_seconds": round(said.age_seconds),
    }


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * _HOUR_SECONDS else f"{seconds / _HOUR_SECONDS:.0f} h"


def _elsewhere(seen: Seen[KernelLog], host: Host, lines: Sequence[str]) -> Iterator[Finding]:
    if lines:
        yield seen.finding(
            "elsewhere",
            "the kernel log speaks of GPUs that are not this job's",
            f"{host.name}: {names_text(lines, 4)}. None of these GPUs is this job's.",
            nodes=(host.name,),
            evidence={"lines": list(lines[:16])},
        )


def _unread(seen: Seen[KernelLog], errors: Mapping[str, str]) -> Iterator[Finding]:
    """Closed to users on most clusters: only who asked for this very check is left without an answer by it."""
    if not errors:
        return
    asked = seen.check.code in seen.options.select
    name, error = next(iter(errors.items()))
    yield seen.finding(
        "unreadable" if asked else "unread",
        "the kernel log cannot be read",
        f"{names_text(list(errors))}: the kernel's log cannot be read ({error}{f', {name}' if len(errors) > 1 else ''})"
        ": UNKNOWN whether the driver reported errors of GPUs.",
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
    ground=memory_errors.ground,
    last=lambda seen: _READ_SECONDS,
    settings={
        # Azure's window; a GPU that failed yesterday may have been mended since.
        "window_hours": 2,
    },
)
