"""Ranks, as the launcher assigned them.

A job needs each rank from 0 to world size - 1 once, one world size on every rank, and one GPU for each rank.

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
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import Host, hosts_of, names_text, odd_text, ranks_text
from ddpdiag.checks.odd import no_majority, odd_finding
from ddpdiag.model import EventKind, Finding, Severity
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import begun, count

FINDINGS = {
    "duplicate": FindingSpec.error(
        "two processes have the same rank; they overwrite each other's keys in the rendezvous, and hang."
    ),
    "other-run": FindingSpec.warning("a process of another run came to this run's port; it was turned away."),
    "world-size": FindingSpec.error("ranks state different world sizes."),
    "uneven": FindingSpec.warning(
        "hosts start different numbers of processes, which torchrun accepts without a warning."
    ),
    "local-rank": FindingSpec.error("two ranks of a host have the same LOCAL_RANK, and so would use the same GPU."),
    "no-local-rank": FindingSpec(
        "RANK and WORLD_SIZE are set, but LOCAL_RANK is not. env:// does not need it, but scripts read it to choose a "
        "GPU: they stop with a KeyError, or all ranks of a host use the first GPU. ddpdiag itself counts the ranks of "
        "each host instead."
    ),
    "fewer-gpus": FindingSpec("a host shows fewer GPUs than it has ranks."),
    "version": FindingSpec.error("a rank runs another version of ddpdiag than rank 0, and cannot take part."),
    "unauthenticated": FindingSpec.note(
        "ranks of several hosts had no shared secret to authenticate with, so another process on the network could "
        "have joined or led the run."
    ),
    "idle-gpus": FindingSpec.warning("GPUs that no rank uses are not tested."),
}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from _duplicate_ranks(seen)
    yield from _other_runs(seen)
    yield from _world_sizes(seen)
    yield from _different_versions(seen)
    if seen.recording.header.authentication == "none":
        yield seen.finding(
            "unauthenticated",
            "the ranks did not authenticate each other",
            "The hosts share no secret. Any process that can reach ddpdiag's port on rank 0's host could have joined "
            "or led this run.",
            fix="On a network that you trust there is nothing to do. Otherwise make a secret with `openssl rand -hex "
            "32` and export it as DDPDIAG_TOKEN on all hosts. With `--require-auth` ddpdiag refuses to run "
            "without one.",
        )
    yield from _uneven_hosts(seen)
    for host in hosts_of(seen):
        yield from _local_ranks(seen, host)
        yield from _gpu_counts(seen, host)


def _different_versions(seen: Seen[Nothing]) -> Iterator[Finding]:
    """The finding on ranks that were rejected because their version of ddpdiag differs from rank 0's."""
    version, events = seen.recording.header.version, seen.recording.events
    other_versions = {e.rank: e.detail for e in events if e.kind is EventKind.VERSION and e.rank is not None}
    if other_versions:
        texts = [f"rank {rank} runs {other}" for rank, other in sorted(other_versions.items())]
        yield seen.finding(
            "version",
            "ranks run different versions of ddpdiag",
            f"Rank 0 runs ddpdiag {version}, but {names_text(texts)}. A rank with another version than rank 0 cannot "
            "take part.",
            ranks=tuple(sorted(other_versions)),
            evidence={"rank_0": version, "others": ", ".join(sorted(set(other_versions.values())))},
            fix=f"Install ddpdiag {version} in the Python environment of {ranks_text(tuple(other_versions))}: run "
            "`python -m pip install .` there, in the checkout that rank 0's installation comes from.",
        )


def _uneven_hosts(seen: Seen[Nothing]) -> Iterator[Finding]:
    hosts = list(hosts_of(seen))
    odd = find_odd_ranks({number: len(host.ranks) for number, host in enumerate(hosts)})
    if odd is None or not _have_all_joined(seen):
        return
    counts = odd_text(odd, missing="none", show=lambda numbers: names_text([hosts[number].name for number in numbers]))
    usual = odd.majority if isinstance(odd.majority, int) else max(len(host.ranks) for host in hosts)
    yield seen.finding(
        "uneven",
        "hosts run different numbers of ranks",
        f"The number of ranks is {counts}. The same number is expected on every host." + no_majority(odd.ranks, "host"),
        ranks=tuple(rank for number in odd.ranks for rank in hosts[number].ranks),
        fix=f"Start the same number on every host: `torchrun --nproc-per-node={usual} ...` on each, or without "
        f"torchrun `srun --nodes={len(hosts)} --ntasks={usual * len(hosts)} --ntasks-per-node={usual} ...`. If the "
        "difference is intended, there is nothing to do.",
    )


def _duplicate_ranks(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each rank number that several processes used."""
    first_by_later: dict[int, dict[str, str]] = defaultdict(dict)  # by rank: later process -> first process
    for event in seen.recording.events:
        if event.kind is EventKind.DUPLICATE and event.rank is not None:
            # A process is "host (pid 17)": `event.host` is the later one, `event.detail` the first one.
            first_by_later[event.rank][event.host or "?"] = event.detail or seen.world.host_name(event.rank)
    for rank, processes in first_by_later.items():
        first, later = next(iter(processes.values())), list(processes)
        hosts = (seen.world.host_name(rank), *(other.partition(" (")[0] for other in later))
        yield seen.finding(
            "duplicate",
            f"{'two' if len(later) == 1 else 1 + len(later)} processes joined as rank {rank}",
            f"Rank {rank} joined from {first} and again from {names_text(later)}. Each rank must be started exactly "
            "once.",
            ranks=(rank,),
            hosts=tuple(dict.fromkeys(hosts)),
            evidence={"first": first, "second": later[0]},
            fix="If the job script exports RANK or WORLD_SIZE, remove these lines; otherwise every process gets the "
            "same value. With torchrun start one torchrun per host, under Slurm with `srun --nodes=N --ntasks=N "
            "torchrun ...` (N: number of hosts).",
        )


def _other_runs(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each process of another run that connected. It blames no rank or host: the port is the cause."""
    for event in seen.recording.events:
        if event.kind is EventKind.OTHER_RUN:
            yield seen.finding(
                "other-run",
                "another run uses the same port",
                f"A process of another run of ddpdiag ({event.detail}) came to the port of this one. Both runs were "
                "started with the same MASTER_PORT. Each went on with its own ranks, but two trainings cannot use "
                "one port on the same host.",
                fix="Give each job a port of its own: `torchrun --master-port=...` or `--rdzv-endpoint=HOST:PORT`, or "
                "export another MASTER_PORT. Where both must have one port, `--run-id` tells the checks apart.",
            )


def _world_sizes(seen: Seen[Nothing]) -> Iterator[Finding]:
    """The finding on ranks that state different world sizes, including rejected ranks, whose size is in an event."""
    sizes = {rank: str(place.world_size) for rank, place in seen.world.places.items()}
    hosts = {rank: place.host for rank, place in seen.world.places.items()}
    for event in seen.recording.events:
        if event.kind is EventKind.MISMATCH and event.rank is not None:
            sizes[event.rank] = event.detail or "another"
            hosts[event.rank] = event.host or hosts.get(event.rank, "?")
    if odd := find_odd_ranks(sizes):
        yield odd_finding(
            seen,
            "world-size",
            odd,
            "ranks have different world sizes",
            f"The world size is {odd_text(odd, missing='unknown')}. It must be the same on every rank.",
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in odd.ranks)),
            fix="Start torchrun on every host with the same `--nnodes` and `--nproc-per-node`. If the job script "
            "exports WORLD_SIZE, remove that line, or export the same total number of ranks on every host.",
        )


def _local_ranks(seen: Seen[Nothing], host: Host) -> Iterator[Finding]:
    """Findings on a local rank that several ranks have, unless each sees one GPU, and on ranks without LOCAL_RANK."""
    ranks_by_local_rank: dict[int | None, list[int]] = defaultdict(list)
    for rank in host.ranks:
        ranks_by_local_rank[seen.world.arrivals[rank].place.local_rank].append(rank)
    for local_rank, ranks in ranks_by_local_rank.items():
        if local_rank is not None and len(ranks) > 1 and not _has_one_gpu_per_rank(seen, host):
            yield seen.finding(
                "local-rank",
                f"ranks on {host.name} have the same local rank",
                f"{begun(ranks_text(ranks))} on {host.name} all have local rank {local_rank}. A script that chooses "
                "its GPU by LOCAL_RANK puts them on the same GPU. Each rank of a host needs its own local rank.",
                ranks=ranks,
                fix="Remove `export LOCAL_RANK=...` from the job script; torchrun sets the variable in each process. "
                "Under srun without torchrun set it in each task: `srun bash -c 'export LOCAL_RANK=$SLURM_LOCALID; "
                "exec python train.py'`.",
            )
    if ranks_without := [rank for rank in host.ranks if "LOCAL_RANK" in seen.world.arrivals[rank].unset_variables]:
        is_crowded = host.gpu_count > 0 and len(host.ranks) > 1
        effect = " A script that does not read it puts all ranks on the first GPU." if is_crowded else ""
        yield seen.finding(
            "no-local-rank",
            f"LOCAL_RANK is not set on {host.name}",
            f"{begun(ranks_text(ranks_without))} on {host.name} joined without the variable LOCAL_RANK. A training "
            f"script that reads it stops with a KeyError.{effect}",
            severity=Severity.ERROR if is_crowded else Severity.WARNING,
            ranks=ranks_without,
            evidence={"ranks": len(host.ranks), "gpus": host.gpu_count},
            fix="Start the job with torchrun, which sets it. If you set RANK yourself, also export LOCAL_RANK: 0, 1, "
            "... on each host (under srun: `export LOCAL_RANK=$SLURM_LOCALID` in each task).",
        )


def _has_one_gpu_per_rank(seen: Seen[Nothing], host: Host) -> bool:
    """Whether each rank of the host sees exactly one GPU, as with Slurm's --gpus-per-task=1. All then use cuda:0."""
    return all(seen.world.arrivals[rank].gpus == 1 for rank in host.ranks)


def _gpu_counts(seen: Seen[Nothing], host: Host) -> Iterator[Finding]:
    """The finding on a host with more ranks than GPUs or, if all ranks joined, with GPUs that no rank uses."""
    ranks, gpus = len(host.ranks), host.gpu_count
    # Ranks that see one GPU each may see different GPUs of the PCI bus. If it is hidden (None), only GPU002 can decide.
    bus_counts = [seen.world.arrivals[rank].pci_gpus for rank in host.ranks]
    may_be_bound = _has_one_gpu_per_rank(seen, host) and any(n is None or n >= ranks for n in bus_counts)
    fix = (
        f"Start {count(gpus, 'rank')} on {host.name}: `torchrun --nproc-per-node={gpus}` (Slurm without torchrun: "
        f"`--ntasks-per-node={gpus}`)."
    )
    if 0 < gpus < ranks and not may_be_bound:
        yield seen.finding(
            "fewer-gpus",
            f"more ranks than GPUs on {host.name}",
            f"{host.name} runs {count(ranks, 'rank')}, but only {count(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} "
            "visible to them. Each rank needs its own GPU.",
            severity=Severity.WARNING if seen.options.backend == "gloo" else Severity.ERROR,
            ranks=host.ranks,
            evidence={"ranks": ranks, "gpus": gpus},
            fix=f"{fix} Or ask for {ranks} GPUs per host (`sbatch --gpus-per-node={ranks}`), and make "
            "CUDA_VISIBLE_DEVICES list all of them.",
        )
    elif gpus > ranks and _have_all_joined(seen):
        yield seen.finding(
            "idle-gpus",
            f"{count(gpus - ranks, 'GPU')} on {host.name} without a rank",
            f"{host.name} shows {gpus} GPUs to the job but runs only {count(ranks, 'rank')}. The others are neither "
            "used nor tested.",
            ranks=host.ranks,
            evidence={"ranks": ranks, "gpus": gpus},
            fix=f"{fix} If the job needs only {count(ranks, 'GPU')}, hide the others: `export "
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks)))}`.",
        )


def _have_all_joined(seen: Seen[Nothing]) -> bool:
    """Whether all ranks joined. If not, hosts may have fewer ranks only because of absent ranks, which RUN001 names."""
    return len(seen.world.arrivals) == seen.world.size


CHECK: Check[Nothing] = Check(__name__, "LCH001", "ranks", Stage.LAUNCH, Scope.WORLD)
