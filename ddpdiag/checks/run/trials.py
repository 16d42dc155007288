"""No check crashed, failed or hung on any rank.

A check failed on a rank if it raised an exception, crashed or passed its deadline there. The ranks to blame are, in
this order: ranks that sent no result; ranks whose process died; ranks that failed with an error of their own; ranks
that hung before the step that most ranks had reached, that posted fewer collectives, or that are in no call of
torch.distributed although no collective was posted yet. The other ranks only wait for them. "Connection closed by peer"
is a consequence of another rank's end and blames no rank; so is "illegal memory access" after the end of a peer.

If RDZ002, RDZ003 or RDZ004 found that hosts of the check do not reach each other, a rank that waits at another step
than the others is not blamed. The finding then names the hosts or links of those checks. The same holds if all ranks
hang at one step and RDZ004 found a slow link between their hosts, or if they hang while they create NCCL process groups
of different classes (LCH002). A failure over gloo is only a warning if the job uses another backend that works.

Findings and their causes:

If an exception, or the last output of a process that died, is a known error text, the finding shows the title, meaning
and fix that `ddpdiag explain` shows for it. Steps and stacks are then only in the JSON report, and with --details.

Otherwise the finding shows for each rank the last step, the state of the process (T is stopped, D is stuck in the
kernel or a driver, R is running), its position in the code, and the collective that it posted last, from torch's flight
recorder (gloo and nccl; not of a rank that is stopped or holds the GIL). Collectives of a group are numbered, and the
same number is the same collective on all ranks. RUN003.mismatch names the ranks that posted another collective or
another size than most ranks under one number: their path through the code, or their shapes, differ.

Fix: start with the rank that is named; its own error and stack show more than those of the ranks that waited for it.

Confirm by hand: While it hangs, `py-spy dump --pid PID` on each host, and `cat /proc/PID/status /proc/PID/stack` as
root; TORCH_FR_BUFFER_SIZE=2000 and `torchfrtrace DIR` for the collectives.

Sources: torch's flight recorder (docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html); gloo's
transport/tcp/pair.cc; NCCL issue 1646 (55 s for a communicator); proc_pid_stat(5), process states.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set

from ddpdiag.checks.api import Check, Contribution, MovedFinding, Nothing, Scope, Seen, Stage
from ddpdiag.checks.blame import Blame, find_blame, is_echo, is_unfinished
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.host.limits import failed_to_start_process
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.run.failed_trials import Failure, failure_finding
from ddpdiag.model import EventKind, Finding, Outcome, Severity, Status, Trial
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONNECT_STEP, CONTEXT_STEP, NVML_STEP

_PERSISTENCE_FIX = "As root turn on persistence mode (`nvidia-smi -pm 1`, or start nvidia-persistenced)."
# NCCL prints the line "Init timings" since 2.21 (init.cc): kernels, bootstrap, topology, graphs, connections.
_NCCL_FIX = (
    "Run again: kernels that had to be loaded from a cold disk are quick the second time. If it stays slow, look at "
    "the line 'Init timings' of NCCL_DEBUG=INFO. Where 'kernels' is the largest part, install torch on a local disk in "
    "place of NFS. Where 'topo' or 'connections' is, name the network adapters to use in NCCL_IB_HCA: NCCL opens all "
    f"of them. {_PERSISTENCE_FIX}"
)
# The steps that may be slow at their first use: the key in an outcome's timings, the text, and the fix.
_STARTS = (
    (
        NVML_STEP,
        "starting the GPUs",
        f"{_PERSISTENCE_FIX} If it is on already, `dmesg | grep -i nvrm` shows what the driver waits for.",
    ),
    (
        CONTEXT_STEP,
        "creating a CUDA context",
        f"{_PERSISTENCE_FIX} If it is on already, install torch on a local disk, and use a torch with kernels for this "
        "GPU (`python -c 'import torch; print(torch.cuda.get_arch_list())'`).",
    ),
    (COMMUNICATOR_STEP, "creating a communicator", _NCCL_FIX),
    (CONNECT_STEP, "the first collective (NCCL connects all ranks in it)", _NCCL_FIX),
)

FINDINGS = {
    "unheard": FindingSpec.error("a rank's supervisor sent no result."),
    "died": FindingSpec.error("the process ended by a signal or an exit code, without an answer.", same_item=True),
    "raised": FindingSpec.error(
        "an exception, whose text is shown. If all ranks raised the same, none of them is to blame."
    ),
    "hung": FindingSpec.error(
        "a rank passed the deadline of the check (`--set CODE.deadline_seconds=SECONDS`), or what was left of the "
        "budget, or its process was stopped or in uninterruptible sleep for 10 s without a step. A rank that was still "
        "making progress then is reported as unfinished (RUN004), not as hung. So is a check of `ddpdiag host` that "
        "had less than its own time left of the budget, unless it is stuck in the kernel: some drivers start slowly. A "
        "rank that is the first user of the GPUs, creates its CUDA context or its communicator, or posts the first "
        "collective, in which NCCL connects the ranks, has up to 60 s more for that."
    ),
    "slow-start": FindingSpec.warning(
        "starting the GPUs, creating a CUDA context or a communicator, or the first collective, took more than "
        "`slow_start_seconds` (10). Each start of a training job takes as long. The usual causes are a driver without "
        "persistence mode, libraries on a slow file system, kernels that are loaded for the first time or compiled, "
        "and a host with many network adapters."
    ),
    "mismatch": FindingSpec.error("ranks posted different collectives under the same number (see below)."),
    "survived": FindingSpec.error(
        "a process survived SIGKILL, whichever rank was blamed: it is stuck in the kernel, often in a driver or on a "
        "file server, and keeps its GPU, memory and ports. A process that held a GPU counts 20 s after SIGKILL only, "
        "since the driver needs some seconds to take the GPU back."
    ),
}

_SLOW_LINK, _LOSSY_LINK = "RDZ004.slow", "RDZ004.loss"


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Findings on failures (one for each kind, on the first one), slow starts, and processes that survived SIGKILL."""
    yield from (finding for finding, _ in _findings_with_failures(seen))
    yield from _slow_starts(seen)
    yield from _survivors(seen)


def _findings_with_failures(seen: Seen[Nothing]) -> Iterator[tuple[Finding, list[Failure]]]:
    """Yield one finding for each kind of failure, with all failures of this kind. Failures are of one kind if they have
    the same word and blamed ranks, and if all or none of them harm the job. A trial that did not finish in time
    (RUN004) is left out, because its result is not known."""
    failures_by_kind: dict[tuple[str, tuple[int, ...], bool], list[Failure]] = {}
    for failure in failures(seen):
        trial, outcomes, blame, _, no_rank_at_fault = failure
        if no_rank_at_fault or not is_unfinished(trial, blame, outcomes, lenient=seen.options.alone):
            failures_by_kind.setdefault((failure.word, blame.ranks, seen.is_harmless(trial)), []).append(failure)
    for of_one_kind in failures_by_kind.values():
        yield failure_finding(seen, of_one_kind[0]), of_one_kind


def _causes_of_trial(seen: Seen[Nothing], trial: Trial, outcomes: Sequence[Outcome]) -> tuple[Sequence[Finding], bool]:
    """Findings of other checks that explain a failure of this trial, and whether they show that no rank is at fault. No
    rank is at fault if ranks could not start a process (HST004), or if an all-reduce fails that works with other
    variables (P2P003). If all hung ranks are opening an NCCL group, the cause may be groups of different classes
    (LCH002)."""
    ranks_without_process = {outcome.rank for outcome in outcomes if failed_to_start_process(outcome)}
    if ranks_without_process:
        limits = tuple(found for found in seen.findings_of("HST004") if found.code == "HST004.processes")
        if ranks_without_process <= {rank for found in limits for rank in found.ranks}:
            return limits, True
    fallback_seen, backend = seen.of(fallback.CHECK), trial.params.get("backend")
    is_all_reduce = trial.code == all_reduce.CHECK.code and backend == seen.world.backend
    if is_all_reduce and fallback.job_workarounds(fallback_seen) and fallback_seen.findings:
        return fallback_seen.findings, True
    if backend == "nccl" and {o.last_step for o in outcomes if o.status is Status.HUNG} == {COMMUNICATOR_STEP}:
        return tuple(found for found in seen.findings_of("LCH002") if found.code == "LCH002.process-group"), False
    return (), False


def failures(seen: Seen[Nothing]) -> Iterator[Failure]:
    """Yield each failure of a group, except in trials that may fail, and failures by the loss of a rank (RUN002)."""
    lost_ranks = {e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None}
    trials = {trial.number: trial for trial in seen.recording.trials if not trial.may_fail}
    by_rank = {(o.trial, o.rank): o for o in seen.recording.outcomes if o.trial in trials}
    network_causes = network_errors(seen) if trials else ()
    # An error about a slow link explains a hang for which no rank is blamed.
    link_findings = seen.findings_of("RDZ004") if trials else ()
    slow_links = [link for link in link_findings if link.severity is Severity.ERROR and link.code == _SLOW_LINK]
    for trial in trials.values():
        for group in trial.groups:
            outcomes = [by_rank[trial.number, rank] for rank in group if (trial.number, rank) in by_rank]
            hosts = frozenset(seen.world.host_names(group))
            explanations, no_rank_at_fault = _causes_of_trial(seen, trial, outcomes)
            explanations = explanations or findings_between(network_causes, hosts)
            blame = find_blame(outcomes, "; ".join(cause.title for cause in explanations))
            if blame is None or (lost_ranks and _is_caused_by_loss(lost_ranks.intersection(group), blame, outcomes)):
                continue
            if not explanations and not blame.ranks and blame.status is Status.HUNG:
                explanations = findings_between(slow_links, hosts)[:1]
            yield Failure(trial, outcomes, blame, explanations, no_rank_at_fault)


def network_errors(seen: Seen[Nothing]) -> tuple[Finding, ...]:
    """Errors about links that carry no data or no large packets (RDZ004), then about names and addresses that other
    ranks cannot use (RDZ002, RDZ003)."""
    findings = (finding for code in ("RDZ004", "RDZ002", "RDZ003") for finding in seen.findings_of(code))
    errors = (finding for finding in findings if finding.severity is Severity.ERROR)
    return tuple(error for error in errors if error.code not in (_SLOW_LINK, _LOSSY_LINK))


def findings_between(findings: Sequence[Finding], hosts: Set[str]) -> tuple[Finding, ...]:
    """Those of the findings that concern a collective between these hosts; empty for a single host. A finding that
    names no host and no link concerns all hosts."""

    def concerns(finding: Finding) -> bool:
        if finding.links:
            return any(hosts >= {*link.split(" -> ")} for link in finding.links)
        return not finding.hosts or not hosts.isdisjoint(finding.hosts)

    return tuple(filter(concerns, findings)) if len(hosts) > 1 else ()


def _is_caused_by_loss(lost_ranks: set[int], blame: Blame, outcomes: Sequence[Outcome]) -> bool:
    """Whether the group failed because of its `lost_ranks`: only they are blamed; or one of them sent no outcome, and
    no rank is blamed or all failed ranks report another rank's end. A rank that sent an outcome was lost later."""
    if blame.ranks and lost_ranks.issuperset(blame.ranks):
        return True
    silent = lost_ranks - {o.rank for o in outcomes if o.status not in (Status.UNHEARD, Status.SKIPPED)}
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    return bool(silent) and (not blame.ranks or all(map(is_echo, failed)))


def _slow_starts(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each kind of start that was slow on a rank. It shows the slowest rank."""
    limit = seen.setting("slow_start_seconds")
    ignored_trials = {trial.number for trial in seen.recording.trials if trial.may_fail}
    done = [o for o in seen.recording.outcomes if o.status is Status.DONE and o.trial not in ignored_trials]
    for step, start, fix in _STARTS:
        slow = [o for o in done if o.timings.get(step, 0.0) > limit]
        if slow:
            slowest, slow_ranks = max(slow, key=lambda outcome: outcome.timings[step]), sorted({o.rank for o in slow})
            seconds, host = slowest.timings[step], seen.world.host_name(slowest.rank)
            # In NCCL's first steps all ranks wait for each other, so no rank or host is named for them.
            yield seen.finding(
                "slow-start",
                f"{start} takes {seconds:.1f} s",
                f"In {slowest.code}, {start} took {seconds:.1f} s on rank {slowest.rank} ({host}); at most {limit:g} s "
                "is expected. Each start of a training job takes as long.",
                ranks=slow_ranks if step == CONTEXT_STEP else (),
                hosts=seen.world.host_names(slow_ranks) if step == NVML_STEP else (),
                evidence={"step": step, "seconds": round(seconds, 1), "trial": slowest.trial},
                fix=fix,
            )


def _survivors(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each process that survived SIGKILL, whichever rank is blamed for the trial."""
    for outcome in seen.recording.outcomes:
        survivors = [(process, "held a GPU and still exists long after SIGKILL") for process in outcome.survivors]
        if outcome.process is not None and outcome.process.survived:
            survivors.insert(0, (outcome.process, f"survived SIGKILL in {outcome.code}"))
        for process, reason in survivors:
            host = seen.world.host_name(outcome.rank)
            wait = f"; it waits in {process.wchan}" if process.wchan else ""
            yield seen.finding(
                "survived",
                f"process {process.pid} on {host} cannot be killed",
                f"Process {process.pid} of rank {outcome.rank} on {host} {reason}{wait}.",
                ranks=[outcome.rank],
                evidence={"pid": process.pid, "state": process.state, "wchan": process.wchan},
                fix=f"As root run `dmesg -T` and `cat /proc/{process.pid}/stack` on {host}, which show the device or "
                f"file system that the process waits for. Reset that device, or reboot {host}.",
            )


def _moved_findings(seen: Seen[Nothing]) -> Iterator[MovedFinding]:
    """Show each finding under the checks of its failed trials, with the number of affected ranks."""
    for finding, of_one_kind in _findings_with_failures(seen) if seen.findings else ():
        for failure in of_one_kind:
            blamed_ranks = () if failure.no_rank_at_fault else failure.blame.ranks
            # The affected ranks waited for the blamed ranks until the deadline, or reported that another rank failed.
            affected = Counter(
                o.status.value
                for o in failure.outcomes
                if blamed_ranks and o.rank not in blamed_ranks and (o.status is Status.HUNG or is_echo(o))
                if o.status not in (Status.DONE, Status.SKIPPED)
            )
            yield MovedFinding(failure.trial.code, finding, affected_counts=affected)
            # The finding on a consequence is only a note, so its cause is shown under the check as the error.
            errors = [cause for cause in failure.causes if failure.is_explained and cause.severity is Severity.ERROR]
            yield from (MovedFinding(failure.trial.code, error) for error in errors)


def report(seen: Seen[Nothing]) -> Contribution:
    return Contribution(moved_findings=tuple(_moved_findings(seen)))


# NCCL starts in 1 to 3 s, and a driver without persistence mode needs about a second for each GPU of a host.
SETTINGS = {"slow_start_seconds": 10.0}
CHECK: Check[Nothing] = Check(__name__, "RUN003", "trials", Stage.RUN, Scope.WORLD)
