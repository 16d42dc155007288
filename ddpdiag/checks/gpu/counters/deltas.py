"""GPU010's rules: what of a GPU must not rise, or come up, while a job runs.

Each rule takes the GPU as it was at the beginning and at the end. A counter that fell was set to zero by a reset or a
reload of the driver, and is no rise; one that only one of the two looks told is none either.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ddpdiag.checks.gpu.cards import Action, Fault
from ddpdiag.checks.gpu.nvswitch import JOINED, recovery_of
from ddpdiag.model import Scalar, Severity
from ddpdiag.probes.gpu.health import Health
from ddpdiag.probes.gpu.links import NvLink

# nvml.h, nvmlClocksEventReasonHwSlowdown, ...SwThermalSlowdown, ...HwThermalSlowdown, ...HwPowerBrakeSlowdown.
_HARMFUL = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Pair(NamedTuple):
    """One GPU at the beginning and at the end of a run, and the seconds between (None: not known)."""

    before: Health
    after: Health
    seconds: float | None

    @property
    def span(self) -> str:
        """Such as " within 12.3 s"."""
        return "" if self.seconds is None else f" within {self.seconds:.1f} s"

    def rate(self, rise: int) -> float:
        """Rises per second; one second at least, since a single event has no rate."""
        return rise / max(self.seconds or 0.0, 1.0)


class Counter(NamedTuple):
    """A number that should stay as it is, and what it means if it rises; `beside` is a part that is told elsewhere."""

    word: str
    title: str
    name: str
    action: Action
    of: Callable[[Health], int | None]
    hint: str = ""
    beside: Callable[[Health], int | None] = lambda _: None

    def rise(self, pair: Pair) -> int:
        """By how much it rose, without that part."""
        part = risen(self.beside(pair.before), self.beside(pair.after))
        return risen(self.of(pair.before), self.of(pair.after)) - part


# An uncorrectable error ends the process that meets it; a row or page is replaced after one, or after many correctable.
COUNTERS = (
    Counter(
        "uncorrected",
        "GPU memory got uncorrectable errors during the run",
        "uncorrectable errors of its memory",
        Action.RESET,
        lambda health: health.memory.uncorrected,
        "Replace it if they come back.",
        # Both kinds are in the total.
        lambda health: health.memory.sram_uncorrected,
    ),
    Counter(
        "sram",
        "GPU SRAM got uncorrectable errors during the run",
        "uncorrectable errors of SRAM",
        Action.RESET,
        lambda health: health.memory.sram_uncorrected,
        "Replace it if they come back.",
    ),
    Counter(
        "remapped",
        "a GPU remapped bad rows during the run",
        "rows remapped for uncorrectable errors",
        Action.RESET,
        lambda health: health.memory.uncorrectable_remaps,
    ),
    Counter(
        "remapped-corrected",
        "a GPU remapped weak rows during the run",
        "rows remapped for correctable errors",
        Action.MONITOR,
        lambda health: health.memory.correctable_remaps,
    ),
    Counter(
        "retired",
        "a GPU retired pages during the run",
        "retired pages",
        Action.RESET,
        lambda health: health.memory.retired_pages,
    ),
)


class Sign(NamedTuple):
    """Something that should not come up, and what it means if it does."""

    word: str
    title: str
    said: str
    action: Action
    of: Callable[[Health], object]


SIGNS = (
    Sign(
        "remap-pending",
        "a GPU began to wait for the remapping of a bad row",
        "a bad row of its memory stays in use until it is reset",
        Action.RESET,
        lambda health: health.memory.remap_pending,
    ),
    Sign(
        "remap-failed",
        "a GPU could not remap a bad row",
        "a row of its memory went bad, and no spare is left",
        Action.ISOLATE,
        lambda health: health.memory.remap_failed,
    ),
    Sign(
        "retirement-pending",
        "a GPU began to wait for the retirement of a bad page",
        "a bad page of its memory stays in use until it is reset",
        Action.RESET,
        lambda health: health.memory.retirement_pending,
    ),
    Sign(
        "broken",
        "a GPU says that it is lost or must be reset",
        "NVML said so in answer to a question",
        Action.REBOOT,
        lambda health: health.broken,
    ),
)


def risen(before: int | None, after: int | None) -> int:
    """By how much a counter rose; 0 where it did not, fell, or is not told at both times."""
    return 0 if before is None or after is None else max(0, after - before)


def counted(pair: Pair) -> Iterator[Fault]:
    """Counters that rose."""
    for counter in COUNTERS:
        before, after = counter.of(pair.before), counter.of(pair.after)
        if counter.rise(pair) > 0:
            said = f"{counter.name} rose from {before} to {after}{pair.span}; no rise expected"
            yield Fault(
                counter.word,
                counter.title,
                said,
                counter.action,
                counter.hint,
                _evidence(pair, before, after),
            )


def came_up(pair: Pair) -> Iterator[Fault]:
    """Signs that were not there at the beginning."""
    for sign in SIGNS:
        if sign.of(pair.after) and not sign.of(pair.before):
            said = f"{sign.said}; it came up{pair.span or ' during the run'}"
            yield Fault(sign.word, sign.title, said, sign.action, evidence=_evidence(pair, False, True))
    wanted = pair.after.recovery_action
    if wanted and not pair.before.recovery_action:
        name, action = recovery_of(wanted)
        said = f"the driver asks for a recovery: {name}; none was needed at the beginning"
        title = "the driver asks to recover a GPU after the run"
        yield Fault("recovery", title, said, action, evidence=_evidence(pair, 0, wanted))


def corrected(pair: Pair, most: float) -> Iterator[Fault]:
    """Correctable errors that came: good to know, and a warning once there are more than `most` in all."""
    before, after = pair.before.memory.corrected, pair.after.memory.corrected
    if risen(before, after):
        yield Fault(
            "corrected",
            "GPU memory got correctable errors during the run",
            f"correctable errors rose from {before} to {after}{pair.span}; ECC hides them",
            Action.MONITOR,
            severity=Severity.WARNING if (after or 0) > most else Severity.NOTE,
            evidence=_evidence(pair, before, after),
        )


def replayed(pair: Pair, most_per_minute: float) -> Iterator[Fault]:
    """Packets that went over PCIe twice; `most_per_minute` are normal."""
    before, after = pair.before.pcie.replays, pair.after.pcie.replays
    rise = risen(before, after)
    if not rise:
        return
    allowed = most_per_minute * max((pair.seconds or 0.0) / 60, 1.0)
    yield Fault(
        "pcie-replays",
        "the PCIe link of a GPU sent packets again",
        f"PCIe replays rose from {before} to {after}{pair.span}; at most {most_per_minute:g} a minute expected",
        Action.MONITOR,
        "Reseat the card, and look at the riser and the slot, if they go on rising.",
        _evidence(pair, before, after),
        severity=Severity.WARNING if rise > allowed else Severity.NOTE,
    )


def flawed_links(pair: Pair, most_crc_per_second: float) -> Iterator[Fault]:
    """NVLinks that went down, had to recover or send again, or whose CRC found errors."""
    before = {link.number: link for link in pair.before.nvlinks}
    pairs = [(before[link.number], link) for link in pair.after.nvlinks if link.number in before]
    down = [new.number for old, new in pairs if old.up and not new.up]
    if down:
        yield Fault(
            "nvlink-down",
            "an NVLink of a GPU went down during the run",
            f"{_links(down)} up at the beginning and down at the end{pair.span}",
            Action.RESET,
            severity=Severity.ERROR if pair.before.fabric.state == JOINED else Severity.WARNING,
            evidence={"links": list(down), "seconds": pair.seconds},
        )
    errors = [(new.number, text) for old, new in pairs if (text := _rise_of(old, new))]
    if errors:
        yield Fault(
            "nvlink-errors",
            "an NVLink of a GPU had errors during the run",
            f"{'; '.join(f'link {number}: {text}' for number, text in errors)}{pair.span}; no rise expected",
            Action.MONITOR,
            "If they come back, reset all GPUs of the host, then run the field diagnostic.",
            {"links": [number for number, _ in errors], "seconds": pair.seconds},
        )
    yield from _crc(pair, pairs, most_crc_per_second)


def _rise_of(old: NvLink, new: NvLink) -> str:
    rises = (("replays", old.replays, new.replays), ("recoveries", old.recoveries, new.recoveries))
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in rises if risen(before, after))


def _crc(pair: Pair, pairs: list[tuple[NvLink, NvLink]], most_per_second: float) -> Iterator[Fault]:
    rises = {new.number: rise for old, new in pairs if (rise := risen(old.crc_errors, new.crc_errors))}
    if not rises:
        return
    worst = max(rises, key=lambda number: rises[number])
    yield Fault(
        "nvlink-crc",
        "CRC found errors on an NVLink during the run",
        f"CRC errors rose on {_links(sorted(rises))}, by {rises[worst]} on link {worst}{pair.span}; they were sent "
        f"again, and at most {most_per_second:g} a second are expected",
        Action.MONITOR,
        severity=Severity.WARNING if pair.rate(rises[worst]) > most_per_second else Severity.NOTE,
        evidence={
            "links": [*sorted(rises)],
            "rises": [rises[number] for number in sorted(rises)],
            "seconds": pair.seconds,
        },
    )


def slowed(pair: Pair) -> Iterator[Fault]:
    """Clocks that something held down after the load, and not before it."""
    before, after = pair.before.clocks.events, pair.after.clocks.events
    new = 0 if before is None or after is None else after & ~before
    if names := [name for bit, name in _HARMFUL.items() if new & bit]:
        celsius = pair.after.clocks.celsius
        yield Fault(
            "slowdown",
            "the clocks of a GPU were held down after the run",
            f"{' and '.join(names)} (clock events {after:#x}) at the end"
            f"{'' if celsius is None else f', at {celsius} C'}; none at the beginning",
            Action.MONITOR,
            "Look at the host's power supplies and cables." if new & 0x80 else "Look at fans and coolant.",
            {"clock_events": f"{after:#x}", "celsius": celsius, "seconds": pair.seconds},
        )


def _links(numbers: list[int]) -> str:
    return f"{'link' if len(numbers) == 1 else 'links'} {', '.join(map(str, numbers))}"


def _evidence(pair: Pair, before: Scalar, after: Scalar) -> dict[str, Scalar | list[Scalar]]:
    return {"before": before, "after": after, "seconds": None if pair.seconds is None else round(pair.seconds, 3)}
