"""What `ddpdiag explain` makes of a sample of logs: right first, named, a symptom, unknown, or a false blame.

    python tests/benchmarks/known_texts.py tests/benchmarks/known_texts_a.toml FOLDER

The labels are committed; the logs are other people's text, or written after it, and never are. What a score is worth
depends on them: logs that were shortened or written after a thread lack the length and noise of real ones. FOLDER holds
one file for each label, "KEY.txt"; a label without a file is skipped and counted. A label:

    [issue_owner_repo_123]
    address = "https://github.com/owner/repo/issues/123"
    about = "one line: what was wrong"
    expect = ["card-a", "new:card-b"]       # names of cards; any of them is right, and "new:" does not exist yet
    quote = "fragment of the line that first shows it"
    innocent = ["card-c", "rank 3"]         # cards and ranks that would be a false blame if named first
    symptom = true                          # no card can tell the cause: `expect` is empty, the quoted line is enough
    healthy = true                          # a job without a failure: any failure named is a false blame

What counts, by the first sighting, since readers start there:

    right first   its card is in `expect`; with `symptom`, its line holds `quote`; with `healthy`, no failure is named
    named         another card that is shown is in `expect`
    symptom       its line holds `quote`, and its card is not in `expect`
    unknown       no failure is named, or a failure or a wait that is neither expected nor innocent
    false blame   its card or one of its ranks is `innocent`; or it names a cause that is not expected

The bars: right first at least 85 %, unknown at most 5 %, no false blame; healthy logs are counted apart. A missed bar
is printed, and does not change the exit code.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from ddpdiag.explain.card import Role, all_cards
from ddpdiag.explain.matcher import Explanation, Sighting, explain_log


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about a log."""

    address: str
    about: str
    title: str = ""
    expect: tuple[str, ...] = ()
    quote: str = ""
    innocent: tuple[str, ...] = ()
    symptom: bool = False
    healthy: bool = False


class Outcome(Enum):
    """What counts for a log."""

    FIRST = "right first"
    NAMED = "named"
    SYMPTOM = "symptom"
    UNKNOWN = "unknown"
    FALSE = "false blame"


# At least (right first) or at most this share of the logs.
BARS = {Outcome.FIRST: 0.85, Outcome.UNKNOWN: 0.05, Outcome.FALSE: 0.0}
_FAILURES = (Role.CAUSE, Role.FAILURE, Role.WAIT)


def labels_of(path: Path) -> dict[str, Label]:
    """The labels of a file; ValueError for one that contradicts itself or expects a card that does not exist."""
    labels = msgspec.toml.decode(path.read_bytes(), type=dict[str, Label])
    known = {card.name for card in all_cards()}
    for key, label in labels.items():
        names = [name for name in (*label.expect, *label.innocent) if not name.startswith(("new:", "rank "))]
        if missing := [name for name in names if name not in known]:
            print(f"note: {key}: no card has the name {', '.join(missing)}")
        if not label.expect and not label.symptom and not label.healthy:
            raise ValueError(f"{key}: expected one of `expect`, `symptom` and `healthy`")
        if label.symptom and not label.quote:
            raise ValueError(f"{key}: `symptom` needs a `quote`")
    return labels


def blamed_ranks(sighting: Sighting) -> tuple[int, ...]:
    """The ranks at which a reader would look because of it; echoes, hints and notes blame none."""
    if sighting.card.role is Role.WAIT:
        return sighting.missing_ranks
    return sighting.ranks if sighting.card.role in (Role.CAUSE, Role.FAILURE) else ()


def outcome_of(label: Label, found: Explanation) -> Outcome:
    """What counts for a log with this label."""
    failures = [one for one in found.sightings if one.card.role in _FAILURES]
    if label.healthy:
        return Outcome.FALSE if found.is_explained and failures else Outcome.FIRST
    if not found.sightings:
        return Outcome.UNKNOWN
    first = found.sightings[0]
    innocent = {first.card.name, *(f"rank {rank}" for rank in blamed_ranks(first))}
    if innocent & set(label.innocent) and first.card.role is not Role.ECHO:
        return Outcome.FALSE
    is_quoted = bool(label.quote) and " ".join(label.quote.split()) in " ".join(first.first.excerpt.split())
    is_named = {first.card.name, f"new:{first.card.name}"} & set(label.expect)
    if is_named or (label.symptom and is_quoted and found.is_explained):
        return Outcome.FIRST
    if any(one.card.name in label.expect for one in found.sightings):
        return Outcome.NAMED
    if is_quoted and first.card.role is not Role.ECHO:
        return Outcome.SYMPTOM
    return Outcome.FALSE if first.card.role is Role.CAUSE else Outcome.UNKNOWN


def row(key: str, label: Label, found: Explanation) -> str:
    """A log: what counts, the card named first, what was expected."""
    first = found.sightings[0] if found.sightings else None
    named = f"{first.card.name} ({first.card.role.value}, line {first.first.line})" if first else "nothing"
    expected = "healthy" if label.healthy else " or ".join(label.expect) or f"the line {label.quote!r}"
    return f"{outcome_of(label, found).value:<12} {key}: {named}; expected: {expected}"


def summary(title: str, outcomes: Sequence[Outcome], bars: dict[Outcome, float]) -> Iterator[str]:
    """How often each outcome was, beside its bar."""
    counted = Counter(outcomes)
    yield f"\n{title}: {len(outcomes)}"
    for outcome in Outcome:
        share = counted[outcome] / len(outcomes)
        line = f"{outcome.value:<12} {counted[outcome]:>4} {share:>6.1%}"
        if outcome in bars:
            bar = bars[outcome]
            passes = share >= bar if outcome is Outcome.FIRST else share <= bar
            line += f"   bar: at {'least' if outcome is Outcome.FIRST else 'most'} {bar:.0%}: "
            line += "passes" if passes else "falls short"
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="TOML file of labels")
    parser.add_argument("folder", type=Path, help="folder with the logs, KEY.txt")
    parser.add_argument("--wrong", action="store_true", help="print only the logs that are not right first")
    arguments = parser.parse_args()
    failed, healthy, missing = [], [], 0
    for key, label in labels_of(arguments.labels).items():
        path = arguments.folder / f"{key}.txt"
        if not path.is_file():
            missing += 1
            continue
        found = explain_log([path.read_bytes()], path.name)
        outcome = outcome_of(label, found)
        (healthy if label.healthy else failed).append(outcome)
        if not arguments.wrong or outcome is not Outcome.FIRST:
            print(row(key, label, found))
    if failed:
        print(*summary("failed jobs", failed, BARS), sep="\n")
    if healthy:
        print(*summary("healthy jobs", healthy, {Outcome.FIRST: 1.0}), sep="\n")
    if missing:
        print(f"\nlabels without a log in {arguments.folder}: {missing}")


if __name__ == "__main__":
    main()
