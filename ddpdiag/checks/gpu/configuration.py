"""Equal settings on all GPUs of one model.

Driver, VBIOS, ECC and persistence mode should be the same for all GPUs of one model: another VBIOS may have other
clocks and power limits, and another driver may make NCCL take another path; ECC takes memory and bandwidth on older
cards; without persistence mode the driver starts the GPU again for every first process, for about a second. Different
models on one host, or between hosts, are GPU001's findings; different drivers are LCH003's, where it can read them.

A GPU that differs from more than half of the GPUs of its model is named; without a majority, no GPU is named.

Findings:

Causes: a card that was replaced, a host that missed an update. Fix: bring the named GPU or host to what the others have
(`nvidia-smi -q`); `nvidia-smi -pm 1`, or let nvidia-persistenced run.

Confirm by hand: `nvidia-smi --query-gpu=name,driver_version,vbios_version,ecc.mode.current,persistence_mode
--format=csv` on two hosts, and compare.

Sources: NVIDIA driver persistence (docs.nvidia.com/deploy/driver-persistence); NVML API reference
(docs.nvidia.com/deploy/nvml-api).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, by_model, cards_of
from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.checks.launch import versions
from ddpdiag.model import Finding, Severity
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count

FINDINGS = {
    **dict.fromkeys(("driver", "ecc"), FindingSpec.warning("the driver version or the ECC mode differs (a warning).")),
    "vbios": FindingSpec.warning(
        "the VBIOS differs (a warning; a note for consumer cards, which several makers build).", same_item=True
    ),
    "persistence": FindingSpec.note("the persistence mode differs (a note)."),
    "unreadable": FindingSpec.not_seen("the settings of a host's GPUs could not be read."),
}


class Trait(NamedTuple):
    """A setting that should be equal, the severity if it is not, and what to do."""

    word: str
    name: str
    fix: str
    severity: Severity | None = None


_DRIVER = Trait(
    "driver", "driver version", "As root install driver {usual} on {hosts} and reboot. Until then {leave_out}."
)
_VBIOS = Trait(
    "vbios",
    "VBIOS version",
    "You can train. If GPU005 or GPU012 also names one of these GPUs, ask the vendor for one VBIOS version.",
)
# Consumer cards of one model come from several makers, each with a VBIOS of its own.
_MAKERS = _VBIOS._replace(fix="Nothing to do if the cards are from several makers.", severity=Severity.NOTE)
_ECC = Trait(
    "ecc", "ECC mode", "As root run `nvidia-smi{gpu} -e {mode}` on {hosts}, then reset the GPU or reboot the host."
)
_PERSISTENCE = Trait(
    "persistence",
    "persistence mode",
    "As root run `nvidia-smi -pm 1` on every host where it is off, or start nvidia-persistenced there.",
)
_MODES = {True: "on", False: "off", None: None}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from memory_errors.not_looked_at(seen)
    all_cards = cards_of(seen.of(memory_errors.CHECK))
    # LCH003 names drivers that differ, where it can read them.
    named = len({row.driver for row in seen.of(versions.CHECK).by_rank.values()}) > 1
    for model, cards in by_model(all_cards):
        if not named:
            yield from _unlike(seen, model, cards, _DRIVER, [card.driver for card in cards])
        vbios = _MAKERS if "GeForce" in model else _VBIOS
        yield from _unlike(seen, model, cards, vbios, [card.health.vbios for card in cards])
        yield from _unlike(seen, model, cards, _ECC, [_MODES[card.health.memory.ecc] for card in cards])
        yield from _unlike(seen, model, cards, _PERSISTENCE, [_MODES[card.health.persistence] for card in cards])


def _unlike(
    seen: Seen[Nothing], model: str, cards: Sequence[Card], trait: Trait, values: Sequence[str | None]
) -> Iterator[Finding]:
    known = {number: value for number, value in enumerate(values) if value is not None}
    odd = odd_ones_out(known)
    if odd is None:
        return
    counts = Counter(known.values()).most_common()
    blamed = [cards[number] for number in odd.ranks]
    shown = names_text([f"{value!r} ({count(number, 'GPU')})" for value, number in counts], 4)
    named = [f"{card.label} has {known[number]!r}" for number, card in zip(odd.ranks, blamed, strict=True)]
    if len(named) > 2:
        per_host = Counter(card.host.name for card in blamed)
        hosts = names_text([f"{count(own, 'GPU')} of {name}" for name, own in per_host.items()], 4)
        named = [f"{hosts} differ from the others"]
    yield seen.finding(
        trait.word,
        f"GPUs of one model have different {trait.name}s",
        f"{model}, {trait.name}: {shown}. One value is expected. "
        f"{' and '.join(named) or 'No majority shows which is right'}.",
        severity=trait.severity,
        ranks=tuple(sorted({rank for card in blamed for rank in card.takers})),
        hosts=tuple(dict.fromkeys(card.host.name for card in blamed)),
        gpus=tuple(card.health.uuid for card in blamed if card.health.uuid),
        evidence={
            "values": [value for value, _ in counts],
            "counts": [number for _, number in counts],
            "pci": [card.health.pci for card in blamed],
            "action": Action.NONE.value,
        },
        fix=_fix(trait, odd.usual, counts, blamed),
    )


def _fix(trait: Trait, usual: object, counts: Sequence[tuple[str, int]], blamed: Sequence[Card]) -> str:
    """The fix for the GPUs that differ; of GPUs without a majority, with all but those of the first value."""
    hosts = list(dict.fromkeys(card.host.name for card in blamed))
    wanted = str(counts[0][0] if usual is None else usual)
    return trait.fix.format(
        usual=wanted,
        hosts=names_text(hosts) or "all hosts",
        leave_out=leave_out(hosts) if hosts else "run each job on hosts with one version",
        gpu=f" -i {blamed[0].smi_id}" if len(blamed) == 1 else "",
        mode=int(wanted == "on"),
    )


skip = devices.skip
CHECK: Check[Nothing] = Check(__name__, "GPU009", "gpus-alike", Stage.GPU, Scope.HOST)
