"""The meaning of error texts of other programs, by the cards of `ddpdiag explain`.

A check that quotes an exception, a log or a worker's output first looks for a card that matches the text. A card that
names a cause (Role.CAUSE) gives the finding its title, message and fix. Without such a card the text is only quoted. A
text that only shows that another process failed (Role.ECHO) blames no rank.
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

# The part of a card's meaning that becomes the title: up to a ":" or ";", or to the end of the first sentence.
_TITLE_CLAUSE = re.compile(r"((?:\([^)]*\)|[^(])+?)(?:[:;] |\. |\.$|$)")
# First words of a meaning that begin with a lower-case letter in a title, because they are no names.
_LOWER_FIRST = re.compile(r"(?:A|All|An|Another|Files|Hosts|It|Mostly|No|Nothing|Other|Ranks|Some|The|There|This|Two) ")
# Failed assertions, and folders of the machine that built a library. Quotes omit them, since they do not help users.
_BUILD_DETAILS = re.compile(
    r"\[enforce fail at [^\]]{1,200}\] .{1,100}?\. |"
    r"(?<![\w/])(?:\.\.|/)[\w/.+-]{1,200}/(?=[\w.-]{1,80}\.(?:cc|cpp|cu|h):\d)"
)

_REASONS = (Role.CAUSE, Role.FAILURE, Role.WAIT)


class KnownError(Struct, frozen=True, kw_only=True):
    """An error text (`quote`) with the meaning that a card of `ddpdiag explain` gives it.

    `title` is the first clause of the meaning, and `meaning_tail` the rest, with the punctuation before it. `name` is
    the card's name. `check_code` is the check (or lint rule) whose manual page explains more. `is_harmless`: the text
    alone shows no failure. `action`, for a line of the kernel log, says what must be done with the device.
    """

    name: str
    check_code: str
    title: str
    meaning_tail: str
    fix: str
    quote: str
    is_harmless: bool = False
    action: str = ""

    @property
    def meaning(self) -> str:
        """The meaning in whole sentences, without a first sentence that equals the title; may be empty."""
        tail = self.meaning_tail
        return tail[1:].strip() if tail.startswith(".") else begun(f"{self.title}{tail}")

    @property
    def evidence(self) -> dict[str, Scalar | list[Scalar]]:
        """The finding's evidence: the name of the card, and the quoted text."""
        return {KNOWN_ERROR: self.name, "text": self.quote}

    def explain(self, finding: Finding) -> Finding:
        """Return the finding, which quotes the text, with the card's title, meaning, evidence and fix."""
        return structs.replace(
            finding,
            title=f"{finding.title}: {self.title}",
            message=f"{finding.message} {self.meaning}".strip(),
            fix=self.fix,
            evidence=self.evidence | finding.evidence,
        )


def known_error(*texts: str) -> KnownError | None:
    """Return the first known cause that these texts contain; None if no card of a cause matches."""
    causes = (sighting for text in texts for sighting in _sightings(text) if sighting.card.role is Role.CAUSE)
    return next(map(known_error_of, causes), None)


def explain_line(line: str) -> KnownError:
    """Return the meaning of a line, such as an Xid of the kernel log. Raises IndexError if no card matches the line."""
    return known_error_of(_sightings(line)[0])


def known_error_of(sighting: Sighting) -> KnownError:
    """Convert a sighting (a text, with the card that matches it) to a KnownError."""
    meaning = sighting.card.meaning
    clause = match[1] if (match := _TITLE_CLAUSE.match(meaning)) else meaning
    return KnownError(
        name=sighting.card.name,
        check_code=sighting.card.code.partition(".")[0],
        title=clause[:1].lower() + clause[1:] if _LOWER_FIRST.match(clause) else clause,
        meaning_tail=meaning[len(clause) :],
        fix=sighting.card.fix,
        is_harmless=sighting.card.role in (Role.HINT, Role.ECHO, Role.NOTE),
        action=sighting.card.action,
        quote=_BUILD_DETAILS.sub("", sighting.first.excerpt).rstrip(". "),
    )


def main_reason(log: Iterable[bytes], *, with_unknown: bool = False) -> Sighting | None:
    """Return the main sighting in the log of a failed job; None if its card does not explain the failure.

    `with_unknown`: also a failure that no card explains.
    """
    sightings = explain_log(log, "").sightings
    first = sightings[0] if sightings else None
    if first is None or first.card.role not in _REASONS or (first.card.is_fallback and not with_unknown):
        return None
    return first


def explained_text(error: str) -> str:
    """Return the known cause of an error with the text in quotes; without a known cause, the error's first line."""
    known = known_error(error)
    return f'{known.title} ("{known.quote}")' if known else error.partition("\n")[0]


def cause_in(outcome: Outcome) -> KnownError | None:
    """Return the known cause of a rank's error, else of the last output of its process; None if neither has one."""
    # The detail of an exception is a traceback, which may begin with handled exceptions. So only its last line counts.
    raised = outcome.status is Status.RAISED
    return known_error(outcome.error, outcome.detail.rstrip().rpartition("\n")[2] if raised else outcome.detail)


def common_cause(outcomes: Iterable[Outcome]) -> KnownError | None:
    """Return the known cause if it is the same for all of these ranks; else None."""
    causes = [*map(cause_in, outcomes)]
    names = {cause.name if cause is not None else None for cause in causes}
    return causes[0] if len(names) == 1 else None


def is_echo(text: str) -> bool:
    """Whether `text` contains an error that only shows that another process failed."""
    return any(sighting.card.role is Role.ECHO for sighting in _sightings(text))


# Results are cached, because ranks of large runs fail with the same few texts.
@lru_cache(maxsize=1024)
def _sightings(text: str) -> tuple[Sighting, ...]:
    return explain_log([text.encode("utf-8", "replace")], "").sightings if text else ()
