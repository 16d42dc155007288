"""GPUs of one model that are set up alike.

Driver, VBIOS, ECC and persistence mode should be the same for all GPUs of one model: another VBIOS may have other
clocks and power limits, another driver another NCCL path; ECC takes memory and bandwidth on older cards; without
persistence mode the driver starts the GPU anew for every first process, for about a second. Different models on one
host, or between hosts, are GPU001's findings; different drivers are LCH003's, where it can read them.

Who differs from more than half of the GPUs of that model is named; without a majority, nobody.

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

from ddpdiag.checks.api import Nothing, Seen
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu.cards import Action, Card, by_model
from ddpdiag.checks.gpu.memory_errors import health_check
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.launch import versions
from ddpdiag.model import Finding, Severity
from ddpdiag.stats import odd_ones_out

FINDINGS = {
    **dict.fromkeys(("driver", "ecc"), Explained.warning("a warning.")),
    "vbios": Explained.warning(
        "a warning, and good to know of consumer cards, which come from several makers.", same_item=True
    ),
    "persistence": Explained.note("good to know."),
    "unreadable": Explained.not_seen("nothing of a host's GPUs could be read."),
}


class Trait(NamedTuple):
    """What should be alike, how bad it is if not, and what to do."""

    word: str
    name: str
    fix: str
    severity: Severity | None = None


_DRIVER = Trait("driver", "driver", "Install one driver version on all hosts, and reboot.")
_VBIOS = Trait("vbios", "VBIOS", "Ask the vendor for one VBIOS version; compare clocks and limits.")
# Consumer cards of one model come from several makers, each with a VBIOS of its own.
_MAKERS = _VBIOS._replace(fix="Nothing, if the cards are of several makers.", severity=Severity.NOTE)
_ECC = Trait("ecc", "ECC mode", "Set it alike with `nvidia-smi -e 1`, and reset the GPU.")
_PERSISTENCE = Trait("persistence", "persistence mode", "Set `nvidia-smi -pm 1`, or let nvidia-persistenced run.")
_MODES = {True: "on", False: "off", None: None}


def judge(seen: Seen[Nothing], all_cards: Sequence[Card]) -> Iterator[Finding]:
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
    shown = ", ".join(f"{value!r} on {count}" for value, count in counts[:4])
    named = [f"{card.label} has {known[number]!r}" for number, card in zip(odd.ranks, blamed, strict=True)]
    yield seen.finding(
        trait.word,
        f"GPUs of one model differ in their {trait.name}",
        f"{model}: {trait.name} {shown} GPUs; one is expected. {names_text(named, 4) or 'No majority says which'}.",
        severity=trait.severity,
        ranks=tuple(sorted({rank for card in blamed for rank in card.takers})),
        nodes=tuple(dict.fromkeys(card.host.name for card in blamed)),
        gpus=tuple(card.health.uuid for card in blamed if card.health.uuid),
        evidence={
            "values": [value for value, _ in counts],
            "counts": [count for _, count in counts],
            "pci": [card.health.pci for card in blamed[:16]],
            "action": Action.NONE.value,
        },
        fix=trait.fix,
    )


CHECK = health_check("GPU009", "gpus-alike", __doc__, FINDINGS, judge)
