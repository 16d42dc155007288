"""Variables that avoid what hangs or fails in the job's backend.

The best-known failure of multi-GPU training is that NCCL hangs while gloo works. If the all-reduce of COL001 fails or
gives wrong values over the job's backend, and works over gloo, the path between the GPUs is at fault. This check then
searches for workarounds. Every attempt is an all-reduce with checked values, in fresh processes:

1. the environment as it is; 2. without your own NCCL variables; 3. each variable below that the error names, alone;
4. the variables below, each in addition to those before it. For paths inside a host these are NCCL_P2P_DISABLE=1,
NCCL_CUMEM_HOST_ENABLE=0, NCCL_SHM_DISABLE=1, NCCL_NVLS_ENABLE=0 (first if GPUs have joined an NVSwitch fabric) and
NCCL_CUMEM_ENABLE=0 (also turns NVLS off). For paths between hosts they are NCCL_MNNVL_ENABLE=0, NCCL_NET_GDR_LEVEL=LOC,
NCCL_PXN_DISABLE=1, NCCL_NET_PLUGIN=none, NCCL_IB_DISABLE=1 (on one host as well, because NCCL starts its network there,
too), and NCCL_SOCKET_IFNAME with each interface that all hosts have.

Variables that another check suspects are tried first, and variables that cannot matter are left out. Variables that the
first working set does not need are removed. The rest must work three times before it is recommended. No search is made
for ranks that share a GPU: NCCL refuses them. If the backend works, variables that are set are listed in the report and
cost no run, and P2P004 and P2P005 judge the path and the rate.

Findings:

Causes: ACS or IOMMU between GPUs (P2P), GPUs without peer access or a container without SYS_NICE (CUMEM_HOST), a small
/dev/shm (SHM), a fabric manager that does not run (NVLS), a network that is present but does not carry RDMA (IB). A
workaround costs bandwidth: fix the cause.

Fix: `ddpdiag check --write-workaround nccl.env` writes the exports; source that file in the job until the cause is
fixed.

Confirm by hand: Run the job, or nccl-tests' `all_reduce_perf`, once as it is and once with the variables that are
shown; NCCL_DEBUG=INFO shows the path that was used.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html); NCCL user
guide, troubleshooting (docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html); NCCL issues 257 and 631
(P2P), 1838 (shared memory by cuMem), 342 (/dev/shm), 1672 (NVLS).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct, structs

from ddpdiag.bandwidth import busbw
from ddpdiag.checks.api import (
    Check,
    Contribution,
    Scope,
    Seen,
    SkipReason,
    Stage,
    blocked,
    inapplicable,
    new_trial,
    unneeded,
)
from ddpdiag.checks.blame import missing_backend_errors
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import affordable_calls
from ddpdiag.checks.findings import FindingSpec, workarounds_text
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.known_errors import explained_text
from ddpdiag.checks.p2p.fallback import conditions
from ddpdiag.checks.p2p.fallback.search import EndKind, Grouping, Override, Result, SearchEnd, SearchInput, Step, replay
from ddpdiag.checks.p2p.fallback.variables import VARIABLES, Variable
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.world import ONE_RANK_REASON, no_gpu_reason
from ddpdiag.model import Finding, Kind, Outcome, Scalar, Severity, Status, Trial
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONNECT_STEP, CONTEXT_STEP, Context
from ddpdiag.stats import Samples, samples
from ddpdiag.text import begun, count, rate_text

FINDINGS = {
    "fallback": FindingSpec(
        "the backend fails here, and works with the variables that are shown: an error, since the job fails as it is. "
        "With `--write-workaround FILE`, for a job that sources FILE, it is a warning, and training is tried with them."
    ),
    "transient": FindingSpec.warning("it failed in COL001, but not in three runs after that."),
    "nothing": FindingSpec.error("no set of variables works, or not three times.", same_item=True),
    "unfinished": FindingSpec.warning("the budget (or the run) ended before the search did."),
}

# Large enough to be bound by bandwidth: gloo's all-reduce on CPUs, and one between GPUs.
_LARGE_ON_CPU_BYTES, _LARGE_ON_GPU_BYTES = 4 << 20, 64 << 20
_SMALL_BYTES = 4
# The limit for the start of a group with new variables: a multiple of the slowest earlier start, and a minimum.
_START_FACTOR, _MIN_START_SECONDS = 3.0, 5.0
_WORST_FIRST = (Status.UNHEARD, Status.DIED, Status.RAISED, Status.HUNG)
_VERBS = {
    "hung": "hangs",
    "died": "crashes",
    "raised": "fails",
    "wrong": "gives wrong values",
    "unheard": "gives no result",
}
# NCCL's ranks open each other's memory, and copies within one process do not (transport/p2p.cc).
_COPIES_ARE_CORRECT_TEXT = (
    "Not ACS or the IOMMU: direct copies between the GPUs arrived right inside one process (P2P002). NCCL's ranks open "
    "each other's memory from process to process (CUDA IPC or cuMem): compare the IPC and PID namespaces of their "
    "containers, and look for Xid lines in `dmesg`."
)
_ACS_CODE = "P2P001.acs"


class Data(Struct, frozen=True):
    """One rank's result: the seconds of an all-reduce of `bytes` per rank, and the number of wrong elements."""

    backend: str
    ranks: int
    bytes: int
    seconds: Samples
    wrong: int


def measure(ctx: Context) -> Data:
    """Run a small and a large all-reduce with known sums, and time the large one."""
    from ddpdiag.workloads.collectives import check_all_reduce, is_true_on_any_rank, time_all_reduce
    from ddpdiag.workloads.group import process_group

    backend = str(ctx.trial.params["backend"])
    with process_group(ctx, backend) as device:
        small = check_all_reduce(ctx, _SMALL_BYTES, device)
        size = _LARGE_ON_CPU_BYTES if device.type == "cpu" else _LARGE_ON_GPU_BYTES
        large = check_all_reduce(ctx, size, device)
        seconds = [large.seconds]
        if not is_true_on_any_rank(ctx, small.wrong + large.wrong > 0):
            calls = affordable_calls(1, 6, large.seconds, ctx.end - time.monotonic())
            seconds = time_all_reduce(ctx, large.bytes, device, calls)
    return Data(backend, len(ctx.group), large.bytes, samples(seconds), small.wrong + large.wrong)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan the next step of the search; none if a rank was lost, because the result of fewer ranks may differ."""
    if len(seen.world.living_ranks) < seen.world.size or conditions.why_no_search(seen) is not None:
        return ()
    step, _ = search_progress(seen)
    return () if isinstance(step, SearchEnd) else (_trial(seen, step),)


def _trial(seen: Seen[Data], step: Step) -> Trial:
    by_host = tuple(ranks for ranks in seen.world.hosts.values() if len(ranks) > 1)
    groups = by_host if step.grouping is Grouping.EACH_HOST else (seen.world.living_ranks,)
    params = {"backend": seen.world.backend, "part": step.grouping.value, "set": step.set_name}
    params |= conditions.search_order(seen).params
    trial = new_trial(seen, groups=groups, params=params, env=step.env, fresh=True, may_fail=True)
    return structs.replace(trial, first_use_seconds=min(trial.first_use_seconds, start_limit_seconds(seen)))


def start_limit_seconds(seen: Seen[Any]) -> float:
    """The most seconds that a group with new variables may take to start, derived from the slowest earlier start."""
    timings = [outcome.timings for outcome in seen.recording.outcomes if outcome.status is Status.DONE]
    steps = (CONTEXT_STEP, COMMUNICATOR_STEP, CONNECT_STEP)
    slowest = max((sum(seconds.get(step, 0.0) for step in steps) for seconds in timings), default=0.0)
    return max(_MIN_START_SECONDS, _START_FACTOR * slowest)


def search_progress(seen: Seen[Data]) -> tuple[Step | SearchEnd, tuple[Result, ...]]:
    """The next step of the search, or the end of the search, and the results of the earlier steps."""
    if not seen.trials:
        return Step(Grouping.ALL_RANKS), ()
    results: dict[tuple[str, str], list[Result]] = {}
    for trial in seen.trials:
        outcomes = {outcome.rank: outcome for outcome in seen.outcomes if outcome.trial == trial.number}
        if not _is_truncated(seen, trial, outcomes):
            key = str(trial.params["part"]), str(trial.params["set"])
            results.setdefault(key, []).append(_result_of(seen, trial, outcomes))
    return replay(conditions.search_input(seen), results)


def _is_truncated(seen: Seen[Data], trial: Trial, outcomes: Mapping[int, Outcome]) -> bool:
    """Whether the run ended the trial early (the budget, Ctrl-C, a lost rank), so that it has no result."""
    return not outcomes.keys() >= set(trial.ranks) or any(
        o.status is Status.SKIPPED
        or (o.status is Status.UNHEARD and o.rank in seen.world.inactive_ranks)
        or (o.status is Status.HUNG and trial.is_shortened and not o.interrupted)
        for o in outcomes.values()
    )


def _result_of(seen: Seen[Data], trial: Trial, outcomes: Mapping[int, Outcome]) -> Result:
    rows = {row.place.rank: row.data for row in seen.rows if row.trial is trial}
    right_ranks = {rank for rank, data in rows.items() if not data.wrong}
    failed_groups = tuple(group for group in trial.groups if not right_ranks.issuperset(group))
    # The worst outcome of the failed groups, without ranks that the run itself stopped.
    group_outcomes = [outcomes[rank] for group in failed_groups for rank in group if rank in outcomes]
    not_stopped = [outcome for outcome in group_outcomes if not outcome.interrupted and outcome.status in _WORST_FIRST]
    worst = min(not_stopped, default=None, key=lambda outcome: _WORST_FIRST.index(outcome.status))
    rates = [busbw("all_reduce", row.bytes, row.seconds.median, row.ranks) for row in rows.values()]
    return Result(
        step=Step(Grouping(trial.params["part"])),
        failure="" if not failed_groups else worst.status.value if worst else "wrong",
        busbw=None if failed_groups else min(rates),
        failed_groups=failed_groups,
        error=explained_text(worst.error) if worst else "",
    )


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip if no variable can help (with one rank, gloo, or no GPU), or if no search is needed."""
    if seen.world.size == 1:
        return inapplicable(ONE_RANK_REASON)
    if seen.world.backend == "gloo":
        return inapplicable("the job uses gloo, which has one transport only")
    return inapplicable(no_gpu_reason(seen.world)) or unneeded(conditions.why_no_search(seen))


def job_workarounds(any_check: Seen[Any]) -> Mapping[str, str | None]:
    """The variables with which the job's backend works (None: unset it); empty if none are needed, or none is found."""
    end, _ = search_progress(any_check.of(CHECK))
    if not isinstance(end, SearchEnd) or end.kind is not EndKind.FOUND:
        return {}
    return Step(Grouping.ALL_RANKS, end.overrides).env


def skip_failing_backend(seen: Seen[Any]) -> SkipReason | None:
    """Skip another check of the backend if COL001 failed and no workaround was found."""
    return None if job_workarounds(seen) else blocked(seen.of(all_reduce.CHECK).failure_text)


def excuse(seen: Seen[Data], finding: Finding) -> str | None:
    """The reason why an error of the job's backend does not count (workarounds make the backend work), or None."""
    code, _, _ = finding.code.partition(".")
    if code == all_reduce.CHECK.code:
        is_of_backend = finding.evidence.get("backend") == seen.world.backend
    else:  # RUN003 on a trial of COL001 over the job's backend
        trials = (t for t in seen.recording.trials if t.params.get("backend") == seen.world.backend)
        trial_numbers = {trial.number for trial in trials if trial.code == all_reduce.CHECK.code}
        is_of_backend = code == "RUN003" and finding.evidence.get("trial") in trial_numbers
    works = is_of_backend and seen.options.uses_workarounds and job_workarounds(seen)
    return f"The backend works with the exports of {CHECK.code}." if works else None


def report(seen: Seen[Data]) -> Contribution:
    """Add to the report the excuses, the workarounds, and the lowest bus bandwidth of the runs with them."""
    (end, _), env = search_progress(seen), job_workarounds(seen)
    figures = {"fallback.busbw_bytes_per_s": _lowest_busbw(end.runs)} if isinstance(end, SearchEnd) and env else {}
    return Contribution(excuse=partial(excuse, seen), workarounds=env, figures=figures)


class FaultPlace(NamedTuple):
    """The fault's place in words (" between hosts"), its hosts, and their ranks if only some hosts fail alone."""

    text: str = ""
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    if not seen.trials or missing_backend_errors(seen.outcomes):
        return
    end, results = search_progress(seen)
    if isinstance(end, Step):
        yield _unfinished_finding(seen, results)
    elif end.kind is EndKind.FOUND:
        yield _workaround_finding(seen, end, results)
    elif end.kind is EndKind.TRANSIENT:
        yield _transient_finding(seen, results)
    elif end.kind is EndKind.NOTHING:
        yield _nothing_works_finding(seen, end, results)


def _workaround_finding(seen: Seen[Data], end: SearchEnd, results: Sequence[Result]) -> Finding:
    backend, env, first = seen.world.backend, Step(Grouping.ALL_RANKS, end.overrides).env, _first_failure(results)
    variables, place = workarounds_text(env), fault_place(seen, results, end, conditions.search_input(seen))
    avoided = " and ".join(dict.fromkeys(override.feature for override in end.overrides))
    gloo, successes = conditions.col001_result(seen, "gloo"), sum(run.works for run in end.runs)
    gloo_text = f" (gloo: {rate_text(gloo.busbw)})" if gloo is not None and gloo.busbw else ""
    message = (
        f"{backend} {_verb(first)}{place.text}{_error_text(first)}{'; gloo works' if gloo_text else ''}. "
        f"{begun(variables)}, which avoids {avoided}, {backend} worked in {successes} of {len(end.runs)} runs, at "
        f"{rate_text(_lowest_busbw(end.runs))} busbw{gloo_text}. {_cause_text(seen, end.overrides, place.hosts)}"
    )
    return seen.finding(
        "fallback",
        f"{backend} {_verb(first)}; {variables} it works",
        message.strip(),
        severity=Severity.WARNING if seen.options.uses_workarounds else Severity.ERROR,
        hosts=place.hosts,
        gpus=[*dict.fromkeys(devices.uuids_of(seen, place.ranks))],
        evidence=_evidence(seen, results, end),
        fix="Until the cause is fixed, add the lines below to the job script (`ddpdiag check --write-workaround FILE` "
        "writes them to a file).",
        env=env,
    )


def _transient_finding(seen: Seen[Data], results: Sequence[Result]) -> Finding:
    backend, runs = seen.world.backend, len(results)
    return seen.finding(
        "transient",
        f"{backend} failed once, then worked {count(runs, 'time')}",
        f"The all-reduce over {backend} failed in {all_reduce.CHECK.code}, then worked in {runs} of {runs} runs in new "
        "processes with the same environment. A long job will meet such a fault again.",
        evidence=_evidence(seen, results),
        fix="Run `ddpdiag check` again. On each host run `dmesg -T | grep -i -E 'xid|link'` for errors at the time of "
        "this run, and leave a host with such errors out (Slurm: `--exclude=HOST`). Without any, save checkpoints "
        "often.",
    )


def _nothing_works_finding(seen: Seen[Data], end: SearchEnd, results: Sequence[Result]) -> Finding:
    backend, first = seen.world.backend, _first_failure(results)
    place = fault_place(seen, results, end, conditions.search_input(seen))
    lines = _evidence(seen, results, end)
    sets_text = f"{begun(_tried_sets_text(results))}, and none works"
    if end.runs:
        variables = begun(workarounds_text(Step(Grouping.ALL_RANKS, end.overrides).env))
        sets_text = f"{variables} it worked {count(len(end.runs) - 1, 'time')}, and the next run {_verb(end.runs[-1])}"
    excluded = f" Not tried: {'; '.join(map(str, lines['not_tried']))}." if lines["not_tried"] else ""
    gloo = conditions.col001_result(seen, "gloo")
    return seen.finding(
        "nothing",
        f"{backend} {_verb(first)}, and no variable avoids it{' reliably' if end.runs else ''}",
        f"{backend} {_verb(first)}{place.text}{_error_text(first)}{'; gloo works' if gloo is not None else ''}. "
        f"{sets_text}.{excluded}",
        hosts=place.hosts,
        gpus=[*dict.fromkeys(devices.uuids_of(seen, place.ranks))],
        evidence=lines,
        fix="Run the job once with NCCL_DEBUG=INFO and give its output to `ddpdiag explain FILE`. Look for `dmesg -T | "
        "grep -i xid` on the hosts. Then try another version of NCCL, or of the driver.",
    )


def _unfinished_finding(seen: Seen[Data], results: Sequence[Result]) -> Finding:
    backend = seen.world.backend
    failure = f"failed in {all_reduce.CHECK.code}"
    if results and not _first_failure(results).works:
        failure = f"{_verb(_first_failure(results))}{_error_text(_first_failure(results))}"
    return seen.finding(
        "unfinished",
        "the run ended before a workaround was found",
        f"{backend} {failure}. {begun(_tried_sets_text(results))} before the run ended.",
        evidence=_evidence(seen, results),
        fix="Fix the other errors of this report first, then run again with more time (--budget "
        f"{max(180, round(3 * seen.options.budget_seconds))}).",
    )


def _first_failure(results: Sequence[Result]) -> Result:
    """The first failed run with the unchanged environment, or the first such run if none failed."""
    without_overrides = [each for each in results if each.step == Step(Grouping.ALL_RANKS)]
    return next((each for each in without_overrides if not each.works), without_overrides[0])


def _tried_sets_text(results: Sequence[Result]) -> str:
    """The number of sets in words, such as "2 sets of variables were tried"."""
    number = len({result.step.set_name for result in results if result.step.overrides})
    return f"{number or 'no'} {'set of variables was' if number == 1 else 'sets of variables were'} tried"


def _verb(result: Result) -> str:
    return _VERBS.get(result.failure, "fails")


def _error_text(result: Result) -> str:
    """The error that a rank raised, in brackets, with its meaning if that is known; empty if no rank raised one."""
    return f" ({result.error})" if result.error and result.failure == "raised" else ""


def _lowest_busbw(runs: Sequence[Result]) -> float:
    return min((run.busbw for run in runs if run.busbw is not None), default=0.0)


def _evidence(seen: Seen[Data], results: Sequence[Result], end: SearchEnd | None = None) -> dict[str, list[Scalar]]:
    """The evidence: the results of the steps in order, and the variables that were not tried, with the reasons."""
    excluded = conditions.excluded_overrides(seen)
    if end is not None and end.hosts_work:
        inside_hosts = conditions.search_input(seen).inside_hosts
        excluded |= dict.fromkeys((override.name for override in inside_hosts), "inside each host it works")
    reasons: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        reasons.setdefault(reason, []).append(next(iter(VARIABLES[name].override.env)))
    return {
        "tried": [*map(_result_line, results)],
        "not_tried": [f"{names_text(names)} ({reason})" for reason, names in reasons.items()],
    }


def _result_line(result: Result) -> str:
    grouping = "" if result.step.grouping is Grouping.ALL_RANKS else f", {result.step.grouping.value}"
    ranks = f" ({names_text([*map(ranks_text, result.failed_groups)])})" if grouping and result.failed_groups else ""
    result_text = f"works, {rate_text(result.busbw or 0.0)}" if result.works else f"{_verb(result)}{ranks}"
    return f"{result.step.set_name or 'as it is'}{grouping}: {result_text}"


def _cause_text(seen: Seen[Data], overrides: Sequence[Override], hosts: Sequence[str]) -> str:
    """A sentence on the cause that the overrides avoid: the finding of another check, else the usual cause.

    Empty if no override has a usual cause. An override that unsets a variable of the user has none. `hosts` are those
    on which the backend fails, or empty if they are not known. Findings on other hosts explain nothing.
    """
    # "IFNAME eth0" is an override for one of several interfaces, and "no NCCL_ALGO" unsets a variable of the user.
    names = [override.name.partition(" ")[0] for override in overrides]
    variable = next((VARIABLES[name] for name in names if name in VARIABLES and VARIABLES[name].cause), None)
    if variable is None:
        return ""
    is_acs_ruled_out = _ACS_CODE in variable.finding_codes and _are_copies_correct(seen, hosts)
    for finding in _cause_findings(seen, variable, hosts):
        if not (is_acs_ruled_out and finding.code == _ACS_CODE):
            return f"Probable cause: {finding.title} ({finding.code}): {finding.message}"
    return _COPIES_ARE_CORRECT_TEXT if is_acs_ruled_out else f"Usual cause: {variable.cause}."


def _cause_findings(seen: Seen[Data], variable: Variable, hosts: Sequence[str]) -> Iterator[Finding]:
    """Findings of other checks that show the cause that this variable avoids, the likeliest first."""
    for code in variable.finding_codes:
        for finding in seen.findings_of(code.partition(".")[0]):
            hosts_of_finding = finding.hosts or seen.world.host_names(finding.ranks)
            is_elsewhere = hosts and hosts_of_finding and not set(hosts) & set(hosts_of_finding)
            counts = finding.severity is not Severity.NOTE or code == _ACS_CODE
            if finding.code.startswith(code) and counts and not is_elsewhere:
                yield finding


def _are_copies_correct(seen: Seen[Data], hosts: Sequence[str]) -> bool:
    """Whether P2P002 copied directly between GPUs of `hosts` (empty: of all hosts), and all copies were correct."""
    copies = seen.of(check_by_code("P2P002"))
    ranks_by_host = [ranks for (name, _), ranks in seen.world.hosts.items() if not hosts or name in hosts]
    ranks = {rank for host_ranks in ranks_by_host for rank in host_ranks}
    pairs = [pair for row in copies.all_rows if row.place.rank in ranks for pair in row.data.pairs if pair.access]
    all_ended = all(outcome.status is Status.DONE for outcome in copies.outcomes if outcome.rank in ranks)
    return bool(pairs) and all_ended and not any(pair.wrong for pair in pairs)


def fault_place(seen: Seen[Any], results: Sequence[Result], end: SearchEnd, facts: SearchInput) -> FaultPlace:
    """The place where the backend fails, as far as the results of the search show it."""
    if len(facts.hosts) == 1:
        hosts = seen.world.host_names([facts.hosts[0][0]])
        return FaultPlace(f" on {hosts[0]}", hosts=hosts)
    if end.hosts_work:
        return FaultPlace(" between hosts and works inside each host")
    shared_hosts = sum(len(ranks) > 1 for ranks in facts.hosts)
    if not shared_hosts:
        return FaultPlace(" between hosts")
    each_host = next((each for each in results if each.step == Step(Grouping.EACH_HOST)), None)
    if each_host is None or not 0 < len(each_host.failed_groups) < shared_hosts:
        return FaultPlace()
    ranks = tuple(sorted(rank for group in each_host.failed_groups for rank in group))
    hosts = seen.world.host_names(ranks)
    return FaultPlace(f" inside {names_text(hosts)} and works inside the other hosts", hosts, ranks)


# NCCL connects its ranks in 1 to 3 s. Each set that hangs takes the whole deadline.
CHECK: Check[Data] = Check(__name__, "P2P003", "fallback", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=10)
