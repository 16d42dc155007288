"""Who keeps the others waiting in a training step, in findings; for TRN003."""

from collections.abc import Iterator, Mapping, Set
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.training.ddp_step.stragglers import Limits, Straggler, Why, slow_ways, stragglers
from ddpdiag.model import Finding
from ddpdiag.model.measurements import Steps
from ddpdiag.text import share_text

D = TypeVar("D")

_CLASSES = {
    Why.DATA: "it waits for its images",
    Why.COMPUTE: "it computes longer",
    Why.CORES: "something else uses its cores",
    Why.CLOCKS: "its GPU's clocks are held down",
}
_FIXES = {
    Why.DATA: "Look at the disk or file server of that host, and at the number of its DataLoader workers.",
    Why.COMPUTE: "Look at the health of that GPU or CPU, and at what else runs there.",
    Why.CORES: "Look for other processes on that host (top), at the pinning of ranks to cores, and at cgroup limits.",
    Why.CLOCKS: "Look at its temperature and power (GPU005).",
}


def step_findings(seen: Seen[D], steps: Mapping[int, Steps], limits: Limits, throttled: Set[str]) -> Iterator[Finding]:
    """Stragglers by their own work; where there are none, slow ways. `throttled` are GPUs with clocks held down."""
    found = stragglers(steps, limits)
    for own in found:
        yield _straggler(seen, own, limits, throttled)
    if not found:
        hosts = [tuple(rank for rank in ranks if rank in steps) for ranks in seen.world.hosts.values()]
        for own in slow_ways(steps, [ranks for ranks in hosts if ranks]):
            yield _network(seen, own)


def _straggler(seen: Seen[D], own: Straggler, limits: Limits, throttled: Set[str]) -> Finding:
    (rank,) = own.ranks
    gpus = devices.uuids_of(seen, own.ranks)
    why = Why.CLOCKS if own.why is Why.COMPUTE and not throttled.isdisjoint(gpus) else own.why
    return seen.finding(
        "straggler",
        f"all wait for rank {rank}: {_CLASSES[why]}",
        f"Rank {rank} on {seen.world.node_of(rank)} works {1e3 * own.own:.1f} ms in a step, the others usually "
        f"{1e3 * own.usual:.1f} ms. In {share_text(own.windows)} of the windows that is more than {limits.ratio:g} "
        "times the median of all ranks, and it waits less than most in the all-reduce.",
        ranks=(rank,),
        gpus=gpus,
        evidence={"class": why.value, "own_seconds": own.own, "usual_seconds": own.usual, "windows": own.windows},
        fix=_FIXES[why],
    )


def _network(seen: Seen[D], own: Straggler) -> Finding:
    nodes = seen.world.nodes_of(own.ranks)
    hosts = len(seen.world.hosts) > 1
    who = f"{', '.join(nodes)} ({ranks_text(own.ranks)})" if hosts else f"rank {own.ranks[0]} on {nodes[0]}"
    return seen.finding(
        "network",
        f"all wait for the network of {nodes[0] if hosts else f'rank {own.ranks[0]}'}",
        f"The ranks work alike, and {who} needs {1e3 * own.own:.1f} ms to exchange 1 MiB with either neighbour; others "
        f"need {1e3 * own.usual:.1f} ms.",
        ranks=() if hosts else own.ranks,
        nodes=nodes,
        evidence={"class": own.why.value, "own_seconds": own.own, "usual_seconds": own.usual},
        fix="Look at its links: RDZ004 measures them, `--stage fabric` (FAB001) holds it against more partners.",
    )
