"""Equal settings on all GPUs of one model.

Driver, VBIOS and ECC mode should be the same for all GPUs of one model: another VBIOS may have other clocks and power
limits, another driver may make NCCL take another path, and ECC takes memory and bandwidth on older cards. Different
models on one host, or between hosts, are GPU001's findings; different drivers are LCH003's, where it can read them.

A GPU that differs from more than half of the GPUs of its model is named; without a majority, no GPU is named.

Findings:

Causes: a card that was replaced, a host that missed an update. Fix: bring the named GPU or host to what the others have
(`nvidia-smi -q`).

Confirm by hand: `nvidia-smi --query-gpu=name,driver_version,vbios_version,ecc.mode.current --format=csv` on two hosts,
and compare.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, by_model, cards_of, not_looked_at
from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.checks.launch import versions
from ddpdiag.checks.odd import no_majority
from ddpdiag.model import Finding, Severity
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count

FINDINGS = {
    **dict.fromkeys(("driver", "ecc"), FindingSpec.warning("the driver version or the ECC mode differs (a warning).")),
    "vbios": FindingSpec.warning(
        "the VBIOS differs (a warning; a note for consumer cards, which several makers build).", same_item=True
    ),
    "unreadable": FindingSpec.not_seen("the settings of a host's GPUs could not be read."),
}


class Trait(NamedTuple):
    """A setting that should be equal on GPUs of one model, and the fix where it is not."""

    word: str
    name: str
    of: Callable[[Card], str | None]
    fix: str


_TRAITS = (
    Trait(
        "driver",
        "driver version",
        lambda card: card.driver,
        "As root install driver {usual} on {hosts} and reboot. Until then {leave_out}.",
    ),
    Trait(
        "vbios",
        "VBIOS version",
        lambda card: card.health.vbios,
        "You can train. If GPU005 or GPU012 also names one of these GPUs, ask the vendor for one VBIOS version.",
    ),
    Trait(
        "ecc",
        "ECC mode",
        lambda card: {True: "on", False: "off", None: None}[card.health.memory.ecc],
        "As root run `nvidia-smi{gpu} -e {mode}` on {hosts}, then reset the GPU or reboot the host.",
    ),
)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from not_looked_at(seen)
    # LCH003 names drivers that differ, where it can read them.
    is_named = len({row.driver for row in seen.of(versions.CHECK).by_rank.values()}) > 1
    for model, cards in by_model(cards_of(seen)):
        for trait in _TRAITS:
            if trait.word != "driver" or not is_named:
                yield from _unlike(seen, model, cards, trait)


def _unlike(seen: Seen[Nothing], model: str, cards: Sequence[Card], trait: Trait) -> Iterator[Finding]:
    known = {number: value for number, card in enumerate(cards) if (value := trait.of(card)) is not None}
    odd = odd_ones_out(known)
    if odd is None:
        return
    counts = Counter(known.values()).most_common()
    blamed = [cards[number] for number in odd.ranks]
    hosts = list(dict.fromkeys(card.host.name for card in blamed))
    shown = names_text([f"{value!r} ({count(number, 'GPU')})" for value, number in counts], 4)
    named = names_text([f"{card.label} has {trait.of(card)!r}" for card in blamed], 4)
    usual = str(counts[0][0] if odd.usual is None else odd.usual)
    # Consumer cards of one model come from several makers, each with a VBIOS of its own.
    from_makers = trait.word == "vbios" and "GeForce" in model
    yield seen.finding(
        trait.word,
        f"GPUs of one model have different {trait.name}s",
        f"{model}, {trait.name}: {shown}. One value is expected.{f' {named}.' if named else no_majority((), 'GPU')}",
        severity=Severity.NOTE if from_makers else None,
        ranks=tuple(sorted({rank for card in blamed for rank in card.takers})),
        hosts=hosts,
        gpus=tuple(card.health.uuid for card in blamed if card.health.uuid),
        evidence={
            "values": [value for value, _ in counts],
            "counts": [number for _, number in counts],
            "pci": [card.health.pci for card in blamed],
            "action": Action.NONE.value,
        },
        fix="Nothing to do if the cards are from several makers."
        if from_makers
        else trait.fix.format(
            usual=usual,
            hosts=names_text(hosts) or "all hosts",
            leave_out=leave_out(hosts) if hosts else "run each job on hosts with one version",
            gpu=f" -i {blamed[0].smi_id}" if len(blamed) == 1 else "",
            mode=int(usual == "on"),
        ),
    )


skip = devices.skip
CHECK: Check[Nothing] = Check(__name__, "GPU009", "gpus-alike", Stage.GPU, Scope.HOST)
