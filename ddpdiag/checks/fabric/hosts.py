"""The host, or the network path between two hosts, that slows down the job.

A slow or failing collective does not show which host is at fault. This check finds it in a few parallel rounds,
whatever the number of hosts: first every host alone (its ranks among themselves); then random pairs of hosts, across
leaf switches where the topology is known; then every suspect again with hosts that passed; then suspects that never
passed again in quiet rounds; finally an all-reduce over all healthy hosts as the proof. Of up to 8 hosts all pairs are
tested; up to 128 hosts begin with three rounds of pairs.

A pair fails if it is far below the rate that most pairs reach: by `floor_share` (over gloo 0.4 if not set: CPUs of busy
hosts vary more than network cards), or by so many standard deviations of the measured noise that fewer than 0.05
healthy hosts are blamed in a whole run. A host is blamed after three failures (four among more than 1,000 hosts), all
but one of them with healthy partners, if it is as slow in quiet rounds. A search of up to four hosts has no quiet
rounds: at most one other pair communicates in any of its rounds.

Quiet rounds tell a slow host from a network that does not carry all hosts at once, or is busy with other jobs. Only
suspects and healthy hosts communicate in them. Each of the first four has a quarter of the suspects; hosts that are
neighbours in the order of leaves and ranks are in different ones. The last two have the suspects that never passed and,
as witnesses, their nearest healthy neighbours. A single suspect takes two quiet rounds, many suspects take all six
(some 3 s each), and without suspects there are none. More than 128 hosts never take more than ten rounds of pairs in
all. Hosts whose tests do not end are not slow but failing, and are not tried again.

A host that is slow alone among fast neighbours is at fault. Hosts that are slow together share the cause, and none of
them is blamed: hosts that are slow only while others communicate; rows of slow hosts, in the order of leaves and ranks,
that are too long for chance (Slurm and most others number hosts along their cables); and, of up to 128 hosts, healthy
hosts of which many pairs are slow. Where the order of ranks says nothing about cables and no leaf is known, hosts
behind a network that is slow all the time are blamed. A slow host behind a leaf that is slow itself is not found. If a
leaf has only two hosts in this run and both are slow, it is not known whether the hosts or the leaf is slow.

A quick check of up to 16 hosts skips this check if the all-reduce over all ranks succeeded, or if RDZ004 has found what
is wrong between the hosts: use `--depth standard` or `--stage fabric`. Hosts that were lost before take no part; the
variables that P2P003 found are set here, too. A pair counts as not ended if it takes more than four times the time in
which half of the pairs ended, and 5 s at least.

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
from typing import TypeVar

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import affordable_calls
from ddpdiag.checks.fabric.rounds import Data, FabricState
from ddpdiag.checks.fabric.search import BadAlone, SearchResult, median_rate
from ddpdiag.checks.fabric.search_data import (
    BadPath,
    BadUnit,
    CongestedPart,
    Phase,
    RateLimits,
    Result,
    Rules,
    SystemicFault,
    slower_share,
)
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text
from ddpdiag.checks.matrix import pair_matrix
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.world import World, no_gpu_reason
from ddpdiag.model import Depth, EventKind, Finding, Kind, Matrix, Scalar, Severity, Trial
from ddpdiag.model.recording import SIGNAL_EVENTS
from ddpdiag.model.trial import Context
from ddpdiag.stats import samples
from ddpdiag.text import begun, count, rate_text, share_text

FINDINGS = {
    "alone": FindingSpec("a host is slow or fails when tested alone; it takes no part in the pairs.", slows_job=True),
    "host": FindingSpec(
        "a host is slow or fails with every partner. Hosts that are only slow are listed in the report (JSON: "
        "hosts.slow).",
        slows_job=True,
    ),
    "path": FindingSpec.warning("two hosts are slow or fail together, and pass with others: neither host is blamed."),
    "systemic": FindingSpec(
        "half of all pairs (of up to 8 hosts: half of the hosts with all others) are far below `least_bytes_per_s` or "
        "the best pairs, or do not end: the configuration is at fault, not a host."
    ),
    "congested": FindingSpec(
        "pairs that share a part of the network are slow: only while other hosts communicate (a warning), or always. "
        "The hosts behind it are listed (JSON: evidence.hosts), and none is blamed."
    ),
    "undecided": FindingSpec.warning(
        "hosts are slow, and no other one shows whether they are at fault or what they share: there are two hosts "
        "only, or two are all of their leaf."
    ),
    "unproven": FindingSpec.error("the hosts pass in pairs, but the all-reduce over all of them fails."),
    "together": FindingSpec.warning("the hosts pass in pairs, but the all-reduce over all of them is slow."),
    "clear": FindingSpec.note("no other host is slow or fails; the smallest slowdown that would have been found."),
    "unmeasured": FindingSpec.unchecked("the run ended before the search was complete."),
    "topology": FindingSpec.note("the file of `--topology` does not name all hosts."),
}

_SMALL_BYTES = 64 << 10
# A test should send enough to be bound by bandwidth, and end soon on a slow link as well.
_LARGE_BYTES, _LARGE_ON_GPU_BYTES = 4 << 20, 64 << 20
_CALL_SECONDS = 0.1
_MAX_CALLS = 6
# A smaller slowdown is harmless, although in a quiet fleet 2 % may be many standard deviations.
FLOOR, _FLOOR_ON_CPU = 0.05, 0.4
# A quick check does not search among so few hosts.
_SMALL_WORLD = 16
_MIN_HOSTS_TO_PAIR, _MIN_HOSTS_TO_BLAME = 2, 3
_ONE_HOST = "there is one host only"
# With two ranks it cannot be decided which of them is at fault.
MIN_RANKS_ON_HOST = 3
# A pair that takes so many times as long as half of the pairs did is ended.
LATE_FACTOR = 4.0
# Cluster checks as a rule warn below 80 % of the usual rate and fail below 50 %.
_ERROR_SHARE = 0.5


def measure(ctx: Context) -> Data:
    """Time all-reduces with known sums in this rank's group, as large as the time allows."""
    from ddpdiag.workloads.collectives import check_all_reduce, is_true_on_any_rank, minimum_over_ranks, time_all_reduce
    from ddpdiag.workloads.group import process_group

    with process_group(ctx, str(ctx.trial.params["backend"])) as device:
        first = check_all_reduce(ctx, _SMALL_BYTES, device)
        most = _LARGE_BYTES if device.type == "cpu" else _LARGE_ON_GPU_BYTES
        affords = int(first.bytes * _CALL_SECONDS / max(first.seconds, 1e-6))
        size = minimum_over_ranks(ctx, max(_SMALL_BYTES, min(most, affords)), device)
        large = check_all_reduce(ctx, size, device)
        wrong, seconds = first.wrong + large.wrong, [large.seconds]
        if is_true_on_any_rank(ctx, wrong > 0):
            wrong = max(wrong, 1)
        else:
            calls = affordable_calls(1, _MAX_CALLS, large.seconds, ctx.end - time.monotonic())
            seconds = time_all_reduce(ctx, large.bytes, device, calls)
    return Data(len(ctx.group), large.bytes, samples(seconds), wrong)


@lru_cache(maxsize=1)
def _fabric(seen: Seen[Data]) -> FabricState:
    """Return the state of the search. It is computed once for each view."""
    rules = Rules(
        floor=seen.setting("floor_share", floor_of(seen.world)),
        transients=seen.setting("transient_share"),
        failures=int(seen.setting("rounds")) or None,
        least=seen.setting("least_bytes_per_s"),
    )
    return FabricState(seen, rules)


def floor_of(world: World) -> float:
    """Return the smallest slowdown, as a share, that is reported. It is larger over gloo, as busy CPUs vary more."""
    return FLOOR if world.backend == "nccl" else _FLOOR_ON_CPU


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    if _no_search_reason(seen) is not None:
        return ()
    fabric = _fabric(seen)
    step = fabric.state
    if isinstance(step, SearchResult):
        return ()
    params = {"backend": seen.world.backend, "phase": step.phase.value}
    if fabric.absent_hosts:
        params["absent"] = " ".join(map(str, sorted(fabric.absent_hosts)))
    env = fallback.job_workarounds(seen)
    late = LATE_FACTOR if step.phase is not Phase.VERIFY else None
    return (new_trial(seen, groups=fabric.runnable(step), params=params, env=env, may_fail=True, late_factor=late),)


def _no_search_reason(seen: Seen[Data]) -> str | None:
    """Return why this check does not search, or None. A quick check of a few hosts relies on RDZ004's test of links."""
    is_requested = "fabric" in seen.options.stages or any(code.startswith("FAB") for code in seen.options.select)
    hosts = len(seen.world.hosts)
    if hosts == 1:
        return _ONE_HOST
    if is_requested or seen.options.depth is not Depth.QUICK or hosts > _SMALL_WORLD:
        return None
    if hosts < _MIN_HOSTS_TO_BLAME or seen.of(all_reduce.CHECK).failure_text is None:
        return f"pairs of {hosts} hosts are tested with --depth standard, or --stage fabric"
    if any(finding.severity is not Severity.NOTE for finding in seen.findings_of("RDZ004")):
        return "RDZ004 has found what is wrong between the hosts"
    return None


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip if no two hosts can take part, if nccl has no GPU, or for the reason that `_no_search_reason` returns."""
    world, living = seen.world, frozenset(seen.world.living_ranks)
    left = sum(not living.isdisjoint(ranks) for ranks in world.hosts.values())
    if len(world.hosts) > 1 and left < _MIN_HOSTS_TO_PAIR:
        return inapplicable(f"{left} of {len(world.hosts)} hosts is left")
    # FAB002 searches among the ranks of a single host, unless this check was selected by its code.
    named = any("FAB001".startswith(code) for code in world.options.select)
    if len(world.hosts) == 1 and (named or max(map(len, world.hosts.values())) < MIN_RANKS_ON_HOST):
        return inapplicable(_ONE_HOST)
    return inapplicable(no_gpu_reason(world)) or unneeded(_no_search_reason(seen))


def bad_alone(seen: Seen[Data]) -> frozenset[tuple[int, ...]]:
    """Return the ranks of each host that is slow or fails when tested alone."""
    fabric = _fabric(seen)
    alone = fabric.state.alone if seen.trials and isinstance(fabric.state, SearchResult) else ()
    return frozenset(fabric.fleet.ranks[each.unit] for each in alone)


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """Return the figures of a complete search, such as the usual rate of pairs and the smallest detectable slowdown."""
    state = _fabric(seen).state if seen.trials else None
    if not isinstance(state, SearchResult):
        return {}
    found, proof = state.diagnosis, state.proof
    return {
        "fabric.pair_busbw_bytes_per_s": found.bar.usual or None,
        "fabric.noise_share": found.bar.sigma,
        "fabric.found_from_share": found.detectable_share,
        "fabric.rounds": found.rounds,
        "fabric.proof_busbw_bytes_per_s": proof.rate if proof is not None else None,
    }


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """Return the column with the best rate that the rank's host reached in any pair."""
    fabric = _fabric(seen)
    best: dict[int, float] = {}
    for (host, _), rate in fabric.pair_rates.items():
        if rate > 0:
            best[host] = max(best.get(host, 0.0), rate)
    return {rank: {"host_busbw_bytes_per_s": best[host]} for host in best for rank in fabric.fleet.ranks[host]}


def matrices(seen: Seen[Data]) -> Sequence[Matrix]:
    """Return the table of the rates of pairs of hosts, if any were measured."""
    fabric = _fabric(seen)
    matrix = pair_matrix("fab.pairs", "All-reduce between two hosts, busbw", fabric.fleet.names, fabric.pair_rates)
    return () if matrix is None else (matrix,)


def report(seen: Seen[Data]) -> Contribution:
    return Contribution(columns=columns(seen), figures=figures(seen), matrices=tuple(matrices(seen)))


D = TypeVar("D")

_SHOWN = 8
_FAILURES = {
    "hung": "did not end in time",
    "died": "crashed",
    "raised": "failed",
    "wrong": "gave wrong values",
    "unheard": "gave no result",
    "lost": "lost contact",
    "skipped": "was ended early",
}


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield findings on the hosts and paths at fault, if any, and on the smallest slowdown that was detectable."""
    if not seen.trials:
        return
    fabric = _fabric(seen)
    state = fabric.state
    if not isinstance(state, SearchResult):
        when, fix = truncation_of(seen)
        yield seen.finding(
            "unmeasured",
            "the search for a slow host was not completed",
            f"It ended after {count(len(fabric.results), 'round')}, {when}. A slow or failing host may be missing from "
            "this report.",
            fix=fix,
            is_about_run=True,
        )
        return
    found = state.diagnosis
    yield from _topology_finding(seen, fabric)
    for alone in state.alone:
        yield _alone_finding(seen, fabric, alone)
    if found.systemic:
        yield _systemic_finding(seen, fabric, found.systemic, found.bar)
        return
    for part in found.congested:
        yield _congested_finding(seen, fabric, part, found.bar)
    yield from (_host_finding(seen, fabric, bad, found.bar) for bad in found.bad)
    yield from (_host_path_finding(seen, fabric, path, found.bar.usual) for path in found.paths)
    yield from _final_findings(seen, fabric, state)


def _congested_finding(seen: Seen[D], fabric: FabricState, part: CongestedPart, limits: RateLimits) -> Finding:
    names = [fabric.fleet.names[unit] for unit in part.units]
    where = f"{'between' if part.is_between else 'behind'} {names_text(names)}"
    loaded, quiet = median_rate(part.loaded_tests), median_rate(part.quiet_tests)
    is_eased = quiet is not None and quiet >= limits.least
    without = "They were not tested" if quiet is None else f"They reach {rate_text(quiet)}"
    known = f"{part.domain}: " if part.domain is not None else ""
    pairs = f"Pairs of one of these {len(names)} hosts with another host"
    if part.is_between:
        pairs = "The slow pairs of these hosts"
    return seen.finding(
        "congested",
        f"{known}the network {where} is slow" + (" while other hosts communicate" if is_eased else ""),
        f"{pairs} usually reach {rate_text(loaded or 0.0)} busbw while other hosts communicate. {without} without "
        f"other traffic. Other pairs reach {rate_text(limits.usual)}. They share a part of the network that is "
        + ("overloaded; no host is at fault." if is_eased else "slow; no host is blamed."),
        severity=Severity.WARNING if is_eased or quiet is None else severity_of_tests(part.quiet_tests, limits.usual),
        hosts=(),
        evidence={
            "hosts": [*names],
            "domain": str(part.domain) if part.domain is not None else None,
            "loaded_bytes_per_s": loaded,
            "quiet_bytes_per_s": quiet,
            "usual_bytes_per_s": limits.usual,
        },
        fix="Ask the network team what these hosts share (leaf switch, uplinks), and for its load from other jobs, "
        "links that are down, and counters of drops, ECN marks and PFC pauses. No host needs to be replaced.",
    )


def _alone_finding(seen: Seen[D], fabric: FabricState, alone: BadAlone) -> Finding:
    name, ranks = fabric.fleet.names[alone.unit], fabric.fleet.ranks[alone.unit]
    return seen.finding(
        "alone",
        f"{name} {'fails' if slower_share(alone.tests, alone.usual) is None else 'is slow'} when tested alone",
        f"{name} was tested alone {count(len(alone.tests), 'time')}, by an all-reduce among its "
        f"{count(len(ranks), 'rank')}. Test by test: {tests_text(alone.tests)}."
        + (f" Other hosts usually reach {rate_text(alone.usual)} busbw." if alone.usual else ""),
        severity=severity_of_tests(alone.tests, alone.usual),
        hosts=(name,),
        evidence=tests_evidence(alone.tests, alone.usual),
        fix=f"{begun(leave_out([name]))}. Then run `ddpdiag check` on {name} alone: it tests clocks, memory, GPUs and "
        "other users there.",
    )


def _host_finding(seen: Seen[D], fabric: FabricState, bad: BadUnit, limits: RateLimits) -> Finding:
    name, *partners = (fabric.fleet.names[unit] for unit in (bad.unit, *bad.partners))
    return unit_finding(
        seen,
        "host",
        name,
        f"{count(len(set(partners)), 'partner')} ({names_text([*dict.fromkeys(partners)], _SHOWN)})",
        bad,
        limits,
        hosts=(name,),
        fix=f"{begun(leave_out([name]))}. Then compare its network links with another host's (`ethtool INTERFACE`, "
        f"`ibstat`), and run `ddpdiag check` on {name} alone.",
    )


def unit_finding(
    seen: Seen[D],
    word: str,
    name: str,
    partners: str,
    bad: BadUnit,
    limits: RateLimits,
    *,
    fix: str,
    hosts: Sequence[str] | None = None,
    ranks: Sequence[int] = (),
    gpus: Sequence[str] = (),
) -> Finding:
    """Create the finding that a host or rank (`word`) is slow or fails with every partner."""
    share = slower_share(bad.tests, limits.usual)
    quiet = ", also while others do not communicate" if bad.quiet_tests else ""
    return seen.finding(
        word,
        f"{name} {'fails with every partner' if share is None else f'is slower than the other {word}s'}",
        f"With each of {partners}{quiet} {name} {'fails' if share is None else f'is {share_text(share)} slower'}: "
        f"{tests_text(bad.tests)}. Pairs of {word}s usually reach {rate_text(limits.usual)} busbw, and these partners "
        "reach it with others.",
        severity=severity_of_tests(bad.tests, limits.usual),
        hosts=hosts,
        ranks=ranks,
        gpus=gpus,
        evidence=tests_evidence(bad.tests, limits.usual),
        fix=fix,
    )


def tests_evidence(tests: Sequence[Result], usual: float) -> dict[str, Scalar | list[Scalar]]:
    """Return evidence: the rates in bytes per second (None: the test failed), and how much slower the best one is."""
    slower = {} if (share := slower_share(tests, usual)) is None else {"slower_share": share}
    rates: list[Scalar] = [tested.rate for tested in tests[:_SHOWN]]
    return {"rates_bytes_per_s": rates, "usual_bytes_per_s": usual, **slower}


def _host_path_finding(seen: Seen[D], fabric: FabricState, path: BadPath, usual: float) -> Finding:
    one, other = (fabric.fleet.names[unit] for unit in path.pair)
    fix = f"Ask the network team about switches and cables between {one} and {other}. Until then {leave_out([other])}."
    return path_finding(seen, (one, other), "", path, usual, fix=fix)


def path_finding(seen: Seen[D], ends: tuple[str, str], where: str, path: BadPath, usual: float, *, fix: str) -> Finding:
    """Create the finding that the path between two hosts, or two ranks on a host (`where`), is slow or fails."""
    one, other = ends
    share = slower_share(path.tests, usual)
    return seen.finding(
        "path",
        f"the path between {one} and {other}{where} {'fails' if share is None else 'is slow'}",
        f"In {count(len(path.tests), 'test')} {one} and {other}{where} "
        f"{'fail' if share is None else f'are {share_text(share)} slower'} with each other: {tests_text(path.tests)}. "
        f"Each of them passes with other partners ({rate_text(usual)} busbw), so the path between the two is at fault.",
        hosts=(),
        links=(f"{one} -> {other}", f"{other} -> {one}"),
        evidence=tests_evidence(path.tests, usual),
        fix=fix,
    )


def _systemic_finding(seen: Seen[D], fabric: FabricState, systemic: SystemicFault, limits: RateLimits) -> Finding:
    if len(fabric.units) <= 2:
        return seen.finding(
            "undecided",
            "two hosts are slow or fail together; which one is at fault is not known",
            f"The all-reduce between {' and '.join(fabric.fleet.names[:2])} is too slow, or does not end: "
            f"{systemic.reason}.",
            fix="Run again with a third host; the pairs with it show which of the two is at fault.",
        )
    # If no pair ended there is no usual rate.
    usual = f"; pairs that end usually reach {rate_text(limits.usual)} busbw" if limits.usual else ""
    return seen.finding(
        "systemic",
        "most pairs of hosts are slow or fail: no host is blamed",
        f"{begun(systemic.reason)}{usual}. So many failures have a cause that the hosts share, such as a setting, "
        "the wrong interface, a fallback to TCP sockets, or a switch.",
        severity=Severity.ERROR if systemic.most_failed or limits.usual < limits.least else Severity.WARNING,
        evidence={"usual_bytes_per_s": limits.usual} if limits.usual else {},
        fix="Run `ddpdiag check --select RDZ003,P2P004`, which shows the interface and the transport in use. Set "
        "NCCL_SOCKET_IFNAME (gloo: GLOO_SOCKET_IFNAME) or NCCL_IB_HCA to the fast network, then run again.",
    )


def _final_findings(seen: Seen[D], fabric: FabricState, state: SearchResult) -> Iterator[Finding]:
    """Yield findings on undecided hosts and on a failed all-reduce over all healthy hosts. If no host is undecided,
    also yield that no other host is slow."""
    found, proof = state.diagnosis, state.proof
    if open_ones := [fabric.fleet.names[unit] for unit in found.undecided]:
        yield seen.finding(
            "undecided",
            "hosts are slow; whether they or what they share is at fault is not known",
            f"{names_text(open_ones, _SHOWN)} are slow in {count(found.rounds, 'round')}. No healthy host of this run "
            "is behind the same leaf switch, so either these hosts are slow or the switch is.",
            evidence={"hosts": [*open_ones]},
            fix="Run again with a third host behind that switch; it shows whether the hosts or the switch are slow.",
        )
    if proof is not None and proof.rate is None and proof.failure != "lost":  # RUN002 names the lost
        yield seen.finding(
            "unproven",
            "hosts that pass in pairs fail all together",
            f"The all-reduce over all {len(found.cleared)} healthy hosts {_FAILURES.get(proof.failure, 'failed')}, "
            "although each of them passes in pairs. The cause appears in large groups only, such as a limit of open "
            "files (`ulimit -n`), too little memory, or a switch.",
            fix="Run again with half of the hosts, to find the number of hosts at which it fails. RUN003 of this "
            "report has the step at which the ranks stopped.",
        )
    if open_ones:
        return
    behind = {unit for part in found.congested for unit in part.units} - found.cleared
    bad = {alone.unit for alone in state.alone} | {own.unit for own in found.bad} | behind
    proven = proof.rate if proof is not None else None
    rate = f", {rate_text(proven)} busbw all together" if proven else ""
    if proven and proven < found.bar.least and not found.congested:  # else the cause is named already
        # The ring of all goes over more switches than a pair, so no host is blamed for it.
        yield seen.finding(
            "together",
            "hosts that pass in pairs are slow all together",
            f"The all-reduce over all {len(found.cleared)} healthy hosts reaches {rate_text(proven)} busbw, pairs of "
            f"them usually {rate_text(found.bar.usual)}, in the better of two tests. Other traffic slowed both "
            "down, or the network between many hosts is slower than between two.",
            evidence={"together_bytes_per_s": proven, "usual_bytes_per_s": found.bar.usual},
            fix="Run it again. If all together are slow again, ask the network team about the uplinks of the leaf "
            "switches, and try NCCL_ALGO=Ring or NCCL_ALGO=Tree.",
        )
    detectable = "With only two hosts a slowdown of one of them cannot be found: there is no third one to compare with."
    if len(fabric.units) > 2:
        slower = share_text(found.detectable_share)
        detectable = f"A host that is {slower} slower would have been found with a probability of 99 %."
    yield seen.finding(
        "clear",
        "no further host is slow or fails in pairs" if bad else "no host is slow or fails in pairs",
        f"{count(len(fabric.units) - len(bad), 'other host' if bad else 'host')} in {count(found.rounds, 'round')} of "
        f"pairs: usually {rate_text(found.bar.usual)} busbw{rate}. {detectable}",
    )


def _topology_finding(seen: Seen[D], fabric: FabricState) -> Iterator[Finding]:
    names, known = fabric.fleet.names, fabric.user_domains
    missing = [name for unit, name in enumerate(names) if unit not in known]
    if not seen.options.topology or not missing:
        return
    yield seen.finding(
        "topology",
        f"--topology names {len(known)} of {len(names)} hosts",
        f"The file does not name {names_text(missing, _SHOWN)}. Each of these hosts was tested as if it had a leaf "
        "switch of its own."
        if known
        else f"The file names none of the hosts of this run ({names_text(missing, _SHOWN)}), so it was not used.",
        evidence={"hosts": [*missing]},
        fix="Add these hosts to the file, with their names as in this report.",
    )


def severity_of_tests(tests: Sequence[Result], usual: float) -> Severity:
    """Return ERROR if a test failed, or the best one is far below the usual rate; else WARNING."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    bad = len(known) < len(tests) or max(known, default=0.0) < _ERROR_SHARE * usual
    return Severity.ERROR if bad else Severity.WARNING


def tests_text(tests: Sequence[Result]) -> str:
    """Describe the results of tests, each different result once."""
    return ", ".join(
        dict.fromkeys(
            rate_text(tested.rate) if tested.rate is not None else _FAILURES.get(tested.failure, "failed")
            for tested in tests[:_SHOWN]
        )
    )


def truncation_of(seen: Seen[D]) -> tuple[str, str]:
    """Return the reason why the search was cut short ("when the run ended"), and the fix.

    A signal is named first, then lack of time, then lost ranks, because an earlier reason explains the later ones.
    """
    events = seen.recording.events
    if any(event.kind in SIGNAL_EVENTS for event in events):
        return "when a signal ended the run (RUN004)", "Run it again to the end."
    if any(event.kind is EventKind.BUDGET for event in events) or any(trial.is_shortened for trial in seen.trials):
        budget = seen.options.budget_seconds
        return f"when the time budget of {budget:g} s was used up", f"Run again with --budget {2 * budget:g}."
    if lost := sorted(e.rank for e in events if e.kind is EventKind.LOST and e.rank is not None):
        fix = f"Fix the finding of RUN002 first, or run again without {ranks_text(lost)}."
        return f"when {ranks_text(lost)} stopped responding (RUN002)", fix
    return "when the run ended", "Run it again to the end."


# least_bytes_per_s: as RDZ004. transient_share, rounds (0: by the number of hosts): see checks/fabric/search_data.py.
SETTINGS = {"floor_share": FLOOR, "transient_share": 0.01, "rounds": 0, "least_bytes_per_s": 30e6}
CHECK: Check[Data] = Check(__name__, "FAB001", "hosts", Stage.FABRIC, Scope.LIVING, Kind.TORCH, deadline=10)
