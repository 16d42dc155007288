"""No check crashed, failed or hung on any rank.

A check failed on a rank if it raised an exception, crashed or passed its deadline there. The ranks to blame are, in
this order: ranks that sent no result; ranks whose process died; ranks that failed with an error of their own; ranks
that hung before the step that most ranks had reached, that posted fewer collectives, or that are in no call of
torch.distributed although no collective was posted yet. The other ranks only wait for them. "Connection closed by peer"
is a consequence of another rank's end and blames no rank; so is "illegal memory access" after the end of a peer.

Where RDZ002, RDZ003 or RDZ004 found that hosts of the check do not reach each other, a rank that waits elsewhere than
the others proves nothing, and the hosts or links that these checks name are named here as well. The same holds where
all ranks hang alike and RDZ004 found a slow link between their hosts, or where they hang while they create NCCL process
groups whose classes differ (LCH002). A failure over gloo is a warning
where the job uses another backend, which works.

Findings and their causes:

Where an exception, or the last output of a process that died, is a known error text, the finding is what
`ddpdiag explain` shows of it: title, meaning and fix. The rest is in the JSON report then, and shown with --details.

Else the finding shows for each rank the last step, the state of the process (T is stopped, D is stuck in the kernel or
a driver, R is running), its position in the code, and the collective that it posted last, from torch's flight recorder
(gloo and nccl; it cannot be read of a rank that is stopped or holds the GIL). Collectives of a group are counted, so
that the same number is the same collective on all ranks: RUN003.mismatch names the ranks that posted a different
collective, or a different size, than most, because their path through the code or their shapes differ.

Fix: start with the rank that is named; its own error and stack show more than those of the ranks that waited for it.

Confirm by hand: While it hangs, `py-spy dump --pid PID` on each host, and `cat /proc/PID/status /proc/PID/stack` as
root; TORCH_FR_BUFFER_SIZE=2000 and `torchfrtrace DIR` for the collectives.

Sources: torch's flight recorder (docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html); gloo's
transport/tcp/pair.cc; NCCL issue 1646 (55 s for a communicator); proc_pid_stat(5), process
states.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, TypeVar

from msgspec import structs

from ddpdiag.checks.api import Check, Concern, Contribution, Nothing, Scope, Seen, Stage
from ddpdiag.checks.blame import Blame, blamed, is_echo, unfinished
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.host.limits import lacked_processes
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.run.failed_trials import blaming, by_card, explained, undecided, word_of
from ddpdiag.model import EventKind, Finding, Outcome, Severity, Status, Trial
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONNECT_STEP, CONTEXT_STEP, NVML_STEP

_PERSISTENCE = "As root turn on persistence mode (`nvidia-smi -pm 1`, or start nvidia-persistenced)."
# NCCL has the line "Init timings" since 2.21 (init.cc): kernels, bootstrap, topology, graphs, connections.
_OF_NCCL = (
    "Run again: kernels that had to be loaded from a cold disk are quick the second time. If it stays slow, look at "
    "the line 'Init timings' of NCCL_DEBUG=INFO. Where 'kernels' is the largest part, install torch on a local disk in "
    "place of NFS. Where 'topo' or 'connections' is, name the network adapters to use in NCCL_IB_HCA: NCCL opens all "
    f"of them. {_PERSISTENCE}"
)
# The steps that may be slow the first time: the key in an outcome's timings, the text, and the fix.
_STARTS = (
    (
        NVML_STEP,
        "starting the GPUs",
        f"{_PERSISTENCE} If it is on already, `dmesg | grep -i nvrm` shows what the driver waits for.",
    ),
    (
        CONTEXT_STEP,
        "creating a CUDA context",
        f"{_PERSISTENCE} If it is on already, install torch on a local disk, and use a torch with kernels for this GPU "
        "(`python -c 'import torch; print(torch.cuda.get_arch_list())'`).",
    ),
    (COMMUNICATOR_STEP, "creating a communicator", _OF_NCCL),
    (CONNECT_STEP, "the first collective (NCCL connects all ranks in it)", _OF_NCCL),
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

D = TypeVar("D")

_SLOW, _LOSS, _CLASSES, _LIMIT = "RDZ004.slow", "RDZ004.loss", "LCH002.process-group", "HST004.processes"
# The second part of a finding's code, the blamed ranks, and whether the failure does not concern the job.
FailureKey = tuple[str, tuple[int, ...], bool]


class Failure(NamedTuple):
    """The failure of one group in a trial. `causes` are findings of other checks that explain it.

    `bypassed`: the causes show that no rank is at fault, as they are a workaround or a limit of the host.
    """

    trial: Trial
    outcomes: Sequence[Outcome]
    blame: Blame
    causes: Sequence[Finding]
    bypassed: bool = False

    @property
    def is_explained(self) -> bool:
        """Whether findings of other checks explain the failure, and no rank is at fault."""
        return self.bypassed or (bool(self.causes) and not self.blame.ranks and not self.blame.sides)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Findings about failures (by kind and ranks, about the first trial), slow starts, and processes that survived."""
    yield from (finding for finding, _ in _by_kind(seen))
    yield from _slow_starts(seen)
    yield from _survivors(seen)


def _by_kind(seen: Seen[Nothing]) -> Iterator[tuple[Finding, list[Failure]]]:
    """Each finding with the failures that it is about: all of one kind and of the same ranks.

    A trial that did not finish in time (RUN004) does not count as failed, because its result is not known.
    """
    kinds: dict[FailureKey, list[Failure]] = {}
    for failure in failures(seen):
        trial, outcomes, blame, _, bypassed = failure
        if bypassed or not unfinished(trial, blame, outcomes, patient=seen.options.alone):
            kinds.setdefault((word_of(blame), blame.ranks, seen.is_harmless(trial)), []).append(failure)
    for alike in kinds.values():
        yield _finding_of(seen, alike[0]), alike


def _finding_of(seen: Seen[Nothing], failure: Failure) -> Finding:
    trial, outcomes, blame, causes, _ = failure
    if failure.is_explained:
        finding = explained(seen, trial, blame, outcomes, causes)
        if any(_is_echo_of(failure, cause) for cause in causes):
            finding = structs.replace(finding, severity=Severity.NOTE)
    else:
        of_steps = blaming if blame.ranks else undecided
        finding = by_card(seen, trial, blame, outcomes) or of_steps(seen, trial, blame, outcomes)
    if finding.severity is Severity.ERROR and seen.is_harmless(trial):
        why = f"This is a warning only: the job's backend is {seen.world.backend}, which works here."
        finding = structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {why}")
    return finding


def _is_echo_of(failure: Failure, cause: Finding) -> bool:
    """Whether the failure is only a consequence of `cause`, an error of another check."""
    return failure.is_explained and cause.severity is Severity.ERROR


def _known_causes(seen: Seen[D], trial: Trial, outcomes: Sequence[Outcome]) -> tuple[tuple[Finding, ...], bool]:
    """Findings that explain a failure in this trial, and whether they show that no rank is at fault.

    They show this if ranks could start no process (HST004), or if the job's backend works with variables (P2P003). If
    all ranks hang while they open an NCCL group, the groups may be of different classes (LCH002).
    """
    lacking = {outcome.rank for outcome in outcomes if lacked_processes(outcome)}
    limits = tuple(found for found in seen.findings_of("HST004") if found.code == _LIMIT) if lacking else ()
    if lacking and lacking <= {rank for found in limits for rank in found.ranks}:
        return limits, True
    known, backend = seen.of(fallback.CHECK), trial.params.get("backend")
    is_all_reduce = trial.code == all_reduce.CHECK.code and backend == seen.world.backend
    if is_all_reduce and fallback.found_workarounds(known) and known.findings:
        return known.findings, True
    if backend == "nccl" and {o.at for o in outcomes if o.status is Status.HUNG} == {COMMUNICATOR_STEP}:
        return tuple(finding for finding in seen.findings_of("LCH002") if finding.code == _CLASSES), False
    return (), False


def failures(seen: Seen[D]) -> Iterator[Failure]:
    """The failure of each group that failed in a trial, unless a lost rank explains it."""
    lost = {e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None}
    trials = {trial.number: trial for trial in seen.recording.trials if not trial.may_fail}
    known = {(o.trial, o.rank): o for o in seen.recording.outcomes if o.trial in trials}
    known_causes = causes(seen) if trials else ()
    # Errors about slow links explain a hang for which no rank is blamed.
    links = seen.findings_of("RDZ004") if trials else ()
    known_slow = [link for link in links if link.severity is Severity.ERROR and link.code == _SLOW]
    for trial in trials.values():
        for group in trial.groups:
            outcomes = [known[trial.number, rank] for rank in group if (trial.number, rank) in known]
            nodes = frozenset(seen.world.hosts_of(group))
            explaining, bypassed = _known_causes(seen, trial, outcomes)
            explaining = explaining or between(known_causes, nodes)
            blame = blamed(outcomes, "; ".join(cause.title for cause in explaining))
            if blame is None or (lost and _is_loss(lost.intersection(group), blame, outcomes)):
                continue  # RUN002 names the lost ranks
            if not explaining and not blame.ranks and blame.status is Status.HUNG:
                explaining = between(known_slow, nodes)[:1]
            yield Failure(trial, outcomes, blame, explaining, bypassed)


def causes(seen: Seen[D]) -> tuple[Finding, ...]:
    """Errors about links that carry nothing (RDZ004), then about addresses that peers cannot reach (RDZ002, RDZ003)."""
    found = (finding for code in ("RDZ004", "RDZ002", "RDZ003") for finding in seen.findings_of(code))
    return tuple(
        finding for finding in found if finding.severity is Severity.ERROR and finding.code not in (_SLOW, _LOSS)
    )


def between(known: Sequence[Finding], nodes: Set[str]) -> tuple[Finding, ...]:
    """The findings of `known` that concern a collective between these hosts; empty for a single host.

    A finding without a host or link concerns all hosts.
    """

    def concerns(finding: Finding) -> bool:
        if finding.links:
            return any(nodes >= {*link.split(" -> ")} for link in finding.links)
        return not finding.hosts or not nodes.isdisjoint(finding.hosts)

    return tuple(filter(concerns, known)) if len(nodes) > 1 else ()


def _is_loss(lost: set[int], blame: Blame, outcomes: Sequence[Outcome]) -> bool:
    """Whether the group failed because of the lost ranks. A rank that sent an outcome was lost only later."""
    if blame.ranks and lost.issuperset(blame.ranks):
        return True
    silent = lost - {o.rank for o in outcomes if o.status not in (Status.UNHEARD, Status.SKIPPED)}
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    return bool(silent) and (not blame.ranks or all(map(is_echo, failed)))


def _slow_starts(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each kind of start that was slow, about its slowest rank."""
    limit = seen.number("slow_start_seconds")
    experiments = {trial.number for trial in seen.recording.trials if trial.may_fail}
    done = [o for o in seen.recording.outcomes if o.status is Status.DONE and o.trial not in experiments]
    for step, what, fix in _STARTS:
        slow = [o for o in done if o.timings.get(step, 0.0) > limit]
        if slow:
            slowest = max(slow, key=lambda own: own.timings[step])
            seconds, node = slowest.timings[step], seen.world.host_of(slowest.rank)
            slow_nodes = seen.world.hosts_of(sorted({o.rank for o in slow}))
            # All ranks wait for each other in a communicator or a first collective, so it names no rank or host.
            yield seen.finding(
                "slow-start",
                f"{what} takes {seconds:.1f} s",
                f"In {slowest.code}, {what} took {seconds:.1f} s on rank {slowest.rank} ({node}); at most {limit:g} s "
                "is expected. Each start of a training job takes as long.",
                ranks=sorted({o.rank for o in slow}) if step == CONTEXT_STEP else (),
                hosts=slow_nodes if step == NVML_STEP else (),
                evidence={"step": step, "seconds": round(seconds, 1), "trial": slowest.trial},
                fix=fix,
            )


def _survivors(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each process that survived SIGKILL, whichever rank is blamed for the trial."""
    for outcome in seen.recording.outcomes:
        survivors = [(process, "held a GPU and still exists long after SIGKILL") for process in outcome.survivors]
        if outcome.process is not None and outcome.process.survived:
            survivors.insert(0, (outcome.process, f"survived SIGKILL in {outcome.code}"))
        for process, what in survivors:
            host = seen.world.host_of(outcome.rank)
            where = f"; it waits in {process.wchan}" if process.wchan else ""
            yield seen.finding(
                "survived",
                f"process {process.pid} on {host} cannot be killed",
                f"Process {process.pid} of rank {outcome.rank} on {host} {what}{where}.",
                ranks=[outcome.rank],
                evidence={"pid": process.pid, "state": process.state, "wchan": process.wchan},
                fix=f"As root run `dmesg -T` and `cat /proc/{process.pid}/stack` on {host}, which show the device or "
                f"file system that the process waits for. Reset that device, or reboot {host}.",
            )


def _concerns(seen: Seen[Nothing]) -> Iterator[Concern]:
    """Each finding under the check of each failed trial that it is about, with the other ranks that it affected."""
    for finding, alike in _by_kind(seen) if seen.findings else ():
        for failure in alike:
            # Ranks that waited for the blamed ranks until the deadline, or reported that another rank failed.
            others = [
                o
                for o in failure.outcomes
                if o.rank not in failure.blame.ranks and (o.status is Status.HUNG or is_echo(o))
                if o.status not in (Status.DONE, Status.SKIPPED)
            ]
            is_blamed = bool(failure.blame.ranks) and not failure.bypassed
            affected = Counter(o.status.value for o in others) if is_blamed else {}
            yield Concern(failure.trial.code, finding, affected=affected)
            # The finding is only a note then, and its cause is the error.
            yield from (Concern(failure.trial.code, cause) for cause in failure.causes if _is_echo_of(failure, cause))


def report(seen: Seen[Nothing]) -> Contribution:
    """Show each finding under the checks whose trials it is about."""
    return Contribution(concerns=tuple(_concerns(seen)))


# NCCL starts in 1 to 3 s, and a driver without persistence mode needs about a second for each GPU of a host.
SETTINGS = {"slow_start_seconds": 10.0}
CHECK: Check[Nothing] = Check(__name__, "RUN003", "trials", Stage.RUN, Scope.WORLD)
