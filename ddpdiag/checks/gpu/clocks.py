"""GPU clocks that heat, power or a limit holds down.

The slowest GPU sets the pace of a DDP job. NVML shows why clocks are not at their highest as a set of bits. Benign are
idle (0x1), application clocks (0x2), software power cap (0x4), sync boost (0x10) and display clocks (0x100). A bit
counts if three readings within the measurement all show it. The GPUs are idle then, and heat develops under load, so no
finding here is more than a warning.

Findings and their causes:

Fix: look at fans, coolant, power supplies and cables; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` shows each.
Set the limit with `nvidia-smi -i INDEX -pl WATTS`.

Confirm by hand: Under load, `nvidia-smi
--query-gpu=index,clocks.sm,clocks.max.sm,clocks_event_reasons.active,temperature.gpu,power.draw,power.limit
--format=csv -l 1`.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), nvmlClocksEventReasons; DCGM's health checks
(docs.nvidia.com/datacenter/dcgm), thermal and power.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Nothing, Seen
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu.cards import Action, Card, Fault, by_model, finding_of, usual
from ddpdiag.checks.gpu.memory_errors import health_check
from ddpdiag.model import Finding, Scalar, Severity

FINDINGS = {
    "slowdown": Explained.warning(
        "hardware slowdown (0x8), hardware thermal slowdown (0x40) or power brake (0x80): the card protects itself "
        "from heat, or the host's power supply asked for less."
    ),
    "warm": Explained.warning("software thermal slowdown (0x20): the driver lowers the clocks for heat."),
    "margin": Explained.warning(
        "the GPU is close to its slowdown temperature before there is any load: a fan, a pump, hot air from a "
        "neighbouring device."
    ),
    "power-limit": Explained(
        "a lower limit than most GPUs of that model have (a warning; a note if it is that card's own default), or all "
        "have one below the default (a note)."
    ),
}

# nvml.h, nvmlClocksEventReason*; which of them are harmful: Azure's health checks and NVSentinel's runbook.
_SOFTWARE_THERMAL = 0x20
HARMFUL = {
    0x8: "hardware slowdown",
    _SOFTWARE_THERMAL: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_HEAT = 0x8 | _SOFTWARE_THERMAL | 0x40


def judge(seen: Seen[Nothing], cards: Sequence[Card]) -> Iterator[Finding]:
    for card in cards:
        for fault in _hot(seen, card):
            yield finding_of(seen, card, fault)
    for model, own in by_model(cards):
        yield from _limited(seen, model, own)


def _hot(seen: Seen[Nothing], card: Card) -> Iterator[Fault]:
    """Clocks that something holds down, and a temperature from which heat will soon do so."""
    clocks, least, margin = card.health.clocks, seen.number("margin_celsius"), card.health.clocks.margin_celsius
    events = clocks.events or 0
    evidence = {"clock_events": f"{events:#x}", "celsius": clocks.celsius}
    if harmful := [name for bit, name in HARMFUL.items() if events & bit & ~_SOFTWARE_THERMAL]:
        yield Fault(
            "slowdown",
            # Seen without load, within a moment: NVML also shows it for an instant when clocks change.
            "hardware holds the clocks of a GPU down",
            f"{' and '.join(harmful)} (clock events {events:#x}) without load; none expected",
            Action.MONITOR,
            "Look at the host's power supplies and cables." if events & 0x80 else "Look at fans and coolant.",
            evidence,
        )
    elif events & _SOFTWARE_THERMAL:
        title = "a GPU lowers its clocks because of heat"
        said = f"software thermal slowdown (clock events {events:#x}) at {clocks.celsius} C; none expected"
        yield Fault("warm", title, said, Action.MONITOR, "Look at fans and coolant.", evidence)
    # A slowdown for heat reports it already.
    if margin is not None and margin <= least and not events & _HEAT:
        celsius = "" if clocks.celsius is None else f"{clocks.celsius} C, "
        yield Fault(
            "margin",
            "a GPU is hot before the job starts",
            f"{celsius}{abs(margin)} C {'above' if margin < 0 else 'below'} its slowdown temperature; more than "
            f"{least:g} C below it expected without load",
            Action.MONITOR,
            "Look at fans and coolant.",
            {"celsius": clocks.celsius, "margin_celsius": margin},
        )


def _limited(seen: Seen[Nothing], model: str, cards: Sequence[Card]) -> Iterator[Finding]:
    limits = {card: limit for card in cards if (limit := card.health.clocks.power_limit_watts) is not None}
    most = usual([*limits.values()])
    if most is None:
        return
    for card, limit in limits.items():
        if limit >= most:
            continue
        evidence: dict[str, Scalar | list[Scalar]] = {"power_limit_watts": limit, "usual_power_limit_watts": most}
        own = card.health.clocks.default_power_limit_watts
        if own is not None and limit >= own:
            # Makers of consumer cards sell one model with several limits.
            title, severity = "a GPU has a lower default power limit than others", Severity.NOTE
            said, advice = f"power limit {limit:g} W, as its maker set it; others of that model have {most:g} W", ""
        else:
            title, severity = "a GPU has a lower power limit than others", Severity.WARNING
            said = f"power limit {limit:g} W, {most:g} W expected as for most GPUs of that model"
            advice = f"Raise it with `nvidia-smi -i {card.health.index} -pl {most:g}`."
        yield finding_of(seen, card, Fault("power-limit", title, said, Action.NONE, advice, evidence, severity))
    default = usual([w for card in cards if (w := card.health.clocks.default_power_limit_watts) is not None])
    if default is not None and most < default:
        yield seen.finding(
            "power-limit",
            "the power limit of GPUs is below the default",
            f"{model}: the power limit of most GPUs is {most:g} W, {default:g} W by default; clocks may be lower.",
            severity=Severity.NOTE,
            evidence={"power_limit_watts": most, "default_power_limit_watts": default},
            fix=f"Raise it with `nvidia-smi -pl {default:g}` if it is not intended.",
        )


# gpud's comment on its own limit: 10 C warns before the slowdown begins.
CHECK = health_check("GPU005", "gpu-clocks", __doc__, FINDINGS, judge, settings={"margin_celsius": 10})
