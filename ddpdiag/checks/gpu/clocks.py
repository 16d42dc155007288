"""GPU clocks that heat, power or a limit holds down.

The slowest GPU sets the pace of a DDP job. NVML shows why clocks are not at their highest as a set of bits. Benign are
idle (0x1), application clocks (0x2), software power cap (0x4), sync boost (0x10) and display clocks (0x100). A bit
counts if three readings within the measurement all show it. The GPUs are idle then, and heat develops under load, so no
finding here is more than a warning.

Findings and their causes:

Fix: look at fans, coolant, power supplies and cables; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` shows each.
Set the limit with `nvidia-smi -i UUID -pl WATTS`.

Confirm by hand: Under load, `nvidia-smi
--query-gpu=index,clocks.sm,clocks.max.sm,clocks_event_reasons.active,temperature.gpu,power.draw,power.limit
--format=csv -l 1`.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), nvmlClocksEventReasons; DCGM's health checks
(docs.nvidia.com/datacenter/dcgm), thermal and power.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import cards
from ddpdiag.checks.gpu.cards import (
    Action,
    Card,
    Fault,
    Recheck,
    by_model,
    card_findings,
    cards_of,
    finding_of,
    mode,
)
from ddpdiag.model import Finding

FINDINGS = {
    "slowdown": FindingSpec.warning(
        "hardware slowdown (0x8), software or hardware thermal slowdown (0x20, 0x40) or power brake (0x80): the card "
        "or its driver lowers the clocks for heat, or the host's power supply asked for less."
    ),
    "power-limit": FindingSpec.warning(
        "a lower limit than most GPUs of that model have, and than the card's own default."
    ),
}

# The harmful bits of nvmlClocksEventReason* (nvml.h), according to Azure's health checks and NVSentinel's runbook.
_BRAKE = 0x80
HARMFUL = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    _BRAKE: "power brake",
}
_COOLING_FIX = "The usual cause is its fans or its coolant."
_POWER_FIX = "The usual cause is the power supplies or cables of that host."
RECHECK_CLOCKS = Recheck("nvidia-smi -q -d PERFORMANCE -i {gpu}", "a slowdown or the power brake is still active")


def events_text(events: int, mask: int) -> str:
    """Describe the harmful ones of `events`, and the complete mask: "power brake is active (clock event mask 0x84)"."""
    names = [name for bit, name in HARMFUL.items() if events & bit]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} active (clock event mask {mask:#x})"


def slowdown_cause(events: int) -> tuple[str, str]:
    """Return the cause of harmful events, as a word for scripts ("heat", "power-brake"), and the advice."""
    return ("power-brake", _POWER_FIX) if events & _BRAKE else ("heat", _COOLING_FIX)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from card_findings(seen, clock_faults)
    for _, siblings in by_model(cards_of(seen)):
        yield from _power_limit_findings(seen, siblings)


def clock_faults(card: Card) -> Iterator[Fault]:
    """Yield a fault if heat or power lowers the clocks of this GPU."""
    events, celsius = card.health.clocks.events or 0, card.health.clocks.celsius
    harmful = events & sum(HARMFUL)
    if not harmful:
        return
    yield Fault(
        "slowdown",
        "the clocks of a GPU are held down",
        f"{events_text(harmful, events)}{'' if celsius is None else f' at {celsius} C'}; none is expected",
        Action.MONITOR,
        slowdown_cause(events)[1],
        {"clock_events": f"{events:#x}", "celsius": celsius},
        recheck=RECHECK_CLOCKS,
    )


def _power_limit_findings(seen: Seen[Nothing], siblings: Sequence[Card]) -> Iterator[Finding]:
    """Yield findings for GPUs with a lower power limit than most of their model, unless it is the GPU's default."""
    limits = {card: limit for card in siblings if (limit := card.health.clocks.power_limit_watts) is not None}
    most = mode([*limits.values()])
    for card, limit in limits.items():
        # Consumer cards of one model are sold with several limits.
        default = card.health.clocks.default_power_limit_watts
        if most is None or limit >= most or (default is not None and limit >= default):
            continue
        fault = Fault(
            "power-limit",
            "a GPU has a lower power limit than others",
            f"its power limit is {limit:g} W. Most GPUs of that model here have {most:g} W, as expected for all",
            Action.NONE,
            f"As root run `nvidia-smi -i {card.smi_id} -pl {most:g}` on {card.host.name}.",
            {"power_limit_watts": limit, "usual_power_limit_watts": most},
        )
        yield finding_of(seen, card, fault)


skip = cards.skip
CHECK: Check[Nothing] = Check(__name__, "GPU005", "gpu-clocks", Stage.GPU, Scope.HOST)
