"""The meaning of error texts of other programs, by the cards of `ddpdiag explain`.

A check that quotes an exception, a log or a worker's output first looks for a card. The card of a cause names what is
wrong, so it gives the finding's title, message and fix. The text of a failure without its reason is quoted unchanged.
An echo (Role.ECHO) blames no rank. The text of a rank that waits (Role.WAIT) names the ranks for which it waits.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct, structs

from ddpdiag.explain.card import Role
from ddpdiag.explain.matcher import Sighting, explain_log
from ddpdiag.model import Finding, Outcome, Scalar, Status
from ddpdiag.model.report import KNOWN_ERROR
from ddpdiag.text import begun

# The part of a card's meaning that serves as title: up to a ":" or ";", or to the end of the first sentence.
_CLAUSE = re.compile(r"((?:\([^)]*\)|[^(])+?)(?:[:;] |\. |\.$|$)")
# First words of a meaning that a title writes in lower case, because they are no names.
_WORDS = re.compile(r"(?:A|All|An|Another|Files|Hosts|It|Mostly|No|Nothing|Other|Ranks|Some|The|There|This|Two) ")
# Assertions, and folders of the machine that built a library: quotes leave them out, as they are the same for all.
_NOISE = re.compile(
    r"\[enforce fail at [^\]]{1,200}\] .{1,100}?\. |"
    r"(?<![\w/])(?:\.\.|/)[\w/.+-]{1,200}/(?=[\w.-]{1,80}\.(?:cc|cpp|cu|h):\d)"
)

_REASONS = (Role.CAUSE, Role.FAILURE, Role.WAIT)


class KnownError(Struct, frozen=True, kw_only=True):
    """An error text that a card explains. `title` and `rest` are the card's meaning; `quote` is the text.

    `name` is the card's name, `check` the code of the check (or lint rule) that explains more. `is_harmless`: the text
    alone shows no failure. `action`, for a line of the kernel's log, is what has to be done with the device.
    """

    name: str
    check: str
    title: str
    rest: str
    fix: str
    quote: str
    is_harmless: bool = False
    action: str = ""

    @property
    def more(self) -> str:
        """The meaning in whole sentences. It leaves out the title if that is a sentence, so it may be empty."""
        return self.rest[1:].strip() if self.rest.startswith(".") else begun(f"{self.title}{self.rest}")

    @property
    def evidence(self) -> dict[str, Scalar | list[Scalar]]:
        """The name of the card and the text, for the JSON report."""
        return {KNOWN_ERROR: self.name, "text": self.quote}

    def explain(self, finding: Finding) -> Finding:
        """Add the card's title, meaning and evidence to a finding that quotes the text, and replace its fix."""
        return structs.replace(
            finding,
            title=f"{finding.title}: {self.title}",
            message=f"{finding.message} {self.more}".strip(),
            fix=self.fix,
            evidence=self.evidence | finding.evidence,
        )


def known_error(*texts: str) -> KnownError | None:
    """The first cause that one of these texts names; None if no card of a cause matches any of them."""
    causes = (one for text in texts for one in _sightings(text) if one.card.role is Role.CAUSE)
    return next(map(as_known, causes), None)


def known_line(line: str) -> KnownError:
    """The meaning of a line that has a card, such as an Xid of the kernel's log; IndexError if it has none."""
    return as_known(_sightings(line)[0])


def as_known(sighting: Sighting) -> KnownError:
    """Convert a sighting (a text with its card) to the form that findings use."""
    meaning = sighting.card.meaning
    clause = match[1] if (match := _CLAUSE.match(meaning)) else meaning
    return KnownError(
        name=sighting.card.name,
        check=sighting.card.code.partition(".")[0],
        title=clause[:1].lower() + clause[1:] if _WORDS.match(clause) else clause,
        rest=meaning[len(clause) :],
        fix=sighting.card.fix,
        is_harmless=sighting.card.role in (Role.HINT, Role.ECHO, Role.NOTE),
        action=sighting.card.action,
        quote=_NOISE.sub("", sighting.excerpt).rstrip(". "),
    )


def first_reason(log: Iterable[bytes]) -> Sighting | None:
    """The main sighting in the log of a failed job; None if its card gives no reason for the failure."""
    sightings = explain_log(log, "").sightings
    first = sightings[0] if sightings else None
    if first is None or first.card.role not in _REASONS or first.card.is_fallback:
        return None
    return first


def with_meaning(error: str) -> str:
    """The first line of an error or, if a card names its cause, the cause with the text in quotes."""
    known = known_error(error)
    return f'{known.title} ("{known.quote}")' if known else error.partition("\n")[0]


def cause_in(outcome: Outcome) -> KnownError | None:
    """The cause that a rank's error or, else, the last output of its process names; None if neither names one."""
    # The detail of an exception is a traceback. Only its last line counts: it may begin with handled exceptions.
    raised = outcome.status is Status.RAISED
    return known_error(outcome.error, outcome.detail.rstrip().rpartition("\n")[2] if raised else outcome.detail)


def cause_of(outcomes: Iterable[Outcome]) -> KnownError | None:
    """The cause that all of these ranks name; None if they do not agree."""
    found = [*map(cause_in, outcomes)]
    names = {one.name if one is not None else None for one in found}
    return found[0] if len(names) == 1 else None


def is_echo(text: str) -> bool:
    """Whether `text` contains an error that only shows that another process failed."""
    return any(one.card.role is Role.ECHO for one in _sightings(text))


# Results are cached, because ranks of large runs fail with the same few texts.
@lru_cache(maxsize=1024)
def _sightings(text: str) -> tuple[Sighting, ...]:
    return explain_log([text.encode("utf-8", "replace")], "").sightings if text else ()
