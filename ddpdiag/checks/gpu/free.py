"""Whether GPUs are free for a measurement: what a rate says of a GPU that another process uses is not known."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.hosts import MIB, ranks_text
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.health import GpuUsers

D = TypeVar("D")


def not_free(seen: Seen[D], uuids: Iterable[str]) -> Iterator[str]:
    """Reasons why these GPUs may not be free, by what was seen before the job touched them (GPU003, GPU008)."""
    cards = {card.health.uuid: card for card in cards_of(seen.of(memory_errors.CHECK))}
    users = {
        uuid: finding.title
        for finding in seen.findings_of("GPU008")
        if finding.code == "GPU008.in-use" and finding.severity is not Severity.NOTE
        for uuid in finding.gpus
    }
    for uuid in uuids:
        card = cards.get(uuid)
        if card is None or (card.health.memory_used_bytes is None and card.health.processes is None):
            yield f"whether another process uses {card.label if card else uuid} is not known"
        elif uuid in users or card.health.processes:
            yield f"another process uses {card.label} (GPU008)"
        elif card.health.mig:
            yield f"{card.label} is cut into slices (MIG)"
        elif len(card.takers) > 1:
            yield f"{ranks_text(card.takers)} share {card.label}"


def used_meanwhile(uses: Sequence[tuple[str, GpuUsers]]) -> Iterator[str]:
    """Reasons why GPUs, each with who used it right before a measurement, may not have been free."""
    for name, use in uses:
        if use.pids is None and use.used_bytes is None:
            yield f"whether another process uses {name} is not known"
        elif use.pids:
            yield f"{name} is used by pid {', '.join(map(str, use.pids))}"
        elif use.is_taken:
            yield f"{(use.used_bytes or 0) / MIB:.0f} MiB of {name} are in use"
