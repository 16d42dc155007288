"""Error texts of other programs in a finding: what they mean, by the cards of `ddpdiag explain`.

A check that quotes an exception, a log or a worker's output asks here first. A cause names what is wrong, so its card
gives the finding's title, message and fix. The texts of a failure without its reason are quoted as they are. An echo
blames none; a text by which a rank waits for others names these.
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

# The clause of a meaning that is its title: up to its reasons, or to the next sentence.
_CLAUSE = re.compile(r"((?:\([^)]*\)|[^(])+?)(?:[:;] |\. |\.$|$)")
# Words that begin a sentence, and are no names.
_WORDS = re.compile(r"(?:A|All|An|Another|Files|Hosts|It|Mostly|No|Nothing|Other|Ranks|Some|The|There|This|Two) ")
# Where a library was built, and what it asserts there, says nothing about where it fails.
_NOISE = re.compile(
    r"\[enforce fail at [^\]]{1,200}\] .{1,100}?\. |"
    r"(?<![\w/])(?:\.\.|/)[\w/.+-]{1,200}/(?=[\w.-]{1,80}\.(?:cc|cpp|cu|h):\d)"
)

_REASONS = (Role.CAUSE, Role.FAILURE, Role.WAIT)


class KnownError(Struct, frozen=True, kw_only=True):
    """A known text, as a finding reports it: `title` and the `rest` of the card's meaning, its fix, and the text.

    `name` is the card's, `check` the check (or rule of lint) that explains more. `is_harmless`: the text is no failure
    of its own. `action` is what the device of a line of the kernel's log needs.
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
        """The meaning beyond the title, in whole sentences; may be empty."""
        return self.rest[1:].strip() if self.rest.startswith(".") else begun(f"{self.title}{self.rest}")

    @property
    def evidence(self) -> dict[str, Scalar | list[Scalar]]:
        """The card and the text, for the JSON report."""
        return {KNOWN_ERROR: self.name, "text": self.quote}

    def explain(self, finding: Finding) -> Finding:
        """A finding that quotes the text, with what it means, and with the card's fix."""
        return structs.replace(
            finding,
            title=f"{finding.title}: {self.title}",
            message=f"{finding.message} {self.more}".strip(),
            fix=self.fix,
            evidence=self.evidence | finding.evidence,
        )


def known_error(*texts: str) -> KnownError | None:
    """The cause that one of these texts names, the first of them if several do; None where no card explains any."""
    causes = (one for text in texts for one in _sightings(text) if one.card.role is Role.CAUSE)
    return next(map(as_known, causes), None)


def known_line(line: str) -> KnownError:
    """The meaning of a line that some card knows for certain, such as an Xid of the kernel's log."""
    return as_known(_sightings(line)[0])


def as_known(sighting: Sighting) -> KnownError:
    """A sighting in the words of a finding."""
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
    """The text of a failed job's log that explains the others; None where it gives no reason beyond its own words."""
    sightings = explain_log(log, "").sightings
    first = sightings[0] if sightings else None
    if first is None or first.card.role not in _REASONS or first.card.fallback:
        return None
    return first


def with_meaning(error: str) -> str:
    """The first line of an error, behind what it means where that is known."""
    known = known_error(error)
    return f'{known.title} ("{known.quote}")' if known else error.partition("\n")[0]


def cause_in(outcome: Outcome) -> KnownError | None:
    """The cause that a rank's error names, or the last output of its process."""
    # Of an exception the detail is a traceback, which may begin with others that were handled.
    raised = outcome.status is Status.RAISED
    return known_error(outcome.error, outcome.detail.rstrip().rpartition("\n")[2] if raised else outcome.detail)


def cause_of(outcomes: Iterable[Outcome]) -> KnownError | None:
    """The cause that all of these ranks name."""
    found = [*map(cause_in, outcomes)]
    names = {one.name if one is not None else None for one in found}
    return found[0] if len(names) == 1 else None


def is_echo(text: str) -> bool:
    """Whether it holds a text that only shows that another process failed."""
    return any(one.card.role is Role.ECHO for one in _sightings(text))


# Ranks of large runs fail with the same few texts.
@lru_cache(maxsize=1024)
def _sightings(text: str) -> tuple[Sighting, ...]:
    return explain_log([text.encode("utf-8", "replace")], "").sightings if text else ()
