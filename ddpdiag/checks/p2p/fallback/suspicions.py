"""Why P2P between the GPUs of a host may fail: what was seen there that speaks for it, the most likely first.

P2P001 tells what an idle look finds; whether it does harm is shown only when copies or NCCL fail. Then these sentences
name the probable cause.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors, nvswitch, present
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.p2p.paths.data import Data, Pair, PathView, gpus_of, pairs_text, path_views
from ddpdiag.checks.p2p.paths.obstacles import addresses, hides_acs, redirecting, translated
from ddpdiag.checks.p2p.paths.pairs import said_of_pairs
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.paths import Level, PathGpu


def suspicions(seen: Seen[Data], host_ranks: Sequence[int]) -> tuple[str, ...]:
    """What on the host of these ranks speaks for P2P to fail, one sentence each without a full stop, likeliest first.

    Empty where nothing was found, or nothing was looked at. `seen` is that of P2P001 (`seen.of(p2p001.CHECK)`).
    """
    ranks = frozenset(host_ranks)
    view = next((view for view in path_views(seen) if ranks & {*view.host.ranks}), None)
    said = [*_fabric(seen, ranks), *_isolation(seen, ranks)]
    if view is not None:
        said += [*said_of_pairs(seen, view), *_board(view)]
    return tuple(said + list(_shared_memory(seen, ranks)))


def _fabric(seen: Seen[Data], ranks: frozenset[int]) -> Iterator[str]:
    """GPU007's own words: without the fabric manager CUDA does not start, and NVLinks carry nothing."""
    cards = [card for card in cards_of(seen.of(memory_errors.CHECK)) if ranks & {*card.host.ranks}]
    faults = [(card, fault) for card in cards for fault in nvswitch.joined(card)]
    if faults:
        card, fault = faults[0]
        more = f" (and {len(faults) - 1} more GPUs)" if len(faults) > 1 else ""
        yield f"{card.label}{more}: {fault.said}; look at nvidia-fabricmanager on {card.host.name}"


def _isolation(seen: Seen[Data], ranks: frozenset[int]) -> Iterator[str]:
    """A device that a control group hides cannot be opened by its peer; CUDA_VISIBLE_DEVICES alone does no harm."""
    rows = {rank: row for rank, row in seen.of(present.CHECK).by_rank.items() if rank in ranks}
    views = {rank: {gpu.uuid or str(gpu.index) for gpu in row.nvml.gpus} for rank, row in rows.items()}
    every = {gpu for own in views.values() for gpu in own}
    fewest = min(map(len, views.values()), default=0)
    if 0 < fewest < len(every):
        yield (
            f"a rank is shown {fewest} of {len(every)} GPUs of its host by a control group (Slurm's --gpus-per-task or "
            "--gpu-bind, or a container), so that CUDA may not open its peers' memory"
        )


def _board(view: PathView) -> Iterator[str]:
    """What lies on the PCIe ways; it does not concern NVLinks."""
    pairs = [pair for pair in view.pairs if not pair.is_linked]
    if not pairs:
        return
    # A virtual machine needs ACS.
    found = {} if view.around.virtual else redirecting(view, pairs)
    if found:
        first = next(iter(found.values()))
        yield f"ACS redirects traffic on PCI {_bridges(len(found))} {addresses(found)} (between {pairs_text(first)})"
    if view.around.virtual:
        yield (
            f"{view.host.name} is a virtual machine, in which P2P needs ACS with address translation (ATS) set up by "
            "the host"
        )
    if translated(view, pairs):
        hidden = "; whether ACS redirects is known to root only" if not found and hides_acs(view, pairs) else ""
        yield f"the IOMMU translates what the GPUs of {view.host.name} send (boot with iommu=pt){hidden}"
    elif any(_may_translate(view, gpu) for gpu in gpus_of(pairs)):
        yield f"an IOMMU is on at {view.host.name}, and the kernel does not say whether it translates"
    yield from _sockets(pairs)


def _may_translate(view: PathView, gpu: PathGpu) -> bool:
    return bool(view.around.slot(gpu.pci).grouped) and view.around.translates(gpu.pci) is None


def _sockets(pairs: Sequence[Pair]) -> Iterator[str]:
    far = [pair for pair in pairs if pair.level is Level.SYS]
    if far:
        yield f"{pairs_text(far)} are on different sockets (SYS), and not every board passes P2P between them"


def _shared_memory(seen: Seen[Data], ranks: frozenset[int]) -> Iterator[str]:
    """What NCCL takes instead of P2P, and for setting it up."""
    for finding in seen.findings_of("HST003"):
        if finding.severity is not Severity.NOTE and ranks & {*finding.ranks}:
            yield finding.message.removesuffix(".")


def _bridges(count: int) -> str:
    return "bridge" if count == 1 else "bridges"
