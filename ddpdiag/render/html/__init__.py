"""The report as one page: a file to attach to a ticket, read without network and without script.

The page is built in three steps: a `Page` of plain data from the report, pictures by `plots`, and markup by the
templates beside this file. Whatever a host calls itself, and whatever an error says, is escaped there: Jinja2 with
autoescape on, and a policy in the page that forbids all scripts but its own, and all requests. Of many ranks, hosts and
findings the worst are shown, and a sentence says how many there are.
"""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddpdiag.errors import UsageError
from ddpdiag.model import Finding, Report, Scalar, Severity
from ddpdiag.render import Feature, Sections
from ddpdiag.render.blocks import Section as Blocks
from ddpdiag.render.findings import grouped, subjects
from ddpdiag.render.html.charts import in_words, svg_of
from ddpdiag.render.html.page import (
    Cell,
    Fact,
    FindingBox,
    Listed,
    Page,
    Section,
    Table,
    Text,
    columns,
    paragraphs,
    words,
)
from ddpdiag.render.html.views import shown_items, view_of
from ddpdiag.render.plots import drawing, page_style
from ddpdiag.render.report import sections
from ddpdiag.render.shell import exclude_lines, shell_lines
from ddpdiag.sanitize import printable
from ddpdiag.text import count, fold_hosts, label, quantity, seconds

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


_NOTES_SHOWN = 40
# Below the verdict, where they were measured.
_KEY_FIGURES = {
    "training.samples_per_second": "samples a second",
    "fabric.pair_busbw_bytes_per_s": "busbw of a usual pair",
}


def check_available() -> None:
    """UsageError if Jinja2 or matplotlib is missing; neither is imported."""
    for module, name in (("jinja2", "Jinja2"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise UsageError(f"--html needs {name}: python -m pip install jinja2 matplotlib")


def render(report: Report, features: Sequence[Feature | Sections] = ()) -> str:
    """The page; UsageError if it cannot be made here."""
    check_available()
    with drawing("--html"), page_style():
        page = page_of(report, features)
    script = _source("script.js")
    # The only script that may run is this one, whatever else got into the page.
    policy = b64encode(sha256(script.encode()).digest()).decode()
    return _environment().get_template("page.html").render(page=page, script=script, policy=policy)


def _source(name: str) -> str:
    return (files(__name__) / "templates" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "code": _with_code,
        "kind": lambda block: type(block).__name__,
        "line": words,
        "printable": printable,
        "items": shown_items,
        "view": view_of,
        "svg": lambda block: Markup(svg_of(block)),  # its labels are escaped there
        "words": in_words,
    }
    return environment


_TICKS = re.compile(r"`([^`\n]+)`")


def _with_code(text: str, *, copyable: bool = False) -> "Markup":
    """`text` escaped, with what stands between backticks as code; a command, with a button that copies it."""
    from markupsafe import Markup, escape

    def code(match: re.Match[str]) -> str:
        span = f"<code>{match[1]}</code>"
        # A single word is a name.
        return (
            f'{span}<button type="button" class="copy" hidden>Copy</button>' if " " in match[1] and copyable else span
        )

    # Escaped text has the backticks of the original and no others.
    return Markup(_TICKS.sub(code, str(escape(text))))


def page_of(report: Report, features: Sequence[Feature | Sections] = ()) -> Page:
    """What the page says, that of `features` first; within `page_style`, since it draws."""
    world = report.world
    needed = "\n".join(shell_lines(report.workarounds))
    commands = (*([("The job needs these variables:", needed)] if needed else []), *exclude_lines(report))
    # Of many alike one, with their number.
    found = [note if times == 1 else f"{note} ({times:,} times)" for note, times in Counter(report.notes).items()]
    left = len(found) - _NOTES_SHOWN
    rest = [f"{left:,} more notes are in the JSON report"] if left > 0 else []
    return Page(
        verdict=report.verdict.value,
        verdict_text=report.verdict_text,
        sentence=words(report.sentence),
        head=words(f"{report.verdict_text}: {count(world.size, 'rank')} on {count(len(world.hosts), 'host')}"),
        facts=tuple(Fact(words(name), words(value)) for name, value in _facts(report)),
        commands=tuple(Fact(words(says), printable(text)) for says, text in commands),
        findings=boxes(report.findings),
        sections=tuple(_in_order(report, features)),
        notes=(*map(words, found[:_NOTES_SHOWN]), *rest),
        foot=words(f"ddpdiag {report.version}, run {report.run_id}, {report.created}"),
    )


def _in_order(report: Report, features: Sequence[Feature | Sections]) -> Iterator[Section | Blocks]:
    """The inventory, what the run was for, and all else."""
    every = [*sections(report)]
    yield from (section for section in every if section.name == "inventory")
    for feature in features:
        yield from _of_feature(feature, report)
    yield from (section for section in every if section.name != "inventory")


def _of_feature(feature: Feature | Sections, report: Report) -> Iterator[Section | Blocks]:
    if isinstance(feature, Feature):
        yield from feature.blocks(report)
    else:
        yield feature.section(report)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    world = report.world
    yield "ranks", f"{world.size:,}"
    yield (
        "hosts",
        f"{len(world.hosts):,} ({fold_hosts(world.hosts, limit=_NAMES_SHOWN)})" if world.hosts else "none known",
    )
    gpus = {uuid for row in report.ranks if (uuid := row.get("gpu_uuid")) is not None}
    if gpus:
        yield "GPUs", f"{len(gpus):,}"
    yield "backend", world.backend
    yield "launcher", world.launcher
    for name, value in report.measurements.items():
        is_busbw = name.startswith("all_reduce.") and name.endswith(".busbw_bytes_per_s")
        if (name in _KEY_FIGURES or is_busbw) and isinstance(value, int | float):
            yield _KEY_FIGURES.get(name) or f"all-reduce busbw, {name.split('.')[1]}", quantity(name, value)
    yield "took", f"{seconds(report.seconds)} (limit {seconds(report.budget_seconds)})"
    if report.created:
        yield "run", report.created


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
    names = _in_words(_who(findings)) or "no rank or host is blamed"
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
        within_code = text.count("`", 0, match.start()) % 2
        if match[0] != finding.code and match[0] in anchors and not within_code:
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
        expected=_evidence(plain, yardstick=True),
        facts=_evidence(plain, yardstick=False),
        lists=tuple(_listed(name, value) for name, value in lists.items()),
        fix=fix,
        commands="\n".join(map(printable, shell_lines(finding.env))),
        rest=rest,
    )


def _is_long(name: str, value: list[Scalar]) -> bool:
    """Are these lines rather than words? "rank 3: hung" is a line, and so is each frame of a stack."""
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


def _listed(name: str, value: list[Scalar]) -> Listed:
    items = [words(_value(name, item)) for item in value[:_ITEMS_SHOWN]]
    if left := len(value) - len(items):
        items.append(f"+{left:,} more, in the JSON report")
    return Listed(words(label(name)), tuple(items), name.startswith(_STACK) or len(items) > _OPEN_ITEMS)


def _who(findings: Iterable[Finding]) -> tuple[Fact, ...]:
    """Ranks, hosts, GPUs and links of some findings, each kind folded."""
    return tuple(Fact(kind, words(names)) for kind, names in subjects(findings, _NAMES_SHOWN))
