"""The figures below a finding: what its message does not say already, and with `details` all of them.

Without `details` one stack is enough, and its first frames: of a hang, all ranks but one stand in the same place.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from ddpdiag.model import Finding, Scalar
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.units import label, quantity

# Names and values of one kind in one line.
LIST_SHOWN = 8
# Frames of a stack, the innermost first: where it stands, and who called that.
FRAMES_SHOWN = 3
_STACK = "stack"
# For who knows the kernel, or reads the recording beside the report.
_DETAILS = frozenset({"trial", "pid", "state", "wchan"})
_BARE_NUMBER = re.compile(r"[\d.,+-]*")

Value = Scalar | list[Scalar]


def write_evidence(page: Page, finding: Finding, *, details: bool, earlier: Iterable[Finding] = ()) -> None:
    """Figures in one paragraph; below it what takes a line for each item: tables, stacks, an output of many lines.

    A stack that one of the `earlier` findings has is not shown again.
    """
    shown = finding.evidence if details else _essential(finding, earlier)
    tables = {name: rows for name, value in shown.items() if (rows := _rows(name, value, details=details))}
    limit = None if details else LIST_SHOWN
    figures = (
        f"{one_line(label(name))} = {value_text(name, value, limit)}"
        for name, value in shown.items()
        if name not in tables
    )
    if text := "; ".join(figures):
        page.write(text, style="dim", indent=4)
    for name, rows in tables.items():
        _table(page, label(name), rows, None if details else most_of(rows, _limit(name)))


def _limit(name: str) -> int:
    return FRAMES_SHOWN if name.startswith(_STACK) else LIST_SHOWN


def most_of(things: Sequence[object], few: int) -> int:
    """How many of them are shown: "and 1 more" would take the room of the one."""
    return len(things) if len(things) <= few + 1 else few


def _table(page: Page, name: str, rows: Sequence[str], limit: int | None) -> None:
    page.write(f"{one_line(name)}:", style="dim", indent=4)
    for row in rows[:limit]:
        head, mark, rest = one_line(row).partition(": ")
        page.write(rest or head, style="dim", indent=6, lead=head + mark if rest else "", lead_style="dim")
    if more := left_out(len(rows), limit):
        page.write(more.strip(), style="dim", indent=6)


def _essential(finding: Finding, earlier: Iterable[Finding]) -> Mapping[str, Value]:
    """The evidence without what is for experts, what is not known, and what title or message say word for word."""
    prose = one_line(f"{finding.title} {finding.message}")
    stacks = [name for name, value in finding.evidence.items() if name.startswith(_STACK) and isinstance(value, list)]
    hidden = {*_DETAILS, *stacks[1:]}
    if stacks and any(finding.evidence[stacks[0]] in other.evidence.values() for other in earlier):
        hidden.add(stacks[0])
    shown: dict[str, Value] = {}
    for name, whole in finding.evidence.items():
        value = whole.rstrip().rpartition("\n")[2] if isinstance(whole, str) else whole
        if name not in hidden and not _is_unknown(value) and (name in stacks or not _is_told(name, value, prose)):
            shown[name] = value
    return shown


def _is_unknown(value: Value) -> bool:
    return value is None or (isinstance(value, list) and bool(value) and all(item is None for item in value))


def _is_told(name: str, value: Value, prose: str) -> bool:
    """Does the prose hold each of these, word for word? A number without a unit may mean anything in it."""
    items = value if isinstance(value, list) else [value]
    texts = [value_text(name, item) for item in items]
    return 0 < len(texts) <= LIST_SHOWN and all(
        not isinstance(item, bool)
        and not _BARE_NUMBER.fullmatch(text)
        and re.search(rf"(?<![\w.,]){re.escape(text)}(?!\w)", prose) is not None
        for item, text in zip(items, texts, strict=True)
    )


def _rows(name: str, value: Value, *, details: bool) -> list[str]:
    """What has a line for each item: "rank 3: hung", a frame of a stack, with `details` a sentence; else nothing."""
    if isinstance(value, str):
        return value.splitlines() if details and "\n" in value else []
    if not isinstance(value, list):
        return []
    mark = "" if name.startswith(_STACK) else " " if details else ": "
    rows = [item for item in value if isinstance(item, str) and mark in item]
    return rows if len(rows) == len(value) else []


def value_text(name: str, value: Value, limit: int | None = None) -> str:
    """A value with its unit, in ASCII."""
    if value is None:
        return "not known"
    if isinstance(value, list) and value:
        return ", ".join(value_text(name, item) for item in value[:limit]) + left_out(len(value), limit)
    return one_line(quantity(name, value))


def listed(words: Sequence[str], limit: int | None) -> str:
    """Words joined by commas; of more than `limit`, how many are left out."""
    return ", ".join(words[:limit]) + left_out(len(words), limit)


def left_out(number: int, limit: int | None) -> str:
    """How many names of `number` are not shown."""
    return f" +{number - limit:,} more" if limit is not None and number > limit else ""
