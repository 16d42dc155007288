"""Which host, or which network path between two hosts, slows down the job.

A slow or failing collective does not show which host is at fault. This check finds it in a few parallel rounds,
whatever the number of hosts: first every host alone (its ranks among themselves); then random pairs of hosts, across
leaf switches where the topology is known; then every suspect again with hosts that passed; then suspects that never
passed again in quiet rounds; finally an all-reduce over all healthy hosts as the proof. Of up to 8 hosts all pairs are
tested; up to 128 hosts begin with three rounds of pairs.

A pair fails if it is far below the rate that most pairs reach: by `floor_share` (over gloo 0.4 if not set: CPUs of busy
hosts vary more than network cards), or by so many standard deviations of the measured noise that fewer than 0.05
healthy hosts are blamed in a whole run. A host is blamed after three failures (four among more than 1,000 hosts), all
but one of them with healthy partners (more than 1,000 hosts take four rounds), if it is as slow in quiet rounds (of up
to four hosts there are none: at most one other pair communicates in any round).

Quiet rounds tell a slow host from a network that does not carry all hosts at once, or is busy with other jobs. Only
suspects and healthy partners communicate. Four rounds have a quarter of the suspects each, and hosts that are next to
each other are in different ones; two more rounds have those that still fail, and hosts next to them as witnesses. They
cost two rounds for one suspect and six for many (some 3 s each), never more than ten rounds of pairs among more than
128 hosts, and none without suspects. Hosts whose tests do not end are not slow but failing, and are not tried again.

A host that is slow alone among fast neighbours is at fault. Hosts that are slow together share the cause, and none of
them is blamed: hosts that are slow only while others communicate; hosts of a leaf of which half of the witnesses are
slow as well; without known leaves, rows of slow hosts in the order of ranks that are no chance (Slurm and most others
number hosts along their cables); and, of up to 128 hosts, two groups whose pairs are slow across and not inside. Where
the order of ranks says nothing about cables and no leaf is known, hosts behind a network that is slow all the time
are blamed. A slow host behind a leaf that is slow itself is not found. Of two hosts that are all of their leaf it is
not known whether they are slow or the leaf.

A quick check of up to 16 hosts skips this check if the all-reduce over all ranks succeeded, or if RDZ004 has found what
is wrong between the hosts: use `--depth standard` or `--stage fabric`. Hosts that were lost before take no part; the
variables that P2P003 found are set here, too. A pair that takes more than four times as long as half of the pairs did,
and 5 s at least, did not end.

Findings:

The leaf switch of a host is taken from `--topology FILE`, else from Slurm (SLURM_TOPOLOGY_ADDR). The column host busbw
is the best rate that a host reached with any other one: `--write-healthy-hosts` lists the fastest first.

Causes of a slow host: a cable or port with errors, a card in a slow slot, a throttled GPU or CPU, another user's job.
Fix: exclude the named hosts (`--write-failing-hosts`), and check their links and the hosts themselves.

Confirm by hand: Nccl-tests' `all_reduce_perf` on a named host with a healthy partner, and the same on two healthy
hosts: `srun -w FAILING,HEALTHY ...`, `srun -w HEALTHY1,HEALTHY2 ...`.

Sources: group testing by random pairs, as in SuperBench (Xiong et al., USENIX ATC 2024) and DLRover's network check;
Student's t and the normal quantile for the share of healthy hosts that may be blamed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import affordable
from ddpdiag.checks.fabric.hosts.data import Data, FabricState
from ddpdiag.checks.fabric.hosts.judge import findings
from ddpdiag.checks.fabric.notes import Phase
from ddpdiag.checks.fabric.rules import Rules
from ddpdiag.checks.fabric.search import Located
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.matrix import pair_matrix
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.world import World, without_gpu
from ddpdiag.model import Depth, Finding, Kind, Matrix, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.stats import samples

FINDINGS = {
    "alone": FindingSpec("a host is slow or fails when tested alone; it takes no part in the pairs.", slows=True),
    "node": FindingSpec(
        "a host is slow or fails with every partner. Hosts that are only slow are listed in the report (JSON: "
        "hosts.slow).",
        slows=True,
    ),
    "path": FindingSpec.warning("two hosts are slow or fail together, and pass with others: neither host is blamed."),
    "domain": FindingSpec.error(
        "so many hosts of one leaf or rack are slow or fail that the leaf or rack itself is at fault."
    ),
    "systemic": FindingSpec(
        "half of all pairs (of up to 8 hosts: half of the hosts with all others) are far below the expected rate, or "
        "do not end: the configuration is at fault, not a host."
    ),
    "congested": FindingSpec(
        "pairs that share a part of the network are slow: only while other hosts communicate (a warning), or always. "
        "The hosts behind it are listed (JSON: evidence.hosts), and none is blamed."
    ),
    "undecided": FindingSpec.warning(
        "two hosts are slow, and no third one tells whether they are at fault or what they share: there are two hosts "
        "only, or both are all of their leaf."
    ),
    "transient": FindingSpec.note("pairs that failed and then passed, or that failed when no round was left."),
    "unproven": FindingSpec.error("the hosts pass in pairs, but the all-reduce over all of them fails."),
    "clear": FindingSpec.note("no other host is slow or fails; the smallest slowdown that would have been found."),
    "unmeasured": FindingSpec.not_seen("the run ended before the search was complete."),
    "topology": FindingSpec.note("the file of `--topology` does not name all hosts."),
}

_SMALL_BYTES = 64 << 10
# A test should move enough to be bound by bandwidth, and be over soon on a slow link as well.
_LARGE_BYTES, _LARGE_ON_GPU_BYTES = 4 << 20, 64 << 20
_CALL_SECONDS = 0.1
_CALLS = 6
# Below so much a deviation is harmless: in a quiet fleet 2 % may be many standard deviations.
FLOOR, _FLOOR_ON_CPU = 0.05, 0.4
# A quick check leaves out so few hosts.
_SMALL_WORLD = 16
_LEAST_TO_PAIR, _LEAST_TO_BLAME = 2, 3
_ONE_HOST = "there is one host only"
# Of two ranks it cannot be told which of them is at fault.
LEAST_INSIDE = 3
# A pair that takes so many times as long as half of them did will not end.
LATE_AFTER = 4.0


def measure(ctx: Context) -> Data:
    """An all-reduce with known sums in this rank's group, as large as is affordable; the shortest call counts."""
    from ddpdiag.workloads.collectives import check_all_reduce, fewest, on_any_rank, time_all_reduce
    from ddpdiag.workloads.devices import gpu_limits
    from ddpdiag.workloads.group import process_group

    with process_group(ctx, str(ctx.trial.params["backend"])) as device:
        first = check_all_reduce(ctx, _SMALL_BYTES, device)
        most = _LARGE_BYTES if device.type == "cpu" else _LARGE_ON_GPU_BYTES
        affords = int(first.bytes * _CALL_SECONDS / max(first.seconds, 1e-6))
        size = fewest(ctx, max(_SMALL_BYTES, min(most, affords)), device)
        large = check_all_reduce(ctx, size, device)
        wrong, seconds = first.wrong + large.wrong, [large.seconds]
        if on_any_rank(ctx, wrong > 0):
            wrong = max(wrong, 1)
        else:
            calls = affordable(1, _CALLS, large.seconds, ctx.end - time.monotonic())
            seconds = time_all_reduce(ctx, large.bytes, device, calls)
        limits = gpu_limits(device) if device.type == "cuda" and ctx.place.local_rank == 0 else None
    return Data(len(ctx.group), large.bytes, samples(seconds), wrong, limits)


@lru_cache(maxsize=1)
def _fabric(seen: Seen[Data]) -> FabricState:
    """The fabric, worked out once for the check's parts."""
    rules = Rules(
        floor=seen.number("floor_share", floor_of(seen.world)),
        transients=seen.number("transient_share"),
        rounds=int(seen.number("rounds")) or None,
        least=seen.number("least_bytes_per_s"),
        cover=int(seen.number("cover")) if seen.options.depth is Depth.DEEP else 0,
    )
    return FabricState(seen, rules)


def floor_of(world: World) -> float:
    """Less is no matter, however quiet a fleet is and however sure one may be. CPUs of busy hosts vary more."""
    return FLOOR if world.backend == "nccl" else _FLOOR_ON_CPU


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    if _why_not(seen) is not None:
        return ()
    fabric = _fabric(seen)
    step = fabric.state
    if isinstance(step, Located):
        return ()
    params = {"backend": seen.world.backend, "phase": step.phase.value}
    if fabric.absent:
        params["absent"] = " ".join(map(str, sorted(fabric.absent)))
    env = fallback.job_workarounds(seen)
    late = LATE_AFTER if step.phase is not Phase.VERIFY else None
    return (new_trial(seen, groups=fabric.possible(step), params=params, env=env, may_fail=True, late_after=late),)


def _why_not(seen: Seen[Data]) -> str | None:
    """Why a quick check does not look for anybody, or None: RDZ004 has tried the links between a few hosts already."""
    asked = "fabric" in seen.options.stages or any(code.startswith("FAB") for code in seen.options.select)
    hosts = len(seen.world.hosts)
    if hosts == 1:
        return _ONE_HOST
    if asked or seen.options.depth is not Depth.QUICK or hosts > _SMALL_WORLD:
        return None
    if hosts < _LEAST_TO_BLAME or seen.of(all_reduce.CHECK).failure_text is None:
        return f"pairs of {hosts} hosts are tested with --depth standard, or --stage fabric"
    if any(finding.severity is not Severity.NOTE for finding in seen.findings_of("RDZ004")):
        return "RDZ004 has found what is wrong between the hosts"
    return None


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Within one host there is no pair of hosts."""
    world, living = seen.world, frozenset(seen.world.living)
    left = sum(not living.isdisjoint(ranks) for ranks in world.hosts.values())
    if len(world.hosts) > 1 and left < _LEAST_TO_PAIR:
        return inapplicable(f"{left} of {len(world.hosts)} hosts is left")
    # Among the ranks of the only host FAB002 looks, unless this check was asked for by its name.
    named = any("FAB001".startswith(code) for code in world.options.select)
    if len(world.hosts) == 1 and (named or max(map(len, world.hosts.values())) < LEAST_INSIDE):
        return inapplicable(_ONE_HOST)
    return inapplicable(without_gpu(world)) or unneeded(_why_not(seen))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    return findings(seen, _fabric(seen))


def bad_alone(seen: Seen[Data]) -> frozenset[tuple[int, ...]]:
    """The ranks of each host that is bad by itself."""
    fabric = _fabric(seen)
    alone = fabric.state.alone if seen.trials and isinstance(fabric.state, Located) else ()
    return frozenset(fabric.fleet.ranks[own.unit] for own in alone)


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """What most pairs reach, the noise of it, and the smallest slowdown that would have been found."""
    state = _fabric(seen).state if seen.trials else None
    if not isinstance(state, Located):
        return {}
    found, proof = state.diagnosis, state.proof
    return {
        "fabric.pair_busbw_bytes_per_s": found.bar.usual or None,
        "fabric.noise_share": found.bar.sigma,
        "fabric.found_from_share": found.found_from,
        "fabric.rounds": found.rounds,
        "fabric.proof_busbw_bytes_per_s": proof.rate if proof is not None else None,
    }


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """The best that each rank's host reached in a pair."""
    fabric = _fabric(seen)
    best: dict[int, float] = {}
    for (host, _), rate in fabric.pair_rates.items():
        if rate > 0:
            best[host] = max(best.get(host, 0.0), rate)
    return {rank: {"host_busbw_bytes_per_s": best[host]} for host in best for rank in fabric.fleet.ranks[host]}


def matrices(seen: Seen[Data]) -> Sequence[Matrix]:
    """What pairs of hosts reached."""
    fabric = _fabric(seen)
    matrix = pair_matrix("fab.pairs", "All-reduce between two hosts, busbw", fabric.fleet.names, fabric.pair_rates)
    return () if matrix is None else (matrix,)


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(
        columns=columns(seen), figures=figures(seen), matrices=tuple(matrices(seen)), follows=(all_reduce.CHECK.code,)
    )


# least_bytes_per_s: as RDZ004. transient_share, rounds (0: by the number of hosts), cover (with --depth deep): see
# ddpdiag/checks/fabric/rules.py. error_share: cluster checks as a rule warn below 80 % and fail below 50 %.
SETTINGS = {
    "floor_share": FLOOR,
    "transient_share": 0.01,
    "rounds": 0,
    "cover": 2,
    "least_bytes_per_s": 30e6,
    "error_share": 0.5,
}
CHECK: Check[Data] = Check(__name__, "FAB001", "hosts", Stage.FABRIC, Scope.LIVING, Kind.TORCH, deadline=10)
