"""Findings about copies between GPUs and the host's memory: wrong, slower than siblings, or than the slot allows."""

from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.p2p.copies.data import Measured, View, host_ways
from ddpdiag.checks.p2p.copies.judge import Limits
from ddpdiag.model import Finding
from ddpdiag.text import rate_text, share_text

D = TypeVar("D")

# GB/s of one lane that copies reach, by generation: 55 GB/s measured on 16 lanes of generation 5 (nvbandwidth, 88 % of
# what they carry), and in proportion for the others. AzNHC's limits (21 GB/s on 16 lanes of generation 4, 48 of 5) are
# 76 % and 87 % of this.
_LANE_BYTES_PER_S = {1: 0.215e9, 2: 0.43e9, 3: 0.86e9, 4: 1.72e9, 5: 3.44e9, 6: 6.88e9}
_FIX = "Reboot; reseat the card; compare `nvidia-smi -q -d PCIE` under load, `nvidia-smi topo -m` and `numactl -H`."


class Slot(NamedTuple):
    """What a GPU's PCIe link should carry: bytes per second of copies, and in words."""

    bytes_per_s: float
    source: str


def host_wrong(seen: Seen[D], view: View) -> Iterator[Finding]:
    """What comes from the host's memory, or gets there, with other contents."""
    for index, gpu in view.gpus.items():
        for count, way in ((gpu.wrong_to, "to"), (gpu.wrong_from, "from")):
            if count:
                yield seen.finding(
                    "host-wrong",
                    "copies between a GPU and the host arrive wrong",
                    f"Copies {way} {view.full_label(index)} on {view.host.name}: {count:,} words differ from what the "
                    "other side sent; 0 expected.",
                    ranks=view.ranks_of((index,)),
                    nodes=(view.host.name,),
                    gpus=view.uuids((index,)),
                    evidence={"wrong_words": count},
                    fix=f"Do not train on {view.host.name}; test GPU and memory (`dcgmi diag -r 3`, `dmesg`).",
                )


def host_slow(seen: Seen[D], views: Sequence[View], limits: Limits) -> Iterator[Finding]:
    """GPUs below their siblings on the host, or far below their slot; each GPU and direction once."""
    for _, there, ways in host_ways(views):
        for own in ways:
            usual = _usual([other for other in ways if _alike(own, other)])
            slot = _slot(own)
            if usual is not None and own.bytes_per_s < limits.host_slow_ratio * usual:
                yield _slow(seen, own, there, Slot(usual, "its siblings reach in the median"))
            elif slot is not None and own.bytes_per_s < limits.expected_ratio * slot.bytes_per_s:
                yield _slow(seen, own, there, slot)


def _alike(one: Measured, other: Measured) -> bool:
    return one.view.gpus[one.gpu].name == other.view.gpus[other.gpu].name


def _usual(siblings: Sequence[Measured]) -> float | None:
    """The median, and of an even split the lower half: behind another socket than the memory all are slower."""
    return median_low(own.bytes_per_s for own in siblings) if len(siblings) > 2 else None


def _slot(own: Measured) -> Slot | None:
    """By the width as it is and the generation that is possible, which a card that is idle lets fall (GPU003)."""
    card = own.view.cards.get(own.gpu)
    link = card.health.pcie if card else None
    lane = _LANE_BYTES_PER_S.get(link.generation_max or 0) if link else None
    if link is None or lane is None or not link.width:
        return None
    shown = f"PCIe {link.generation_max} x{link.width}"
    return Slot(link.width * lane, f"copies over {shown} reach (from nvbandwidth's 55 GB/s over PCIe 5 x16)")


def _slow(seen: Seen[D], own: Measured, there: bool, expected: Slot) -> Finding:
    view, name = own.view, own.view.host.name
    return seen.finding(
        "host-slow",
        f"slow copies {'to' if there else 'from'} a GPU of {name}: {rate_text(own.bytes_per_s)}",
        f"{rate_text(own.bytes_per_s)} from {'the host' if there else view.full_label(own.gpu)} to "
        f"{view.full_label(own.gpu) if there else 'the host'} on {name}, "
        f"{share_text(own.bytes_per_s / expected.bytes_per_s)} of the {rate_text(expected.bytes_per_s)} that "
        f"{expected.source}. {_causes(own)}",
        ranks=view.ranks_of((own.gpu,)),
        nodes=(name,),
        gpus=view.uuids((own.gpu,)),
        evidence={
            "bytes_per_s": own.bytes_per_s,
            "expected_bytes_per_s": expected.bytes_per_s,
            "source": expected.source,
            "to_device": there,
        },
        fix=_FIX,
    )


def _causes(own: Measured) -> str:
    card = own.view.cards.get(own.gpu)
    link = card.health.pcie if card else None
    if link is not None and link.width and link.width_max and link.width < link.width_max:
        return f"Its link has {link.width} of {link.width_max} lanes (GPU004)."
    return "Causes: fewer lanes or a lower generation under load, memory of another socket, an IOMMU, a busy host."
