"""Ranks, as the launcher assigned them.

A job needs each rank from 0 to world size - 1 once, one world size on every rank, and one GPU for each rank. Two
processes with the same rank overwrite each other's rendezvous keys and hang. If hosts start different numbers of
processes, the launcher was started with different options. GPUs without a rank are neither used nor tested.

Findings:

Causes: a launcher inside a launcher (torchrun under `srun --ntasks-per-node=8`), RANK or WORLD_SIZE left over from an
older job, `--nproc-per-node` that does not match the host. Ranks that never joined are findings of RUN001.

Fix: start every rank once, with one world size, and as many ranks on a host as it has GPUs.

Confirm by hand: In every process, `env | grep -E 'RANK|WORLD_SIZE|MASTER|SLURM_(PROCID|LOCALID|NTASKS)'`, and compare;
`ps -ef | grep torchrun` shows a launcher that runs twice.

Sources: torch/distributed/rendezvous.py (env://) and elastic/agent/server/local_elastic_agent.py (the variables that
torchrun sets); srun(1), output environment variables.
"""

from collections import defaultdict
from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.hosts import Host, hosts_of, names_text, ranks_text
from ddpdiag.model import EventKind, Finding, Severity
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count

FINDINGS = {
    "duplicate": Explained.error(
        "two processes have the same rank; they overwrite each other's keys in the rendezvous, and hang."
    ),
    "world-size": Explained.error("ranks state different world sizes."),
    "uneven": Explained.warning(
        "hosts start different numbers of processes, which torchrun accepts without a warning."
    ),
    "local-rank": Explained.error("two ranks of a host have the same LOCAL_RANK, and so would use the same GPU."),
    "no-local-rank": Explained(
        "RANK and WORLD_SIZE are set, but LOCAL_RANK is not. env:// does not need it, but scripts read it to choose a "
        "GPU: they stop with a KeyError, or all ranks of a host use the first GPU. ddpdiag itself counts the ranks of "
        "each host instead."
    ),
    "fewer-gpus": Explained("a host shows fewer GPUs than it has ranks."),
    "version": Explained.error("a rank runs another version of ddpdiag than rank 0, and cannot take part."),
    "unauthenticated": Explained.note(
        "ranks of several hosts had no shared secret to authenticate with, so another process on the network could "
        "have joined or led the run."
    ),
    "idle-gpus": Explained.warning("GPUs that no rank uses are not tested."),
}

_SHOWN = 8  # of the processes that joined as one rank


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """By how the ranks arrived; nothing is measured."""
    yield from _duplicates(seen)
    yield from _world_sizes(seen)
    own, events = seen.recording.header.version, seen.recording.events
    if others := {e.rank: e.detail for e in events if e.kind is EventKind.VERSION and e.rank is not None}:
        older = ", ".join(f"rank {rank} runs {version}" for rank, version in sorted(others.items())[:_SHOWN])
        yield seen.finding(
            "version",
            "ranks run different versions of ddpdiag",
            f"rank 0 runs ddpdiag {own}, but {older}; one version on every rank is expected.",
            ranks=tuple(sorted(others)),
            evidence={"rank_0": own, "others": ", ".join(sorted(set(others.values())))},
            fix=f"Install ddpdiag {own} in the environment of these ranks.",
        )
    if seen.recording.header.secret == "none":
        yield seen.finding(
            "unauthenticated",
            "the ranks did not authenticate each other",
            "no secret was shared by all hosts, so any process that reaches rank 0's port could have joined or led "
            "this run.",
            fix="Set DDPDIAG_TOKEN to one secret on all hosts; --require-auth refuses to run without one.",
        )
    hosts = {host.ranks[0]: host for host in hosts_of(seen)}
    odd = odd_ones_out({first: len(host.ranks) for first, host in hosts.items()})
    if odd is not None and _complete(seen):
        groups = sorted(odd.groups.items(), key=lambda group: len(group[1]))
        counts = [f"{number} on {names_text([hosts[first].name for first in firsts])}" for number, firsts in groups]
        yield seen.finding(
            "uneven",
            "hosts run different numbers of ranks",
            f"The numbers of ranks differ: {', '.join(counts)}; the same number is expected on all hosts.",
            ranks=tuple(rank for first in odd.ranks for rank in hosts[first].ranks),
            nodes=tuple(hosts[first].name for first in odd.ranks),
            fix="Start every host with the same --nproc-per-node (Slurm: --ntasks-per-node).",
        )
    for host in hosts_of(seen):
        yield from _local_ranks(seen, host)
        yield from _gpus(seen, host)


def _duplicates(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each rank, however often it joined."""
    again: dict[int, dict[str, str]] = defaultdict(dict)  # of each rank, the first process by each later one
    for event in seen.recording.events:
        if event.kind is EventKind.DUPLICATE and event.rank is not None:
            # The event tells the processes apart, as "host (pid 17)".
            again[event.rank][event.node or "?"] = event.detail or seen.world.node_of(event.rank)
    for rank, processes in again.items():
        first, others = next(iter(processes.values())), list(processes)
        more = f" and {len(others) - _SHOWN} more processes" if len(others) > _SHOWN else ""
        nodes = (seen.world.node_of(rank), *(other.partition(" (")[0] for other in others[:_SHOWN]))
        yield seen.finding(
            "duplicate",
            "a rank joined twice",
            f"rank {rank} joined from {first} and again from {', '.join(others[:_SHOWN])}{more}; "
            "each rank must join once.",
            ranks=(rank,),
            nodes=tuple(dict.fromkeys(nodes)),
            evidence={"first": first, "second": others[0]},
            fix="Start one launcher per host (torchrun under srun on 4 hosts: srun --nodes=4 --ntasks=4 "
            "torchrun ...), and unset RANK and WORLD_SIZE left over from another job.",
        )


def _world_sizes(seen: Seen[Nothing]) -> Iterator[Finding]:
    """World sizes that arrivals state, and those (in the event's detail) of ranks that were turned away for theirs."""
    stated = {rank: str(place.world_size) for rank, place in seen.world.places.items()}
    nodes = {rank: place.node for rank, place in seen.world.places.items()}
    for event in seen.recording.events:
        if event.kind is EventKind.MISMATCH and event.rank is not None:
            stated[event.rank] = event.detail or "another"
            nodes[event.rank] = event.node or nodes.get(event.rank, "?")
    if odd := odd_ones_out(stated):
        stated_sizes = "; ".join(f"{ranks_text(ranks)}: {value}" for value, ranks in odd.groups.items())
        yield seen.finding(
            "world-size",
            "ranks state different world sizes",
            f"the world size must be the same on every rank, but it is not ({stated_sizes})"
            + ("." if odd.ranks else "; no majority, so no rank is blamed."),
            ranks=odd.ranks,
            nodes=tuple(dict.fromkeys(nodes[rank] for rank in odd.ranks)),
            fix="Start every host with the same --nnodes and --nproc-per-node, and unset an exported WORLD_SIZE.",
        )


def _local_ranks(seen: Seen[Nothing], host: Host) -> Iterator[Finding]:
    """Local ranks that several ranks of the host have, or some have not."""
    holders: dict[int | None, list[int]] = defaultdict(list)
    for rank in host.ranks:
        holders[seen.world.arrivals[rank].place.local_rank].append(rank)
    for local_rank, ranks in holders.items():
        if local_rank is not None and len(ranks) > 1 and not _one_gpu_each(seen, host):
            yield seen.finding(
                "local-rank",
                "ranks of a host have the same local rank",
                f"{host.name}: {ranks_text(ranks)} all have local rank {local_rank}, so they use the same GPU; "
                "each rank of a host needs a local rank of its own.",
                ranks=ranks,
                fix="Let the launcher set LOCAL_RANK; do not export it in the job script.",
            )
    if without := [rank for rank in host.ranks if "LOCAL_RANK" in seen.world.arrivals[rank].lacks]:
        crowded = host.gpus > 0 and len(host.ranks) > 1
        one_gpu = f", and a script that does not read it puts {len(host.ranks)} ranks on the first of {host.gpus} GPUs"
        yield seen.finding(
            "no-local-rank",
            "LOCAL_RANK is not set",
            f"{host.name}: {ranks_text(without)} joined without LOCAL_RANK; a script that reads it stops with a "
            f"KeyError{one_gpu if crowded else ''}.",
            severity=Severity.ERROR if crowded else Severity.WARNING,
            ranks=without,
            evidence={"ranks": len(host.ranks), "gpus": host.gpus},
            fix="Start the job with torchrun, or export LOCAL_RANK (0, 1, ... on each host; under srun "
            "$SLURM_LOCALID) in addition to RANK.",
        )


def _one_gpu_each(seen: Seen[Nothing], host: Host) -> bool:
    """Does the launcher show one GPU to each rank? Then all use cuda:0; GPU002 checks whether these are distinct.

    Such as torchrun --virtual-local-rank, which gives every rank local rank 0, or Slurm's --gpus-per-task=1.
    """
    return all(seen.world.arrivals[rank].gpus == 1 for rank in host.ranks)


def _gpus(seen: Seen[Nothing], host: Host) -> Iterator[Finding]:
    ranks, gpus = len(host.ranks), host.gpus
    if gpus == 0 or ranks == gpus:
        return
    processes = "1 process" if gpus == 1 else f"{gpus} processes"
    if ranks > gpus:
        # Where a container hides the bus, only GPU002 can decide.
        buses = [seen.world.arrivals[rank].pci_gpus for rank in host.ranks]
        if _one_gpu_each(seen, host) and (None in buses or max(bus or 0 for bus in buses) >= ranks):
            return
        yield seen.finding(
            "fewer-gpus",
            "more ranks than GPUs",
            f"{host.name}: {ranks} ranks, {count(gpus, 'visible GPU')}; each rank needs a GPU of its own.",
            severity=Severity.WARNING if seen.options.backend == "gloo" else Severity.ERROR,
            ranks=host.ranks,
            evidence={"ranks": ranks, "gpus": gpus},
            fix=f"Start {processes} on {host.name}, or make more GPUs visible (CUDA_VISIBLE_DEVICES, --gres).",
        )
    elif _complete(seen):
        yield seen.finding(
            "idle-gpus",
            "GPUs without a rank",
            f"{host.name}: {ranks} of {gpus} GPUs tested; {count(gpus - ranks, 'visible GPU')} "
            f"{'has' if gpus - ranks == 1 else 'have'} no rank.",
            ranks=host.ranks,
            evidence={"ranks": ranks, "gpus": gpus},
            fix=f"Start {processes} on {host.name} (--nproc-per-node={gpus}; srun --ntasks-per-node={gpus}), "
            "or hide the other GPUs.",
        )


def _complete(seen: Seen[Nothing]) -> bool:
    """Did all ranks join? Otherwise counts only reflect the absent, which RUN001 names."""
    return len(seen.world.arrivals) == seen.world.size


CHECK = Check(
    "LCH001",
    "ranks",
    Stage.LAUNCH,
    Scope.WORLD,
    manual=__doc__ or "",
    findings=FINDINGS,
    judge=judge,
    data=Nothing,
)
