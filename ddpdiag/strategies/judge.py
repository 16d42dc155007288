"""The table and the findings of TRN002, with the ranks to blame."""

import math
from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import without_backend
from ddpdiag.checks.failure_evidence import bundle, last_words, waits_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.known_errors import cause_of
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.model import Finding, Outcome, Scalar, Status
from ddpdiag.model.train import Ended, Strategy, StrategyRow, TrainReport
from ddpdiag.stats import odd_ones_out
from ddpdiag.strategies.trainings import (
    Apart,
    Data,
    Run,
    asked_of,
    batch_of,
    devices_of,
    mean_losses,
    reference,
    run_of,
    runs,
    strategies_of,
    tolerance_of,
    why_not,
)
from ddpdiag.text import begun

# The last loss is the mean over so many steps: one is noisy.
_LAST_STEPS = 5
_NOT_TRIED = "the run ended before this strategy was tried"


def train_of(seen: Seen[Data]) -> TrainReport:
    """One row for each requested strategy, and one for single, where it was run."""
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
        tolerance=tolerance_of(seen),
        sentence=_sentence(rows),
        torch_version=next((data.torch for data in versions.values()), None),
    )


def _row(seen: Seen[Data], strategy: Strategy, alone: Run | None) -> StrategyRow:
    if reason := why_not(strategy, seen.world):
        return StrategyRow(strategy=strategy, ended=Ended.NOT_POSSIBLE, reason=reason)
    run = run_of(seen, strategy)
    if run is None:
        return StrategyRow(strategy=strategy, ended=Ended.UNFINISHED, reason=_NOT_TRIED)
    devices = devices_of(strategy, seen.world)
    speedup = run.rate / alone.rate if run.rate is not None and alone and alone.rate else None
    losses = mean_losses(run)
    return StrategyRow(
        strategy=strategy,
        ended=run.ended,
        reason=run.reason,
        ranks=run.trial.ranks,
        devices=devices,
        samples_per_second=run.rate,
        speedup=speedup,
        efficiency=speedup / devices if speedup is not None else None,
        peak_bytes=max((own.peak_bytes for own in run.data.values() if own.peak_bytes is not None), default=None),
        state_bytes=max((own.state_bytes for own in run.data.values() if own.state_bytes is not None), default=None),
        deviation=run.apart.most if run.apart is not None else None,
        first_loss=losses[0] if losses else None,
        last_loss=sum(losses[-_LAST_STEPS:]) / len(losses[-_LAST_STEPS:]) if losses else None,
    )


def _sentence(rows: Sequence[StrategyRow]) -> str:
    """Name the strategies that work, and the fastest one."""
    worked = [row for row in rows if row.ended is Ended.WORKS and row.samples_per_second is not None]
    if not worked:
        return "No strategy trained to the end."
    several = [row for row in worked if row.strategy is not Strategy.SINGLE]
    names = [row.strategy.value for row in worked]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    said = f"{listed} {'works' if len(worked) == 1 else 'work'} here"
    if not several:
        others = all(row.ended is Ended.NOT_POSSIBLE for row in rows if row.strategy is not Strategy.SINGLE)
        return f"{said}{'; nothing else could be tried' if others and len(rows) > 1 else ''}."
    best = max(several, key=lambda row: row.samples_per_second or 0.0)
    return f"{said}; {_best_text(best)}."


def _best_text(best: StrategyRow) -> str:
    rate, name = f"{best.samples_per_second or 0.0:,.0f} samples/s", best.strategy.value
    if best.speedup is None or best.efficiency is None:
        return f"{name} is the fastest of several processes, {rate}"
    if best.speedup <= 1:
        return f"none is faster than one process alone: the best is {name}, {rate}, {best.speedup:.2f} x its speed"
    where = f"{len(best.ranks)} ranks" if best.devices == len(best.ranks) else f"{best.devices} devices"
    return (
        f"{name} is the fastest, {rate}: {best.speedup:.2f} x one process alone on {where} "
        f"(efficiency {best.efficiency:.0%})"
    )


# Findings ------------------------------------------------------------------------------------------------------------

_CHECK = (
    "Run `ddpdiag check` with the same ranks: it tests hosts, GPUs, rendezvous and all-reduce one by one, and names "
    "what is faulty."
)


def findings(seen: Seen[Data]) -> Iterator[Finding]:
    """One for each training that fails, and one where nothing could be tried."""
    if not strategies_of(seen.world) and seen.world.arrivals:
        yield _nothing(seen, ())
    tried = runs(seen)
    for run in tried:
        match run.ended:
            case Ended.WRONG:
                yield _wrong(seen, run)
            case Ended.HANGS | Ended.FAILS:
                yield _broken(seen, run)
            case Ended.NOT_COMPARED:
                fix = "Run `ddpdiag train --strategy single` first, and correct the problems that it reports."
                yield _unmeasured(seen, run, "was not compared with one process", fix)
            case Ended.UNFINISHED:
                fix = (
                    f"Run again with more time (--set {run.trial.code}.deadline_seconds="
                    f"{2 * run.trial.deadline_seconds:.0f} and a larger --budget), or with fewer steps (--steps)."
                )
                yield _unmeasured(seen, run, "was not finished", fix)
            case _:
                pass
    if tried and not _tried(seen, tried):
        yield _nothing(seen, tried)
    elif seen.options.backend != "auto" and (
        absent := [text for run in tried for text in without_backend(run.outcomes).values()]
    ):
        yield seen.finding(
            "unmeasured",
            f"no training over {seen.world.backend} was tested",
            f"{absent[0]}.",
            fix="Install a torch that was built with this backend, or use another one (--backend).",
            of_the_run=True,
        )


def _unmeasured(seen: Seen[Data], run: Run, problem: str, fix: str) -> Finding:
    return seen.finding(
        "unmeasured",
        f"{run.strategy.value} {problem}",
        f"{run.strategy.value} on {ranks_text(run.trial.ranks)}: {run.reason}.",
        evidence={"trial": run.trial.number, "deadline_seconds": round(run.trial.deadline_seconds, 1)},
        fix=fix,
        of_the_run=True,
    )


def _tried(seen: Seen[Data], tried: Sequence[Run]) -> bool:
    """Whether a requested strategy was tried; one that torch lacks was not."""
    lacking = {run.strategy for run in tried if run.ended is Ended.NOT_POSSIBLE}
    return any(not why_not(each, seen.world) and each not in lacking for each in asked_of(seen.options).strategy)


def _nothing(seen: Seen[Data], tried: Sequence[Run]) -> Finding:
    whys = {run.strategy: run.reason for run in tried if run.ended is Ended.NOT_POSSIBLE}
    for strategy in asked_of(seen.options).strategy:
        whys.setdefault(strategy, why_not(strategy, seen.world) or "")
    reasons = "; ".join(f"{strategy.value}: {why}" for strategy, why in whys.items())
    return seen.finding(
        "unmeasured",
        "no requested strategy is possible here",
        f"{reasons}.",
        fix="Choose other strategies (--strategy), or run this where these are possible.",
        of_the_run=True,
    )


# Wrong ---------------------------------------------------------------------------------------------------------------


def _wrong(seen: Seen[Data], run: Run) -> Finding:
    apart, alone = run.apart or Apart(math.inf, 0), run.strategy is Strategy.SINGLE
    sentences, odd = _other_weights(run)
    return seen.finding(
        "wrong",
        "one process alone does not train"
        if alone
        else f"{run.strategy.value} does not give the same result as one process",
        " ".join((_numbers(seen, run, apart), *sentences)),
        ranks=odd,
        evidence={
            "trial": run.trial.number,
            "first_bad_step": (apart.step or 0) + 1,
            "deviation": apart.most,
            "tolerance": tolerance_of(seen),
        },
        fix=_CHECK,
    )


def _numbers(seen: Seen[Data], run: Run, apart: Apart) -> str:
    """The loss of the first bad step, that of single, and how much they may differ."""
    losses, alone, step = mean_losses(run), reference(seen), apart.step or 0
    asked = asked_of(seen.options)
    own = f"{losses[step]:.6g}" if step < len(losses) else "missing"
    if alone is None or run.strategy is Strategy.SINGLE:
        return f"In step {step + 1} of {asked.steps} its loss is {own}; a finite number is expected."
    return (
        f"In step {step + 1} of {asked.steps} the loss of {ranks_text(run.trial.ranks)} is {own}; in one process "
        f"(single) it is {alone.losses[step]:.6g}. The largest difference of any step or rank is {apart.most:.2g}; at "
        f"most {tolerance_of(seen):.2g} is expected for {asked.dtype}."
    )


def _other_weights(run: Run) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Ranks that began or ended with other parameters than most, in sentences and as ranks to blame.

    Gradients are the same on all ranks once they are averaged, so in ddp all ranks end alike.
    """
    said: list[str] = []
    for word, values in (
        ("began", {rank: own.start for rank, own in run.data.items() if own.start}),
        ("ended", {rank: own.end for rank, own in run.data.items() if own.end}),
    ):
        odd = odd_ones_out(values)
        if odd is not None and odd.ranks:
            said.append(f"{ranks_text(odd.ranks).capitalize()} {word} with other parameters than most ranks.")
            return tuple(said), odd.ranks
        if odd is not None:
            said.append(f"The ranks {word} with {len(odd.groups)} different sets of parameters.")
    return tuple(said), ()


# Hung or failed ------------------------------------------------------------------------------------------------------


def _broken(seen: Seen[Data], run: Run) -> Finding:
    ranks = run.blame.ranks if run.blame is not None else ()
    guilty = [o for o in run.outcomes if o.rank in ranks] or [o for o in run.outcomes if o.status is not Status.DONE]
    first = guilty[0]
    what, verb = run.strategy.value, run.ended.value
    who = f"{ranks_text(ranks)} on {', '.join(seen.world.hosts_of(ranks))}" if ranks else ""
    reason = begun(run.reason.rstrip("."))
    if who:
        its_own = run.reason.startswith("it ")
        reason = (
            f"{begun(who)} {reason.removeprefix('It ')}" if its_own else f"The error of {who}: {run.reason.rstrip('.')}"
        )
    at = f" (last step '{first.at}')" if first.at else ""
    until = f" (deadline {run.trial.deadline_seconds:.1f} s)" if run.ended is Ended.HANGS else ""
    waits = waits_text(run.blame, run.outcomes) if run.blame is not None else ""
    evidence: dict[str, Scalar | list[Scalar]] = {"trial": run.trial.number, "last_step": first.at}
    evidence |= bundle(ranks, run.outcomes)
    if said := last_words(first.detail):
        evidence["output"] = said
    return seen.finding(
        verb,
        f"{what} {verb}{f': {who}' if who else ''}",
        f"{what} on {ranks_text(run.trial.ranks)} {verb}{until}. {begun(reason)}{at}. {waits}".strip(),
        ranks=ranks,
        evidence=evidence,
        fix=_fix(seen, run, first),
        known=cause_of(guilty) if run.ended is Ended.FAILS else None,
    )


def _fix(seen: Seen[Data], run: Run, first: Outcome) -> str:
    if run.strategy is Strategy.SINGLE:
        return f"Run `ddpdiag check` on {seen.world.host_of(first.rank)} alone: no other host took part."
    return _CHECK
