"""Counters of each GPU that rise while the run loads it.

A counter that is not zero may be old; one that rises during a run is a fault that the next job meets as well. The GPUs
are read once more after everything else has run, by the ranks that read them for GPU003, and each GPU, identified by
its UUID, is compared with itself.

Findings, with the numbers before and after and the seconds between:

Causes: wear, heat, a card or cable that is not seated, a bad link. A run of a few seconds loads a GPU little: a counter
that did not rise may still rise in a longer job.

Fix: monitor, reset, reboot or isolate as the finding says; run once more with `--depth deep` to see whether the counter
rises again.

Confirm by hand: `nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE; nvidia-smi nvlink -e` before and after a job, and diff.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api); NVIDIA GPU memory error management
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt); DCGM's PCIe replay policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, cards_of, finding_of, key_of
from ddpdiag.checks.gpu.clocks import COOLING_FIX, HARMFUL, POWER_FIX, WATCH_CLOCKS, events_text
from ddpdiag.checks.gpu.nvlink import WATCH_ERRORS, numbers_text
from ddpdiag.checks.gpu.nvswitch import REPLACE_LOST, recovery_of
from ddpdiag.checks.hosts import leave_out, ranks_text, xid_fix
from ddpdiag.model import Finding, Scalar, Severity, Status, Trial
from ddpdiag.probes.gpu.health import Health, Look
from ddpdiag.probes.gpu.links import JOINED
from ddpdiag.text import count

FINDINGS = {
    "gone": FindingSpec.error(
        "the GPU was present and cannot be opened any more, or is not listed: it fell off the bus (Xid 79)."
    ),
    "broken": FindingSpec.error("NVML reports that the GPU is lost, or must be reset."),
    **dict.fromkeys(
        ("uncorrected", "sram", "remapped"),
        FindingSpec.error("new uncorrectable errors, or rows that were remapped because of them."),
    ),
    **dict.fromkeys(
        ("remap-pending", "remap-failed", "retirement-pending", "recovery"),
        FindingSpec.error("states of the GPU that are present at the end, but not at the beginning."),
    ),
    "nvlink-down": FindingSpec("a link that was up is down at the end."),
    "nvlink-errors": FindingSpec.warning("replays and recoveries.", same_item=True),
    "nvlink-crc": FindingSpec("CRC errors; a note up to `crc_per_second`, as the data are resent.", same_item=True),
    "pcie-replays": FindingSpec("packets that PCIe sent again; a note up to `pcie_replays_per_minute`."),
    **dict.fromkeys(
        ("corrected", "remapped-corrected", "retired"),
        FindingSpec.warning("ECC corrected the errors; `corrected` is a note below GPU003's own limit."),
    ),
    "slowdown": FindingSpec.warning("clocks held down by heat or power at the end, but not at the beginning."),
    "unreadable": FindingSpec.not_seen("the second reading failed, although the first one worked."),
}

_START_SECONDS = 0.5  # for a worker that has to be started anew, since the last one was ended


class Pair(NamedTuple):
    """One GPU at the beginning and at the end of a run, and the seconds between (None: not known)."""

    before: Health
    after: Health
    seconds: float | None

    @property
    def span(self) -> str:
        """Such as " within 12.3 s"."""
        return "" if self.seconds is None else f" within {self.seconds:.1f} s"


class Watched(NamedTuple):
    """A counter that should not rise, or a sign that should not appear, and what it means if it does.

    `text` is a counter's name, or a sign's sentence; `beside` is a part of a counter that has its own row.
    """

    word: str
    title: str
    text: str
    action: Action
    of: Callable[[Health], int | None]
    advice: str = ""
    beside: Callable[[Health], int | None] = lambda _: None


_REPLACE = "If the errors return, have the GPU replaced."
_WATCH_ROWS = Watch("nvidia-smi -q -d ROW_REMAPPER -i {gpu}", "the number of remapped rows has risen")
_WATCH_PCIE = Watch("nvidia-smi -q -i {gpu} | grep -i replay", "the replays have risen")
# Errors of SRAM are in the total, too.
COUNTERS = (
    Watched("uncorrected", "GPU memory had uncorrectable errors during the run", "uncorrectable memory errors",
            Action.RESET, lambda health: health.memory.uncorrected, _REPLACE,
            lambda health: health.memory.sram_uncorrected),
    Watched("sram", "GPU SRAM had uncorrectable errors during the run", "uncorrectable SRAM errors",
            Action.RESET, lambda health: health.memory.sram_uncorrected, _REPLACE),
    Watched("remapped", "a GPU remapped bad memory rows during the run",
            "memory rows remapped for uncorrectable errors",
            Action.RESET, lambda health: health.memory.uncorrectable_remaps),
    Watched("remapped-corrected", "a GPU remapped weak memory rows during the run",
            "memory rows remapped for correctable errors",
            Action.MONITOR, lambda health: health.memory.correctable_remaps),
    Watched("retired", "a GPU retired memory pages during the run", "retired memory pages",
            Action.RESET, lambda health: health.memory.retired_pages,
            "The new pages stay in use until then."),
)  # fmt: skip
SIGNS = (
    Watched("remap-pending", "a GPU needs a reset to remap a bad memory row, since this run", memory_errors.ROW_IN_USE,
            Action.RESET, lambda health: health.memory.remap_pending),
    Watched("remap-failed", "a GPU could not remap a bad memory row", "a memory row is bad, and no spare row is left",
            Action.ISOLATE, lambda health: health.memory.remap_failed),
    Watched("retirement-pending", "a GPU needs a reset to retire a bad memory page, since this run",
            memory_errors.PAGE_IN_USE,
            Action.RESET, lambda health: health.memory.retirement_pending),
    Watched("broken", "a GPU is lost or must be reset", "NVML reports that the GPU is lost or must be reset",
            Action.REBOOT, lambda health: health.broken is not None),
)  # fmt: skip


def plan(seen: Seen[Look]) -> Sequence[Trial]:
    """The ranks that saw GPUs at the beginning."""
    groups = tuple((rank,) for rank in sorted(_first(seen)) if rank in seen.world.living)
    return (new_trial(seen, groups=groups),) if seen.is_last and groups and not seen.trials else ()


def _first(seen: Seen[Look]) -> Mapping[int, Look]:
    return {rank: look for rank, look in seen.of(memory_errors.CHECK).by_rank.items() if any(_opened(look))}


def _opened(look: Look) -> Iterator[Health]:
    return (health for health in look.gpus if health.error is None)


def judge(seen: Seen[Look]) -> Iterator[Finding]:
    yield from memory_errors.not_looked_at(seen)
    cards = {key_of(card.host.name, card.health): card for card in cards_of(seen.of(memory_errors.CHECK))}
    for rank, first in _first(seen).items():
        second = seen.by_rank.get(rank)
        if second is None:
            continue  # the trial failed, which RUN003 reports
        node = seen.world.host_of(rank)
        if second.error is not None:
            yield seen.finding(
                "unreadable",
                "the GPUs could not be read at the end of the run",
                f"{node}: {ranks_text((rank,))} read the GPUs at the beginning, but not at the end (NVML: "
                f"{second.error}), so it is not known whether error counters rose during the run.",
                ranks=(rank,),
                evidence={"error": second.error},
                fix=f"Run `nvidia-smi` on {node}. If it works, run again. If it fails in a container only, start the "
                f"container again. Otherwise see `dmesg -T | grep -i -E 'nvrm|xid'` (as root), and reboot {node} (as "
                f"root), or {leave_out([node])}.",
            )
            continue
        later = {key_of(node, health): health for health in _opened(second)}
        for key in [key_of(node, health) for health in _opened(first)]:
            # A GPU that several ranks see is judged once, and one that is none of the job's never.
            if (card := cards.pop(key, None)) is not None:
                yield from _compared(seen, card, first, second, later.get(key))


def _compared(seen: Seen[Look], card: Card, first: Look, second: Look, after: Health | None) -> Iterator[Finding]:
    begin, end = first.boot_seconds, second.boot_seconds
    seconds = None if begin is None or end is None else max(0.0, end - begin)
    if after is None:
        # NVML may number the rest anew, so an error under the same index may be of another GPU.
        errors = [health.error for health in second.gpus if health.error is not None]
        why = f"NVML reports {errors[0]!r}" if errors else f"NVML lists {count(len(second.gpus), 'GPU')} without it"
        when = "at the end" if seconds is None else f"{seconds:.1f} s later"
        gone = Fault(
            "gone",
            "a GPU was lost during the run",
            f"it was present at the beginning, and is missing {when} ({why})",
            Action.REBOOT,
            REPLACE_LOST,
            {"error": errors[0] if errors else None, "seconds": seconds},
            first=xid_fix(card.host.name),
        )
        yield finding_of(seen, card, gone)
        return
    pair = Pair(card.health, after, seconds)
    links = _changed_links(pair, seen.number("crc_per_second"))
    for fault in (*_came_up(pair), *links, *_repaired(seen, pair), *_slowed(pair)):
        yield finding_of(seen, card, fault)


def _risen(before: int | None, after: int | None) -> int:
    """By how much a counter rose; 0 where it did not, or is not known at both times.

    One that fell was set to zero by a reset or a reload of the driver.
    """
    return 0 if before is None or after is None else max(0, after - before)


def _came_up(pair: Pair) -> Iterator[Fault]:
    """Counters that rose, and signs that were not there at the beginning."""
    for counter in COUNTERS:
        before, after = counter.of(pair.before), counter.of(pair.after)
        if _risen(before, after) > _risen(counter.beside(pair.before), counter.beside(pair.after)):
            said = f"{counter.text} rose from {before} to {after}{pair.span}; no rise expected"
            evidence = _evidence(pair, before, after)
            yield Fault(counter.word, counter.title, said, counter.action, counter.advice, evidence, watch=_WATCH_ROWS)
    for sign in SIGNS:
        if sign.of(pair.after) and not sign.of(pair.before):
            said = f"{sign.text}. At the beginning of the run it was not so"
            yield Fault(sign.word, sign.title, said, sign.action, evidence=_evidence(pair, False, True))
    wanted = pair.after.recovery_action
    if wanted and not pair.before.recovery_action:
        name, action = recovery_of(wanted)
        said = f"the driver requests this recovery: {name}. None was needed at the beginning"
        title = "the driver requests a recovery of a GPU after the run"
        yield Fault("recovery", title, said, action, evidence=_evidence(pair, 0, wanted))


def _repaired(seen: Seen[Look], pair: Pair) -> Iterator[Fault]:
    """Counters of repeated packets and corrected errors: some of it is normal."""
    before, after = pair.before.pcie.replays, pair.after.pcie.replays
    if delta := _risen(before, after):
        normal = seen.number("pcie_replays_per_minute")
        allowed = normal * max((pair.seconds or 0.0) / 60, 1.0)
        title = "the PCIe link of a GPU repeated packets"
        said = f"PCIe replays rose from {before} to {after}{pair.span}; at most {normal:g} a minute expected"
        advice = "Ask the administrator to reseat the card, and to check its riser and slot."
        severity = Severity.WARNING if delta > allowed else Severity.NOTE
        evidence = _evidence(pair, before, after)
        yield Fault("pcie-replays", title, said, Action.MONITOR, advice, evidence, severity, _WATCH_PCIE)
    before, after = pair.before.memory.corrected, pair.after.memory.corrected
    if _risen(before, after):
        title = "GPU memory had correctable errors during the run"
        said = f"correctable errors rose from {before} to {after}{pair.span}. ECC corrected them"
        most = memory_errors.most_corrected(seen.of(memory_errors.CHECK))
        severity = Severity.WARNING if (after or 0) > most else Severity.NOTE
        watch, evidence = memory_errors.WATCH_CORRECTED, _evidence(pair, before, after)
        yield Fault("corrected", title, said, Action.MONITOR, "", evidence, severity, watch)


def _slowed(pair: Pair) -> Iterator[Fault]:
    """Clocks that something held down after the load, and not before it."""
    before, after = pair.before.clocks.events, pair.after.clocks.events
    new = 0 if before is None or after is None else after & ~before
    if any(new & bit for bit in HARMFUL):
        celsius = pair.after.clocks.celsius
        yield Fault(
            "slowdown",
            "the clocks of a GPU were limited at the end of the run",
            f"{events_text(new, after or 0)} at the end of the run{'' if celsius is None else f', at {celsius} C'}, "
            "and was not at the beginning",
            Action.MONITOR,
            POWER_FIX if new & 0x80 else COOLING_FIX,
            {"clock_events": f"{after:#x}", "celsius": celsius, "seconds": pair.seconds},
            watch=WATCH_CLOCKS,
        )


def _changed_links(pair: Pair, most_crc_per_second: float) -> Iterator[Fault]:
    """Links that went down during the run, had to recover or send again, or had CRC errors."""
    before = {link.number: link for link in pair.before.nvlinks}
    pairs = [(before[link.number], link) for link in pair.after.nvlinks if link.number in before]
    if down := [new.number for old, new in pairs if old.up and not new.up]:
        title = "an NVLink of a GPU went down during the run"
        were, are = ("was", "is") if len(down) == 1 else ("were", "are")
        said = f"{numbers_text(down)} {were} up at the beginning of the run and {are} down at its end"
        evidence: dict[str, Scalar | list[Scalar]] = {"links": [*down], "seconds": pair.seconds}
        severity = Severity.ERROR if pair.before.fabric.state == JOINED else Severity.WARNING
        yield Fault("nvlink-down", title, said, Action.RESET, "", evidence, severity)
    errors: dict[int, str] = {}
    for old, new in pairs:
        counts = (("replays", old.replays, new.replays), ("recoveries", old.recoveries, new.recoveries))
        if rises := [f"{name} rose from {start} to {end}" for name, start, end in counts if _risen(start, end)]:
            errors[new.number] = ", ".join(rises)
    if errors:
        yield Fault(
            "nvlink-errors",
            "an NVLink of a GPU had errors during the run",
            f"{'; '.join(f'{text} on NVLink {number}' for number, text in errors.items())}{pair.span}; no rise "
            "expected",
            Action.MONITOR,
            evidence={"links": list(errors), "seconds": pair.seconds},
            watch=WATCH_ERRORS,
        )
    if deltas := {new.number: delta for old, new in pairs if (delta := _risen(old.crc_errors, new.crc_errors))}:
        links, worst = sorted(deltas), max(deltas, key=lambda number: deltas[number])
        title = "an NVLink had CRC errors during the run"
        most, each = ("up to ", " each") if len(links) > 1 else ("", "")
        said = (
            f"{numbers_text(links)} had {most}{count(max(deltas.values()), 'CRC error')}{each}{pair.span}; at most "
            f"{most_crc_per_second:g} per second are expected. The data were sent again, so none were lost"
        )
        # One second at least, since a single event has no rate.
        per_second = deltas[worst] / max(pair.seconds or 0.0, 1.0)
        severity = Severity.WARNING if per_second > most_crc_per_second else Severity.NOTE
        evidence = {"links": [*links], "rises": [deltas[link] for link in links], "seconds": pair.seconds}
        yield Fault("nvlink-crc", title, said, Action.MONITOR, "", evidence, severity, WATCH_ERRORS)


def _evidence(pair: Pair, before: Scalar, after: Scalar) -> dict[str, Scalar | list[Scalar]]:
    return {"before": before, "after": after, "seconds": None if pair.seconds is None else round(pair.seconds, 3)}


def skip(seen: Seen[Look]) -> SkipReason | None:
    """As GPU003, whose first look this one is compared with."""
    first = memory_errors.CHECK
    lacking = seen.is_last and not _first(seen)
    return devices.skip(seen) or unneeded(
        f"{first.code} ({first.name}) saw no GPU to compare with" if lacking else None
    )


def last_seconds(seen: Seen[Look]) -> float:
    """As long as the first look."""
    took = (o.seconds for o in seen.of(memory_errors.CHECK).outcomes if o.status is Status.DONE)
    return max(took, default=0.0) + _START_SECONDS


measure = memory_errors.measure
Data = Look
SETTINGS = {
    # NVIDIA's limit for PCIe replays, as DCGM's watch has it (8 a minute).
    "pcie_replays_per_minute": 8,
    # NVIDIA minds CRC errors from 100 a second on (DCGM, dcgm_gpu_hardware_limits.h).
    "crc_per_second": 100,
}
CHECK: Check[Data] = Check(__name__, "GPU010", "counters", Stage.GPU, Scope.HOST, deadline=memory_errors.CHECK.deadline)
