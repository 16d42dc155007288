"""Findings of TRN002: what does not work, and who stands in its way."""

import math
from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import without_backend
from ddpdiag.checks.failure_evidence import bundle, last_words, waits_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.strategies.data import Data, asked_of
from ddpdiag.checks.strategies.jobs import job_of, jobs, why_not
from ddpdiag.checks.strategies.view import Apart, Run, mean_losses, reference, runs
from ddpdiag.errors import AbsentBackend
from ddpdiag.model import Finding, Outcome, Scalar, Status
from ddpdiag.model.train import Ended, Strategy
from ddpdiag.stats import odd_ones_out

_CHECK = "Run `ddpdiag check`, which asks of hosts, GPUs, rendezvous and all-reduce one by one what is wrong."


def findings(seen: Seen[Data], tolerance: float) -> Iterator[Finding]:
    """One for each training that does not do what it should, and one where nothing could be tried."""
    if not jobs(seen.world) and seen.world.arrivals:
        yield _nothing(seen, ())
    tried = runs(seen, tolerance)
    for run in tried:
        match run.ended:
            case Ended.WRONG:
                yield _wrong(seen, run, tolerance)
            case Ended.HANGS | Ended.FAILS:
                yield _broken(seen, run)
            case Ended.UNFINISHED | Ended.NOT_COMPARED:
                yield _unknown(seen, run)
            case _:
                pass
    if tried and not _tried(seen, tried):
        yield _nothing(seen, tried)
    elif seen.options.backend != "auto" and (absent := _without_backend(tried)):
        yield _absent_backend(seen, absent)


def _tried(seen: Seen[Data], tried: Sequence[Run]) -> bool:
    """Was something tried that was asked for? What torch turned out to lack was not."""
    asked = asked_of(seen.options)
    there = [run for run in tried if run.ended is not Ended.NOT_POSSIBLE]
    lacking = {run.job.strategy for run in tried} - {run.job.strategy for run in there}
    left = [each for each in asked.strategies if why_not(each, seen.world) is None and each not in lacking]
    return bool(left) or asked.scaling


def _nothing(seen: Seen[Data], tried: Sequence[Run]) -> Finding:
    whys = {run.job.strategy: run.reason for run in tried if run.ended is Ended.NOT_POSSIBLE}
    for strategy in asked_of(seen.options).strategies:
        whys.setdefault(strategy, why_not(strategy, seen.world) or "")
    told = "; ".join(f"{strategy.value}: {why}" for strategy, why in whys.items())
    return seen.finding(
        "unmeasured",
        "no strategy that was asked for is possible here",
        f"{told}.",
        remedy="Ask for others with --strategy, or run this where they are possible.",
        of_the_run=True,
    )


def _without_backend(tried: Sequence[Run]) -> str:
    """What torch says of the backend that was asked for by its name, if it was built without; one that it does not
    know at all is RUN003's."""
    said = (text for run in tried for text in without_backend(run.outcomes, (AbsentBackend,)).values())
    return next(said, "")


def _absent_backend(seen: Seen[Data], why: str) -> Finding:
    return seen.finding(
        "unmeasured",
        f"whether ranks can train over {seen.world.backend} is not known",
        f"{why}.",
        remedy="Install a torch that was built with this backend, or name another one with --backend.",
        of_the_run=True,
    )


def _unknown(seen: Seen[Data], run: Run) -> Finding:
    what = _what(seen, run)
    return seen.finding(
        "unmeasured",
        f"whether {what} works is not known",
        f"{what} on {_where(run)}: {run.reason}.",
        evidence={"trial": run.trial.number, "deadline_seconds": round(run.trial.deadline_seconds, 1)},
        remedy=f"Give more time (--budget, --set {run.trial.code}.deadline_seconds=SECONDS), or ask for less (--steps)."
        if run.ended is Ended.UNFINISHED
        else "See first why single did not work.",
        of_the_run=True,
    )


def _what(seen: Seen[Data], run: Run) -> str:
    """Such as "fsdp"; of a point of a curve, what tells it from the others."""
    name = run.job.strategy.value
    if run.job == job_of(run.job.strategy, seen.world):
        return name
    return f"{name} on {len(run.job.ranks)} ranks with {run.job.batch} images in a step"


def _where(run: Run) -> str:
    return ranks_text(run.job.ranks)


# Wrong ---------------------------------------------------------------------------------------------------------------


def _wrong(seen: Seen[Data], run: Run, tolerance: float) -> Finding:
    apart, alone = run.apart or Apart(math.inf, 0), run.job.strategy is Strategy.SINGLE
    step = apart.step or 0
    told, odd = _other_weights(run)
    return seen.finding(
        "wrong",
        "one process alone does not train"
        if alone
        else f"{_what(seen, run)} trains something else than one process alone",
        " ".join((_numbers(seen, run, apart, tolerance), *told)),
        ranks=odd,
        evidence={
            "trial": run.trial.number,
            "first_bad_step": step + 1,
            "deviation": apart.most,
            "tolerance": tolerance,
        },
        remedy=_CHECK,
    )


def _numbers(seen: Seen[Data], run: Run, apart: Apart, tolerance: float) -> str:
    """The loss of the first bad step, that of single, and how far they may be apart."""
    losses, alone, step = mean_losses(run), reference(seen, run.job), apart.step or 0
    dtype, steps = asked_of(seen.options).dtype, asked_of(seen.options).steps
    own = f"{losses[step]:.6g}" if step < len(losses) else "not there"
    if alone is None or run.job.strategy is Strategy.SINGLE:
        return f"In step {step + 1} of {steps} its loss is {own}, a finite number was expected."
    return (
        f"In step {step + 1} of {steps} the loss of {_where(run)} is {own}, that of single {alone.losses[step]:.6g}; "
        f"the largest distance of any step or rank is {apart.most:.2g}, at most {tolerance:.2g} was "
        f"expected ({dtype})."
    )


def _other_weights(run: Run) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Who began or ended with other parameters than most, in sentences and as ranks to blame.

    Gradients are the same on all ranks once they are averaged, so in ddp all ranks end alike.
    """
    said: list[str] = []
    for word, values in (
        ("began", {rank: own.start for rank, own in run.data.items() if own.start}),
        ("ended", {rank: own.end for rank, own in run.data.items() if own.end}),
    ):
        odd = odd_ones_out(values)
        if odd is not None and odd.ranks:
            said.append(f"{ranks_text(odd.ranks).capitalize()} {word} with other parameters than most.")
            return tuple(said), odd.ranks
        if odd is not None:
            said.append(f"The ranks {word} with {len(odd.groups)} different sets of parameters.")
    return tuple(said), ()


# Hung or failed ------------------------------------------------------------------------------------------------------


def _broken(seen: Seen[Data], run: Run) -> Finding:
    blame = run.blame
    ranks = blame.ranks if blame is not None else ()
    guilty = [o for o in run.outcomes if o.rank in ranks] or [o for o in run.outcomes if o.status is not Status.DONE]
    first = guilty[0]
    verb = run.ended.value
    who = f": {ranks_text(ranks)} on {', '.join(seen.world.nodes_of(ranks))}" if ranks else ""
    waits = waits_text(blame, run.outcomes) if blame is not None else ""
    return seen.finding(
        verb,
        f"{_what(seen, run)} {verb}{who}",
        f"{_what(seen, run)} on {_where(run)} {verb}: {_story(first, run)} {waits}".strip(),
        ranks=ranks,
        evidence=_evidence(first, run),
        remedy=_remedy(seen, run, first),
    )


def _remedy(seen: Seen[Data], run: Run, first: Outcome) -> str:
    if first.error.startswith("DataError"):
        return "Copy the files of digits anew, or leave out --data-dir to train on those that ship."
    if run.job.strategy is Strategy.SINGLE:
        return f"Look at {seen.world.node_of(first.rank)} first: nobody else took part."
    return _CHECK


def _story(first: Outcome, run: Run) -> str:
    at = f" (last step '{first.at}')" if first.at else ""
    within = f" within {run.trial.deadline_seconds:.1f} s" if run.ended is Ended.HANGS else ""
    return f"{run.reason.rstrip('.')}{at}{within and f'; it had to end{within}'}."


def _evidence(first: Outcome, run: Run) -> dict[str, Scalar | list[Scalar]]:
    evidence: dict[str, Scalar | list[Scalar]] = {"trial": run.trial.number, "last_step": first.at}
    evidence |= bundle(run.blame.ranks if run.blame is not None else (), run.outcomes)
    if first.detail:
        evidence["output"] = last_words(first.detail)
    return evidence
