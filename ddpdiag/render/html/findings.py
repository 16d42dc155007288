"""Findings as boxes: who, what was seen, what was expected, and what to do."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpdiag.foreign import printable
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.render.html.page import Cell, Fact, FindingBox, Listed, Table, Text, columns, paragraphs, words
from ddpdiag.render.shell import shell_lines
from ddpdiag.render.terminal.findings import grouped, subjects
from ddpdiag.text import label, quantity

# Boxes of one code, and in all; the others are rows of a table, as far as those are read.
SAME_SHOWN, ALL_SHOWN, ROWS_SHOWN = 4, 120, 400
# Names of one kind, items of one list; a list of so few letters is a value like others.
_NAMES_SHOWN, _ITEMS_SHOWN, _SHORT, _ROW_LETTERS = 24, 48, 100, 300
_STACK, _OPEN_ITEMS, _OPEN_ROWS = "stack", 6, 16
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
        _box(finding, anchors, _rest(rests[number], number) if number in rests else None)
        for number, finding in enumerate(kept, 1)
    )


def _rest(findings: Sequence[Finding], number: int) -> Table:
    """One line for each finding that looks like those above it."""
    first, left = findings[0], len(findings) - ROWS_SHOWN
    names = _in_words(_who(findings)) or "none is blamed"
    return Table(
        name=f"more-{number}",
        caption=f"{len(findings):,} more {words(first.code)} ({first.severity.value})",
        columns=columns("who", "what", "more"),
        rows=tuple(map(_row, findings[:ROWS_SHOWN])),
        note=words(f"All of these: {names}.{f' The JSON report has {left:,} more.' if left > 0 else ''}"),
        sortable=True,
        folded=len(findings) > _OPEN_ROWS,
    )


def _in_words(facts: Iterable[Fact]) -> str:
    return "; ".join(f"{fact.name} {fact.value}" for fact in facts)


def _row(finding: Finding) -> tuple[Cell, ...]:
    who = words(_in_words(_who((finding,)))) or "none"
    return Cell(who, who), Cell(words(finding.title)), Cell(words(finding.message)[:_ROW_LETTERS])


def _fix(finding: Finding, anchors: Mapping[str, str]) -> Iterator[Text]:
    """The fix, in which the codes of other findings lead to their boxes."""
    text, end = paragraphs(finding.fix), 0
    for match in _CODE.finditer(text):
        if match[0] != finding.code and match[0] in anchors:
            yield Text(text[end : match.start()])
            yield Text(match[0], anchors[match[0]])
            end = match.end()
    if text[end:]:
        yield Text(text[end:])


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
        expected=_facts(plain, yardstick=True),
        facts=_facts(plain, yardstick=False),
        lists=tuple(_listed(name, value) for name, value in lists.items()),
        fix=fix,
        referred=len(fix) > 1 and f"See {''.join(text.text for text in fix if text.target)}." == finding.fix,
        commands="\n".join(map(printable, shell_lines(finding.env))),
        rest=rest,
    )


def _is_long(name: str, value: list[Scalar]) -> bool:
    """Are these lines rather than words? "rank 3: hung" is a line, and so is each frame of a stack."""
    if name.startswith(_STACK):
        return True
    texts = [item for item in value if isinstance(item, str)]
    return len(value) > _SHORT or sum(map(len, texts)) > _SHORT or any(": " in text for text in texts)


def _facts(evidence: dict[str, Scalar | list[Scalar]], *, yardstick: bool) -> tuple[Fact, ...]:
    return tuple(
        Fact(words(label(name)), words(_value(name, value)))
        for name, value in evidence.items()
        if (name.partition("_")[0] in _YARDSTICKS) is yardstick
    )


def _value(name: str, value: Scalar | list[Scalar]) -> str:
    return "not known" if value is None else quantity(name, value)


def _listed(name: str, value: list[Scalar]) -> Listed:
    items = [words(_value(name, item)) for item in value[:_ITEMS_SHOWN]]
    if left := len(value) - len(items):
        items.append(f"+{left:,} more, in the JSON report")
    return Listed(words(label(name)), tuple(items), name.startswith(_STACK) or len(items) > _OPEN_ITEMS)


def _who(findings: Iterable[Finding]) -> tuple[Fact, ...]:
    """Ranks, hosts, GPUs and links of some findings, each kind folded."""
    return tuple(Fact(kind, words(names)) for kind, names in subjects(findings, _NAMES_SHOWN))
