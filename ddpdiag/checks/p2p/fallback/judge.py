"""What the search found, in findings."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ddpdiag.bandwidth import Bound
from ddpdiag.checks.api import Seen
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import workarounds_text
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p.fallback.causes import Places, cause, places
from ddpdiag.checks.p2p.fallback.members import VARIABLES
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Kind, Part, Step, Tried
from ddpdiag.model import EventKind, Finding, Scalar, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import begun, count, rate_text, reached_text, times_text


class SearchResult(NamedTuple):
    """How far it went, what was tried in order, what was not and why, and the prices: gloo's rate and the expected one.

    gloo's rate is a bus bandwidth in bytes per second.
    """

    end: Step | Ended
    tried: tuple[Tried, ...]
    ground: Ground
    skipped: dict[str, str]
    gloo: float | None = None
    expected: Bound | None = None

    @property
    def as_it_is(self) -> tuple[Tried, ...]:
        """The runs of all ranks in the environment as it is."""
        return tuple(own for own in self.tried if own.step.part is Part.WHOLE and not own.step.members)

    @property
    def first(self) -> Tried:
        """What the environment as it is does: the run that failed, if one did. There is one, once there is an end."""
        return next((tried for tried in self.as_it_is if not tried.works), self.as_it_is[0])

    @property
    def sets(self) -> str:
        """How many sets of variables were tried, beside the environment as it is: "2 sets of variables were tried"."""
        number = len({tried.step.set for tried in self.tried if tried.step.members})
        return f"{number or 'no'} {'set of variables was' if number == 1 else 'sets of variables were'} tried"


_VERBS = {
    "hung": "hangs",
    "died": "crashes",
    "raised": "fails",
    "wrong": "gives wrong values",
    "unheard": "gives no result",
}


_VARIABLES = {name: next(iter(variable.member.env)) for name, variable in VARIABLES.items()}


def findings(seen: Seen[Any], result: SearchResult) -> Iterator[Finding]:
    """At most one."""
    if isinstance(result.end, Step):
        yield _unfinished(seen, result)
        return
    end = result.end
    match end.kind:
        case Kind.FOUND:
            yield _found(seen, result, end)
        case Kind.TRANSIENT:
            yield _transient(seen, result)
        case Kind.UNRELIABLE | Kind.NOTHING:
            yield _nothing(seen, result, end)


def _found(seen: Seen[Any], result: SearchResult, end: Ended) -> Finding:
    """Variables with which the backend works, or is faster."""
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    variables, times = workarounds_text(env), gain_text(result, end)
    where = places(seen, result.tried, end, result.ground)
    avoided = " and ".join(dict.fromkeys(member.what for member in end.members))
    avoids = f"{begun(variables)}, which avoids {avoided},"
    why = cause(seen, end.members, where.hosts)
    does, is_slow = verb(result.first), result.first.works
    if is_slow:
        title = f"{own} is slow; {variables} it is {times} faster"
        gloo = f" (gloo: {rate_text(result.gloo)})" if result.gloo else ""
        message = (
            f"{own} reaches only {rate(result.first)} busbw{gloo}{where.text}. {avoids} it is {times} faster in "
            f"{runs_text(end)}{price(result, end)}. {why}"
        )
        fix = "Until the cause is fixed, add the lines below to the job script."
    else:
        title = f"{own} {does}; {variables} it works"
        gloo = "; gloo works" if result.gloo is not None else ""
        message = (
            f"{own} {does}{where.text}{error_text(result.first)}{gloo}. {avoids} {own} worked in {runs_text(end)}"
            f"{price(result, end)}. {why}"
        )
        fix = (
            "Until the cause is fixed, add the lines below to the job script (`ddpdiag check --write-workaround FILE` "
            "writes them to a file)."
        )
    return seen.finding(
        "slow" if is_slow else "fallback",
        title,
        message.strip(),
        severity=Severity.WARNING if is_slow or seen.options.uses_workarounds else Severity.ERROR,
        hosts=where.hosts,
        gpus=_gpus(seen, where),
        evidence=tried_lines(result),
        fix=fix,
        env=env,
    )


def _transient(seen: Seen[Any], result: SearchResult) -> Finding:
    own, runs = seen.world.backend, len(result.tried)
    return seen.finding(
        "transient",
        f"{own} failed once, then worked {count(runs, 'time')}",
        f"The all-reduce over {own} failed in {all_reduce.CHECK.code}, then worked in {runs} of {runs} runs in new "
        f"processes with the same environment ({rate(result.first)} busbw). A long job will meet such a fault again.",
        evidence=tried_lines(result),
        fix="Run `ddpdiag check` again. On each host run `dmesg -T | grep -i -E 'xid|link'` for errors at the time of "
        "this run, and leave a host with such errors out (Slurm: `--exclude=HOST`). Without any, save checkpoints "
        "often.",
    )


def _nothing(seen: Seen[Any], result: SearchResult, end: Ended) -> Finding:
    own = seen.world.backend
    where = places(seen, result.tried, end, result.ground)
    does = verb(result.first) if not result.first.works else f"is slow ({rate(result.first)} busbw)"
    rate_of_gloo = f" ({rate_text(result.gloo)} busbw)" if result.gloo else ""
    gloo = f"; gloo works{rate_of_gloo}" if result.gloo is not None else ""
    not_tried = f" Not tried: {'; '.join(_skips(result, _VARIABLES))}." if result.skipped else ""
    if end.kind is Kind.UNRELIABLE:
        bad = next(run for run in reversed(end.runs) if not run.works)
        env = Step(Part.WHOLE, end.members).env
        times = count(len(end.runs) - 1, "time")
        word, told = "unreliable", f"{begun(workarounds_text(env))} it worked {times}, and the next run {verb(bad)}"
    else:
        word, told = "nothing", f"{begun(result.sets)}, and none works"
    return seen.finding(
        word,
        f"{own} {does}, and no variable avoids it{' reliably' if end.kind is Kind.UNRELIABLE else ''}",
        f"{own} {does}{where.text}{error_text(result.first)}{gloo}. {told}.{not_tried}",
        severity=Severity.WARNING if result.first.works else Severity.ERROR,
        hosts=where.hosts,
        gpus=_gpus(seen, where),
        evidence=tried_lines(result),
        fix="Run the job once with NCCL_DEBUG=INFO and give its output to `ddpdiag explain FILE`. Look for `dmesg -T | "
        "grep -i xid` on the hosts. Then try another version of NCCL, or of the driver.",
    )


def _unfinished(seen: Seen[Any], result: SearchResult) -> Finding:
    own = seen.world.backend
    known = result.first if result.as_it_is else None
    if known is not None and not known.works:
        did = f"{own} {verb(known)}{error_text(known)}"
    else:
        did = f"{own} {'failed' if result.ground.broken else 'was slow'} in {all_reduce.CHECK.code}"
    why, fix = _why_unfinished(seen)
    return seen.finding(
        "unfinished",
        f"{why} before a workaround was found",
        f"{did}. {begun(result.sets)} before that.",
        evidence=tried_lines(result),
        fix=fix,
    )


def _more_seconds(seen: Seen[Any]) -> int:
    return max(180, round(3 * seen.options.budget_seconds))


def _why_unfinished(seen: Seen[Any]) -> tuple[str, str]:
    """What ended the search, and what to do about it."""
    events = seen.recording.events
    lost = sorted({e.rank for e in events if e.kind is EventKind.LOST and e.rank is not None})
    if lost:
        return (
            f"{ranks_text(lost)} {'was' if len(lost) == 1 else 'were'} lost",
            "Fix the finding of RUN002 first, then run again.",
        )
    if any(e.kind in TOLD_TO_LEAVE for e in events):
        return "the run was interrupted", "Run it again to the end."
    if seen.recording.end is None:
        return "the recording ends", "Judge the whole recording, or run again."
    return "the budget ended", f"Run again with more time (--budget {_more_seconds(seen)})."


def _gpus(seen: Seen[Any], where: Places) -> tuple[str, ...]:
    """The GPUs that the concerned ranks take."""
    taken = seen.of(devices.CHECK).by_rank
    chosen = (taken[rank].gpu for rank in where.concerned if rank in taken)
    return tuple(dict.fromkeys(gpu.uuid for gpu in chosen if gpu is not None and gpu.uuid))


def verb(tried: Tried) -> str:
    """Such as "hangs"."""
    return _VERBS.get(tried.how, "fails")


def error_text(tried: Tried) -> str:
    """The error of a rank, in brackets, where it raised one; with its meaning, if that is known."""
    return f" ({tried.error})" if tried.error and tried.how == "raised" else ""


def runs_text(end: Ended) -> str:
    """Such as "3 of 3 runs"."""
    return f"{sum(run.works for run in end.runs)} of {len(end.runs)} runs"


def rate(tried: Tried) -> str:
    return rate_text(tried.busbw) if tried.busbw is not None else "no"


def _least(runs: Sequence[Tried]) -> float:
    return min((run.busbw for run in runs if run.busbw is not None), default=0.0)


def gain_text(result: SearchResult, end: Ended) -> str:
    """The slowest run over the best as it is: "2.1x"."""
    best = max((tried.busbw or 0.0 for tried in result.as_it_is), default=0.0)
    return times_text(_least(end.runs) / best if best else 0.0)


def price(result: SearchResult, end: Ended) -> str:
    """What it costs against what the hardware should give, or beside gloo."""
    rate = _least(end.runs)
    if not rate:
        return ""
    text = f", at {rate_text(rate)} busbw"
    if result.expected:
        return f"{text}, {reached_text(rate, result.expected.busbw_bytes_per_s)} ({result.expected.source})"
    return text + (f" (gloo: {rate_text(result.gloo)})" if result.gloo else "")


def _skips(result: SearchResult, words: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Each reason once, with the overrides that it concerns; these as in `words`, if they are there."""
    reasons: dict[str, list[str]] = {}
    for name, reason in result.skipped.items():
        reasons.setdefault(reason, []).append(name)
    if isinstance(result.end, Ended) and result.end.inside_works and result.ground.inside:
        names = [override.name for override in result.ground.inside]
        reasons.setdefault("inside each host it works", []).extend(names)
    return [f"{names_text([words.get(name, name) for name in names])} ({reason})" for reason, names in reasons.items()]


def tried_lines(result: SearchResult) -> dict[str, Scalar | list[Scalar]]:
    """What was tried, in order, and what was not, as evidence."""
    return {"tried": [_line(tried) for tried in result.tried], "not_tried": [*_skips(result)]}


def _line(tried: Tried) -> str:
    name = tried.step.set or "as it is"
    part = "" if tried.step.part is Part.WHOLE else f", {tried.step.part.value}"
    result = f"works, {rate(tried)}" if tried.works else verb(tried)
    groups = len(tried.failed) + len(tried.busbws)
    if tried.failed and groups > 1:
        result += f" ({'; '.join(ranks_text(group) for group in tried.failed[:4])})"
    return f"{name}{part}: {result}"
