"""The outcome of each training of TRN002, the table, and the findings with the ranks to blame."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import Blame, blamed, unfinished, without_backend
from ddpdiag.checks.failure_evidence import bundle, last_words, waits_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.known_errors import cause_of
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model import Finding, Outcome, Scalar, Status, Trial
from ddpdiag.model.train import Ended, Strategy, StrategyRow, TrainReport
from ddpdiag.stats import odd_ones_out
from ddpdiag.strategies.trainings import (
    Data,
    asked_of,
    batch_of,
    devices_of,
    strategies_of,
    trial_of,
    why_not,
)
from ddpdiag.text import begun


class Run(NamedTuple):
    """One training by a strategy, with its outcome.

    `blame` is set if a rank failed or hung, `deviation` (the largest difference of a loss from that of single) if the
    losses were compared. `bad_step` is the first step beyond the tolerance.
    """

    strategy: Strategy
    batch: int
    trial: Trial
    data: Mapping[int, Data]
    outcomes: Sequence[Outcome]
    ended: Ended
    reason: str = ""
    blame: Blame | None = None
    deviation: float | None = None
    bad_step: int = 0

    @property
    def rate(self) -> float | None:
        """Images per second of all ranks, by the time of the slowest rank; None if no rank trained to the end."""
        seconds = max((data.seconds for data in self.data.values()), default=0.0)
        if self.ended not in (Ended.WORKS, Ended.WRONG) or seconds <= 0:
            return None
        return self.batch * next(iter(self.data.values())).timed_steps / seconds

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean loss over all images in each step: the ranks' losses, weighted by their numbers of images."""
        trained = [data for data in self.data.values() if data.losses]
        images = sum(data.images for data in trained)
        steps = range(min((len(data.losses) for data in trained), default=0))
        return tuple(sum(data.losses[step] * data.images for data in trained) / images for step in steps)


def run_of(seen: Seen[Data], strategy: Strategy) -> Run | None:
    """The training by a strategy with its outcome; None if there was none."""
    if (trial := trial_of(seen, strategy)) is None:
        return None
    data = {row.place.rank: row.data for row in seen.rows if row.trial.number == trial.number}
    outcomes = [outcome for outcome in seen.outcomes if outcome.trial == trial.number]
    run = Run(strategy, int(trial.params["batch"]), trial, data, outcomes, Ended.WORKS)
    return _compared_with_single(seen, _with_end(seen, run))


def runs(seen: Seen[Data]) -> tuple[Run, ...]:
    """All trainings with their outcomes, in the order in which they ran."""
    found = (run_of(seen, Strategy(trial.params["strategy"])) for trial in seen.trials)
    return tuple(run for run in found if run is not None)


def _with_end(seen: Seen[Data], run: Run) -> Run:
    """The run with its outcome before any comparison of losses, with the reason and the blame."""
    lacks = [data.not_possible for data in run.data.values() if data.not_possible]
    if lacks := lacks or [*without_backend(run.outcomes).values()]:
        return run._replace(ended=Ended.NOT_POSSIBLE, reason="; ".join(dict.fromkeys(lacks)))
    if why := _why_ended_early(seen, run):
        return run._replace(ended=Ended.UNFINISHED, reason=why)
    blame = blamed(run.outcomes)
    if blame is None:
        return run
    if unfinished(run.trial, blame, run.outcomes):
        still = next(o for o in run.outcomes if o.status is Status.HUNG)
        reason = f"it was still making progress after {run.trial.deadline_seconds:.1f} s, at '{still.at}'"
        return run._replace(ended=Ended.UNFINISHED, reason=reason, blame=blame)
    if blame.status is Status.HUNG:
        return run._replace(ended=Ended.HANGS, reason=blame.why, blame=blame)
    # The reason is the error of the first blamed rank.
    failed = [o for o in run.outcomes if o.status is blame.status and (not blame.ranks or o.rank in blame.ranks)]
    reason = next((o.error.splitlines()[0] for o in failed if o.error), blame.why)
    return run._replace(ended=Ended.FAILS, reason=reason, blame=blame)


def _why_ended_early(seen: Seen[Data], run: Run) -> str:
    """The reason if the run, not the training, caused its early end (a rank left, no time); empty if there is none."""
    lost = [o.rank for o in run.outcomes if o.status is Status.UNHEARD and o.rank in seen.world.out]
    if lost:
        return f"{ranks_text(lost)} left the run before the training ended"
    reported = {outcome.rank for outcome in run.outcomes if outcome.status is not Status.SKIPPED}
    if not reported.issuperset(run.trial.ranks):
        return "the run ended before the training did"
    hung = next((o for o in run.outcomes if o.status is Status.HUNG and run.trial.hurried and not o.told), None)
    if hung is not None:
        return f"the budget left {run.trial.deadline_seconds:.1f} s for it, after which it was at '{hung.at}'"
    return ""


def _compared_with_single(seen: Seen[Data], run: Run) -> Run:
    """The run with its losses compared with those of single. The losses of single need only be finite."""
    if run.ended is not Ended.WORKS:
        return run
    losses = run.losses
    if not losses or not all(map(math.isfinite, losses)):
        bad = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        reason = f"its loss is {losses[bad] if losses else 'missing'}"
        return run._replace(ended=Ended.WRONG, deviation=math.inf, bad_step=bad, reason=reason)
    if run.strategy is Strategy.SINGLE:
        return run
    if not (alone := reference(seen)):
        return run._replace(ended=Ended.UNFINISHED, reason="single gave no losses to compare with")
    differences = [abs(loss - right) for loss, right in zip(losses, alone, strict=False)]
    run = run._replace(deviation=max(differences, default=math.inf))
    bad_step = next((step for step, each in enumerate(differences) if each > seen.number("tolerance")), None)
    if bad_step is None:
        return run
    reason = f"its loss differs from that of single by {run.deviation:.2g}"
    return run._replace(ended=Ended.WRONG, bad_step=bad_step, reason=reason)


def reference(seen: Seen[Data]) -> tuple[float, ...]:
    """The losses of single; empty if it did not train, or a loss is not finite."""
    trial = trial_of(seen, Strategy.SINGLE)
    found = (row.data.losses for row in seen.rows if trial is not None and row.trial.number == trial.number)
    return next((losses for losses in found if all(map(math.isfinite, losses))), ())


def train_of(seen: Seen[Data]) -> TrainReport:
    """The table with a row for each requested strategy, and one for single if it ran."""
    asked = asked_of(seen.options)
    alone = run_of(seen, Strategy.SINGLE)
    names = dict.fromkeys((Strategy.SINGLE, *asked.strategy) if alone is not None else asked.strategy)
    rows = tuple(_row(seen, strategy, alone) for strategy in names)
    versions = seen.of(lch003.CHECK).by_rank
    return TrainReport(
        asked=asked,
        batch_size=batch_of(seen.world),
        device=next((data.device for run in runs(seen) for data in run.data.values() if data.device), ""),
        rows=rows,
        tolerance=seen.number("tolerance"),
        sentence=_sentence(rows),
        torch_version=next((data.torch for data in versions.values()), None),
    )


def _row(seen: Seen[Data], strategy: Strategy, alone: Run | None) -> StrategyRow:
    if reason := why_not(strategy, seen.world):
        return StrategyRow(strategy=strategy, ended=Ended.NOT_POSSIBLE, reason=reason)
    run = run_of(seen, strategy)
    if run is None:
        reason = "the run ended before this strategy was tried"
        return StrategyRow(strategy=strategy, ended=Ended.UNFINISHED, reason=reason)
    devices = devices_of(strategy, seen.world)
    speedup = run.rate / alone.rate if run.rate is not None and alone and alone.rate else None
    return StrategyRow(
        strategy=strategy,
        ended=run.ended,
        reason=run.reason,
        ranks=run.trial.ranks,
        devices=devices,
        samples_per_second=run.rate,
        speedup=speedup,
        efficiency=speedup / devices if speedup is not None else None,
        peak_bytes=max((data.peak_bytes for data in run.data.values() if data.peak_bytes is not None), default=None),
        state_bytes=max((data.state_bytes for data in run.data.values() if data.state_bytes is not None), default=None),
        deviation=run.deviation,
    )


def _sentence(rows: Sequence[StrategyRow]) -> str:
    """A sentence that names the strategies that work, and the fastest one with several processes."""
    worked = [row for row in rows if row.ended is Ended.WORKS and row.samples_per_second is not None]
    if not worked:
        return "No strategy trained to the end."
    works = f"{', '.join(row.strategy.value for row in worked)} {'works' if len(worked) == 1 else 'work'} here"
    several = [row for row in worked if row.strategy is not Strategy.SINGLE]
    if not several:
        return f"{works}."
    best = max(several, key=lambda row: row.samples_per_second or 0.0)
    speed = (
        f"{best.strategy.value} is the fastest of several processes, {best.samples_per_second or 0.0:,.0f} samples/s"
    )
    if best.speedup is not None:
        speed = f"{speed}: {best.speedup:.2f} x one process alone on {best.devices} devices"
    return f"{works}; {speed}."


_CHECK = (
    "Run `ddpdiag check` with the same ranks: it tests hosts, GPUs, rendezvous and all-reduce one by one, and names "
    "what is faulty."
)


def findings(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each training that does not work, and one if no requested strategy or backend is possible."""
    trainings = runs(seen)
    for run in trainings:
        match run.ended:
            case Ended.WRONG:
                yield _wrong(seen, run)
            case Ended.HANGS | Ended.FAILS:
                yield _broken(seen, run)
            case Ended.UNFINISHED:
                fix = (
                    f"Run again with more time (--set {run.trial.code}.deadline_seconds="
                    f"{2 * run.trial.deadline_seconds:.0f} and a larger --budget), or with fewer steps (--steps)."
                )
                yield _unmeasured(seen, f"{run.strategy.value} was not finished", run.reason, fix)
            case _:
                pass
    lacking = {run.strategy: run.reason for run in trainings if run.ended is Ended.NOT_POSSIBLE}
    whys = {each: why_not(each, seen.world) or lacking.get(each) for each in asked_of(seen.options).strategy}
    is_known = bool(trainings) or (not strategies_of(seen.world) and bool(seen.world.arrivals))
    absent = [text for run in trainings for text in without_backend(run.outcomes).values()]
    if is_known and all(whys.values()):
        reasons = "; ".join(f"{why} ({strategy.value})" for strategy, why in whys.items())
        fix = "Choose other strategies (--strategy), or run this where these are possible."
        yield _unmeasured(seen, "no requested strategy is possible here", reasons, fix)
    elif seen.options.backend != "auto" and absent:
        fix = "Install a torch that was built with this backend, or use another one (--backend)."
        yield _unmeasured(seen, f"no training over {seen.world.backend} was tested", absent[0], fix)


def _unmeasured(seen: Seen[Data], title: str, reason: str, fix: str) -> Finding:
    return seen.finding("unmeasured", title, f"{begun(reason)}.", fix=fix, of_the_run=True)


def _wrong(seen: Seen[Data], run: Run) -> Finding:
    alone = run.strategy is Strategy.SINGLE
    sentences, odd_ranks = _other_weights(run)
    return seen.finding(
        "wrong",
        "one process alone does not train"
        if alone
        else f"{run.strategy.value} does not give the same result as one process",
        " ".join((_numbers(seen, run), *sentences)),
        ranks=odd_ranks,
        evidence={
            "trial": run.trial.number,
            "first_bad_step": run.bad_step + 1,
            "deviation": run.deviation,
            "tolerance": seen.number("tolerance"),
        },
        fix=_CHECK,
    )


def _numbers(seen: Seen[Data], run: Run) -> str:
    """A sentence with the loss in the first bad step, that of single, and the tolerance."""
    losses, alone, step = run.losses, reference(seen), run.bad_step
    loss = f"{losses[step]:.6g}" if step < len(losses) else "missing"
    where = f"In step {step + 1} of {asked_of(seen.options).steps}"
    if not alone or run.strategy is Strategy.SINGLE:
        return f"{where} its loss is {loss}; a finite number is expected."
    return (
        f"{where} the loss of {ranks_text(run.trial.ranks)} is {loss}; in one process (single) it is "
        f"{alone[step]:.6g}. The largest difference of any step is {run.deviation:.2g}; at most "
        f"{seen.number('tolerance'):.2g} is expected."
    )


def _other_weights(run: Run) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Sentences on the ranks that began or ended with other parameters than most, and these ranks, to be blamed.

    Averaged gradients are the same on all ranks, so in ddp all ranks must end with the same parameters.
    """
    sentences: list[str] = []
    for word, values in (
        ("began", {rank: data.start for rank, data in run.data.items() if data.start}),
        ("ended", {rank: data.end for rank, data in run.data.items() if data.end}),
    ):
        odd = odd_ones_out(values)
        if odd is not None and odd.ranks:
            sentences.append(f"{ranks_text(odd.ranks).capitalize()} {word} with other parameters than most ranks.")
            return tuple(sentences), odd.ranks
        if odd is not None:
            sentences.append(f"The ranks {word} with {len(odd.groups)} different sets of parameters.")
    return tuple(sentences), ()


def _broken(seen: Seen[Data], run: Run) -> Finding:
    ranks = run.blame.ranks if run.blame is not None else ()
    guilty = [o for o in run.outcomes if o.rank in ranks] or [o for o in run.outcomes if o.status is not Status.DONE]
    first = guilty[0]
    what, verb = run.strategy.value, run.ended.value
    who = f"{ranks_text(ranks)} on {', '.join(seen.world.hosts_of(ranks))}" if ranks else ""
    at = f" (last step '{first.at}')" if first.at else ""
    until = f" (deadline {run.trial.deadline_seconds:.1f} s)" if run.ended is Ended.HANGS else ""
    waits = waits_text(run.blame, run.outcomes) if run.blame is not None else ""
    evidence: dict[str, Scalar | list[Scalar]] = {"trial": run.trial.number, "last_step": first.at}
    evidence |= bundle(ranks, run.outcomes)
    if output := last_words(first.detail):
        evidence["output"] = output
    host = seen.world.host_of(first.rank)
    alone = f"Run `ddpdiag check` on {host} alone: no other host took part."
    return seen.finding(
        verb,
        f"{what} {verb}{f': {who}' if who else ''}",
        f"{what} on {ranks_text(run.trial.ranks)} {verb}{until}: {run.reason.rstrip('.')}{at}. {waits}".strip(),
        ranks=ranks,
        evidence=evidence,
        fix=alone if run.strategy is Strategy.SINGLE else _CHECK,
        known=cause_of(guilty) if run.ended is Ended.FAILS else None,
    )
