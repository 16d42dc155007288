"""Variables that avoid what hangs or fails in the job's backend.

The best-known failure of multi-GPU training is that NCCL hangs while gloo works. Where the all-reduce of COL001 works
over gloo and not over the job's backend, or gives wrong values, the path between the GPUs is at fault, and this check
searches for workarounds. Every attempt is an all-reduce with checked values, in fresh processes:

1. the environment as it is; 2. without your own NCCL variables; 3. each variable below that the error
names, alone; then, one on top of the other, inside a host: NCCL_P2P_DISABLE=1, NCCL_CUMEM_HOST_ENABLE=0,
NCCL_SHM_DISABLE=1, NCCL_NVLS_ENABLE=0 (first where GPUs have joined an NVSwitch fabric), NCCL_CUMEM_ENABLE=0 (which
turns NVLS off as well); between hosts: NCCL_MNNVL_ENABLE=0, NCCL_NET_GDR_LEVEL=LOC, NCCL_PXN_DISABLE=1,
NCCL_NET_PLUGIN=none, NCCL_IB_DISABLE=1 (on one host as well, where NCCL starts its network, too), and
NCCL_SOCKET_IFNAME with each interface that all hosts have. Variables that another check suspects are tried first, and
those that cannot matter here are left out. Each variable of the first set that works is left out once, and removed if
it is not needed. The rest must work three times before it is recommended. No search is made for ranks that share a GPU:
NCCL refuses them. Variables that are set while the backend works are listed in the report and cost no run; P2P004 and
P2P005 judge the path and the rate.

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
from ddpdiag.checks.blame import without_backend
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import affordable
from ddpdiag.checks.findings import FindingSpec, workarounds_text
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.known_errors import with_meaning
from ddpdiag.checks.p2p.fallback.conditions import before, ground_of, moot, search_order, skipped_here
from ddpdiag.checks.p2p.fallback.members import VARIABLES, Variable
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Member, Part, Step, Tried, replay
from ddpdiag.checks.p2p.fallback.search import Kind as End
from ddpdiag.checks.registry import by_code
from ddpdiag.checks.world import ONE_RANK, World, without_gpu
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
# A group with a new set of variables may take this many times the slowest start before, and at least so many seconds.
_PATIENCE, _LEAST_FIRST_USE = 3.0, 5.0
_WORST_FIRST = (Status.UNHEARD, Status.DIED, Status.RAISED, Status.HUNG)
_VERBS = {
    "hung": "hangs",
    "died": "crashes",
    "raised": "fails",
    "wrong": "gives wrong values",
    "unheard": "gives no result",
}
# NCCL's ranks open each other's memory, and copies within one process do not (transport/p2p.cc).
_COPIES_ARE_RIGHT = (
    "Not ACS or the IOMMU: direct copies between the GPUs arrived right inside one process (P2P002). NCCL's ranks open "
    "each other's memory from process to process (CUDA IPC or cuMem): compare the IPC and PID namespaces of their "
    "containers, and look for Xid lines in `dmesg`."
)
_ACS = "P2P001.acs"


class Data(Struct, frozen=True):
    """This rank's seconds for one all-reduce of `bytes` per rank, and the elements that were wrong."""

    backend: str
    ranks: int
    bytes: int
    seconds: Samples
    wrong: int


def measure(ctx: Context) -> Data:
    """Run a small and a large all-reduce with known sums, and time the large one."""
    from ddpdiag.workloads.collectives import check_all_reduce, on_any_rank, time_all_reduce
    from ddpdiag.workloads.group import process_group

    backend = str(ctx.trial.params["backend"])
    with process_group(ctx, backend) as device:
        small = check_all_reduce(ctx, _SMALL_BYTES, device)
        size = _LARGE_ON_CPU_BYTES if device.type == "cpu" else _LARGE_ON_GPU_BYTES
        large = check_all_reduce(ctx, size, device)
        seconds = [large.seconds]
        if not on_any_rank(ctx, small.wrong + large.wrong > 0):
            calls = affordable(1, 6, large.seconds, ctx.end - time.monotonic())
            seconds = time_all_reduce(ctx, large.bytes, device, calls)
    return Data(backend, len(ctx.group), large.bytes, samples(seconds), small.wrong + large.wrong)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """The next step of the search; none if a rank was lost, because the result of fewer ranks may differ."""
    if len(seen.world.living) < seen.world.size or moot(seen) is not None:
        return ()
    step, _ = progress_of(seen)
    return () if isinstance(step, Ended) else (_trial(seen, step),)


def _trial(seen: Seen[Data], step: Step) -> Trial:
    groups = {
        Part.WHOLE: (seen.world.living,),
        Part.HOSTS: tuple(ranks for ranks in seen.world.hosts.values() if len(ranks) > 1),
    }[step.part]
    params = {"backend": seen.world.backend, "part": step.part.value, "set": step.set, **search_order(seen).params}
    trial = new_trial(seen, groups=groups, params=params, env=step.env, fresh=True, may_fail=True)
    return structs.replace(trial, first_use_seconds=min(trial.first_use_seconds, first_use_seconds(seen)))


def first_use_seconds(seen: Seen[Any]) -> float:
    """Seconds that a group with a new set may take to start, from the starts before: a set that hangs takes all."""
    done = [outcome.timings for outcome in seen.recording.outcomes if outcome.status is Status.DONE]
    steps = (CONTEXT_STEP, COMMUNICATOR_STEP, CONNECT_STEP)
    slowest = max((sum(own.get(step, 0.0) for step in steps) for own in done), default=0.0)
    return max(_LEAST_FIRST_USE, _PATIENCE * slowest)


def progress_of(seen: Seen[Data]) -> tuple[Step | Ended, tuple[Tried, ...]]:
    """The next step of the search, or its end; and the results of the steps before."""
    if not seen.trials:
        return Step(Part.WHOLE), ()
    answers: dict[tuple[str, str], list[Tried]] = {}
    for trial in seen.trials:
        outcomes = {outcome.rank: outcome for outcome in seen.outcomes if outcome.trial == trial.number}
        if not _is_truncated(seen, trial, outcomes):
            key = str(trial.params["part"]), str(trial.params["set"])
            answers.setdefault(key, []).append(_result_of(seen, trial, outcomes))
    return replay(ground_of(seen), answers)


def _is_truncated(seen: Seen[Data], trial: Trial, outcomes: Mapping[int, Outcome]) -> bool:
    """Whether the run cut the trial short (the budget, Ctrl-C, a lost rank), so that it is no result."""
    if not outcomes.keys() >= set(trial.ranks):
        return True
    return any(
        o.status is Status.SKIPPED
        or (o.status is Status.UNHEARD and o.rank in seen.world.out)
        or (o.status is Status.HUNG and trial.hurried and not o.told)
        for o in outcomes.values()
    )


def _result_of(seen: Seen[Data], trial: Trial, outcomes: Mapping[int, Outcome]) -> Tried:
    """The result of one trial of the search."""
    rows = {row.place.rank: row.data for row in seen.rows if row.trial is trial}
    failed = tuple(group for group in trial.groups if any(rank not in rows or rows[rank].wrong for rank in group))
    # The worst outcome among the ranks that the run did not stop.
    ended = [outcomes[rank] for group in failed for rank in group if rank in outcomes]
    not_stopped = [outcome for outcome in ended if not outcome.told and outcome.status in _WORST_FIRST]
    worst = min(not_stopped, default=None, key=lambda outcome: _WORST_FIRST.index(outcome.status))
    rates = [busbw("all_reduce", row.bytes, row.seconds.median, row.ranks) for row in rows.values()]
    return Tried(
        step=Step(Part(trial.params["part"])),
        how="" if not failed else worst.status.value if worst else "wrong",
        busbw=None if failed else min(rates),
        failed=failed,
        error=with_meaning(worst.error) if worst else "",
    )


def skip(seen: Seen[Data]) -> SkipReason | None:
    return inapplicable(_why_no_variable_helps(seen.world)) or unneeded(moot(seen))


def _why_no_variable_helps(world: World) -> str | None:
    """The reason why no variable can help, or None: there is one rank, gloo (one transport only), or no GPU."""
    if world.size == 1:
        return ONE_RANK
    if world.backend == "gloo":
        return "the job uses gloo, which has one transport only"
    return without_gpu(world)


def needed(seen: Seen[Data]) -> Mapping[str, str | None]:
    """The variables without which the job's backend fails (None: unset it); empty if the search found none."""
    end, _ = progress_of(seen)
    if not isinstance(end, Ended) or end.kind is not End.FOUND:
        return {}
    return Step(Part.WHOLE, end.members).env


def job_workarounds(any_check: Seen[Any]) -> Mapping[str, str | None]:
    """P2P003's `needed`, for the plan of another check."""
    return needed(any_check.of(CHECK))


def blocks(seen: Seen[Any]) -> SkipReason | None:
    """Skip another check of the backend if COL001 failed and no workaround was found."""
    return None if job_workarounds(seen) else blocked(seen.of(all_reduce.CHECK).failure_text)


def excuse(seen: Seen[Data], finding: Finding) -> str | None:
    """The reason why an error of the job's backend without the workaround does not count, or None."""
    code, _, _ = finding.code.partition(".")
    if code == all_reduce.CHECK.code:
        is_of_backend = finding.evidence.get("backend") == seen.world.backend
    else:  # RUN003 on a trial of COL001 over the job's backend
        trials = (t for t in seen.recording.trials if t.params.get("backend") == seen.world.backend)
        known = {trial.number for trial in trials if trial.code == all_reduce.CHECK.code}
        is_of_backend = code == "RUN003" and finding.evidence.get("trial") in known
    works = is_of_backend and seen.options.uses_workarounds and needed(seen)
    return f"The backend works with the exports of {CHECK.code}." if works else None


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report; the bus bandwidth is that of the slowest run with the workarounds."""
    end, _ = progress_of(seen)
    known = needed(seen)
    figures = {"fallback.busbw_bytes_per_s": _slowest(end.runs)} if isinstance(end, Ended) and known else {}
    return Contribution(excuse=partial(excuse, seen), workarounds=known, figures=figures)


# Findings -------------------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """The place of the fault in words (" between hosts"), its hosts, and the ranks of the hosts that fail alone."""

    text: str = ""
    hosts: tuple[str, ...] = ()
    concerned: tuple[int, ...] = ()


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    if not seen.trials or without_backend(seen.outcomes):
        return
    end, tried = progress_of(seen)
    if isinstance(end, Step):
        yield _unfinished(seen, tried)
    elif end.kind is End.FOUND:
        yield _workaround(seen, end, tried)
    elif end.kind is End.TRANSIENT:
        yield _transient(seen, tried)
    elif end.kind is End.NOTHING:
        yield _nothing(seen, end, tried)


def _workaround(seen: Seen[Data], end: Ended, tried: Sequence[Tried]) -> Finding:
    """The finding that the backend works with a set of variables."""
    own, env, first = seen.world.backend, Step(Part.WHOLE, end.members).env, _first(tried)
    variables, where = workarounds_text(env), places(seen, tried, end, ground_of(seen))
    avoided = " and ".join(dict.fromkeys(member.what for member in end.members))
    gloo = before(seen, "gloo")
    beside = f" (gloo: {rate_text(gloo.busbw)})" if gloo is not None and gloo.busbw else ""
    message = (
        f"{own} {_verb(first)}{where.text}{_error_text(first)}{'; gloo works' if beside else ''}. {begun(variables)}, "
        f"which avoids {avoided}, {own} worked in {_runs_text(end)}, at {rate_text(_slowest(end.runs))} busbw{beside}. "
        f"{_cause(seen, end.members, where.hosts)}"
    )
    return seen.finding(
        "fallback",
        f"{own} {_verb(first)}; {variables} it works",
        message.strip(),
        severity=Severity.WARNING if seen.options.uses_workarounds else Severity.ERROR,
        hosts=where.hosts,
        gpus=_gpus(seen, where),
        evidence=_tried_lines(seen, tried, end),
        fix="Until the cause is fixed, add the lines below to the job script (`ddpdiag check --write-workaround FILE` "
        "writes them to a file).",
        env=env,
    )


def _transient(seen: Seen[Data], tried: Sequence[Tried]) -> Finding:
    own, runs = seen.world.backend, len(tried)
    return seen.finding(
        "transient",
        f"{own} failed once, then worked {count(runs, 'time')}",
        f"The all-reduce over {own} failed in {all_reduce.CHECK.code}, then worked in {runs} of {runs} runs in new "
        "processes with the same environment. A long job will meet such a fault again.",
        evidence=_tried_lines(seen, tried),
        fix="Run `ddpdiag check` again. On each host run `dmesg -T | grep -i -E 'xid|link'` for errors at the time of "
        "this run, and leave a host with such errors out (Slurm: `--exclude=HOST`). Without any, save checkpoints "
        "often.",
    )


def _nothing(seen: Seen[Data], end: Ended, tried: Sequence[Tried]) -> Finding:
    own, first, where = seen.world.backend, _first(tried), places(seen, tried, end, ground_of(seen))
    lines = _tried_lines(seen, tried, end)
    said = f"{begun(_sets_text(tried))}, and none works"
    if end.runs:
        variables = begun(workarounds_text(Step(Part.WHOLE, end.members).env))
        said = f"{variables} it worked {count(len(end.runs) - 1, 'time')}, and the next run {_verb(end.runs[-1])}"
    skipped = f" Not tried: {'; '.join(map(str, lines['not_tried']))}." if lines["not_tried"] else ""
    gloo = before(seen, "gloo")
    return seen.finding(
        "nothing",
        f"{own} {_verb(first)}, and no variable avoids it{' reliably' if end.runs else ''}",
        f"{own} {_verb(first)}{where.text}{_error_text(first)}{'; gloo works' if gloo is not None else ''}. "
        f"{said}.{skipped}",
        hosts=where.hosts,
        gpus=_gpus(seen, where),
        evidence=lines,
        fix="Run the job once with NCCL_DEBUG=INFO and give its output to `ddpdiag explain FILE`. Look for `dmesg -T | "
        "grep -i xid` on the hosts. Then try another version of NCCL, or of the driver.",
    )


def _unfinished(seen: Seen[Data], tried: Sequence[Tried]) -> Finding:
    own = seen.world.backend
    did = f"failed in {all_reduce.CHECK.code}"
    if tried and not _first(tried).works:
        did = f"{_verb(_first(tried))}{_error_text(_first(tried))}"
    return seen.finding(
        "unfinished",
        "the run ended before a workaround was found",
        f"{own} {did}. {begun(_sets_text(tried))} before the run ended.",
        evidence=_tried_lines(seen, tried),
        fix="Fix the other errors of this report first, then run again with more time (--budget "
        f"{max(180, round(3 * seen.options.budget_seconds))}).",
    )


def _first(tried: Sequence[Tried]) -> Tried:
    """The first run with the environment as it is that failed, or the first of all if none did."""
    as_it_is = [each for each in tried if each.step == Step(Part.WHOLE)]
    return next((each for each in as_it_is if not each.works), as_it_is[0])


def _sets_text(tried: Sequence[Tried]) -> str:
    """The number of sets in words, such as "2 sets of variables were tried"."""
    number = len({own.step.set for own in tried if own.step.members})
    return f"{number or 'no'} {'set of variables was' if number == 1 else 'sets of variables were'} tried"


def _gpus(seen: Seen[Data], where: Places) -> tuple[str, ...]:
    """UUIDs of the GPUs that the concerned ranks use."""
    devices_by_rank = seen.of(devices.CHECK).by_rank
    chosen = (devices_by_rank[rank].gpu for rank in where.concerned if rank in devices_by_rank)
    return tuple(dict.fromkeys(gpu.uuid for gpu in chosen if gpu is not None and gpu.uuid))


def _verb(tried: Tried) -> str:
    """The result of a step as a verb, such as "hangs"."""
    return _VERBS.get(tried.how, "fails")


def _error_text(tried: Tried) -> str:
    """The error that a rank raised, with its meaning if known, in brackets; empty if no rank raised one."""
    return f" ({tried.error})" if tried.error and tried.how == "raised" else ""


def _runs_text(end: Ended) -> str:
    """The runs that worked in words, such as "3 of 3 runs"."""
    return f"{sum(run.works for run in end.runs)} of {len(end.runs)} runs"


def _slowest(runs: Sequence[Tried]) -> float:
    return min((run.busbw for run in runs if run.busbw is not None), default=0.0)


def _tried_lines(seen: Seen[Data], tried: Sequence[Tried], end: Ended | None = None) -> dict[str, list[Scalar]]:
    """Evidence: the steps that were tried, in order, and the variables that were not tried, with the reason."""
    skipped = skipped_here(seen)
    if end is not None and end.inside_works:
        skipped |= dict.fromkeys((own.name for own in ground_of(seen).inside), "inside each host it works")
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(next(iter(VARIABLES[name].member.env)))
    return {
        "tried": [*map(_line, tried)],
        "not_tried": [f"{names_text(names)} ({reason})" for reason, names in reasons.items()],
    }


def _line(tried: Tried) -> str:
    part = "" if tried.step.part is Part.WHOLE else f", {tried.step.part.value}"
    failed = f" ({names_text([*map(ranks_text, tried.failed)])})" if part and tried.failed else ""
    result = f"works, {rate_text(tried.busbw or 0.0)}" if tried.works else f"{_verb(tried)}{failed}"
    return f"{tried.step.set or 'as it is'}{part}: {result}"


# Cause and place ------------------------------------------------------------------------------------------------------


def _cause(seen: Seen[Data], members: Sequence[Member], nodes: Sequence[str]) -> str:
    """A sentence on the cause behind the first known member: the finding of another check, else the usual cause.

    Empty if the set only unsets the user's variables, which are then the cause. `nodes` are the hosts on which the
    backend fails, if they are known: findings on other hosts explain nothing.
    """
    # "IFNAME eth0" is one of several interfaces, "no NCCL_ALGO" what the user has set.
    kinds = [member.name.partition(" ")[0] for member in members]
    variable = next((VARIABLES[kind] for kind in kinds if kind in VARIABLES and VARIABLES[kind].usual), None)
    if variable is None:
        return ""
    is_cleared = _ACS in variable.seen_by and _copies_are_right(seen, nodes)
    for finding in _findings(seen, variable, nodes):
        if not (is_cleared and finding.code == _ACS):
            return f"Probable cause: {finding.title} ({finding.code}): {finding.message}"
    return _COPIES_ARE_RIGHT if is_cleared else f"Usual cause: {variable.usual}."


def _findings(seen: Seen[Data], variable: Variable, nodes: Sequence[str]) -> Iterator[Finding]:
    """Findings of other checks that show the cause that this variable avoids, likeliest first."""
    for code in variable.seen_by:
        for finding in seen.findings_of(code.partition(".")[0]):
            hosts = finding.hosts or seen.world.hosts_of(finding.ranks)
            elsewhere = nodes and hosts and not set(nodes) & set(hosts)
            counts = finding.severity is not Severity.NOTE or code == _ACS
            if finding.code.startswith(code) and counts and not elsewhere:
                yield finding


def _copies_are_right(seen: Seen[Data], nodes: Sequence[str]) -> bool:
    """Whether P2P002 made direct copies between GPUs of these hosts, and all of them ended and were right."""
    copies = seen.of(by_code("P2P002"))
    ranks = {rank for (name, _), own in seen.world.hosts.items() if not nodes or name in nodes for rank in own}
    pairs = [pair for row in copies.rows_so_far if row.place.rank in ranks for pair in row.data.pairs if pair.access]
    ended = all(outcome.status is Status.DONE for outcome in copies.outcomes if outcome.rank in ranks)
    return bool(pairs) and ended and not any(pair.wrong for pair in pairs)


def places(seen: Seen[Any], tried: Sequence[Tried], end: Ended, ground: Ground) -> Places:
    """The place where the backend fails, as far as the search has found it."""
    if len(ground.hosts) == 1:
        hosts = seen.world.hosts_of([ground.hosts[0][0]])
        return Places(f" on {hosts[0]}", hosts=hosts)
    if end.inside_works:
        return Places(" between hosts and works inside each host")
    several = sum(len(ranks) > 1 for ranks in ground.hosts)
    if not several:
        return Places(" between hosts")
    inside = next((each for each in tried if each.step == Step(Part.HOSTS)), None)
    if inside is None or not 0 < len(inside.failed) < several:
        return Places()
    ranks = tuple(sorted(rank for group in inside.failed for rank in group))
    nodes = seen.world.hosts_of(ranks)
    return Places(f" inside {names_text(nodes)} and works inside the other hosts", nodes, ranks)


# NCCL connects its ranks in 1 to 3 s. Each set that hangs takes the whole deadline.
CHECK: Check[Data] = Check(__name__, "P2P003", "fallback", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=10)
