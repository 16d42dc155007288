"""Show findings to people: the error, the blamed ranks and hosts, the fix, and then the evidence.

The fix comes before the evidence, so that the first screen shows the first finding except for its figures.

Without `--details`, the errors and warnings of only three codes are shown in full. Those of other codes have a title,
the blamed ranks or hosts, and the fix. Figures that the message already names are left out. Of several stacks, only
the first frames of one are shown: in a hang, all ranks but one are usually at the same place in the code.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.model.report import KNOWN_ERROR
from ddpdiag.render.blocks import Block, Code, Column, Fold, Items, Table, Text
from ddpdiag.render.page import DETAIL_ROWS_SHOWN, Page, one_line
from ddpdiag.render.shell import shell_lines
from ddpdiag.text import fold_hosts, fold_ranks, label, listed, omitted_text, quantity

SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}

# So many findings of one code are shown. If a thousand ranks have the same finding, the others are a list of names.
SAME_SHOWN = 3
# If more findings than this would be shown, only one of each code is shown, because a longer page is not read.
FINDINGS_SHOWN = 5
# The errors and warnings of so many codes are shown in full.
CODES_SHOWN = 3
# A line shows at most so many names or values of one kind.
LIST_SHOWN = 8
# Frames of a stack, the innermost first.
FRAMES_SHOWN = 3
_STACK_PREFIX = "stack"
# Figures that only experts need; they are shown with `--details`.
_EXPERT_FIGURES = frozenset({"trial", "pid", "state", "wchan"})
_BARE_NUMBER = re.compile(r"[\d.,+-]*")
Value = Scalar | list[Scalar]

# The characters that may follow the title in a message that begins with the title.
_END_OF_TITLE = re.compile(r"[:;,.]\s+|[:;,.]?\s*$")
_PARENTHESIS = re.compile(r"\s+\(([^()]*)\)")


def group_by_code(findings: Iterable[Finding]) -> dict[tuple[Severity, str], list[Finding]]:
    """Group the findings by severity and code, errors first."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    return groups


def write_findings(
    page: Page, findings: Sequence[Finding], *, details: bool, severities: Sequence[Severity] = SEVERITIES
) -> None:
    """Write the findings of these `severities`, errors first. Without `details`, write only a few of each code."""
    groups = group_by_code(findings)
    total = sum(shown_count(group, SAME_SHOWN) for group in groups.values())
    max_per_code = SAME_SHOWN if total <= FINDINGS_SHOWN else 1
    shown_groups = [group for (severity, _), group in groups.items() if severity in severities]
    serious = [group for group in shown_groups if group[0].severity is not Severity.NOTE]
    earlier: list[Finding] = []
    for number, group in enumerate(shown_groups):
        if CODES_SHOWN <= number < len(serious) and not details:
            closing = f", and {len(group) - 1:,} more like this" if len(group) > 1 else ""
            _write_with_code(page, group[0], one_line(group[0].title) + closing, style="bold")
            _write_subjects(page, group, LIST_SHOWN)
            _write_fix(page, group[0])
            page.blank()
            continue
        shown = DETAIL_ROWS_SHOWN if details else shown_count(group, max_per_code)
        for finding in group[:shown]:
            _write_finding(page, finding, () if details else earlier, details=details)
            earlier.append(finding)
        _write_omitted(page, group, shown, details=details)


def findings_text(findings: Iterable[Finding]) -> str:
    """The errors and warnings with their fixes, as `ddpdiag check --quiet` shows them, in 80 columns."""
    page = Page(color=False, width=80)
    write_findings(page, [*findings], details=False, severities=SEVERITIES[:2])
    return page.text().rstrip()


def _write_with_code(page: Page, finding: Finding, text: str, *, style: str = "") -> None:
    """Write `text` as a paragraph that begins with the severity and code of a finding."""
    lead = f"{finding.severity.value} {one_line(finding.code)}: "
    page.write(text, style=style, lead=lead, lead_style=_STYLES[finding.severity])


def _write_finding(page: Page, finding: Finding, earlier: Sequence[Finding], *, details: bool) -> None:
    _write_with_code(page, finding, one_line(finding.title), style="bold")
    if message := finding.message if details else message_without_title(finding.title, finding.message):
        page.write(message, indent=4)
    _write_subjects(page, (finding,), None if details else LIST_SHOWN)
    same_fixes = (other for other in earlier if (other.fix, other.env) == (finding.fix, finding.env))
    above = next(same_fixes, None) if finding.fix else None
    _write_fix(page, finding, above)
    # If a finding of another code above has the same fix, this finding follows from it, and needs no evidence.
    if above is None or above.code == finding.code:
        write_evidence(page, finding, details=details, earlier=earlier)
    page.blank()


def message_without_title(title: str, message: str) -> str:
    """The message without the title, if the message begins with it; else the message."""
    # The message is a sentence and begins with a capital letter, unlike the title.
    if not title or message[:1].lower() != title[:1].lower() or not message[1:].startswith(title[1:]):
        return message
    rest = message[len(title) :]
    if match := _END_OF_TITLE.match(rest):
        remainder = rest[match.end() :]
    elif match := _PARENTHESIS.match(rest):
        remainder = f"{match[1]}{rest[match.end() :]}"
    else:
        return message
    # A plain word gets a capital letter. A name is kept as it is, and so is a complete sentence.
    is_sentence = rest.startswith(".")
    has_word = remainder.partition(" ")[0].isalpha()
    return remainder[:1].upper() + remainder[1:] if has_word and not is_sentence else remainder


def _write_subjects(page: Page, findings: Sequence[Finding], limit: int | None) -> None:
    if names := blamed_text(findings, limit):
        # A note blames no rank or host.
        word = "about: " if findings[0].severity is Severity.NOTE else "blamed: "
        page.write(names, indent=4, lead=word, lead_style="bold")
    elif sentence := _no_blame_sentence(findings):
        page.write(f"{sentence}: the evidence cannot decide", indent=4)


def _no_blame_sentence(findings: Sequence[Finding]) -> str:
    """The sentence for findings that blame nothing; empty if all of them are notes or about the run."""
    needs_no_blame = all(finding.severity is Severity.NOTE or finding.is_about_run for finding in findings)
    return "" if needs_no_blame else "no rank, host, GPU or link is blamed"


def _write_fix(page: Page, finding: Finding, above: Finding | None = None) -> None:
    """Write the fix and its variables. If a finding `above` has the same fix, write a reference to that finding."""
    if finding.fix:
        text = finding.fix if above is None else f"see {one_line(above.code)} above."
        page.write(text, indent=4, lead="Fix: ", lead_style="bold")
    for line in shell_lines(finding.env) if above is None else ():
        page.write_verbatim(line, indent=8)


def _write_omitted(page: Page, group: Sequence[Finding], shown: int, *, details: bool) -> None:
    """Write one line about the findings of a group that come after the first `shown`."""
    findings = group[shown:]
    if not findings:
        return
    names = blamed_text(findings, LIST_SHOWN) or _no_blame_sentence(findings)
    place = "in the JSON report" if details else "with --details, or in the JSON report"
    text = f"{len(findings):,} more like these{f': {names}' if names else ''}; {place}"
    _write_with_code(page, group[0], text)
    page.blank()


def blamed_text(findings: Sequence[Finding], limit: int | None) -> str:
    """The blamed ranks, hosts, GPUs and links as text: "rank 3; host n1; link n0 -> n1". Empty if none is blamed."""
    return "; ".join(f"{kind} {one_line(names)}" for kind, names in subjects(findings, limit))


def write_evidence(page: Page, finding: Finding, *, details: bool, earlier: Iterable[Finding] = ()) -> None:
    """Write the figures in one paragraph, and below it the values with several lines: tables, stacks, outputs.

    Without `details`, a stack that one of the `earlier` findings has is not shown again.
    """
    shown = finding.evidence if details else _evidence_to_show(finding, earlier)
    all_lines = {name: _value_lines(name, value, details=details) for name, value in shown.items()}
    lines_by_figure = {name: lines for name, lines in all_lines.items() if lines}
    limit = None if details else LIST_SHOWN
    figures = (
        f"{one_line(label(name))} = {value_text(name, value, limit)}"
        for name, value in shown.items()
        if name not in lines_by_figure
    )
    if text := "; ".join(figures):
        page.write(text, style="dim", indent=4)
    for name, lines in lines_by_figure.items():
        few = FRAMES_SHOWN if name.startswith(_STACK_PREFIX) else LIST_SHOWN
        max_lines = None if details else shown_count(lines, few)
        page.write(f"{one_line(label(name))}:", style="dim", indent=4)
        for line in lines[:max_lines]:
            head, mark, rest = one_line(line).partition(": ")
            page.write(rest or head, style="dim", indent=6, lead=head + mark if rest else "", lead_style="dim")
        if more := omitted_text(len(lines), max_lines):
            page.write(more.strip(), style="dim", indent=6)


def shown_count(items: Sequence[object], limit: int) -> int:
    """How many items to show: `limit`, but all if at most one would be left out, because "1 more" also takes a line."""
    return len(items) if len(items) <= limit + 1 else limit


def _evidence_to_show(finding: Finding, earlier: Iterable[Finding]) -> Mapping[str, Value]:
    """The evidence without expert figures, unknown values and values in the message. Empty if the error is known."""
    if KNOWN_ERROR in finding.evidence:
        return {}
    prose = one_line(f"{finding.title} {finding.message}")
    lists = [name for name, value in finding.evidence.items() if isinstance(value, list)]
    stacks = [name for name in lists if name.startswith(_STACK_PREFIX)]
    hidden = {*_EXPERT_FIGURES, *stacks[1:]}
    if stacks and any(finding.evidence[stacks[0]] in other.evidence.values() for other in earlier):
        hidden.add(stacks[0])
    shown: dict[str, Value] = {}
    for name, full in finding.evidence.items():
        value = full.rstrip().rpartition("\n")[2] if isinstance(full, str) else full
        is_unknown = value is None or (isinstance(value, list) and value and all(item is None for item in value))
        if name not in hidden and not is_unknown and (name in stacks or not _is_in_prose(name, value, prose)):
            shown[name] = value
    return shown


def _is_in_prose(name: str, value: Value, prose: str) -> bool:
    """Whether `prose` contains every value of a figure. Numbers without a unit are ambiguous, and never count."""
    items = value if isinstance(value, list) else [value]
    texts = [value_text(name, item) for item in items]
    return 0 < len(texts) <= LIST_SHOWN and all(
        not isinstance(item, bool)
        and not _BARE_NUMBER.fullmatch(text)
        and re.search(rf"(?<![\w.,]){re.escape(text)}(?!\w)", prose) is not None
        for item, text in zip(items, texts, strict=True)
    )


def _value_lines(name: str, value: Value, *, details: bool) -> list[str]:
    """The lines of a value to show line by line, such as "rank 3: hung" or stack frames. Empty for other values."""
    if isinstance(value, str):
        return value.splitlines() if details and "\n" in value else []
    if not isinstance(value, list):
        return []
    separator = "" if name.startswith(_STACK_PREFIX) else " " if details else ": "
    lines = [item for item in value if isinstance(item, str) and separator in item]
    return lines if len(lines) == len(value) else []


def value_text(name: str, value: Value, limit: int | None = None) -> str:
    """The value of the figure `name` as text with its unit, or "not known" for None. A list is cut to `limit` items."""
    if value is None:
        return "not known"
    if isinstance(value, list) and value:
        return ", ".join(value_text(name, item) for item in value[:limit]) + omitted_text(len(value), limit)
    return one_line(quantity(name, value))


def subjects(findings: Iterable[Finding], limit: int | None) -> list[tuple[str, str]]:
    """The blamed subjects by kind: [("ranks", "0-2"), ("host", "n1")]. Each list has at most `limit` names."""
    all_findings = list(findings)
    ranks = {rank for finding in all_findings for rank in finding.ranks}
    hosts = tuple(dict.fromkeys(host for finding in all_findings for host in finding.hosts))
    gpus = tuple(dict.fromkeys(gpu for finding in all_findings for gpu in finding.gpus))
    links = tuple(dict.fromkeys(link for finding in all_findings for link in finding.links))
    kinds = (
        ("rank", len(ranks), fold_ranks(ranks, limit=limit)),
        ("host", len(hosts), fold_hosts(hosts, limit=limit)),
        ("GPU", len(gpus), listed(gpus, limit)),
        ("link", len(links), listed(links, limit)),
    )
    return [(noun if number == 1 else f"{noun}s", text) for noun, number, text in kinds if number]


_NAMES_SHOWN, _SHORT = 24, 100


def finding_boxes(findings: Iterable[Finding], *, advice: bool = True) -> list[tuple[Finding, tuple[Block, ...]]]:
    """The first findings of each code with their blocks, errors first. A last block counts the others of the code.

    Without `advice`, the blocks have only the message and the evidence.
    """
    boxes = []
    for group in group_by_code(findings).values():
        shown = shown_count(group, SAME_SHOWN)
        for number, finding in enumerate(group[:shown], 1):
            parts = [Text(finding.message), *(_advice_blocks(finding) if advice else ()), *_evidence_blocks(finding)]
            if number == shown < len(group):
                names = blamed_text(group, _NAMES_SHOWN)
                parts.append(Text(f"{len(group) - shown:,} more like these{f', in all: {names}' if names else ''}."))
            boxes.append((finding, tuple(parts)))
    return boxes


def _advice_blocks(finding: Finding) -> Iterator[Block]:
    """Yield the blamed ranks, hosts, GPUs and links, the fix and its variables."""
    if names := blamed_text((finding,), _NAMES_SHOWN):
        yield Text(names, "About" if finding.severity is Severity.NOTE else "Blamed")
    elif _no_blame_sentence((finding,)):
        yield Text("none: the evidence names no single rank, host, GPU or link", "Blamed")
    if finding.fix:
        yield Text(finding.fix, "Fix")
    if finding.env:
        yield Code("\n".join(shell_lines(finding.env)), "Variables")


def _evidence_blocks(finding: Finding) -> Iterator[Block]:
    lists = {name: value for name, value in finding.evidence.items() if isinstance(value, list) and _has_lines(value)}
    figures = [(label(name), value_text(name, value)) for name, value in finding.evidence.items() if name not in lists]
    table = Table(columns=(Column("figure"), Column("value")), rows=tuple(figures), noun="figure")
    items = (Items(tuple(value_text(name, item) for item in value), label(name)) for name, value in lists.items())
    if finding.evidence:
        yield Fold("Evidence", (*([table] if figures else ()), *items))


def _has_lines(value: list[Scalar]) -> bool:
    """Whether a list must be shown line by line: its items are lines, such as frames of a stack, or it is long."""
    texts = [item for item in value if isinstance(item, str)]
    return len(value) > _SHORT or sum(map(len, texts)) > _SHORT or any(": " in text or " (" in text for text in texts)
