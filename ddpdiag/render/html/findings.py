"""The findings as boxes: what is wrong, who is blamed, what was seen and expected, and the fix."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.blocks import Column, Items, Table
from ddpdiag.render.findings import grouped, subjects
from ddpdiag.render.html.views import Fact, paragraphs, words
from ddpdiag.render.shell import shell_lines
from ddpdiag.sanitize import printable
from ddpdiag.text import label, quantity


class Part(NamedTuple):
    """A part of a text; `target` is the anchor on this page that it leads to, or empty."""

    text: str
    target: str = ""


class FindingBox(NamedTuple):
    """A finding as texts. `nobody` says that it blames no rank, host, GPU or link, if one of its kind should.

    `rest` are those of its code without a box, below the last that has one.
    """

    severity: str
    code: str
    title: str
    message: str
    who: tuple[Fact, ...]
    about: str
    nobody: str
    expected: tuple[Fact, ...]
    facts: tuple[Fact, ...]
    lists: tuple[Items, ...]
    fix: tuple[Part, ...]
    commands: str
    rest: Table | None


# Boxes of one code, and in all; the other findings are rows of a table.
SAME_SHOWN, ALL_SHOWN = 4, 120
# Names of one kind; a list of so few letters is a value like others.
_NAMES_SHOWN, _SHORT = 24, 100
_STACK = "stack"
# A finding's code within a sentence.
_CODE = re.compile(r"\b[A-Z][A-Z0-9]{2}\d{3}\.[a-z-]*[a-z]")
# Evidence that is the yardstick, not what was seen.
_YARDSTICKS = frozenset({"expected", "usual", "source", "least", "limit", "deadline", "possible", "baseline", "of"})


def boxes(findings: Sequence[Finding]) -> tuple[FindingBox, ...]:
    """The findings, errors first; the last of each code has a table of those of which there is no box."""
    groups = list(grouped(findings).values())
    kept: list[Finding] = []
    rests: dict[int, Sequence[Finding]] = {}
    for group in groups:
        most = min(SAME_SHOWN, max(1, ALL_SHOWN - len(kept)))
        kept += group[:most]
        if group[most:]:
            rests[len(kept)] = group[most:]
    anchors = {finding.code: f"box-{number}" for number, finding in reversed([*enumerate(kept, 1)])}
    return tuple(
        _box(finding, anchors, _rest(rests[number]) if number in rests else None)
        for number, finding in enumerate(kept, 1)
    )


def _rest(findings: Sequence[Finding]) -> Table:
    """One row for each finding that looks like those above it."""
    return Table(
        title=f"{len(findings):,} more {findings[0].code} ({findings[0].severity.value})",
        columns=(Column("blamed"), Column("what"), Column("more")),
        rows=tuple((_in_words(_who((own,))) or "none", own.title, own.message) for own in findings),
        noun="finding",
        note=f"All of these: {_in_words(_who(findings)) or 'no rank or host is blamed'}.",
    )


def _in_words(facts: Iterable[Fact]) -> str:
    return "; ".join(f"{fact.name} {fact.value}" for fact in facts)


def _fix(finding: Finding, anchors: Mapping[str, str]) -> Iterator[Part]:
    """The fix, in which the codes of other findings lead to their boxes."""
    text, end = paragraphs(finding.fix), 0
    for match in _CODE.finditer(text):
        within_code = text.count("`", 0, match.start()) % 2
        if match[0] != finding.code and match[0] in anchors and not within_code:
            yield Part(text[end : match.start()])
            yield Part(match[0], anchors[match[0]])
            end = match.end()
    if text[end:]:
        yield Part(text[end:])


def _box(finding: Finding, anchors: Mapping[str, str], rest: Table | None) -> FindingBox:
    is_note = finding.severity is Severity.NOTE
    who = _who((finding,))
    is_silent = bool(who) or is_note or finding.of_the_run
    lists = {
        name: value for name, value in finding.evidence.items() if isinstance(value, list) and _is_long(name, value)
    }
    plain = {name: value for name, value in finding.evidence.items() if name not in lists}
    fix = tuple(_fix(finding, anchors))
    return FindingBox(
        severity=finding.severity.value,
        code=words(finding.code),
        title=words(finding.title),
        message=paragraphs(finding.message),
        who=who,
        about="About" if is_note else "Blamed",
        nobody="" if is_silent else "none: the evidence names no single rank, host, GPU or link",
        expected=_evidence(plain, yardstick=True),
        facts=_evidence(plain, yardstick=False),
        lists=tuple(_listed(name, value) for name, value in lists.items()),
        fix=fix,
        commands="\n".join(map(printable, shell_lines(finding.env))),
        rest=rest,
    )


def _is_long(name: str, value: list[Scalar]) -> bool:
    """Whether these are lines rather than words: "rank 3: hung" is a line, and so is each frame of a stack."""
    if name.startswith(_STACK):
        return True
    texts = [item for item in value if isinstance(item, str)]
    return len(value) > _SHORT or sum(map(len, texts)) > _SHORT or any(": " in text for text in texts)


def _evidence(evidence: dict[str, Scalar | list[Scalar]], *, yardstick: bool) -> tuple[Fact, ...]:
    return tuple(
        Fact(words(label(name)), words(_value(name, value)))
        for name, value in evidence.items()
        if (name.partition("_")[0] in _YARDSTICKS) is yardstick
    )


def _value(name: str, value: Scalar | list[Scalar]) -> str:
    return "not known" if value is None else quantity(name, value)


def _listed(name: str, value: list[Scalar]) -> Items:
    return Items(tuple(_value(name, item) for item in value), label(name))


def _who(findings: Iterable[Finding]) -> tuple[Fact, ...]:
    """Ranks, hosts, GPUs and links of some findings, each kind folded."""
    return tuple(Fact(kind, words(names)) for kind, names in subjects(findings, _NAMES_SHOWN))
