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
from ddpdiag.checks.fabric.notes import Diagnosis, Reached, Results, Round, Rules
from ddpdiag.checks.fabric.rounds import Data, answers_of
from ddpdiag.checks.fabric.search import follow, localise
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.paths import Pair, host_paths
from ddpdiag.checks.world import without_gpu
from ddpdiag.model import Depth, Finding, Kind, Trial
from ddpdiag.text import begun, count, rate_text, share_text

FINDINGS = {
    "rank": FindingSpec("a rank, with its GPU, is slow or fails with every partner on its host.", slows=True),
    "path": FindingSpec.warning(
        "two ranks are slow or fail together, and pass with others: the path between the two (NVLink, PCIe) is at "
        "fault, and neither GPU."
    ),
    "systemic": FindingSpec.note(
        "half of all pairs are slow or fail (of up to 8 ranks: half of the ranks, with all others): the cause is the "
        "host, or a setting, and no single GPU."
    ),
    "clear": FindingSpec.note("no rank is slow or fails; the smallest slowdown that would have been found."),
    "unmeasured": FindingSpec.not_seen("the run ended before the search was complete."),
}

_SHOWN = 8


@lru_cache(maxsize=1)
def _states(seen: Seen[Data]) -> Mapping[tuple[int, ...], Round | Diagnosis]:
    """The next round or the diagnosis of each host, by its ranks. All hosts are searched at once, each separately."""
    floor = seen.number("floor_share", fab001.floor_of(seen.world))
    rules = Rules(floor=floor, transients=seen.number("transient_share"), quiet=False)
    # The first trial has pairs of all hosts that are searched.
    tried = set(seen.trials[0].ranks) if seen.trials else set()
    hosts = [ranks for ranks in seen.world.hosts.values() if not tried.isdisjoint(ranks)] if tried else _wanted(seen)
    answers, possible = _answers(seen, hosts), partial(_possible, frozenset(seen.world.living))
    return {ranks: follow(localise(ranks, rules=rules, seed=ranks[0]), answers[ranks[0]], possible) for ranks in hosts}


def _answers(seen: Seen[Data], hosts: Sequence[tuple[int, ...]]) -> Mapping[int, Sequence[Results]]:
    """The results of each host's pairs, by its first rank: an entry for each trial in which the host took part."""
    host_of = {rank: ranks[0] for ranks in hosts for rank in ranks}
    answers: dict[int, list[Results]] = {ranks[0]: [] for ranks in hosts}
    for results in answers_of(seen):
        by_host: dict[int, dict[tuple[int, ...], Reached]] = {}
        for group, reached in results.items():
            by_host.setdefault(host_of[group[0]], {})[group] = reached
        for host, reached_there in by_host.items():
            answers[host].append(reached_there)
    return answers


def _possible(living: frozenset[int], step: Round) -> tuple[tuple[int, ...], ...]:
    """The pairs of a round that have lost no rank."""
    return tuple(filter(living.issuperset, step.groups))


def _wanted(seen: Seen[Data]) -> Sequence[tuple[int, ...]]:
    """The ranks of each host to search. A host that lost a rank is left out."""
    living = frozenset(seen.world.living)
    hosts = [own for own in seen.world.hosts.values() if len(own) >= fab001.LEAST_INSIDE and living.issuperset(own)]
    options = seen.options
    known = seen.of(paths.CHECK)
    if seen.world.backend == "nccl" and known.trials:
        # If some pairs of GPUs of a host are known to be joined by NVLinks or a switch and others are not, a slower
        # pair is no fault.
        mixed = {own.host.name for own in host_paths(known) if len(set(map(_joined, own.pairs))) > 1}
        hosts = [own for own in hosts if seen.world.host_of(own[0]) not in mixed]
    if options.depth is Depth.DEEP or any(seen.check.code.startswith(code) for code in options.select):
        return hosts
    if len(seen.world.hosts) == 1:
        asked = "fabric" in options.stages or options.depth is not Depth.QUICK
        return hosts if asked else ()
    alone = fab001.bad_alone(seen.of(fab001.CHECK))
    return [ranks for ranks in hosts if ranks in alone]


def _joined(pair: Pair) -> tuple[object, ...]:
    """The connection of a pair: its NVLinks, which NCCL uses if there are any, else the level of its PCIe path."""
    return tuple(path.nvlinks for path in pair.known_paths) if pair.has_nvlinks else (pair.level,)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """The next round of every host that has one."""
    living, steps = frozenset(seen.world.living), _states(seen).values()
    groups = tuple(group for step in steps if isinstance(step, Round) for group in _possible(living, step))
    if not groups:
        return ()
    params = {"backend": seen.world.backend, "phase": "inside"}
    env = fallback.job_workarounds(seen)
    return (new_trial(seen, groups=groups, params=params, env=env, may_fail=True, late_factor=fab001.LATE_AFTER),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip unless some host has enough ranks to decide which one is at fault.

    A request of the stage `fabric` does not require this check, since hosts may have one rank each.
    """
    if max(map(len, seen.world.hosts.values()), default=0) < fab001.LEAST_INSIDE:
        return optional(f"no host has {fab001.LEAST_INSIDE} ranks")
    if seen.trials or plan(seen):
        return optional(without_gpu(seen.world))
    all_hosts = "--depth deep or --select FAB002: all"
    return optional(without_gpu(seen.world)) or unneeded(
        f"only hosts that fail when FAB001 tests them alone are searched ({all_hosts})"
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on the ranks at fault, host by host; then on the hosts without any."""
    if not seen.trials:
        return
    states = _states(seen)
    found = {ranks: state for ranks, state in states.items() if isinstance(state, Diagnosis)}
    if left := len(states) - len(found):
        when, fix = truncation_of(seen)
        yield seen.finding(
            "unmeasured",
            "the search for a slow rank was not completed",
            f"It ended in round {len(seen.trials)}, {when}. On {count(left, 'host')} a slow or failing rank may be "
            "missing from this report.",
            fix=fix,
            is_about_run=True,
        )
    for ranks, state in found.items():
        yield from _of_host(seen, ranks, state)
    good = {ranks: own for ranks, own in found.items() if not (own.systemic or own.bad or own.paths)}
    if good:
        nodes = [seen.world.host_of(ranks[0]) for ranks in good]
        from_share = max(own.found_from for own in good.values())
        least = min(own.bar.usual for own in good.values())
        yield seen.finding(
            "clear",
            "no rank slows down its host",
            f"{names_text(nodes, _SHOWN)}: pairs of ranks usually reach {rate_text(least)} busbw"
            f"{' or more' if len(good) > 1 else ''}. A rank that is {share_text(from_share)} slower would have been "
            "found with a probability of 99 %.",
            hosts=(),
        )


def _of_host(seen: Seen[Data], ranks: tuple[int, ...], found: Diagnosis) -> Iterator[Finding]:
    node, usual = seen.world.host_of(ranks[0]), found.bar.usual
    if found.systemic:
        yield seen.finding(
            "systemic",
            f"no single rank of {node} is at fault",
            f"{begun(found.systemic.reason)}. So the cause is the host or a setting, not one of its {len(ranks)} "
            "ranks.",
            hosts=(),
            fix=f"{begun(leave_out([node]))}, and run `ddpdiag check` on {node} alone: it tests the driver, GPUs and "
            "P2P there.",
        )
        return
    for bad in found.bad:
        gpus, partners = devices.uuids_of(seen, (bad.unit,)), tuple(dict.fromkeys(bad.partners))
        gpu = f" ({gpus[0]})" if gpus else ""
        yield unit_finding(
            seen,
            "rank",
            f"rank {bad.unit} on {node}{gpu}",
            f"{count(len(partners), 'partner')} there ({ranks_text(partners)})",
            bad,
            found.bar,
            ranks=(bad.unit,),
            gpus=gpus,
            fix=f"Run `ddpdiag check --select GPU` on {node}, which tests clocks, links and memory of this GPU. Leave "
            f"it out with CUDA_VISIBLE_DEVICES, or {leave_out([node])}."
            if gpus
            else f"{begun(leave_out([node]))}. Look there for other processes on the cores of rank {bad.unit} (`top`), "
            "and for a killed or failing process (`dmesg -T | grep -i -E 'oom|killed'`).",
        )
    fix = f"Look with `top` and `lscpu` on {node} for other processes on their cores, or cores on different sockets."
    if seen.world.gpus:
        fix = (
            f"On {node} run `nvidia-smi topo -m` for what connects the two GPUs, and `nvidia-smi nvlink -s`. Findings "
            "P2P001, P2P002 and GPU006 of this report have more."
        )
    for path in found.paths:
        one, other = path.pair
        yield path_finding(seen, (f"rank {one}", f"rank {other}"), f" on {node}", path, usual, fix=fix)


measure = fab001.measure
# The same values as FAB001's.
SETTINGS = {"floor_share": fab001.FLOOR, "transient_share": 0.01}
CHECK: Check[Data] = Check(__name__, "FAB002", "ranks-of-a-host", Stage.FABRIC, Scope.LIVING, Kind.TORCH, deadline=10)
