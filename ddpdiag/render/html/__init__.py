"""The report as one page: a file to attach to a ticket, read without network and without script.

A `Page` of plain data is made from the report, and the templates beside this file make markup of it. Every text is
escaped there, whatever a host is called and an error says: Jinja2 with autoescape on, and a policy in the page that
forbids all requests and all scripts but its own. Of many ranks, hosts and findings the worst are shown, and a sentence
says how many there are.
"""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from ddpdiag.errors import UsageError
from ddpdiag.model import Report
from ddpdiag.render import Feature
from ddpdiag.render.blocks import Block, Section
from ddpdiag.render.findings import finding_boxes
from ddpdiag.render.html.charts import in_words, svg_of
from ddpdiag.render.html.views import Fact, shown_items, view_of, words
from ddpdiag.render.report import sections
from ddpdiag.render.shell import exclude_lines, shell_lines
from ddpdiag.sanitize import printable
from ddpdiag.text import count, fold_hosts, seconds

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_NOTES_SHOWN, _NAMES_SHOWN, _BOXES_SHOWN = 40, 24, 120


class FindingBox(NamedTuple):
    severity: str
    code: str
    title: str
    blocks: tuple[Block, ...]


class Page(NamedTuple):
    """The page: verdict and sentence, the facts of the run, lines to paste, findings, sections."""

    verdict: str
    verdict_text: str
    sentence: str
    head: str
    facts: tuple[Fact, ...]
    commands: tuple[Fact, ...]
    findings: tuple[FindingBox, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    foot: str


def check_available() -> None:
    """Raise UsageError if Jinja2 is missing, without importing it."""
    if find_spec("jinja2") is None:
        raise UsageError("--html needs Jinja2: python -m pip install jinja2")


def render(report: Report, features: Sequence[Feature] = ()) -> str:
    """The page as HTML; UsageError if Jinja2 is missing."""
    check_available()
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


def _with_code(text: str) -> "Markup":
    """`text` escaped for HTML, with the text between backticks as code."""
    from markupsafe import Markup, escape

    # Escaped text has the backticks of the original and no others.
    return Markup(_TICKS.sub(r"<code>\1</code>", str(escape(text))))


def page_of(report: Report, features: Sequence[Feature] = ()) -> Page:
    """The page as data, with the sections of `features` first."""
    world = report.world
    needed = "\n".join(shell_lines(report.workarounds))
    commands = (*([("The job needs these variables:", needed)] if needed else []), *exclude_lines(report))
    # Equal notes are shown once, with their number.
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
        findings=tuple(
            FindingBox(finding.severity.value, words(finding.code), words(finding.title), parts)
            for finding, parts in finding_boxes(report.findings)[:_BOXES_SHOWN]
        ),
        sections=tuple(_in_order(report, features)),
        notes=(*map(words, found[:_NOTES_SHOWN]), *rest),
        foot=words(f"ddpdiag {report.version}, run {report.run_id}, {report.created}"),
    )


def _in_order(report: Report, features: Sequence[Feature]) -> Iterator[Section]:
    """The inventory, the sections of the features, and all others."""
    every = [*sections(report)]
    yield from (section for section in every if section.name == "inventory")
    for feature in features:
        yield from feature.blocks(report)
    yield from (section for section in every if section.name != "inventory")


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
    yield "took", f"{seconds(report.seconds)} (limit {seconds(report.budget_seconds)})"
    if report.created:
        yield "run", report.created
