"""PCIe link of each GPU.

A link that trained with fewer lanes than card and slot have copies at a fraction of its speed, to the host's memory
and, without NVLink, to other GPUs. The width does not change with load. The generation does (an idle
card lets it fall to 1), so it is no finding.

Findings and their causes:

Fix: reboot, since the link trains again; reseat the card; compare `nvidia-smi -q -d PCIE` with another host's.

Confirm by hand: `nvidia-smi --query-gpu=index,pci.bus_id,pcie.link.width.current,pcie.link.width.max --format=csv`; as
root, `lspci -vv -s ADDRESS | grep -E 'LnkCap|LnkSta'` for the card and for the port above it; `dmesg | grep 'limited
by'`.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), nvmlDeviceGetCurrPcieLinkWidth; Linux's sysfs-bus-pci
(current_link_width, max_link_width); PCI Express base specification, link training.
"""

from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import cards
from ddpdiag.checks.gpu.cards import Action, Card, Fault, by_model, card_findings, cards_of
from ddpdiag.model import Finding
from ddpdiag.text import share_text

FINDINGS = {
    "narrow": FindingSpec.warning(
        "fewer lanes than card and slot could use: a card not fully seated, a riser, a bad lane. No finding where all "
        "GPUs of that model have the same width: some boards and virtual machines are built so."
    ),
}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    # If several GPUs of a model all have the same width, the board is built so (clouds give an L4 8 of its 16 lanes).
    uniform_models = {
        model
        for model, cards in by_model(cards_of(seen))
        if len(cards) > 1 and len({card.health.pcie.width for card in cards}) == 1
    }
    yield from card_findings(seen, lambda card: () if card.health.name in uniform_models else _narrow_faults(card))


def _narrow_faults(card: Card) -> Iterator[Fault]:
    link = card.health.pcie
    if not link.width or not link.width_max or link.width >= link.width_max:
        return
    yield Fault(
        "narrow",
        "the PCIe link of a GPU has too few lanes",
        f"its PCIe link has {link.width} lanes (x{link.width}). Card and slot can use {link.width_max}, so copies to "
        f"and from it reach {share_text(link.width / link.width_max)} of their speed",
        Action.REBOOT,
        f"A reboot trains the link again. If it stays at x{link.width}, ask the administrator to reseat the card and "
        "to check its riser.",
        {"width": link.width, "width_of_card_and_slot": link.width_max},
    )


skip = cards.skip
CHECK: Check[Nothing] = Check(__name__, "GPU004", "pcie-link", Stage.GPU, Scope.HOST)
