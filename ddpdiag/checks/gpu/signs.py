"""Counters and states of a GPU that show a fault by their value (GPU003, GPU006) or by a change in the run (GPU010)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.cards import WATCH_LOG, Action, Fault, Watch
from ddpdiag.model import Scalar
from ddpdiag.probes.gpu.health import Health
from ddpdiag.text import count, fold_ranks

D = TypeVar("D")
# Counts by the number of an NVLink. The key None stands for the GPU itself.
Counts = Mapping[int | None, int | None]


class Counter(NamedTuple):
    """A counter: its noun, its reader (`of`), the action, and the codes of the findings for its `total` and `rise`.

    `most` and `most_per_minute` name the settings that limit the total and the rise; without one, 0 is expected.
    """

    noun: str
    of: Callable[[Health], Counts]
    action: Action
    total: str = ""
    most: str = ""
    rise: str = ""
    most_per_minute: str = ""
    advice: str = ""
    watch: Watch = WATCH_LOG


class State(NamedTuple):
    """A faulty state: the word of its finding in GPU003 and GPU010, its text, its reader (`of`), and the action."""

    word: str
    said: str
    of: Callable[[Health], bool | None]
    action: Action


def _dram(health: Health) -> Counts:
    """The uncorrectable errors of DRAM: the total, which includes SRAM, without those of SRAM."""
    total, sram = health.memory.uncorrected, health.memory.sram_uncorrected
    return {None: None if total is None else max(0, total - (sram or 0))}


_REPLACE = "If the errors return, have the GPU replaced."
COUNTERS = (
    Counter(
        "uncorrectable DRAM error",
        _dram,
        Action.RESET,
        total="GPU003.uncorrected",
        rise="GPU010.uncorrected",
        advice=_REPLACE,
    ),
    Counter(
        "uncorrectable SRAM error",
        lambda health: {None: health.memory.sram_uncorrected},
        Action.RESET,
        total="GPU003.sram",
        rise="GPU010.sram",
        advice=_REPLACE,
    ),
    Counter(
        "uncorrectable row remap", lambda health: {None: health.memory.remaps}, Action.RESET, rise="GPU010.remapped"
    ),
    Counter(
        "correctable memory error",
        lambda health: {None: health.memory.corrected},
        Action.MONITOR,
        total="GPU003.corrected",
        most="corrected_errors",
        watch=Watch("nvidia-smi -q -d ECC -i {gpu}", "the number of correctable errors has risen"),
    ),
    # Sums of replays and recoveries.
    Counter(
        "NVLink error",
        lambda health: {link.number: link.errors for link in health.nvlinks},
        Action.MONITOR,
        total="GPU006.errors",
        rise="GPU010.nvlink-errors",
        watch=Watch("nvidia-smi nvlink -e -i {gpu}", "its error counters have risen"),
    ),
    Counter(
        "PCIe replay",
        lambda health: {None: health.pcie.replays},
        Action.MONITOR,
        rise="GPU010.pcie-replays",
        most_per_minute="pcie_replays_per_minute",
        advice="Ask the administrator to reseat the card, and to check its riser and slot.",
        watch=Watch("nvidia-smi -q -i {gpu} | grep -i replay", "the replays have risen"),
    ),
)
STATES = (
    State(
        "sram",
        "its uncorrectable SRAM errors exceed NVIDIA's own limit",
        lambda health: health.memory.sram_threshold_exceeded,
        Action.ISOLATE,
    ),
    State(
        "remap-failed",
        "a memory row is bad, and no spare row is left",
        lambda health: health.memory.remap_failed,
        Action.ISOLATE,
    ),
    State(
        "remap-pending",
        "a bad memory row is still in use, because the GPU remaps it only at a reset",
        lambda health: health.memory.remap_pending,
        Action.RESET,
    ),
    State(
        "retirement-pending",
        "a bad memory page is still in use, because the GPU retires it only at a reset",
        lambda health: health.memory.retirement_pending,
        Action.RESET,
    ),
)


def states(health: Health) -> Iterator[Fault]:
    for state in STATES:
        if state.of(health):
            need = "has worn-out memory" if state.action is Action.ISOLATE else "needs a reset for bad memory"
            yield Fault(state.word, f"a GPU {need}", state.said, state.action)


def totals(seen: Seen[D], health: Health) -> Iterator[Fault]:
    """Yield a fault for each counter of this check that is above its limit."""
    for row in COUNTERS:
        if row.total.startswith(seen.check.code):
            most = seen.number(row.most) if row.most else 0.0
            if above := {key: number for key, number in row.of(health).items() if (number or 0) > most}:
                total = sum(number or 0 for number in above.values())
                expected = f"at most {most:,.0f}" if most else "0"
                said = f"{count(total, row.noun)}{_links_text(above)}; {expected} expected"
                evidence = {"value": total, "limit": most, **_links(above)}
                yield _fault(row, row.total, f"a GPU has {row.noun}s", said, evidence)


def rises(seen: Seen[D], before: Health, after: Health, seconds: float | None) -> Iterator[Fault]:
    """Yield a fault for each counter that rose in `seconds` (None: not known). A counter that fell was reset."""
    span = "" if seconds is None else f" within {seconds:.1f} s"
    for row in COUNTERS:
        old, new = row.of(before), row.of(after)
        risen = {
            key: end - begin
            for key, end in new.items()
            if end is not None and (begin := old.get(key)) is not None and end > begin
        }
        per_minute = seen.number(row.most_per_minute) if row.most_per_minute else 0.0
        # In a run of less than a minute the limit of a whole minute counts, since a single event has no rate.
        if not row.rise or sum(risen.values()) <= per_minute * max((seconds or 0.0) / 60, 1.0):
            continue
        begin, end = (sum(counts[key] or 0 for key in risen) for counts in (old, new))
        expected = f"at most {per_minute:g} a minute" if per_minute else "no rise"
        said = f"{row.noun}s{_links_text(risen)} rose from {begin} to {end}{span}; {expected} expected"
        evidence = {"before": begin, "after": end, "seconds": seconds, **_links(risen)}
        yield _fault(row, row.rise, f"a GPU had {row.noun}s during the run", said, evidence)


def _fault(row: Counter, code: str, title: str, said: str, evidence: Mapping[str, Scalar | list[Scalar]]) -> Fault:
    return Fault(code.partition(".")[2], title, said, row.action, row.advice, evidence, watch=row.watch)


def _links(counts: Counts) -> dict[str, Scalar | list[Scalar]]:
    numbers = [key for key in counts if key is not None]
    return {"links": [*numbers], "counts": [counts[key] for key in numbers]} if numbers else {}


def _links_text(counts: Counts) -> str:
    numbers = [key for key in counts if key is not None]
    return f" on {numbers_text(numbers)}" if numbers else ""


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers of NVLinks as text, such as "NVLink 3" or "NVLinks 3,7-9"."""
    return f"{'NVLink' if len(numbers) == 1 else 'NVLinks'} {fold_ranks(numbers)}"
