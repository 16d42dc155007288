"""Findings for people: the error, the blamed ranks and hosts, the fix, and then the figures.

The fix comes before the evidence, so that the first screen shows all of the first finding but its figures. Of many
different findings, those after the first three have only a title, the blamed and the fix.

The figures are those that the message does not have, and with `details` all of them. Without `details` one stack is
enough, and its first frames: in a hang all ranks but one are at the same place.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.model.report import KNOWN_ERROR
from ddpdiag.render.blocks import Block, Code, Column, Fold, Items, Table, Text
from ddpdiag.render.page import MOST_SHOWN, Page, one_line
from ddpdiag.render.shell import shell_lines
from ddpdiag.text import fold_hosts, fold_ranks, label, left_out, listed, quantity

SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}

# If each of a thousand ranks has the same finding, a few are shown, and the others are a list of names.
SAME_SHOWN = 3
# If more findings than this would be shown, only one of each code is: nobody reads a longer page.
FINDINGS_SHOWN = 5
# Errors and warnings of so many codes are shown in full.
CODES_SHOWN = 3
# Names and values of one kind in one line.
LIST_SHOWN = 8
# Frames of a stack, the innermost first.
FRAMES_SHOWN = 3
_STACK = "stack"
# For experts, and for readers of the recording.
_DETAILS = frozenset({"trial", "pid", "state", "wchan"})
_BARE_NUMBER = re.compile(r"[\d.,+-]*")
Value = Scalar | list[Scalar]

# What may stand between a title and the rest of a message that begins with it.
_BETWEEN = re.compile(r"[:;,.]\s+|[:;,.]?\s*$")
_ASIDE = re.compile(r"\s+\(([^()]*)\)")


def grouped(findings: Iterable[Finding]) -> dict[tuple[Severity, str], list[Finding]]:
    """Findings of one severity and code together, errors first."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    return groups


def write_findings(
    page: Page, findings: Sequence[Finding], *, details: bool, severities: Sequence[Severity] = SEVERITIES
) -> None:
    """Write the findings of these `severities`, errors first; of many, a few of each code, unless `details`."""
    groups = grouped(findings)
    few = SAME_SHOWN if sum(most_of(group, SAME_SHOWN) for group in groups.values()) <= FINDINGS_SHOWN else 1
    own = [group for (severity, _), group in groups.items() if severity in severities]
    serious = [group for group in own if group[0].severity is not Severity.NOTE]
    earlier: list[Finding] = []
    for number, group in enumerate(own):
        if CODES_SHOWN <= number < len(serious) and not details:
            others = f", and {len(group) - 1:,} more like this" if len(group) > 1 else ""
            _write_headed(page, group[0], one_line(group[0].title) + others, style="bold")
            _write_subjects(page, group, LIST_SHOWN)
            _write_fix(page, group[0])
            page.blank()
            continue
        most = MOST_SHOWN if details else most_of(group, few)
        for finding in group[:most]:
            _finding(page, finding, () if details else earlier, details=details)
            earlier.append(finding)
        _more(page, group, most, details=details)


def _write_headed(page: Page, finding: Finding, text: str, *, style: str = "") -> None:
    """Write a paragraph that begins with the severity and code of a finding."""
    lead = f"{finding.severity.value} {one_line(finding.code)}: "
    page.write(text, style=style, lead=lead, lead_style=_STYLES[finding.severity])


def _finding(page: Page, finding: Finding, earlier: Sequence[Finding], *, details: bool) -> None:
    _write_headed(page, finding, one_line(finding.title), style="bold")
    if message := finding.message if details else beyond(finding.title, finding.message):
        page.write(message, indent=4)
    _write_subjects(page, (finding,), None if details else LIST_SHOWN)
    same = (other for other in earlier if (other.fix, other.env) == (finding.fix, finding.env))
    above = next(same, None) if finding.fix else None
    _write_fix(page, finding, above)
    # A finding of another code with the same fix follows from the one above, and is shown without evidence.
    if above is None or above.code == finding.code:
        write_evidence(page, finding, details=details, earlier=earlier)
    page.blank()


def beyond(title: str, message: str) -> str:
    """The message without the title, if it begins with the title."""
    # A sentence begins with a capital letter.
    if not title or message[:1].lower() != title[:1].lower() or not message[1:].startswith(title[1:]):
        return message
    rest = message[len(title) :]
    if match := _BETWEEN.match(rest):
        beyond_it = rest[match.end() :]
    elif match := _ASIDE.match(rest):
        beyond_it = f"{match[1]}{rest[match.end() :]}"
    else:
        return message
    # Only a plain word gets a capital letter. A name stays as it is written, and so does a whole sentence.
    is_sentence = rest.startswith(".")
    has_word = beyond_it.partition(" ")[0].isalpha()
    return beyond_it[:1].upper() + beyond_it[1:] if has_word and not is_sentence else beyond_it


def _write_subjects(page: Page, findings: Sequence[Finding], limit: int | None) -> None:
    if names := blame(findings, limit):
        # A note blames none.
        word = "about: " if findings[0].severity is Severity.NOTE else "blamed: "
        page.write(names, indent=4, lead=word, lead_style="bold")
    elif sentence := _without_blame(findings):
        page.write(f"{sentence}: the evidence cannot decide", indent=4)


def _without_blame(findings: Sequence[Finding]) -> str:
    """A sentence that nothing is blamed; empty if the findings are notes or about the run as a whole."""
    of_all = all(finding.severity is Severity.NOTE or finding.of_the_run for finding in findings)
    return "" if of_all else "no rank, host, GPU or link is blamed"


def _write_fix(page: Page, finding: Finding, above: Finding | None = None) -> None:
    """Write the fix and its variables, or a reference to the finding `above` that shows the same ones."""
    if finding.fix:
        text = finding.fix if above is None else f"see {one_line(above.code)} above."
        page.write(text, indent=4, lead="Fix: ", lead_style="bold")
    for line in shell_lines(finding.env) if above is None else ():
        page.verbatim(line, indent=8)


def _more(page: Page, group: Sequence[Finding], shown: int, *, details: bool) -> None:
    """Write one line on the findings of a group beyond the first `shown`."""
    findings = group[shown:]
    if not findings:
        return
    names = blame(findings, LIST_SHOWN) or _without_blame(findings)
    place = "in the JSON report" if details else "with --details, or in the JSON report"
    text = f"{len(findings):,} more like these{f': {names}' if names else ''}; {place}"
    _write_headed(page, group[0], text)
    page.blank()


def blame(findings: Sequence[Finding], limit: int | None) -> str:
    """The blamed ranks, hosts, GPUs and links: "rank 3; host n1; link n0 -> n1", or empty."""
    return "; ".join(f"{kind} {one_line(names)}" for kind, names in subjects(findings, limit))


def write_evidence(page: Page, finding: Finding, *, details: bool, earlier: Iterable[Finding] = ()) -> None:
    """Write the figures in one paragraph, and below it values with many lines: tables, stacks, outputs.

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
        few = FRAMES_SHOWN if name.startswith(_STACK) else LIST_SHOWN
        most = None if details else most_of(rows, few)
        page.write(f"{one_line(label(name))}:", style="dim", indent=4)
        for row in rows[:most]:
            head, mark, rest = one_line(row).partition(": ")
            page.write(rest or head, style="dim", indent=6, lead=head + mark if rest else "", lead_style="dim")
        if more := left_out(len(rows), most):
            page.write(more.strip(), style="dim", indent=6)


def most_of(things: Sequence[object], few: int) -> int:
    """How many of `things` to show: `few`, or all if only one more is left, since "1 more" takes a line, too."""
    return len(things) if len(things) <= few + 1 else few


def _essential(finding: Finding, earlier: Iterable[Finding]) -> Mapping[str, Value]:
    """The evidence without details for experts, unknown values, and values that title or message already name."""
    if KNOWN_ERROR in finding.evidence:
        return {}
    prose = one_line(f"{finding.title} {finding.message}")
    stacks = [name for name, value in finding.evidence.items() if name.startswith(_STACK) and isinstance(value, list)]
    hidden = {*_DETAILS, *stacks[1:]}
    if stacks and any(finding.evidence[stacks[0]] in other.evidence.values() for other in earlier):
        hidden.add(stacks[0])
    shown: dict[str, Value] = {}
    for name, whole in finding.evidence.items():
        value = whole.rstrip().rpartition("\n")[2] if isinstance(whole, str) else whole
        is_unknown = value is None or (isinstance(value, list) and value and all(item is None for item in value))
        if name not in hidden and not is_unknown and (name in stacks or not _is_in_prose(name, value, prose)):
            shown[name] = value
    return shown


def _is_in_prose(name: str, value: Value, prose: str) -> bool:
    """Whether the prose has each value, word for word. A number without a unit never counts: it is ambiguous."""
    items = value if isinstance(value, list) else [value]
    texts = [value_text(name, item) for item in items]
    return 0 < len(texts) <= LIST_SHOWN and all(
        not isinstance(item, bool)
        and not _BARE_NUMBER.fullmatch(text)
        and re.search(rf"(?<![\w.,]){re.escape(text)}(?!\w)", prose) is not None
        for item, text in zip(items, texts, strict=True)
    )


def _rows(name: str, value: Value, *, details: bool) -> list[str]:
    """The lines of a value that needs one line for each item ("rank 3: hung", a frame of a stack); else empty."""
    if isinstance(value, str):
        return value.splitlines() if details and "\n" in value else []
    if not isinstance(value, list):
        return []
    mark = "" if name.startswith(_STACK) else " " if details else ": "
    rows = [item for item in value if isinstance(item, str) and mark in item]
    return rows if len(rows) == len(value) else []


def value_text(name: str, value: Value, limit: int | None = None) -> str:
    """The value of the figure `name` as text, with its unit: "not known" for None, at most `limit` items."""
    if value is None:
        return "not known"
    if isinstance(value, list) and value:
        return ", ".join(value_text(name, item) for item in value[:limit]) + left_out(len(value), limit)
    return one_line(quantity(name, value))


def subjects(findings: Iterable[Finding], limit: int | None) -> list[tuple[str, str]]:
    """The blamed subjects by kind, such as [("ranks", "0-2"), ("host", "n1")], each shortened to `limit`."""
    kept = list(findings)
    ranks = {rank for finding in kept for rank in finding.ranks}
    nodes = tuple(dict.fromkeys(node for finding in kept for node in finding.hosts))
    gpus = tuple(dict.fromkeys(gpu for finding in kept for gpu in finding.gpus))
    links = tuple(dict.fromkeys(link for finding in kept for link in finding.links))
    kinds = (
        ("rank", len(ranks), fold_ranks(ranks, limit=limit)),
        ("host", len(nodes), fold_hosts(nodes, limit=limit)),
        ("GPU", len(gpus), listed(gpus, limit)),
        ("link", len(links), listed(links, limit)),
    )
    return [(noun if number == 1 else f"{noun}s", text) for noun, number, text in kinds if number]


_NAMES_SHOWN, _SHORT = 24, 100


def finding_boxes(findings: Iterable[Finding]) -> list[tuple[Finding, tuple[Block, ...]]]:
    """The first findings of each code with their parts, errors first; the last one says how many are like it."""
    boxes = []
    for group in grouped(findings).values():
        most = most_of(group, SAME_SHOWN)
        for number, finding in enumerate(group[:most], 1):
            parts = [*finding_blocks(finding)]
            if number == most < len(group):
                names = blame(group, _NAMES_SHOWN)
                parts.append(Text(f"{len(group) - most:,} more like these{f', in all: {names}' if names else ''}."))
            boxes.append((finding, tuple(parts)))
    return boxes


def finding_blocks(finding: Finding) -> Iterator[Block]:
    """The message, the blamed, the fix and the evidence of a finding."""
    yield Text(finding.message)
    if names := blame((finding,), _NAMES_SHOWN):
        yield Text(names, "About" if finding.severity is Severity.NOTE else "Blamed")
    elif _without_blame((finding,)):
        yield Text("none: the evidence names no single rank, host, GPU or link", "Blamed")
    if finding.fix:
        yield Text(finding.fix, "Fix")
    if finding.env:
        yield Code("\n".join(shell_lines(finding.env)), "Variables")
    lists = {name: value for name, value in finding.evidence.items() if isinstance(value, list) and _is_long(value)}
    figures = [(label(name), value_text(name, value)) for name, value in finding.evidence.items() if name not in lists]
    table = Table(columns=(Column("figure"), Column("value")), rows=tuple(figures), noun="figure")
    items = (Items(tuple(value_text(name, item) for item in value), label(name)) for name, value in lists.items())
    if finding.evidence:
        yield Fold("Evidence", (*([table] if figures else ()), *items))


def _is_long(value: list[Scalar]) -> bool:
    """Whether these are lines rather than words: "rank 3: hung" is a line, and so is each frame of a stack."""
    texts = [item for item in value if isinstance(item, str)]
    return len(value) > _SHORT or sum(map(len, texts)) > _SHORT or any(": " in text or " (" in text for text in texts)
