"""The table of GPU health: counters and states that show a fault, by themselves (GPU003, GPU006) or because they rise
or begin during the run (GPU010)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.cards import Action, Fault, Watch
from ddpdiag.model import Scalar, Severity
from ddpdiag.probes.gpu.health import Health
from ddpdiag.probes.gpu.links import NvLink
from ddpdiag.text import count, fold_ranks

D = TypeVar("D")
# Counts by the number of an NVLink; the key of the GPU itself is None.
Counts = Mapping[int | None, int | None]


class Counter(NamedTuple):
    """A row: the finding's code, title and action, and the counter (its noun and `detail`, and its reader).

    `limit` is the name of a setting, and without a name 0. With `per_seconds` the limit is of a rise in that time.
    """

    code: str
    title: str
    noun: str
    of: Callable[[Health], Counts]
    action: Action
    limit: str = ""
    per_seconds: float = 0.0
    detail: str = ""
    advice: str = ""
    watch: Watch | None = None


class State(NamedTuple):
    """A row: the word of the finding in GPU003 and GPU010, its title, text and action, and the reader of the state."""

    word: str
    title: str
    said: str
    of: Callable[[Health], bool | None]
    action: Action


def _dram(health: Health) -> Counts:
    """Uncorrectable errors without those of SRAM, which the total includes."""
    total, sram = health.memory.uncorrected, health.memory.sram_uncorrected
    return {None: None if total is None else max(0, total - (sram or 0))}


def _remaps(health: Health) -> Counts:
    return {None: health.memory.uncorrectable_remaps}


def _link_errors(link: NvLink) -> int | None:
    known = [number for number in (link.replays, link.recoveries) if number is not None]
    return sum(known) if known else None


def link_errors(health: Health) -> Counts:
    """Replays and recoveries, which hold up traffic."""
    return {link.number: _link_errors(link) for link in health.nvlinks}


_LOADED = " since the driver was loaded"
_REPLACE = "If the errors return, have the GPU replaced."
_WATCH_ECC = Watch("nvidia-smi -q -d ECC -i {gpu}", "the number of correctable errors has risen")
_WATCH_ROWS = Watch("nvidia-smi -q -d ROW_REMAPPER -i {gpu}", "the number of remapped rows has risen")
_WATCH_PCIE = Watch("nvidia-smi -q -i {gpu} | grep -i replay", "the replays have risen")
_WATCH_LINKS = Watch("nvidia-smi nvlink -e -i {gpu}", "its error counters have risen")

# The first row of a code that applies to a GPU is reported.
TOTALS = (
    Counter(
        "GPU003.uncorrected",
        "GPU memory has uncorrectable errors",
        "uncorrectable DRAM error",
        _dram,
        Action.RESET,
        "uncorrected_errors",
        detail=_LOADED,
        advice=_REPLACE,
    ),
    Counter(
        "GPU003.sram",
        "GPU SRAM has uncorrectable errors",
        "uncorrectable SRAM error",
        lambda health: {None: health.memory.sram_uncorrected_ever},
        Action.ISOLATE,
        "sram_errors",
        detail=" in its lifetime",
    ),
    Counter(
        "GPU003.sram",
        "GPU SRAM has uncorrectable errors",
        "uncorrectable SRAM error",
        lambda health: {None: health.memory.sram_uncorrected},
        Action.RESET,
        "uncorrected_errors",
        detail=_LOADED,
    ),
    Counter(
        "GPU003.remaps",
        "a GPU has remapped too many memory rows",
        "row remap",
        # GPU003.remap-failed says it already.
        lambda health: {} if health.memory.remap_failed else _remaps(health),
        Action.ISOLATE,
        "remapped_rows",
        detail=" for uncorrectable errors",
    ),
    Counter(
        "GPU003.retired-pages",
        "a GPU has retired too many memory pages",
        "retired memory page",
        lambda health: {None: health.memory.retired_pages},
        Action.ISOLATE,
        "retired_pages",
    ),
    Counter(
        "GPU003.corrected",
        "GPU memory has too many correctable errors",
        "correctable error",
        lambda health: {None: health.memory.corrected},
        Action.MONITOR,
        "corrected_errors",
        detail=_LOADED,
        watch=_WATCH_ECC,
    ),
    Counter(
        "GPU006.errors",
        "an NVLink of a GPU had errors (replays, recoveries)",
        "link error",
        link_errors,
        Action.MONITOR,
        "link_errors",
        detail=_LOADED,
        watch=_WATCH_LINKS,
    ),
)
RISES = (
    Counter(
        "GPU010.uncorrected",
        "GPU memory had uncorrectable errors during the run",
        "uncorrectable DRAM error",
        _dram,
        Action.RESET,
        advice=_REPLACE,
    ),
    Counter(
        "GPU010.sram",
        "GPU SRAM had uncorrectable errors during the run",
        "uncorrectable SRAM error",
        lambda health: {None: health.memory.sram_uncorrected},
        Action.RESET,
        advice=_REPLACE,
    ),
    Counter(
        "GPU010.remapped",
        "a GPU remapped bad memory rows during the run",
        "row remap",
        _remaps,
        Action.RESET,
        detail=" for uncorrectable errors",
    ),
    Counter(
        "GPU010.remapped-corrected",
        "a GPU remapped weak memory rows during the run",
        "row remap",
        lambda health: {None: health.memory.correctable_remaps},
        Action.MONITOR,
        detail=" for correctable errors",
        watch=_WATCH_ROWS,
    ),
    Counter(
        "GPU010.retired",
        "a GPU retired memory pages during the run",
        "retired memory page",
        lambda health: {None: health.memory.retired_pages},
        Action.RESET,
        advice="The new pages stay in use until then.",
    ),
    Counter(
        "GPU010.nvlink-errors",
        "an NVLink of a GPU had errors during the run (replays, recoveries)",
        "link error",
        link_errors,
        Action.MONITOR,
        watch=_WATCH_LINKS,
    ),
    Counter(
        "GPU010.nvlink-crc",
        "an NVLink had CRC errors during the run, and sent the data again",
        "CRC error",
        lambda health: {link.number: link.crc_errors for link in health.nvlinks},
        Action.MONITOR,
        "crc_per_second",
        per_seconds=1.0,
        watch=_WATCH_LINKS,
    ),
    Counter(
        "GPU010.pcie-replays",
        "the PCIe link of a GPU repeated packets",
        "PCIe replay",
        lambda health: {None: health.pcie.replays},
        Action.MONITOR,
        "pcie_replays_per_minute",
        per_seconds=60.0,
        advice="Ask the administrator to reseat the card, and to check its riser and slot.",
        watch=_WATCH_PCIE,
    ),
)
STATES = (
    State(
        "sram",
        "GPU SRAM has uncorrectable errors",
        "its uncorrectable SRAM errors exceed NVIDIA's own limit",
        lambda health: health.memory.sram_threshold_exceeded,
        Action.ISOLATE,
    ),
    State(
        "remap-failed",
        "a GPU could not remap a bad memory row",
        "a memory row is bad, and no spare row is left",
        lambda health: health.memory.remap_failed,
        Action.ISOLATE,
    ),
    State(
        "remap-pending",
        "a GPU needs a reset to remap a bad memory row",
        "a bad memory row is still in use, because the GPU remaps it only at a reset",
        lambda health: health.memory.remap_pending,
        Action.RESET,
    ),
    State(
        "retirement-pending",
        "a GPU needs a reset to retire a bad memory page",
        "a bad memory page is still in use, because the GPU retires it only at a reset",
        lambda health: health.memory.retirement_pending,
        Action.RESET,
    ),
)


def states(health: Health) -> Iterator[Fault]:
    """The states that the GPU is in."""
    for state in STATES:
        if state.of(health):
            yield Fault(state.word, state.title, state.said, state.action)


def totals(seen: Seen[D], health: Health) -> Iterator[Fault]:
    """The counters of this check that are above their limits."""
    for row in TOTALS:
        check, _, word = row.code.partition(".")
        if check == seen.check.code:
            most = seen.number(row.limit)
            if above := {key: number for key, number in row.of(health).items() if (number or 0) > most}:
                total = sum(number or 0 for number in above.values())
                said = f"{count(total, row.noun)}{_links_text(above)}{row.detail}; {_limit_text(most)} expected"
                yield _fault(row, word, said, {"value": total, "limit": most, **_links(above)})


def rises(seen: Seen[D], before: Health, after: Health, seconds: float | None) -> Iterator[Fault]:
    """The counters that rose in these seconds (None: not known); one that fell was set to zero by a reset."""
    span = "" if seconds is None else f" within {seconds:.1f} s"
    for row in RISES:
        old, new = row.of(before), row.of(after)
        risen = {key: (end or 0) - (old[key] or 0) for key, end in new.items() if _has_risen(old.get(key), end)}
        if not risen:
            continue
        begin, end = (sum(counts[key] or 0 for key in risen) for counts in (old, new))
        said, severity = f"{row.noun}s{_links_text(risen)}{row.detail} rose from {begin} to {end}{span}", None
        if row.limit:
            most = seen.number(row.limit)
            said += f"; at most {most:g} {'a minute' if row.per_seconds > 1 else 'a second'} expected"
            # Of a shorter run the whole limit counts, since a single event has no rate.
            allowed = most * max((seconds or 0.0) / row.per_seconds, 1.0)
            severity = Severity.WARNING if max(risen.values()) > allowed else Severity.NOTE
        else:
            said += "; no rise expected"
        evidence = {"before": begin, "after": end, "seconds": seconds, **_links(risen)}
        yield _fault(row, row.code.partition(".")[2], said, evidence, severity)


def _has_risen(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _fault(
    row: Counter, word: str, said: str, evidence: Mapping[str, Scalar | list[Scalar]], severity: Severity | None = None
) -> Fault:
    fault = Fault(word, row.title, said, row.action, row.advice, evidence, severity)
    return fault if row.watch is None else fault._replace(watch=row.watch)


def _limit_text(most: float) -> str:
    return f"at most {most:,.0f}" if most else "0"


def _links(counts: Counts) -> dict[str, Scalar | list[Scalar]]:
    numbers = [key for key in counts if key is not None]
    return {"links": [*numbers], "counts": [counts[key] for key in numbers]} if numbers else {}


def _links_text(counts: Counts) -> str:
    numbers = [key for key in counts if key is not None]
    return f" on {numbers_text(numbers)}" if numbers else ""


def numbers_text(numbers: Sequence[int]) -> str:
    """Such as "NVLink 3" or "NVLinks 3,7-9"."""
    return f"{'NVLink' if len(numbers) == 1 else 'NVLinks'} {fold_ranks(numbers)}"
