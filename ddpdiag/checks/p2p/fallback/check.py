"""Variables that avoid what hangs, fails or is slow in the job's backend.

The best-known failure of multi-GPU training is that NCCL hangs while gloo works. Where the all-reduce of COL001 works
over gloo and not over the job's backend, or gives wrong values, or is slower than gloo, the path between the GPUs is at
fault, and this check searches for workarounds. Every attempt is an all-reduce with checked values, in fresh processes:

1. the environment as it is; 2. without your own NCCL variables and ~/.nccl.conf; 3. each variable below that the error
names, alone; then, one on top of the other, inside a host: NCCL_P2P_DISABLE=1, NCCL_CUMEM_HOST_ENABLE=0,
NCCL_SHM_DISABLE=1, NCCL_NVLS_ENABLE=0 (first where GPUs have joined an NVSwitch fabric), NCCL_CUMEM_ENABLE=0 (which
turns NVLS off as well); between hosts: NCCL_MNNVL_ENABLE=0, NCCL_NET_GDR_LEVEL=LOC, NCCL_PXN_DISABLE=1,
NCCL_NET_PLUGIN=none, NCCL_IB_DISABLE=1 (on one host as well, where NCCL starts its network, too), and
NCCL_SOCKET_IFNAME with each interface that all hosts have. Variables that another check suspects are tried first, and
those that cannot matter here are left out. Each variable of the first set that works is left out once, and removed if
it is not needed. The rest must work three times before it is recommended. A set gets less time where gloo was fast. No
search is made for ranks that share a GPU: NCCL refuses them. Variables that are set while the backend works are listed
in the report and cost no run; P2P004 and P2P005 judge the path and the rate.

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
from typing import Any

from msgspec import Struct, structs

from ddpdiag.bandwidth import bound, busbw, factor
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
from ddpdiag.checks.findings import FindingSpec, Workarounds, workarounds_text
from ddpdiag.checks.known_errors import with_meaning
from ddpdiag.checks.p2p.fallback.conditions import before, ground_of, moot, overrides_here, search_order
from ddpdiag.checks.p2p.fallback.judge import SearchResult, findings, runs_text
from ddpdiag.checks.p2p.fallback.search import Ended, Part, Step, Tried, replay
from ddpdiag.checks.p2p.fallback.search import Kind as Outcomes
from ddpdiag.checks.world import ONE_RANK, World, without_gpu
from ddpdiag.model import Finding, Kind, Outcome, Scalar, Status, Trial
from ddpdiag.model.bench import Limits
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONNECT_STEP, CONTEXT_STEP, Context
from ddpdiag.stats import Samples, samples

FINDINGS = {
    "fallback": FindingSpec(
        "the backend fails here, and works with the variables that are shown: an error, since the job fails as it is. "
        "With `--write-workaround FILE`, for a job that sources FILE, it is a warning, and training is tried with them."
    ),
    "slow": FindingSpec.warning("it works, but is at least `rescue` times as fast with them."),
    "transient": FindingSpec.warning("it failed in COL001, but not in three runs after that."),
    "unreliable": FindingSpec("a set of variables worked at first, and then failed."),
    "nothing": FindingSpec("no set of variables works.", same_item=True),
    "unfinished": FindingSpec.warning("the budget (or the run) ended before the search did."),
}

# Large enough to be bound by bandwidth: through a host's processors, and between GPUs.
_LARGE_ON_CPU_BYTES, _LARGE_ON_GPU_BYTES = 4 << 20, 64 << 20
# A set gets so many times what one that works took, and at least so much.
_PATIENCE, _LEAST_DEADLINE = 3.0, 5.0
_SMALL_BYTES = 4
_WORST_FIRST = (Status.UNHEARD, Status.DIED, Status.RAISED, Status.HUNG)


class Data(Struct, frozen=True):
    """This rank's seconds for one all-reduce of `bytes` per rank, and the elements that were wrong.

    `limits` are those of the links of its GPU; None on a CPU.
    """

    backend: str
    ranks: int
    bytes: int
    seconds: Samples
    wrong: int
    limits: Limits | None = None


def measure(ctx: Context) -> Data:
    """A small and a large all-reduce with known sums; the large one is timed."""
    from ddpdiag.workloads.collectives import check_all_reduce, on_any_rank, time_all_reduce
    from ddpdiag.workloads.devices import gpu_limits
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
        ctx.step("read the links of the GPU")
        limits = gpu_limits(device, ctx.trial.env) if device.type == "cuda" else None
    return Data(backend, len(ctx.group), large.bytes, samples(seconds), small.wrong + large.wrong, limits)


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """The next step; none without a rank that was lost meanwhile, since fewer ranks are another question."""
    if len(seen.world.living) < seen.world.size or moot(seen) is not None:
        return ()
    step, _ = progress_of(seen)
    if isinstance(step, Ended):
        return ()
    return (_trial(seen, step),)


def _trial(seen: Seen[Data], step: Step) -> Trial:
    groups = {
        Part.WHOLE: (seen.world.living,),
        Part.HOSTS: tuple(ranks for ranks in seen.world.hosts.values() if len(ranks) > 1),
    }[step.part]
    params = {"backend": seen.world.backend, "part": step.part.value, "set": step.set, **search_order(seen).params}
    trial = new_trial(seen, groups=groups, params=params, env=step.env, fresh=True, may_fail=True)
    return structs.replace(
        trial,
        deadline_seconds=set_deadline(seen, trial.deadline_seconds),
        first_use_seconds=min(trial.first_use_seconds, first_use_seconds(seen)),
    )


def _slowest_seconds(seen: Seen[Any]) -> float | None:
    """The seconds of the slowest trial that went well; None if none did."""
    worked = [trial.number for trial in seen.trials if seen.succeeded(trial)]
    return max((outcome.seconds for outcome in seen.outcomes if outcome.trial in worked), default=None)


def set_deadline(seen: Seen[Any], usual: float) -> float:
    """Less than usual where gloo worked: each set that hangs costs all of it, and one that is far slower is no help."""
    gloo = before(seen, "gloo")
    if gloo is None or not gloo.busbw or f"{seen.check.code}.deadline_seconds" in seen.options.settings:
        return usual
    # The all-reduce runs twice at least, at a rate that may be worse than gloo's by slower_than_gloo.
    moved = 2 * _LARGE_ON_GPU_BYTES * factor("all_reduce", seen.world.size)
    seconds = max(seen.number("slower_than_gloo") * moved / gloo.busbw, _slowest_seconds(seen) or 0.0)
    # What the number of ranks adds to the usual one stays.
    return min(usual, usual - seen.check.deadline + max(_LEAST_DEADLINE, _PATIENCE * seconds))


def first_use_seconds(seen: Seen[Any]) -> float:
    """Limit the start of each set by the starts before it: a set that hangs there costs all of this."""
    done = [outcome.timings for outcome in seen.recording.outcomes if outcome.status is Status.DONE]
    steps = (CONTEXT_STEP, COMMUNICATOR_STEP, CONNECT_STEP)
    slowest = max((sum(own.get(step, 0.0) for step in steps) for own in done), default=0.0)
    return max(_LEAST_DEADLINE, _PATIENCE * slowest)


def progress_of(seen: Seen[Data]) -> tuple[Step | Ended, tuple[Tried, ...]]:
    """The end of the search, or its next step; and the steps that were tried."""
    if not seen.trials:
        return Step(Part.WHOLE), ()
    answers: dict[tuple[str, str], list[Tried]] = {}
    for trial in seen.trials:
        outcomes = {outcome.rank: outcome for outcome in seen.outcomes if outcome.trial == trial.number}
        if not _is_truncated(seen, trial, outcomes):
            key = str(trial.params["part"]), str(trial.params["set"])
            answers.setdefault(key, []).append(_tried(seen, trial, outcomes))
    return replay(ground_of(seen), answers)


def _is_truncated(seen: Seen[Data], trial: Trial, outcomes: Mapping[int, Outcome]) -> bool:
    """Whether it ended for a reason of the run (the budget, Ctrl-C, a lost rank), so that it is no answer."""
    if not outcomes.keys() >= set(trial.ranks):
        return True
    return any(
        o.status is Status.SKIPPED
        or (o.status is Status.UNHEARD and o.rank in seen.world.out)
        or (o.status is Status.HUNG and trial.hurried and not o.told)
        for o in outcomes.values()
    )


def _tried(seen: Seen[Data], trial: Trial, outcomes: Mapping[int, Outcome]) -> Tried:
    rows = {row.place.rank: row.data for row in seen.rows if row.trial is trial}
    failed = tuple(group for group in trial.groups if any(rank not in rows or rows[rank].wrong for rank in group))
    rates = {group: _rate(group, rows) for group in trial.groups if group not in failed}
    # Of those that were not told to stop, the one with the worst end.
    ended = [outcomes[rank] for group in failed for rank in group if rank in outcomes]
    own = [outcome for outcome in ended if not outcome.told and outcome.status in _WORST_FIRST]
    worst = min(own, default=None, key=lambda outcome: _WORST_FIRST.index(outcome.status))
    return Tried(
        step=Step(Part(trial.params["part"])),
        works=not failed,
        how="" if not failed else worst.status.value if worst else "wrong",
        busbw=min(rates.values()) if rates and not failed else None,
        failed=failed,
        error=with_meaning(worst.error) if worst else "",
        busbws=rates,
    )


def _rate(group: Sequence[int], rows: Mapping[int, Data]) -> float:
    slowest = max((rows[rank] for rank in group), key=lambda data: data.seconds.median)
    return busbw("all_reduce", slowest.bytes, slowest.seconds.median, slowest.ranks)


def skip(seen: Seen[Data]) -> SkipReason | None:
    return inapplicable(_ground(seen.world)) or unneeded(moot(seen))


def _ground(world: World) -> str | None:
    """Why no variable can help: one rank has no partner, gloo has one transport only, and nccl needs GPUs."""
    if world.size == 1:
        return ONE_RANK
    if world.backend == "gloo":
        return "the job uses gloo, which has one transport only"
    return without_gpu(world)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    gloo = before(seen, "gloo")
    if seen.trials and not without_backend(seen.outcomes):
        end, tried = progress_of(seen)
        # What the GPUs' links and cards should give, where a set worked on all ranks and reported them.
        limits = {row.place.rank: row.data.limits for row in seen.rows if row.data.limits is not None}
        hosts = {f"{name} {boot}": ranks for (name, boot), ranks in seen.world.hosts.items()}
        yield from findings(
            seen,
            SearchResult(
                end=end,
                tried=tried,
                ground=ground_of(seen),
                skipped=overrides_here(seen)[1],
                gloo=gloo.busbw if gloo is not None else None,
                expected=bound("all_reduce", seen.world.backend, hosts, limits) if limits else None,
            ),
        )


def needed(seen: Seen[Data]) -> Workarounds:
    """The variables that the job needs, or that make it faster, as they were tried; none if none were found.

    They are needed where the backend failed as it is; then with the sentence that advises to set them.
    """
    end, tried = progress_of(seen)
    if not isinstance(end, Ended) or end.kind is not Outcomes.FOUND:
        return Workarounds()
    env = Step(Part.WHOLE, end.members).env
    if all(own.works for own in tried if own.step == Step(Part.WHOLE)):
        return Workarounds(env)
    text = f"Run the job {workarounds_text(env)}, which worked in {runs_text(end)} ({CHECK.code})."
    return Workarounds(env, needed=True, fix=text)


def job_workarounds(any_check: Seen[Any]) -> Mapping[str, str | None]:
    """Those that the job will have, or cannot do without. What only makes it faster is not measured as if it had it."""
    found = needed(any_check.of(CHECK))
    return found.variables if any_check.options.uses_workarounds or found.needed else {}


def blocks(seen: Seen[Any]) -> SkipReason | None:
    """Training over this backend makes no sense where COL001 failed, unless a workaround was found."""
    return None if needed(seen.of(CHECK)).needed else blocked(seen.of(all_reduce.CHECK).failure_text)


def excuse(seen: Seen[Data], finding: Finding) -> str | None:
    """Errors of the job's backend as it was without the workarounds, where the job will have them."""
    code, _, _ = finding.code.partition(".")
    if code == all_reduce.CHECK.code:
        own = finding.evidence.get("backend") == seen.world.backend
    else:  # of COL001 over the job's backend
        trials = (t for t in seen.recording.trials if t.params.get("backend") == seen.world.backend)
        known = {trial.number for trial in trials if trial.code == all_reduce.CHECK.code}
        own = code == "RUN003" and finding.evidence.get("trial") in known
    works = own and seen.options.uses_workarounds and needed(seen).needed
    return f"The backend works with the exports of {CHECK.code}." if works else None


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The bus bandwidth with the workarounds: the slowest of the runs that confirmed them."""
    end, _ = progress_of(seen)
    rates = [run.busbw for run in end.runs if run.busbw is not None] if isinstance(end, Ended) else []
    return {"fallback.busbw_bytes_per_s": min(rates)} if rates and needed(seen).variables else {}


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(excuse=partial(excuse, seen), workarounds=needed(seen), figures=figures(seen))


# gloo goes through the processors, and half as fast as that is no noise.
SETTINGS = {"rescue": 2.0, "slower_than_gloo": 2.0}
# NCCL connects its ranks in 1 to 3 s, and each set that hangs costs all of this, or less (`_deadline`).
CHECK: Check[Data] = Check(__name__, "P2P003", "fallback", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=10)
