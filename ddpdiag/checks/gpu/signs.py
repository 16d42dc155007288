"""The table of GPU health: counters and states that show a fault, by themselves (GPU003, GPU006) or because they rise
or begin during the run (GPU010)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.cards import WATCH_LOG, Action, Fault, Watch
from ddpdiag.model import Scalar, Severity
from ddpdiag.probes.gpu.health import Health
from ddpdiag.text import count, fold_ranks

D = TypeVar("D")
# Counts by the number of an NVLink; the key of the GPU itself is None.
Counts = Mapping[int | None, int | None]


class Counter(NamedTuple):
    """A row: the finding's code, what is counted (its noun and its reader), the action, the setting that limits it.

    Without a limit 0 is expected. With `per_seconds` the limit is of a rise in that time.
    """

    code: str
    noun: str
    of: Callable[[Health], Counts]
    action: Action
    limit: str = ""
    per_seconds: float = 0.0
    advice: str = ""
    watch: Watch = WATCH_LOG


class State(NamedTuple):
    """A row: the word of the finding in GPU003 and GPU010, its text, the reader of the state, the action."""

    word: str
    said: str
    of: Callable[[Health], bool | None]
    action: Action


def _of_memory(name: str) -> Callable[[Health], Counts]:
    return lambda health: {None: getattr(health.memory, name)}


def _dram(health: Health) -> Counts:
    """Uncorrectable errors without those of SRAM, which the total includes."""
    total, sram = health.memory.uncorrected, health.memory.sram_uncorrected
    return {None: None if total is None else max(0, total - (sram or 0))}


def _link_errors(health: Health) -> Counts:
    """Replays and recoveries, which hold up traffic."""
    return {link.number: link.errors for link in health.nvlinks}


def _crc(health: Health) -> Counts:
    return {link.number: link.crc_errors for link in health.nvlinks}


_REPLACE = "If the errors return, have the GPU replaced."
_RESEAT = "Ask the administrator to reseat the card, and to check its riser and slot."
_KEPT = "The new pages stay in use until then."
_WATCH_ECC = Watch("nvidia-smi -q -d ECC -i {gpu}", "the number of correctable errors has risen")
_WATCH_ROWS = Watch("nvidia-smi -q -d ROW_REMAPPER -i {gpu}", "the number of remapped rows has risen")
_WATCH_PCIE = Watch("nvidia-smi -q -i {gpu} | grep -i replay", "the replays have risen")
_WATCH_LINKS = Watch("nvidia-smi nvlink -e -i {gpu}", "its error counters have risen")

_DRAM, _SRAM = "uncorrectable DRAM error", "uncorrectable SRAM error"
_BAD_ROW, _WEAK_ROW = "uncorrectable row remap", "correctable row remap"
# Sums of replays and recoveries.
_LINKS = "NVLink error"
# The first row of a code that applies to a GPU is reported.
TOTALS = (
    Counter("GPU003.uncorrected", _DRAM, _dram, Action.RESET, "uncorrected_errors", advice=_REPLACE),
    Counter("GPU003.sram", f"lifetime {_SRAM}", _of_memory("sram_uncorrected_ever"), Action.ISOLATE, "sram_errors"),
    Counter("GPU003.sram", _SRAM, _of_memory("sram_uncorrected"), Action.RESET, "uncorrected_errors"),
    Counter("GPU003.remaps", _BAD_ROW, _of_memory("uncorrectable_remaps"), Action.ISOLATE, "remapped_rows"),
    Counter("GPU003.retired-pages", "retired page", _of_memory("retired_pages"), Action.ISOLATE, "retired_pages"),
    Counter(
        "GPU003.corrected",
        "correctable memory error",
        _of_memory("corrected"),
        Action.MONITOR,
        "corrected_errors",
        watch=_WATCH_ECC,
    ),
    Counter("GPU006.errors", _LINKS, _link_errors, Action.MONITOR, "link_errors", watch=_WATCH_LINKS),
)
RISES = (
    Counter("GPU010.uncorrected", _DRAM, _dram, Action.RESET, advice=_REPLACE),
    Counter("GPU010.sram", _SRAM, _of_memory("sram_uncorrected"), Action.RESET, advice=_REPLACE),
    Counter("GPU010.remapped", _BAD_ROW, _of_memory("uncorrectable_remaps"), Action.RESET),
    Counter(
        "GPU010.remapped-corrected", _WEAK_ROW, _of_memory("correctable_remaps"), Action.MONITOR, watch=_WATCH_ROWS
    ),
    Counter("GPU010.retired", "retired page", _of_memory("retired_pages"), Action.RESET, advice=_KEPT),
    Counter("GPU010.nvlink-errors", _LINKS, _link_errors, Action.MONITOR, watch=_WATCH_LINKS),
    Counter("GPU010.nvlink-crc", "CRC error", _crc, Action.MONITOR, "crc_per_second", 1.0, watch=_WATCH_LINKS),
    Counter(
        "GPU010.pcie-replays",
        "PCIe replay",
        lambda health: {None: health.pcie.replays},
        Action.MONITOR,
        "pcie_replays_per_minute",
        60.0,
        _RESEAT,
        _WATCH_PCIE,
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
    """The states that the GPU is in."""
    for state in STATES:
        if state.of(health):
            need = "has worn-out memory" if state.action is Action.ISOLATE else "needs a reset for bad memory"
            yield Fault(state.word, f"a GPU {need}", state.said, state.action)


def totals(seen: Seen[D], health: Health) -> Iterator[Fault]:
    """The counters of this check that are above their limits."""
    for row in TOTALS:
        if row.code.partition(".")[0] == seen.check.code:
            most = seen.number(row.limit)
            if above := {key: number for key, number in row.of(health).items() if (number or 0) > most}:
                total = sum(number or 0 for number in above.values())
                expected = f"at most {most:,.0f}" if most else "0"
                said = f"{count(total, row.noun)}{_links_text(above)}; {expected} expected"
                yield _fault(row, f"a GPU has {row.noun}s", said, {"value": total, "limit": most, **_links(above)})


def rises(seen: Seen[D], before: Health, after: Health, seconds: float | None) -> Iterator[Fault]:
    """The counters that rose in these seconds (None: not known); one that fell was set to zero by a reset."""
    span = "" if seconds is None else f" within {seconds:.1f} s"
    for row in RISES:
        old, new = row.of(before), row.of(after)
        risen = {key: (end or 0) - (old[key] or 0) for key, end in new.items() if _has_risen(old.get(key), end)}
        if not risen:
            continue
        begin, end = (sum(counts[key] or 0 for key in risen) for counts in (old, new))
        expected, severity = "no rise", None
        if row.limit:
            most = seen.number(row.limit)
            expected = f"at most {most:g} {'a minute' if row.per_seconds > 1 else 'a second'}"
            # Of a shorter run the whole limit counts, since a single event has no rate.
            allowed = most * max((seconds or 0.0) / row.per_seconds, 1.0)
            severity = Severity.WARNING if max(risen.values()) > allowed else Severity.NOTE
        said = f"{row.noun}s{_links_text(risen)} rose from {begin} to {end}{span}; {expected} expected"
        evidence = {"before": begin, "after": end, "seconds": seconds, **_links(risen)}
        yield _fault(row, f"a GPU had {row.noun}s during the run", said, evidence, severity)


def _has_risen(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _fault(
    row: Counter, title: str, said: str, evidence: Mapping[str, Scalar | list[Scalar]], severity: Severity | None = None
) -> Fault:
    word = row.code.partition(".")[2]
    return Fault(word, title, said, row.action, row.advice, evidence, severity, row.watch)


def _links(counts: Counts) -> dict[str, Scalar | list[Scalar]]:
    numbers = [key for key in counts if key is not None]
    return {"links": [*numbers], "counts": [counts[key] for key in numbers]} if numbers else {}


def _links_text(counts: Counts) -> str:
    numbers = [key for key in counts if key is not None]
    return f" on {numbers_text(numbers)}" if numbers else ""


def numbers_text(numbers: Sequence[int]) -> str:
    """Such as "NVLink 3" or "NVLinks 3,7-9"."""
    return f"{'NVLink' if len(numbers) == 1 else 'NVLinks'} {fold_ranks(numbers)}"
