"""Counters and states of a GPU that show a fault by their value (GPU003, GPU006) or by a change in the run (GPU010)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.cards import RECHECK_LOG, Action, Fault, Recheck
from ddpdiag.model import Scalar
from ddpdiag.probes.gpu.health import Health
from ddpdiag.text import count, fold_ranks

D = TypeVar("D")
# Counts of errors, by the number of an NVLink. The key None stands for the GPU itself.
Counts = Mapping[int | None, int | None]
Evidence = Mapping[str, Scalar | list[Scalar]]


class ErrorCounter(NamedTuple):
    """A counter of errors: its name (`noun`), the function that reads it, and the action if its value shows a fault.

    `total_code` and `rise_code` are the codes of the findings for too large a total and for a rise during the run
    (empty: not judged). `total_limit` and `rise_limit` name the settings with the limits (empty: the limit is 0).
    """

    noun: str
    read: Callable[[Health], Counts]
    action: Action
    total_code: str = ""
    total_limit: str = ""
    rise_code: str = ""
    rise_limit: str = ""
    advice: str = ""
    recheck: Recheck = RECHECK_LOG


class FaultyState(NamedTuple):
    """A faulty state: the word of its findings (GPU003, GPU010), their text, the function that reads it, the action."""

    word: str
    text: str
    read: Callable[[Health], bool | None]
    action: Action


def _dram_errors(health: Health) -> Counts:
    """Return the uncorrectable errors of DRAM: NVML's total includes those of SRAM, so these are subtracted."""
    total, sram = health.memory.uncorrected, health.memory.sram_uncorrected
    return {None: None if total is None else max(0, total - (sram or 0))}


_REPLACE = "If the errors return, have the GPU replaced."
COUNTERS = (
    ErrorCounter(
        "uncorrectable DRAM error",
        _dram_errors,
        Action.RESET,
        total_code="GPU003.uncorrected",
        rise_code="GPU010.uncorrected",
        advice=_REPLACE,
    ),
    ErrorCounter(
        "uncorrectable SRAM error",
        lambda health: {None: health.memory.sram_uncorrected},
        Action.RESET,
        total_code="GPU003.sram",
        rise_code="GPU010.sram",
        advice=_REPLACE,
    ),
    ErrorCounter(
        "uncorrectable row remap",
        lambda health: {None: health.memory.remaps},
        Action.RESET,
        rise_code="GPU010.remapped",
    ),
    ErrorCounter(
        "correctable memory error",
        lambda health: {None: health.memory.corrected},
        Action.MONITOR,
        total_code="GPU003.corrected",
        total_limit="corrected_errors",
        recheck=Recheck("nvidia-smi -q -d ECC -i {gpu}", "the number of correctable errors has risen"),
    ),
    # Sums of replays and recoveries.
    ErrorCounter(
        "NVLink error",
        lambda health: {link.number: link.errors for link in health.nvlinks},
        Action.MONITOR,
        total_code="GPU006.errors",
        rise_code="GPU010.nvlink-errors",
        recheck=Recheck("nvidia-smi nvlink -e -i {gpu}", "its error counters have risen"),
    ),
    ErrorCounter(
        "PCIe replay",
        lambda health: {None: health.pcie.replays},
        Action.MONITOR,
        rise_code="GPU010.pcie-replays",
        rise_limit="pcie_replays_per_minute",
        advice="Ask the administrator to reseat the card, and to check its riser and slot.",
        recheck=Recheck("nvidia-smi -q -i {gpu} | grep -i replay", "the replays have risen"),
    ),
)
STATES = (
    FaultyState(
        "sram",
        "its uncorrectable SRAM errors exceed NVIDIA's own limit",
        lambda health: health.memory.sram_threshold_exceeded,
        Action.ISOLATE,
    ),
    FaultyState(
        "remap-failed",
        "a memory row is bad, and no spare row is left",
        lambda health: health.memory.remap_failed,
        Action.ISOLATE,
    ),
    FaultyState(
        "remap-pending",
        "a bad memory row is still in use, because the GPU remaps it only at a reset",
        lambda health: health.memory.remap_pending,
        Action.RESET,
    ),
    FaultyState(
        "retirement-pending",
        "a bad memory page is still in use, because the GPU retires it only at a reset",
        lambda health: health.memory.retirement_pending,
        Action.RESET,
    ),
)


def state_faults(health: Health) -> Iterator[Fault]:
    for state in STATES:
        if state.read(health):
            need = "has worn-out memory" if state.action is Action.ISOLATE else "needs a reset for bad memory"
            yield Fault(state.word, f"a GPU {need}", state.text, state.action)


def totals(health: Health) -> dict[str, int]:
    """Return the counters that are not 0, those of NVLinks in all: {"pcie_replays": 12}."""
    sums = {counter.noun: sum(number or 0 for number in counter.read(health).values()) for counter in COUNTERS}
    return {f"{noun.lower().replace(' ', '_')}s": total for noun, total in sums.items() if total}


def total_faults(seen: Seen[D], health: Health) -> Iterator[Fault]:
    """Yield a fault for each counter of this check that is above its limit."""
    for counter in COUNTERS:
        if counter.total_code.startswith(seen.check.code):
            most = seen.setting(counter.total_limit) if counter.total_limit else 0.0
            if above := {key: number for key, number in counter.read(health).items() if (number or 0) > most}:
                total = sum(number or 0 for number in above.values())
                expected = f"at most {most:,.0f}" if most else "0"
                text = f"{count(total, counter.noun)}{_links_text(above)}; {expected} expected"
                evidence = {"value": total, "limit": most, **_links_evidence(above)}
                yield _fault(counter, counter.total_code, f"a GPU has {counter.noun}s", text, evidence)


def rise_faults(seen: Seen[D], before: Health, after: Health, seconds: float | None) -> Iterator[Fault]:
    """Yield a fault for each counter that rose in `seconds` (None: not known). Ignores a counter that fell (reset)."""
    span = "" if seconds is None else f" within {seconds:.1f} s"
    for counter in COUNTERS:
        old, new = counter.read(before), counter.read(after)
        risen = {
            key: end - begin
            for key, end in new.items()
            if end is not None and (begin := old.get(key)) is not None and end > begin
        }
        per_minute = seen.setting(counter.rise_limit) if counter.rise_limit else 0.0
        # A run of less than a minute has the limit of a minute, because a single event has no rate.
        if not counter.rise_code or sum(risen.values()) <= per_minute * max((seconds or 0.0) / 60, 1.0):
            continue
        begin, end = (sum(counts[key] or 0 for key in risen) for counts in (old, new))
        expected = f"at most {per_minute:g} a minute" if per_minute else "no rise"
        text = f"{counter.noun}s{_links_text(risen)} rose from {begin} to {end}{span}; {expected} expected"
        evidence = {"before": begin, "after": end, "seconds": seconds, **_links_evidence(risen)}
        yield _fault(counter, counter.rise_code, f"a GPU had {counter.noun}s during the run", text, evidence)


def _fault(counter: ErrorCounter, code: str, title: str, text: str, evidence: Evidence) -> Fault:
    return Fault(code.partition(".")[2], title, text, counter.action, counter.advice, evidence, recheck=counter.recheck)


def _links_evidence(counts: Counts) -> Evidence:
    numbers = [key for key in counts if key is not None]
    return {"links": [*numbers], "counts": [counts[key] for key in numbers]} if numbers else {}


def _links_text(counts: Counts) -> str:
    numbers = [key for key in counts if key is not None]
    return f" on {nvlink_text(numbers)}" if numbers else ""


def nvlink_text(numbers: Sequence[int]) -> str:
    """Describe NVLinks by their numbers, such as "NVLink 3" or "NVLinks 3,7-9"."""
    return f"{'NVLink' if len(numbers) == 1 else 'NVLinks'} {fold_ranks(numbers)}"
