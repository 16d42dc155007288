"""PCIe link of each GPU.

A link that trained with fewer lanes than card and slot have copies at a fraction of its speed, to the host's memory
and, without NVLink, to other GPUs. The width does not change with load. The generation does: an idle card lets it fall
to 1, so it is only shown (`measurements` in the report), beside the best of card and slot. Replays are counted since
the driver was loaded; only their rate means something (NVIDIA allows 8 a minute), so they are evidence and no finding.

Findings and their causes:

Fix: reboot, since the link trains again; reseat the card; compare `nvidia-smi -q -d PCIE` with another host's.

Confirm by hand: `nvidia-smi --query-gpu=index,pci.bus_id,pcie.link.width.current,pcie.link.width.max --format=csv`; as
root, `lspci -vv -s ADDRESS | grep -E 'LnkCap|LnkSta'` for the card and for the port above it; `dmesg | grep 'limited
by'`.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), nvmlDeviceGetCurrPcieLinkWidth; Linux's sysfs-bus-pci
(current_link_width, max_link_width); PCI Express base specification, link training.
"""

from collections.abc import Iterator, Mapping

from ddpdiag.checks.api import Check, Contribution, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, by_model, cards_of, finding_of
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.text import share_text

FINDINGS = {
    "narrow": FindingSpec(
        "fewer lanes than card and slot could use: a card not fully seated, a riser, a bad lane. Only a note if all "
        "GPUs of that model have the same width: some boards and virtual machines are built so."
    ),
    "slot": FindingSpec.note(
        "as many lanes as the slot has, but fewer than the card has: the board's design, or the BIOS splits the slot."
    ),
}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from memory_errors.not_looked_at(seen)
    cards = cards_of(seen.of(memory_errors.CHECK))
    for _, own in by_model(cards):
        # Where all of several are alike it is the board's design (clouds give an L4 8 of its 16 lanes).
        alike = len(own) > 1 and len({card.health.pcie.width for card in own}) == 1
        for card in own:
            for fault in _faults(card, alike=alike):
                yield finding_of(seen, card, fault)


def _faults(card: Card, *, alike: bool) -> Iterator[Fault]:
    link = card.health.pcie
    if not link.width:
        return
    evidence: dict[str, Scalar | list[Scalar]] = {
        "width": link.width,
        "width_of_card_and_slot": link.width_max,
        "width_of_card": link.width_card,
        "generation": link.generation,
        "generation_of_card_and_slot": link.generation_max,
        "replays": link.replays,
    }
    if link.width_max and link.width < link.width_max:
        yield Fault(
            "narrow",
            "the PCIe link of a GPU has too few lanes",
            f"its PCIe link has {link.width} lanes (x{link.width}). Card and slot can use {link.width_max}, so copies "
            f"to and from it reach {share_text(link.width / link.width_max)} of their speed",
            Action.NONE if alike else Action.REBOOT,
            "Nothing to do if that is the design of these hosts: all GPUs of that model have this width."
            if alike
            else f"A reboot trains the link again. If it stays at x{link.width}, ask the administrator to reseat the "
            "card and to check its riser.",
            evidence,
            severity=Severity.NOTE if alike else Severity.WARNING,
        )
    elif link.width_card and link.width < link.width_card:
        title = "the PCIe slot of a GPU has fewer lanes than the card"
        said = f"its PCIe link has {link.width} lanes (x{link.width}), as many as its slot. The card can use "
        said += f"{link.width_card}"
        advice = (
            f"Nothing to do for this job. For x{link.width_card}, ask the administrator whether the BIOS splits this "
            f"slot (bifurcation), or to move the card to an x{link.width_card} slot."
        )
        yield Fault("slot", title, said, Action.NONE, advice, evidence)


def figures(seen: Seen[Nothing]) -> Mapping[str, Scalar]:
    """The narrowest link and the lowest generation of the GPUs, as they run now, and the best that is possible."""
    links = [card.health.pcie for card in cards_of(seen.of(memory_errors.CHECK))]
    found = (
        ("pcie.min_width", [link.width for link in links]),
        ("pcie.min_generation", [link.generation for link in links]),
        ("pcie.min_generation_possible", [link.generation_max for link in links]),
    )
    return {name: min(known) for name, values in found if (known := [v for v in values if v is not None])}


def report(seen: Seen[Nothing]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(figures=figures(seen))


skip = devices.skip
CHECK: Check[Nothing] = Check(__name__, "GPU004", "pcie-link", Stage.GPU, Scope.HOST)
