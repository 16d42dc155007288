"""No check crashed, failed or hung on any rank.

A check failed on a rank if it raised an exception, crashed or passed its deadline there. The ranks to blame are, in
this order: ranks that sent no result; ranks whose process died; ranks that failed with an error of their own; ranks
that hung before the step that most ranks had reached, that posted fewer collectives, or that are in no call of
torch.distributed although no collective was posted yet. The other ranks only wait for them. "Connection closed by peer"
is a consequence of another rank's end and blames no rank; so is "illegal memory access" after the end of a peer.

Where RDZ002, RDZ003 or RDZ004 found that hosts of the check do not reach each other, a rank that waits elsewhere than
the others proves nothing, and the hosts or links that these checks name are named here as well. The same holds where
all ranks hang alike, and RDZ004 found a link so slow that the posted collective needs half of the check's time or more,
or where they hang while they create NCCL process groups whose classes differ (LCH002). A failure over gloo is a warning
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
transport/tcp/pair.cc; NCCL user guide, RAS; NCCL issue 1646 (55 s for a communicator); proc_pid_stat(5), process
states.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

from msgspec import structs

from ddpdiag.checks.api import Check, Concern, Contribution, Nothing, Scope, Seen, Stage
from ddpdiag.checks.blame import Blame, blamed, is_echo, unfinished, without_backend
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.host.limits import lacked_processes
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.posted import DTYPES
from ddpdiag.checks.run.failed_trials import blaming, by_card, explained, undecided, word_of
from ddpdiag.errors import UnknownBackend
from ddpdiag.model import EventKind, Finding, Outcome, Scalar, Severity, Status, Trial
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONNECT_STEP, CONTEXT_STEP, NVML_STEP

_PERSISTENCE = "As root turn on persistence mode (`nvidia-smi -pm 1`, or start nvidia-persistenced)."
# "Init timings" since NCCL 2.21 (init.cc): kernels, bootstrap, topology, graphs, connections.
_OF_NCCL = (
    "Run again: kernels that had to be loaded from a cold disk are quick the second time. If it stays slow, look at "
    "the line 'Init timings' of NCCL_DEBUG=INFO. Where 'kernels' is the largest part, install torch on a local disk in "
    "place of NFS. Where 'topo' or 'connections' is, name the network adapters to use in NCCL_IB_HCA: NCCL opens all "
    f"of them. {_PERSISTENCE}"
)
# What is slow the first time, and what to do about it.
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
    "unsupported": FindingSpec.error(
        "torch does not know the requested backend on any rank (exit code 2).", effect=Effect.USAGE
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
# What needs so much of a trial's time for one collective leaves too little for the others.
_SHARE_OF_TIME = 0.5
# The word of a finding's code, the ranks, and whether it does not concern the job.
FailureKey = tuple[str, tuple[int, ...], bool]


class Failure(NamedTuple):
    """A group that failed in a trial; `causes` are findings of other checks that explain it.

    `bypassed` says that these show that no rank is at fault by itself: a workaround, or a limit of the host.
    """

    trial: Trial
    outcomes: Sequence[Outcome]
    blame: Blame
    causes: Sequence[Finding]
    bypassed: bool = False


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each kind of failure of the same ranks, with the first trial in which they failed."""
    unsupported = _unsupported(seen)
    yield from unsupported.values()
    told: set[FailureKey] = set()
    for failure in _ended(seen, unsupported):
        trial, outcomes, blame, own, bypassed = failure
        if (key := _failure_key(seen, failure)) not in told:
            told.add(key)
            if bypassed or (own and not blame.ranks and not blame.sides):
                found = explained(seen, trial, blame, outcomes, own)
                if any(_is_echo_of(failure, cause) for cause in own):
                    found = structs.replace(found, severity=Severity.NOTE)
            else:
                of_steps = blaming if blame.ranks else undecided
                found = by_card(seen, trial, blame, outcomes) or of_steps(seen, trial, blame, outcomes)
            if found.severity is Severity.ERROR and seen.is_harmless(trial):
                why = f"This is a warning only: the job's backend is {seen.world.backend}, which works here."
                found = structs.replace(found, severity=Severity.WARNING, message=f"{found.message} {why}")
            yield found
    yield from _slow_starts(seen)
    yield from _survivors(seen)


def concerns(seen: Seen[Nothing]) -> Iterator[Concern]:
    """The check of each trial that failed, with its finding; several trials that failed alike share one finding.

    A trial that was not finished in time (RUN004) has not failed: it is not known what would have become of it.
    """
    of_trials = {finding.evidence.get("trial"): finding for finding in seen.findings}
    first: dict[FailureKey, int] = {}
    for failure in _ended(seen, _unsupported(seen)) if seen.findings else ():
        number = first.setdefault(_failure_key(seen, failure), failure.trial.number)
        if number in of_trials:
            # How many ranks waited for the blamed ones until the deadline, or reported that another rank failed.
            failed = [o for o in failure.outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
            others = [
                o for o in failed if o.rank not in failure.blame.ranks and (o.status is Status.HUNG or is_echo(o))
            ]
            is_blamed = bool(failure.blame.ranks) and not failure.bypassed
            affected = Counter(o.status.value for o in others) if is_blamed else {}
            yield Concern(failure.trial.code, of_trials[number], affected=affected)
            # The finding is a note then, and what explains it is the error.
            yield from (Concern(failure.trial.code, cause) for cause in failure.causes if _is_echo_of(failure, cause))


def _is_echo_of(failure: Failure, cause: Finding) -> bool:
    """Whether the failure is only a consequence of an error of another check."""
    explains = failure.bypassed or not (failure.blame.ranks or failure.blame.sides)
    return explains and cause.severity is Severity.ERROR


def _ended(seen: Seen[Nothing], unsupported: Mapping[Scalar, Finding]) -> Iterator[Failure]:
    """Failures other than of ranks that only needed more time."""
    for failure in failures(seen):
        trial, outcomes, blame, _, bypassed = failure
        wants_time = not bypassed and unfinished(trial, blame, outcomes, patient=seen.options.alone)
        if trial.params.get("backend") not in unsupported and not wants_time:
            yield failure


def _failure_key(seen: Seen[Nothing], failure: Failure) -> FailureKey:
    return word_of(failure.blame), failure.blame.ranks, seen.is_harmless(failure.trial)


def _unsupported(seen: Seen[Nothing]) -> dict[Scalar, Finding]:
    """A finding for each backend that torch does not know on any rank: the name was mistyped, no rank is at fault."""
    asked: dict[Scalar, dict[int, str]] = {}
    outcomes: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in seen.recording.outcomes:
        if outcome.error:
            outcomes[outcome.trial].append(outcome)
    for trial in seen.recording.trials:
        said = without_backend(outcomes[trial.number], (UnknownBackend,))
        if said and len(said) == len(trial.ranks):
            asked.setdefault(trial.params.get("backend"), said)
    return {
        backend: seen.finding(
            "unsupported",
            next(iter(said.values())),
            f"The torch of these ranks has no backend named {backend}, so nothing was tested with it.",
            fix="Use one of the known backends (such as `--backend gloo`), or omit --backend. A third-party backend "
            "must be installed first.",
            of_the_run=True,
        )
        for backend, said in asked.items()
    }


def _known_causes(seen: Seen[D], trial: Trial, outcomes: Sequence[Outcome]) -> tuple[tuple[Finding, ...], bool]:
    """Findings that explain a failure in this trial, and whether they show that no rank is at fault by itself.

    They do where ranks could start no process (HST004), and where the job's backend works with variables (P2P003).
    Where all ranks hang while they open a group, it may be that they choose different classes of groups for NCCL.
    """
    lacking = {outcome.rank for outcome in outcomes if lacked_processes(outcome)}
    limits = tuple(found for found in seen.findings_of("HST004") if found.code == _LIMIT) if lacking else ()
    if lacking and lacking <= {rank for found in limits for rank in found.ranks}:
        return limits, True
    known, backend = seen.of(fallback.CHECK), trial.params.get("backend")
    is_all_reduce = trial.code == all_reduce.CHECK.code and backend == seen.world.backend
    if is_all_reduce and fallback.needed(known).variables and known.findings:
        return known.findings, True
    if backend == "nccl" and {o.at for o in outcomes if o.status is Status.HUNG} == {COMMUNICATOR_STEP}:
        return tuple(finding for finding in seen.findings_of("LCH002") if finding.code == _CLASSES), False
    return (), False


def failures(seen: Seen[D]) -> Iterator[Failure]:
    """The failure of each group in each trial, unless a lost rank explains it."""
    lost = {e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None}
    trials = {trial.number: trial for trial in seen.recording.trials if not trial.may_fail}
    known = {(o.trial, o.rank): o for o in seen.recording.outcomes if o.trial in trials}
    known_causes = causes(seen) if trials else ()
    # Links on which far less passes than on others.
    links = seen.findings_of("RDZ004") if trials else ()
    known_slow = [own for own in links if own.severity is Severity.ERROR and own.code == _SLOW]
    for trial in trials.values():
        for group in trial.groups:
            outcomes = [known[trial.number, rank] for rank in group if (trial.number, rank) in known]
            nodes = frozenset(seen.world.hosts_of(group))
            own, bypassed = _known_causes(seen, trial, outcomes)
            own = own or between(known_causes, nodes)
            blame = blamed(outcomes, "; ".join(cause.title for cause in own))
            if blame is None or (lost and _is_loss(lost.intersection(group), blame, outcomes)):
                continue  # RUN002 names the lost
            may_be_slow = not own and not blame.ranks and blame.status is Status.HUNG
            if may_be_slow and (slow := _too_slow(between(known_slow, nodes), trial, outcomes)):
                blame, own = structs.replace(blame, why=slow[1]), slow[:1]
            yield Failure(trial, outcomes, blame, own, bypassed)


def causes(seen: Seen[D]) -> tuple[Finding, ...]:
    """Errors about links on which nothing passes, then about addresses that peers cannot reach."""
    found = (finding for code in ("RDZ004", "RDZ002", "RDZ003") for finding in seen.findings_of(code))
    return tuple(
        finding for finding in found if finding.severity is Severity.ERROR and finding.code not in (_SLOW, _LOSS)
    )


def between(known: Sequence[Finding], nodes: Set[str]) -> tuple[Finding, ...]:
    """Those causes that concern a collective of these hosts.

    Of hosts that share the cause (no host, no link) all are concerned.
    """

    def concerns(finding: Finding) -> bool:
        if finding.links:
            return any(nodes >= {*link.split(" -> ")} for link in finding.links)
        return not finding.hosts or not nodes.isdisjoint(finding.hosts)

    return tuple(filter(concerns, known)) if len(nodes) > 1 else ()


def _too_slow(known: Sequence[Finding], trial: Trial, outcomes: Sequence[Outcome]) -> tuple[Finding, str] | None:
    """The link on which what was posted last takes half of the trial's time or longer, and in words how long.

    Whatever the collective, nearly all of its bytes come from each host or go to it once: no less time than that.
    """
    posted = [o.collectives[-1] for o in outcomes if o.collectives]
    size_bytes = max((own.elements * DTYPES.get(own.dtype, ("", 1))[1] for own in posted), default=0)
    for cause in known:
        rate = cause.evidence["bytes_per_s"]
        if isinstance(rate, float) and size_bytes >= rate * trial.deadline_seconds * _SHARE_OF_TIME:
            took = f"{size_bytes / 1e6:.3g} MB need {size_bytes / rate:.3g} s over a link of {rate / 1e6:.3g} MB/s"
            return cause, f"{took}, and the check has {trial.deadline_seconds:.3g} s in all"
    return None


def _is_loss(lost: set[int], blame: Blame, outcomes: Sequence[Outcome]) -> bool:
    """Whether it failed because of the lost ranks; a rank that sent an outcome was lost later."""
    if blame.ranks and lost.issuperset(blame.ranks):
        return True
    silent = lost - {o.rank for o in outcomes if o.status not in (Status.UNHEARD, Status.SKIPPED)}
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    return bool(silent) and (not blame.ranks or all(map(is_echo, failed)))


def _slow_starts(seen: Seen[Nothing]) -> Iterator[Finding]:
    """The slowest start of the GPUs, with the hosts that are slow; the slowest context, with the ranks; the slowest
    communicator and the slowest first collective, in which all ranks wait for each other."""
    limit = seen.number("slow_start_seconds")
    experiments = {trial.number for trial in seen.recording.trials if trial.may_fail}
    done = [o for o in seen.recording.outcomes if o.status is Status.DONE and o.trial not in experiments]
    for step, what, fix in _STARTS:
        slow = [o for o in done if o.timings.get(step, 0.0) > limit]
        if slow:
            slowest = max(slow, key=lambda own: own.timings[step])
            seconds, node = slowest.timings[step], seen.world.host_of(slowest.rank)
            slow_nodes = seen.world.hosts_of(sorted({o.rank for o in slow}))
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
    """One finding for each process that still exists, whichever rank was to blame for the trial."""
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


def report(seen: Seen[Nothing]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(concerns=tuple(concerns(seen)))


# NCCL starts in 1 to 3 s, and a driver without persistence mode needs about a second for each GPU of a host.
SETTINGS = {"slow_start_seconds": 10.0}
CHECK: Check[Nothing] = Check(__name__, "RUN003", "trials", Stage.RUN, Scope.WORLD)
