"""The GPU, or the path between two GPUs, that slows down its host.

FAB001 finds hosts that fail when tested alone: the ranks of the host are slow, or fail, among themselves. This check
finds which of these ranks is at fault, by the same procedure: pairs of ranks, then suspects again with ranks that
passed. Of up to 8 ranks all pairs are tested. All hosts to be searched are tested at the same time. Over NCCL a host is
not searched if some of its pairs of GPUs are connected differently than others (P2P001): a slower pair is no fault
there.

It searches hosts that fail when tested alone; the host of a run with one host, with `--depth standard` or
`--stage fabric`; and every host with `--depth deep` or `--select FAB002`. A host needs three ranks: with two it cannot
be decided which of them is at fault.

Findings:

Causes of a slow GPU: its clocks (GPU005), its PCIe link (GPU004), its NVLinks (GPU006), memory errors (GPU003), another
user (GPU008). Fix: exclude the host, or that GPU (CUDA_VISIBLE_DEVICES), and check the GPU itself.

Confirm by hand: Nccl-tests' `all_reduce_perf -g 1` on two ranks of the named host with
CUDA_VISIBLE_DEVICES=FAILING,HEALTHY, and the same with two healthy ones.

Sources: as FAB001.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, new_trial, optional, unneeded
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.fabric.hosts import path_finding, truncation_of, unit_finding
from ddpdiag.checks.fabric.rounds import Data, results_of
from ddpdiag.checks.fabric.search import replay, search_pairs
from ddpdiag.checks.fabric.search_data import Diagnosis, Result, Results, Round, Rules
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.paths import Pair, host_paths
from ddpdiag.checks.world import no_gpu_reason
from ddpdiag.model import Depth, Finding, Kind, Trial
from ddpdiag.text import begun, count, rate_text, share_text

FINDINGS = {
    "rank": FindingSpec("a rank, with its GPU, is slow or fails with every partner on its host.", slows_job=True),
    "path": FindingSpec.warning(
        "two ranks are slow or fail together, and pass with others: the path between the two (NVLink, PCIe) is at "
        "fault, and neither GPU."
    ),
    "systemic": FindingSpec.note(
        "half of all pairs are slow or fail (of up to 8 ranks: half of the ranks, with all others): the cause is the "
        "host, or a setting, and no single GPU."
    ),
    "clear": FindingSpec.note("no rank is slow or fails; the smallest slowdown that would have been found."),
    "unmeasured": FindingSpec.unchecked("the run ended before the search was complete."),
}

_SHOWN = 8


@lru_cache(maxsize=1)
def _state_by_host(seen: Seen[Data]) -> Mapping[tuple[int, ...], Round | Diagnosis]:
    """Return the next round or the diagnosis of each host, by its ranks. The hosts are searched independently."""
    floor = seen.setting("floor_share", fab001.floor_of(seen.world))
    rules = Rules(floor=floor, transients=seen.setting("transient_share"), has_quiet_rounds=False)
    # The first trial has pairs of all hosts that are searched.
    tested, all_hosts = set(seen.trials[0].ranks if seen.trials else ()), seen.world.hosts.values()
    hosts = [ranks for ranks in all_hosts if not tested.isdisjoint(ranks)] if tested else _hosts_to_search(seen)
    results, runnable = _results_by_host(seen, hosts), partial(_runnable, frozenset(seen.world.living_ranks))
    searches = {ranks: search_pairs(ranks, rules=rules, seed=ranks[0]) for ranks in hosts}
    return {ranks: replay(search, results[ranks[0]], runnable) for ranks, search in searches.items()}


def _results_by_host(seen: Seen[Data], hosts: Sequence[tuple[int, ...]]) -> Mapping[int, Sequence[Results]]:
    """Return the results of the pairs of each host, by its first rank: one entry for each trial with such pairs."""
    first_rank_of = {rank: ranks[0] for ranks in hosts for rank in ranks}
    by_host: dict[int, list[Results]] = {ranks[0]: [] for ranks in hosts}
    for results in results_of(seen):
        of_trial: dict[int, dict[tuple[int, ...], Result]] = {}
        for group, result in results.items():
            of_trial.setdefault(first_rank_of[group[0]], {})[group] = result
        for first_rank, own_results in of_trial.items():
            by_host[first_rank].append(own_results)
    return by_host


def _runnable(living: frozenset[int], step: Round) -> tuple[tuple[int, ...], ...]:
    """Return the pairs of a round that have lost no rank."""
    return tuple(filter(living.issuperset, step.groups))


def _hosts_to_search(seen: Seen[Data]) -> Sequence[tuple[int, ...]]:
    """Return the ranks of each host to search. A host that lost a rank is left out."""
    living, minimum = frozenset(seen.world.living_ranks), fab001.MIN_RANKS_ON_HOST
    hosts = [ranks for ranks in seen.world.hosts.values() if len(ranks) >= minimum and living.issuperset(ranks)]
    options = seen.options
    gpu_paths = seen.of(paths.CHECK)
    if seen.world.backend == "nccl" and gpu_paths.trials:
        # If some pairs of GPUs of a host are known to be joined by NVLinks or a switch and others are not, a slower
        # pair is no fault.
        mixed = {one.host.name for one in host_paths(gpu_paths) if len(set(map(_connection, one.pairs))) > 1}
        hosts = [ranks for ranks in hosts if seen.world.host_name(ranks[0]) not in mixed]
    if options.depth is Depth.DEEP or any(seen.check.code.startswith(code) for code in options.select):
        return hosts
    if len(seen.world.hosts) == 1:
        is_requested = "fabric" in options.stages or options.depth is not Depth.QUICK
        return hosts if is_requested else ()
    bad_alone = fab001.bad_alone(seen.of(fab001.CHECK))
    return [ranks for ranks in hosts if ranks in bad_alone]


def _connection(pair: Pair) -> tuple[object, ...]:
    """Return the connection of a pair: its NVLinks, which NCCL prefers, else the level of its PCIe path."""
    return tuple(path.nvlinks for path in pair.known_paths) if pair.has_nvlinks else (pair.level,)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial with the next round of every host whose search is not complete."""
    living, states = frozenset(seen.world.living_ranks), _state_by_host(seen).values()
    groups = tuple(group for state in states if isinstance(state, Round) for group in _runnable(living, state))
    if not groups:
        return ()
    params = {"backend": seen.world.backend, "phase": "inside"}
    env = fallback.job_workarounds(seen)
    return (new_trial(seen, groups=groups, params=params, env=env, may_fail=True, late_factor=fab001.LATE_FACTOR),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip if no host has enough ranks to decide which one is at fault, if nccl has no GPU, or if no host is bad.

    `--stage fabric` does not require this check, because hosts may have one rank each.
    """
    if max(map(len, seen.world.hosts.values()), default=0) < fab001.MIN_RANKS_ON_HOST:
        return optional(f"no host has {fab001.MIN_RANKS_ON_HOST} ranks")
    if seen.trials or plan(seen):
        return optional(no_gpu_reason(seen.world))
    all_hosts = "--depth deep or --select FAB002: all"
    return optional(no_gpu_reason(seen.world)) or unneeded(
        f"only hosts that fail when FAB001 tests them alone are searched ({all_hosts})"
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield the findings on the ranks at fault of each host; then a note on the hosts without such ranks."""
    if not seen.trials:
        return
    states = _state_by_host(seen)
    diagnoses = {ranks: state for ranks, state in states.items() if isinstance(state, Diagnosis)}
    if left := len(states) - len(diagnoses):
        when, fix = truncation_of(seen)
        yield seen.finding(
            "unmeasured",
            "the search for a slow rank was not completed",
            f"It ended in round {len(seen.trials)}, {when}. On {count(left, 'host')} a slow or failing rank may be "
            "missing from this report.",
            fix=fix,
            is_about_run=True,
        )
    for ranks, diagnosis in diagnoses.items():
        yield from _host_findings(seen, ranks, diagnosis)
    good = {ranks: one for ranks, one in diagnoses.items() if not (one.systemic or one.bad or one.paths)}
    if good:
        hosts = [seen.world.host_name(ranks[0]) for ranks in good]
        from_share = max(one.detectable_share for one in good.values())
        least = min(one.bar.usual for one in good.values())
        yield seen.finding(
            "clear",
            "no rank slows down its host",
            f"{names_text(hosts, _SHOWN)}: pairs of ranks usually reach {rate_text(least)} busbw"
            f"{' or more' if len(good) > 1 else ''}. A rank that is {share_text(from_share)} slower would have been "
            "found with a probability of 99 %.",
            hosts=(),
        )


def _host_findings(seen: Seen[Data], ranks: tuple[int, ...], diagnosis: Diagnosis) -> Iterator[Finding]:
    host, usual = seen.world.host_name(ranks[0]), diagnosis.bar.usual
    if diagnosis.systemic:
        yield seen.finding(
            "systemic",
            f"no single rank of {host} is at fault",
            f"{begun(diagnosis.systemic.reason)}. So the cause is the host or a setting, not one of its {len(ranks)} "
            "ranks.",
            hosts=(),
            fix=f"{begun(leave_out([host]))}, and run `ddpdiag check` on {host} alone: it tests the driver, GPUs and "
            "P2P there.",
        )
        return
    for bad in diagnosis.bad:
        gpus, partners = devices.uuids_of(seen, (bad.unit,)), tuple(dict.fromkeys(bad.partners))
        gpu = f" ({gpus[0]})" if gpus else ""
        yield unit_finding(
            seen,
            "rank",
            f"rank {bad.unit} on {host}{gpu}",
            f"{count(len(partners), 'partner')} there ({ranks_text(partners)})",
            bad,
            diagnosis.bar,
            ranks=(bad.unit,),
            gpus=gpus,
            fix=f"Run `ddpdiag check --select GPU` on {host}, which tests clocks, links and memory of this GPU. Leave "
            f"it out with CUDA_VISIBLE_DEVICES, or {leave_out([host])}."
            if gpus
            else f"{begun(leave_out([host]))}. Look there for other processes on the cores of rank {bad.unit} (`top`), "
            "and for a killed or failing process (`dmesg -T | grep -i -E 'oom|killed'`).",
        )
    fix = f"Look with `top` and `lscpu` on {host} for other processes on their cores, or cores on different sockets."
    if seen.world.gpu_count:
        fix = (
            f"On {host} run `nvidia-smi topo -m` for what connects the two GPUs, and `nvidia-smi nvlink -s`. Findings "
            "P2P001, P2P002 and GPU006 of this report have more."
        )
    for path in diagnosis.paths:
        one, other = path.pair
        yield path_finding(seen, (f"rank {one}", f"rank {other}"), f" on {host}", path, usual, fix=fix)


measure = fab001.measure
# The same values as FAB001's.
SETTINGS = {"floor_share": fab001.FLOOR, "transient_share": 0.01}
CHECK: Check[Data] = Check(__name__, "FAB002", "ranks-of-a-host", Stage.FABRIC, Scope.LIVING, Kind.TORCH, deadline=10)
