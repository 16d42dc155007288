"""A manual page, as a check's docstring holds it: its parts, and the findings that it explains.

Title.

What the check asks, why, and how it measures; as many paragraphs as it takes.

Findings and their causes:
- narrow: fewer lanes than card and slot could use.
- slot, board: as many as the slot has. both: an item may explain further findings after a full stop.

Fix: what to do.

Confirm by hand: how to see the same without this program.

Sources: where the facts and thresholds come from.
"""

import re
from collections.abc import Iterator

# What any check may say, and pages need not repeat (see `Verdict`).
COMMON = {
    "unreadable": "what this check asks for could not be looked at; the verdict is UNKNOWN, never healthy.",
}
SECTIONS = ("Findings", "Fix:", "Confirm by hand:", "Sources:")

_WORD = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*"
_HEAD = re.compile(rf"(?:^|(?<=[.;] ))({_WORD}(?:, {_WORD})*): ")


def paragraphs(manual: str) -> tuple[str, ...]:
    """The paragraphs after the title."""
    return tuple(part.strip("\n") for part in manual.strip().split("\n\n")[1:] if part.strip())


def missing_sections(manual: str) -> tuple[str, ...]:
    """Sections that a page should have and has not; "Fix:" may end a paragraph of causes."""
    parts = paragraphs(manual)
    return tuple(
        section
        for section in SECTIONS
        if not any(part.startswith(section) or (section == "Fix:" and " Fix: " in _flat(part)) for part in parts)
    )


def findings_of(manual: str) -> dict[str, str]:
    """What the page says of each finding, by its word ("narrow"), without `COMMON`."""
    return {word: text for item in _items(manual) for words, text in _explained(item) for word in words}


def finding_text(manual: str, word: str) -> str | None:
    """What the page, or every page, says of this finding; None if a check of this page has no such finding."""
    return findings_of(manual).get(word, COMMON.get(word))


def _items(manual: str) -> Iterator[str]:
    """The items of its lists, each in one line."""
    for part in paragraphs(manual):
        for item in re.split(r"^- ", part, flags=re.MULTILINE)[1:]:
            yield _flat(item)


def _explained(item: str) -> Iterator[tuple[list[str], str]]:
    heads = list(_HEAD.finditer(item))
    for head, after in zip(heads, (*heads[1:], None), strict=True):
        text = item[head.end() : after.start() if after else len(item)].strip()
        yield head.group(1).split(", "), text


def _flat(text: str) -> str:
    return " ".join(text.split())
