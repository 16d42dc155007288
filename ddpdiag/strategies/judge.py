"""The judgement of TRN002: the outcome of each training, the table of strategies, and the findings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import Blame, find_blame, is_unfinished, missing_backend_errors
from ddpdiag.checks.failure_evidence import crash_line, failure_evidence, waiting_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.known_errors import common_cause
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model import Finding, Outcome, Scalar, Status, Trial
from ddpdiag.model.train import Strategy, StrategyRow, StrategyStatus, TrainReport
from ddpdiag.stats import find_odd_ranks
from ddpdiag.strategies.trainings import (
    Data,
    batch_size_of,
    devices_of,
    strategies_of,
    train_options,
    trial_of,
    why_impossible,
)
from ddpdiag.text import begun


class StrategyRun(NamedTuple):
    """One training by a strategy: the data and outcome of each rank, and the training's `status` with the `reason`.

    `blame` is set if a rank failed or hung, `deviation` (the largest difference of a loss from that of single) if the
    losses were compared. `bad_step` is the index, from 0, of the first step whose loss is wrong.
    """

    strategy: Strategy
    trial: Trial
    data_by_rank: Mapping[int, Data]
    outcomes: Sequence[Outcome]
    status: StrategyStatus
    reason: str = ""
    blame: Blame | None = None
    deviation: float | None = None
    bad_step: int = 0

    @property
    def images_per_second(self) -> float | None:
        """The rate of all ranks together, by the slowest rank's time; None if the training did not end."""
        seconds = max((data.seconds for data in self.data_by_rank.values()), default=0.0)
        if self.status not in (StrategyStatus.WORKS, StrategyStatus.WRONG) or seconds <= 0:
            return None
        return int(self.trial.params["batch"]) * next(iter(self.data_by_rank.values())).timed_steps / seconds

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean loss over all images of each step: the mean of the ranks' losses, weighted by their image counts."""
        trained = [data for data in self.data_by_rank.values() if data.losses]
        images = sum(data.images for data in trained)
        steps = range(min((len(data.losses) for data in trained), default=0))
        return tuple(sum(data.losses[step] * data.images for data in trained) / images for step in steps)


def run_of(seen: Seen[Data], strategy: Strategy) -> StrategyRun | None:
    """The training by a strategy, with its outcome; None if no trial of the strategy was started."""
    if (trial := trial_of(seen, strategy)) is None:
        return None
    data = {row.place.rank: row.data for row in seen.rows if row.trial.number == trial.number}
    outcomes = [outcome for outcome in seen.outcomes if outcome.trial == trial.number]
    return _compared_with_single(
        seen, _with_outcome(seen, StrategyRun(strategy, trial, data, outcomes, StrategyStatus.WORKS))
    )


def runs(seen: Seen[Data]) -> tuple[StrategyRun, ...]:
    """All trainings with their outcomes, in the order in which they ran."""
    strategies = (Strategy(trial.params["strategy"]) for trial in seen.trials)
    return tuple(run for strategy in strategies if (run := run_of(seen, strategy)) is not None)


def _with_outcome(seen: Seen[Data], run: StrategyRun) -> StrategyRun:
    """`run` with its outcome, reason and blame, without a comparison of losses."""
    reasons = [data.not_possible for data in run.data_by_rank.values() if data.not_possible]
    if reasons := reasons or [*missing_backend_errors(run.outcomes).values()]:
        return run._replace(status=StrategyStatus.NOT_POSSIBLE, reason="; ".join(dict.fromkeys(reasons)))
    if reason := _why_ended_early(seen, run):
        return run._replace(status=StrategyStatus.UNFINISHED, reason=reason)
    blame = find_blame(run.outcomes)
    if blame is None:
        return run
    if is_unfinished(run.trial, blame, run.outcomes):
        hung = next(o for o in run.outcomes if o.status is Status.HUNG)
        reason = f"it was still making progress after {run.trial.deadline_seconds:.1f} s, at '{hung.last_step}'"
        return run._replace(status=StrategyStatus.UNFINISHED, reason=reason, blame=blame)
    if blame.status is Status.HUNG:
        return run._replace(status=StrategyStatus.HANGS, reason=blame.why, blame=blame)
    # The reason is the error of the first blamed rank.
    failed = [o for o in run.outcomes if o.status is blame.status and (not blame.ranks or o.rank in blame.ranks)]
    reason = next((o.error.splitlines()[0] for o in failed if o.error), blame.why)
    return run._replace(status=StrategyStatus.FAILS, reason=reason, blame=blame)


def _why_ended_early(seen: Seen[Data], run: StrategyRun) -> str:
    """The reason why the training was ended although it may work: a rank left the run, or time ran out; else empty."""
    lost = [o.rank for o in run.outcomes if o.status is Status.UNHEARD and o.rank in seen.world.inactive_ranks]
    if lost:
        return f"{ranks_text(lost)} left the run before the training ended"
    reported = {outcome.rank for outcome in run.outcomes if outcome.status is not Status.SKIPPED}
    if not reported.issuperset(run.trial.ranks):
        return "the run ended before the training did"
    hung = next(
        (o for o in run.outcomes if o.status is Status.HUNG and run.trial.is_shortened and not o.interrupted), None
    )
    if hung is not None:
        return f"the budget left {run.trial.deadline_seconds:.1f} s for it, after which it was at '{hung.last_step}'"
    return ""


def _compared_with_single(seen: Seen[Data], run: StrategyRun) -> StrategyRun:
    """`run` with its losses compared with those of single. For single itself, the losses must only be finite."""
    if run.status is not StrategyStatus.WORKS:
        return run
    losses = run.losses
    if not losses or not all(map(math.isfinite, losses)):
        bad_step = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        reason = f"its loss is {losses[bad_step] if losses else 'missing'}"
        return run._replace(status=StrategyStatus.WRONG, deviation=math.inf, bad_step=bad_step, reason=reason)
    if run.strategy is Strategy.SINGLE:
        return run
    if not (single_losses := reference_losses(seen)):
        return run._replace(status=StrategyStatus.UNFINISHED, reason="single gave no losses to compare with")
    differences = [abs(loss - expected) for loss, expected in zip(losses, single_losses, strict=False)]
    run = run._replace(deviation=max(differences, default=math.inf))
    for step, difference in enumerate(differences):
        if difference > seen.setting("tolerance"):
            reason = f"its loss differs from that of single by {run.deviation:.2g}"
            return run._replace(status=StrategyStatus.WRONG, bad_step=step, reason=reason)
    return run


def reference_losses(seen: Seen[Data]) -> tuple[float, ...]:
    """The loss of each step of single; empty if single did not train, or if a loss is not finite."""
    trial = trial_of(seen, Strategy.SINGLE)
    rows = (row for row in seen.rows if trial is not None and row.trial.number == trial.number)
    return next((row.data.losses for row in rows if all(map(math.isfinite, row.data.losses))), ())


def train_report(seen: Seen[Data]) -> TrainReport:
    """The report of `ddpdiag train`: a row for each requested strategy, and a row for single if it ran."""
    options = train_options(seen.options)
    single = run_of(seen, Strategy.SINGLE)
    strategies = dict.fromkeys((Strategy.SINGLE, *options.strategy) if single is not None else options.strategy)
    rows = tuple(_row(seen, strategy, single) for strategy in strategies)
    versions = seen.of(lch003.CHECK).by_rank
    return TrainReport(
        request=options,
        batch_size=batch_size_of(seen.world),
        device=next((data.device for run in runs(seen) for data in run.data_by_rank.values() if data.device), ""),
        rows=rows,
        tolerance=seen.setting("tolerance"),
        sentence=_sentence(rows),
        torch_version=next((data.torch for data in versions.values()), None),
    )


def _row(seen: Seen[Data], strategy: Strategy, single: StrategyRun | None) -> StrategyRow:
    if reason := why_impossible(strategy, seen.world):
        return StrategyRow(strategy=strategy, status=StrategyStatus.NOT_POSSIBLE, reason=reason)
    run = run_of(seen, strategy)
    if run is None:
        reason = "the run ended before this strategy was tried"
        return StrategyRow(strategy=strategy, status=StrategyStatus.UNFINISHED, reason=reason)
    devices, all_data = devices_of(strategy, seen.world), run.data_by_rank.values()
    rate, single_rate = run.images_per_second, single.images_per_second if single is not None else None
    speedup = rate / single_rate if rate is not None and single_rate else None
    return StrategyRow(
        strategy=strategy,
        status=run.status,
        reason=run.reason,
        ranks=run.trial.ranks,
        devices=devices,
        samples_per_second=rate,
        speedup=speedup,
        efficiency=speedup / devices if speedup is not None else None,
        peak_bytes=max((data.peak_bytes for data in all_data if data.peak_bytes is not None), default=None),
        state_bytes=max((data.state_bytes for data in all_data if data.state_bytes is not None), default=None),
        deviation=run.deviation,
    )


def _sentence(rows: Sequence[StrategyRow]) -> str:
    """The summary: which strategies work, and which of those with several processes is the fastest."""
    working = [row for row in rows if row.status is StrategyStatus.WORKS and row.samples_per_second is not None]
    if not working:
        return "No strategy trained to the end."
    sentence = f"{', '.join(row.strategy.value for row in working)} {'works' if len(working) == 1 else 'work'} here"
    several = [row for row in working if row.strategy is not Strategy.SINGLE]
    if not several:
        return f"{sentence}."
    best = max(several, key=lambda row: row.samples_per_second or 0.0)
    speed = (
        f"{best.strategy.value} is the fastest of several processes, {best.samples_per_second or 0.0:,.0f} samples/s"
    )
    if best.speedup is not None:
        speed = f"{speed}: {best.speedup:.2f} x one process alone on {best.devices} devices"
    return f"{sentence}; {speed}."


_CHECK_FIX = (
    "Run `ddpdiag check` with the same ranks: it tests hosts, GPUs, rendezvous and all-reduce one by one, and names "
    "what is faulty."
)


def findings(seen: Seen[Data]) -> Iterator[Finding]:
    """Yield a finding for each training that does not work, and another if no requested strategy or backend can run."""
    trainings = runs(seen)
    for run in trainings:
        match run.status:
            case StrategyStatus.WRONG:
                yield _wrong_finding(seen, run)
            case StrategyStatus.HANGS | StrategyStatus.FAILS:
                yield _broken_finding(seen, run)
            case StrategyStatus.UNFINISHED:
                fix = (
                    f"Run again with more time (--set {run.trial.code}.deadline_seconds="
                    f"{2 * run.trial.deadline_seconds:.0f} and a larger --budget), or with fewer steps (--steps)."
                )
                yield _unmeasured_finding(seen, f"{run.strategy.value} was not finished", run.reason, fix)
            case _:
                pass
    impossible = {run.strategy: run.reason for run in trainings if run.status is StrategyStatus.NOT_POSSIBLE}
    requested = train_options(seen.options).strategy
    why_not = {each: why_impossible(each, seen.world) or impossible.get(each) for each in requested}
    is_known = bool(trainings) or (not strategies_of(seen.world) and bool(seen.world.arrivals))
    missing_backend = [text for run in trainings for text in missing_backend_errors(run.outcomes).values()]
    if is_known and all(why_not.values()):
        reasons = "; ".join(f"{why} ({strategy.value})" for strategy, why in why_not.items())
        fix = "Choose other strategies (--strategy), or run this where these are possible."
        yield _unmeasured_finding(seen, "no requested strategy is possible here", reasons, fix)
    elif seen.options.backend != "auto" and missing_backend:
        fix = "Install a torch that was built with this backend, or use another one (--backend)."
        yield _unmeasured_finding(seen, f"no training over {seen.world.backend} was tested", missing_backend[0], fix)


def _unmeasured_finding(seen: Seen[Data], title: str, reason: str, fix: str) -> Finding:
    return seen.finding("unmeasured", title, f"{begun(reason)}.", fix=fix, is_about_run=True)


def _wrong_finding(seen: Seen[Data], run: StrategyRun) -> Finding:
    is_single = run.strategy is Strategy.SINGLE
    sentences, odd_ranks = _different_weights(run)
    return seen.finding(
        "wrong",
        "one process alone does not train"
        if is_single
        else f"{run.strategy.value} does not give the same result as one process",
        " ".join((_loss_sentence(seen, run), *sentences)),
        ranks=odd_ranks,
        evidence={
            "trial": run.trial.number,
            "first_bad_step": run.bad_step + 1,
            "deviation": run.deviation,
            "tolerance": seen.setting("tolerance"),
        },
        fix=_CHECK_FIX,
    )


def _loss_sentence(seen: Seen[Data], run: StrategyRun) -> str:
    """A text on the loss in the first bad step. If the losses were compared, with single's loss and the tolerance."""
    losses, single_losses, step = run.losses, reference_losses(seen), run.bad_step
    loss = f"{losses[step]:.6g}" if step < len(losses) else "missing"
    where = f"In step {step + 1} of {train_options(seen.options).steps}"
    if not single_losses or run.strategy is Strategy.SINGLE:
        return f"{where} its loss is {loss}; a finite number is expected."
    return (
        f"{where} the loss of {ranks_text(run.trial.ranks)} is {loss}; in one process (single) it is "
        f"{single_losses[step]:.6g}. The largest difference of any step is {run.deviation:.2g}; at most "
        f"{seen.setting('tolerance'):.2g} is expected."
    )


def _different_weights(run: StrategyRun) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Sentences on ranks that began or ended with different parameters; and the ranks that differ from most."""
    sentences: list[str] = []
    for word, values in (
        ("began", {rank: data.start_checksum for rank, data in run.data_by_rank.items() if data.start_checksum}),
        ("ended", {rank: data.end_checksum for rank, data in run.data_by_rank.items() if data.end_checksum}),
    ):
        odd = find_odd_ranks(values)
        if odd is not None and odd.ranks:
            sentences.append(f"{ranks_text(odd.ranks).capitalize()} {word} with other parameters than most ranks.")
            return tuple(sentences), odd.ranks
        if odd is not None:
            sentences.append(f"The ranks {word} with {len(odd.by_value)} different sets of parameters.")
    return tuple(sentences), ()


def _broken_finding(seen: Seen[Data], run: StrategyRun) -> Finding:
    ranks = run.blame.ranks if run.blame is not None else ()
    guilty = [o for o in run.outcomes if o.rank in ranks] or [o for o in run.outcomes if o.status is not Status.DONE]
    first = guilty[0]
    strategy, outcome = run.strategy.value, run.status.value
    blamed_text = f"{ranks_text(ranks)} on {', '.join(seen.world.host_names(ranks))}" if ranks else ""
    at = f" (last step '{first.last_step}')" if first.last_step else ""
    deadline = f" (deadline {run.trial.deadline_seconds:.1f} s)" if run.status is StrategyStatus.HANGS else ""
    waits = waiting_text(run.blame, run.outcomes) if run.blame is not None else ""
    reason = run.reason.rstrip(".")
    evidence: dict[str, Scalar | list[Scalar]] = {"trial": run.trial.number, "last_step": first.last_step}
    evidence |= failure_evidence(ranks, run.outcomes)
    if output := crash_line(first.detail):
        evidence["output"] = output
    host = seen.world.host_name(first.rank)
    alone_fix = f"Run `ddpdiag check` on {host} alone: no other host took part."
    return seen.finding(
        outcome,
        f"{strategy} {outcome}{f': {blamed_text}' if blamed_text else ''}",
        f"{strategy} on {ranks_text(run.trial.ranks)} {outcome}{deadline}: {reason}{at}. {waits}".strip(),
        ranks=ranks,
        evidence=evidence,
        fix=alone_fix if run.strategy is Strategy.SINGLE else _CHECK_FIX,
        known_error=common_cause(guilty) if run.status is StrategyStatus.FAILS else None,
    )
