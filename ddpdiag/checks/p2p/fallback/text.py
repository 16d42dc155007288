"""What was tried on the ladder, in words."""

from collections.abc import Sequence
from typing import NamedTuple

from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Part, Step, Tried
from ddpdiag.model import Scalar
from ddpdiag.text import rate_text

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
        """What the environment as it is does: the run that failed, if one did. There is one, once there is an end."""
        return next((tried for tried in self.as_it_is if not tried.works), self.as_it_is[0])

    @property
    def sets(self) -> str:
        """How many sets of variables were tried, beside the environment as it is: "2 sets of variables were tried"."""
        count = len({tried.step.set for tried in self.tried if tried.step.members})
        return f"{count or 'no'} {'set of variables was' if count == 1 else 'sets of variables were'} tried"


def verb(tried: Tried) -> str:
    """Such as "hangs"."""
    return _VERBS.get(tried.how, "fails")


def error_text(tried: Tried) -> str:
    """What a rank said of it, in brackets, where it said something."""
    return f" ({tried.error})" if tried.error and tried.how == "raised" else ""


def runs_text(end: Ended) -> str:
    """Such as "3 of 3 runs"."""
    good = sum(run.works for run in end.runs)
    return f"{good} of {len(end.runs)} runs"


def rate(tried: Tried) -> str:
    """Its bus bandwidth."""
    return rate_text(tried.busbw) if tried.busbw is not None else "no"


def _least(runs: Sequence[Tried]) -> float:
    return min((run.busbw for run in runs if run.busbw is not None), default=0.0)


def ratio(climbed: Climbed, runs: Sequence[Tried]) -> float:
    """The slowest run over the best as it is."""
    best = max((tried.busbw or 0.0 for tried in climbed.as_it_is), default=0.0)
    return _least(runs) / best if best else 0.0


def price(climbed: Climbed, end: Ended) -> str:
    """What it costs against what the hardware should give, or beside gloo."""
    rate = _least(end.runs)
    if not rate:
        return ""
    text = f", at {rate_text(rate)} busbw"
    if climbed.expected:
        return f"{text}, {100 * rate / climbed.expected:.0f} % of {rate_text(climbed.expected)} ({climbed.source})"
    return text + (f" (gloo: {rate_text(climbed.gloo)})" if climbed.gloo else "")


def gloo_text(climbed: Climbed) -> str:
    """gloo's bus bandwidth in brackets, where it is known."""
    return f" ({rate_text(climbed.gloo)} busbw)" if climbed.gloo else ""


def against_gloo(climbed: Climbed) -> str:
    """The same, as a part of a sentence."""
    return f", and gloo {rate_text(climbed.gloo)}" if climbed.gloo else ""


def not_tried(climbed: Climbed) -> str:
    """A sentence on the rungs that cannot matter here."""
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


def tried_lines(climbed: Climbed) -> dict[str, Scalar | list[Scalar]]:
    """What was tried, in order, and what was not, as evidence."""
    lines: list[Scalar] = [_line(tried) for tried in climbed.tried]
    skipped: list[Scalar] = list(_skips(climbed))
    return {"tried": lines, "not_tried": skipped}


def _line(tried: Tried) -> str:
    name = tried.step.set or "as it is"
    part = "" if tried.step.part is Part.WHOLE else f", {tried.step.part.value}"
    result = f"works, {rate(tried)}" if tried.works else verb(tried)
    groups = len(tried.failed) + len(tried.busbws)
    if tried.failed and groups > 1:
        result += f" ({'; '.join(ranks_text(group) for group in tried.failed[:4])})"
    return f"{name}{part}: {result}"
