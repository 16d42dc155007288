"""What the climb came to, in findings. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.bandwidth.text import rate_text, times_text
from ddpdiag.check import Seen
from ddpdiag.checks import gpu002
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.ladder import Ended, Ground, Kind, Part, Step, Tried
from ddpdiag.checks.ladder_causes import cause
from ddpdiag.checks.ladder_pairs import Places, places
from ddpdiag.model import Finding, Scalar, Severity

D = TypeVar("D")

_VERBS = {
    "hung": "hangs",
    "died": "crashes",
    "raised": "fails",
    "wrong": "gives wrong values",
    "unheard": "ends without a word",
}


class Climbed(NamedTuple):
    """How far it went, what was tried in order, what was not and why, and the prices: gloo's rate and the expected one.

    Rates are bus bandwidths in bytes per second; `source` says where the expected one comes from.
    """

    end: Step | Ended
    tried: tuple[Tried, ...]
    ground: Ground
    skipped: dict[str, str]
    gloo: float | None = None
    expected: float | None = None
    source: str = ""

    @property
    def as_it_is(self) -> tuple[Tried, ...]:
        """The runs of all ranks in the environment as it is."""
        whole = [tried for tried in self.tried if tried.step.part is Part.WHOLE]
        return tuple(tried for tried in whole if not tried.step.members)

    @property
    def first(self) -> Tried:
        """What the environment as it is does: the run that failed, if one did."""
        return next((tried for tried in self.as_it_is if not tried.works), self.as_it_is[0])


def findings(seen: Seen[D], climbed: Climbed) -> Iterator[Finding]:
    """At most one."""
    if not climbed.tried:
        return
    if isinstance(climbed.end, Step):
        yield _unfinished(seen, climbed)
        return
    match climbed.end.kind:
        case Kind.FOUND if climbed.first.works and all(member in climbed.ground.own for member in climbed.end.members):
            yield _held_back(seen, climbed, climbed.end)
        case Kind.FOUND if climbed.first.works:
            yield _slow(seen, climbed, climbed.end)
        case Kind.FOUND:
            yield _fallback(seen, climbed, climbed.end)
        case Kind.HELD_BACK:
            yield _held_back(seen, climbed, climbed.end)
        case Kind.NEEDED:
            yield _needed(seen, climbed, climbed.end)
        case Kind.TRANSIENT:
            yield _transient(seen, climbed)
        case Kind.UNRELIABLE | Kind.NOTHING:
            yield _nothing(seen, climbed, climbed.end)


def both_fail(seen: Seen[D]) -> Finding:
    """gloo fails as well."""
    own = seen.world.backend
    return seen.finding(
        "both",
        Severity.INFO,
        f"gloo fails as well as {own}",
        f"The all-reduce fails over gloo and over {own}: that is the network, a host or a rank, and not how GPUs are "
        "joined, so no variable was looked for.",
        remedy="Mend what the other findings name, then check again.",
    )


def _fallback(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    where = places(seen, climbed.first, end, climbed.ground)
    verb = _verb(climbed.first)
    taken = " and ".join(dict.fromkeys(member.what for member in end.members))
    works = f"gloo works, and {own} {verb}" if climbed.gloo is not None else f"{own} {verb}"
    return seen.finding(
        "fallback",
        Severity.WARNING if seen.options.exports else Severity.ERROR,
        f"{own} {verb}; {exports_text(env)} it works",
        f"{works}{where.text}{_said(climbed.first)}. What fails is {taken}: "
        f"{exports_text(env)} {own} worked in {_runs(end)}"
        f"{_price(climbed, end)}. {cause(seen, end.members)}".strip(),
        ranks=where.ranks,
        nodes=where.nodes,
        gpus=_gpus(seen, where),
        links=where.links,
        evidence=_evidence(climbed),
        remedy=f"Until the cause is mended, set in the job what follows (`ddpdiag check --env-file FILE` writes it); "
        f"nothing less than this was seen to work, and it was tried {len(end.runs)} times.",
        env=env,
    )


def _slow(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    where = places(seen, climbed.first, end, climbed.ground)
    taken = " and ".join(dict.fromkeys(member.what for member in end.members))
    times = times_text(_ratio(climbed, end.runs))
    return seen.finding(
        "slow",
        Severity.WARNING,
        f"{own} is slow; {exports_text(env)} it is {times} faster",
        f"{own} reaches {_rate(climbed.first)} busbw{_against_gloo(climbed)}{where.text}. What slows it down is "
        f"{taken}: "
        f"{exports_text(env)} it is {times} faster in {_runs(end)}{_price(climbed, end)}. "
        f"{cause(seen, end.members)}".strip(),
        ranks=where.ranks,
        nodes=where.nodes,
        gpus=_gpus(seen, where),
        links=where.links,
        evidence=_evidence(climbed),
        remedy="Until the cause is mended, set in the job what follows.",
        env=env,
    )


def _held_back(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    settings = ", ".join(member.what for member in end.members)
    times = times_text(_ratio(climbed, end.runs))
    return seen.finding(
        "held-back",
        Severity.WARNING,
        f"{settings} costs bandwidth: without it {own} is {times} faster",
        f"{own} reaches {_rate(climbed.first)} busbw with {settings}, and works without it in {_runs(end)}"
        f"{_price(climbed, end)}: {times} faster. It may be left from an old workaround.",
        evidence=_evidence(climbed),
        remedy="Take it out of the job, of the shell's start-up files and of ~/.nccl.conf and /etc/nccl.conf.",
        env=env,
    )


def _needed(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own = seen.world.backend
    settings = ", ".join(member.what for member in end.members)
    without = end.runs[-1]
    return seen.finding(
        "needed",
        Severity.INFO,
        f"{settings} is needed here",
        f"{own} works with {settings} ({_rate(climbed.first)} busbw), and {_verb(without)} without it"
        f"{_said(without)}: keep it until the cause is mended.",
        evidence=_evidence(climbed),
    )


def _transient(seen: Seen[D], climbed: Climbed) -> Finding:
    own = seen.world.backend
    runs = len(climbed.tried)
    return seen.finding(
        "transient",
        Severity.WARNING,
        f"{own} failed once, and then worked {runs} times",
        f"The all-reduce over {own} failed at first, and worked in {runs} of {runs} runs in fresh processes, with "
        f"nothing changed ({_rate(climbed.first)} busbw). What fails now and then will fail in a long job.",
        evidence=_evidence(climbed),
        remedy="Check again, and look at the kernel log of the hosts (Xid, link down) at the time of the failure.",
    )


def _nothing(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own = seen.world.backend
    where = places(seen, climbed.first, end, climbed.ground)
    verb = _verb(climbed.first) if not climbed.first.works else f"is slow ({_rate(climbed.first)} busbw)"
    works = f"gloo works{_gloo(climbed)}, and {own} {verb}" if climbed.gloo is not None else f"{own} {verb}"
    if end.kind is Kind.UNRELIABLE:
        bad = next(run for run in reversed(end.runs) if not run.works)
        env = Step(Part.WHOLE, end.members).env
        word, told = "unreliable", f"{exports_text(env)} it worked {len(end.runs) - 1} times and then {_verb(bad)}"
    else:
        sets = len({tried.step.set for tried in climbed.tried})
        word, told = "nothing", f"none of {sets} sets of variables changes that"
    return seen.finding(
        word,
        Severity.WARNING if climbed.first.works else Severity.ERROR,
        f"{own} {verb}, and no variable gets around it",
        f"{works}{where.text}{_said(climbed.first)}; {told}.{_not_tried(climbed)}",
        ranks=where.ranks,
        nodes=where.nodes,
        gpus=_gpus(seen, where),
        links=where.links,
        evidence=_evidence(climbed),
        remedy=f"Look at what {own} says with NCCL_DEBUG=INFO, at `nvidia-smi topo -m` and the kernel log; "
        "try another version of NCCL or of the driver.",
    )


def _unfinished(seen: Seen[D], climbed: Climbed) -> Finding:
    own = seen.world.backend
    did = f"{own} {_verb(climbed.first)}" if not climbed.first.works else f"{own} was compared"
    return seen.finding(
        "unfinished",
        Severity.WARNING,
        "the budget ended before a way around was found",
        f"{did}{_said(climbed.first)}; {len(climbed.tried)} sets of variables were tried before the run ended, and "
        "more are left.",
        evidence=_evidence(climbed),
        remedy=f"Give it more time (--budget {max(180, round(3 * seen.options.budget_seconds))}).",
    )


# Words ---------------------------------------------------------------------------------------------------------------


def _verb(tried: Tried) -> str:
    return _VERBS.get(tried.how, "fails")


def _said(tried: Tried) -> str:
    return f" ({tried.error})" if tried.error and tried.how == "raised" else ""


def exports_text(env: Mapping[str, str | None]) -> str:
    """Such as "with NCCL_P2P_DISABLE=1" or "without NCCL_ALGO"."""
    settings = ", ".join(f"{name}={value}" for name, value in env.items() if value is not None)
    removed = ", ".join(name for name, value in env.items() if value is None)
    words = ([f"with {settings}"] if settings else []) + ([f"without {removed}"] if removed else [])
    return " and ".join(words)


def _runs(end: Ended) -> str:
    good = sum(run.works for run in end.runs)
    return f"{good} of {len(end.runs)} runs"


def _rate(tried: Tried) -> str:
    return rate_text(tried.busbw) if tried.busbw is not None else "no"


def _least(runs: Sequence[Tried]) -> float:
    return min((run.busbw for run in runs if run.busbw is not None), default=0.0)


def _ratio(climbed: Climbed, runs: Sequence[Tried]) -> float:
    """The slowest run over the best as it is."""
    best = max((tried.busbw or 0.0 for tried in climbed.as_it_is), default=0.0)
    return _least(runs) / best if best else 0.0


def _price(climbed: Climbed, end: Ended) -> str:
    """What it costs against what the hardware should give, or beside gloo."""
    rate = _least(end.runs)
    if not rate:
        return ""
    text = f", at {rate_text(rate)} busbw"
    if climbed.expected:
        return f"{text}, {100 * rate / climbed.expected:.0f} % of {rate_text(climbed.expected)} ({climbed.source})"
    return text + (f" ({_beside_gloo(rate, climbed.gloo)})" if climbed.gloo else "")


def _beside_gloo(rate: float, gloo: float) -> str:
    return f"gloo: {rate_text(gloo)}"


def _gloo(climbed: Climbed) -> str:
    return f" ({rate_text(climbed.gloo)} busbw)" if climbed.gloo else ""


def _against_gloo(climbed: Climbed) -> str:
    return f", and gloo {rate_text(climbed.gloo)}" if climbed.gloo else ""


def _not_tried(climbed: Climbed) -> str:
    return f" Not tried: {'; '.join(_skips(climbed))}." if climbed.skipped else ""


def _skips(climbed: Climbed) -> list[str]:
    """Each reason once, with the rungs that it concerns."""
    reasons: dict[str, list[str]] = {}
    for name, reason in climbed.skipped.items():
        reasons.setdefault(reason, []).append(name)
    if isinstance(climbed.end, Ended) and climbed.end.inside_works and climbed.ground.inside:
        names = [rung.name for rung in climbed.ground.inside]
        reasons.setdefault("inside each host it works", []).extend(names)
    return [f"{names_text(names)} ({reason})" for reason, names in reasons.items()]


def _gpus(seen: Seen[D], where: Places) -> tuple[str, ...]:
    """The GPUs that the concerned ranks take."""
    taken = seen.of(gpu002.CHECK).by_rank
    chosen = (taken[rank].gpu for rank in where.concerned if rank in taken)
    return tuple(dict.fromkeys(gpu.uuid for gpu in chosen if gpu is not None and gpu.uuid))


def _evidence(climbed: Climbed) -> dict[str, Scalar | list[Scalar]]:
    lines: list[Scalar] = [_line(tried) for tried in climbed.tried]
    skipped: list[Scalar] = list(_skips(climbed))
    return {"tried": lines, "not_tried": skipped}


def _line(tried: Tried) -> str:
    name = tried.step.set or "as it is"
    part = "" if tried.step.part is Part.WHOLE else f", {tried.step.part.value}"
    result = f"works, {_rate(tried)}" if tried.works else _verb(tried)
    groups = len(tried.failed) + len(tried.busbws)
    if tried.failed and groups > 1:
        result += f" ({'; '.join(ranks_text(group) for group in tried.failed[:4])})"
    return f"{name}{part}: {result}"
