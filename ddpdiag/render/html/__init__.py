"""The report as one HTML file to attach to a ticket. It can be read without network and without scripts.

A `Page` of plain data is made from the report, and Jinja2 templates turn the page into HTML. Jinja2 escapes every text,
and a policy in the page forbids all requests and all scripts except the page's own. Of many ranks, hosts and findings
only the worst are shown, and a sentence gives the number of the others.
"""

import re
from base64 import b64encode
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
from ddpdiag.render.html.charts import alt_text, svg_of
from ddpdiag.render.html.views import Fact, cut_line, shown_items, view_of
from ddpdiag.render.report import count_equal, sections
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
    """The data of the page. `head` is the browser's title, `commands` are lines to paste, and `foot` ends the page.

    A page without `findings` (None) has no part for them and for `file_problems`.
    """

    verdict: str
    verdict_text: str
    sentence: str
    head: str
    facts: tuple[Fact, ...]
    commands: tuple[Fact, ...]
    findings: tuple[FindingBox, ...] | None
    sections: tuple[Section, ...]
    file_problems: tuple[str, ...]
    foot: str


def check_available() -> None:
    """Raise UsageError if Jinja2 is not installed. Does not import Jinja2."""
    if find_spec("jinja2") is None:
        raise UsageError("--html needs Jinja2: python -m pip install jinja2")


def render(report: Report, features: Sequence[Feature] = ()) -> str:
    """The report as HTML. Raises UsageError if Jinja2 is not installed."""
    check_available()
    return render_page(page_of(report, features))


def render_page(page: Page) -> str:
    """Any page as HTML."""
    script = _asset("script.js")
    # The policy allows only this script, even if another got into the page.
    policy = b64encode(sha256(script.encode()).digest()).decode()
    return _environment().get_template("page.html").render(page=page, script=script, policy=policy)


def _asset(name: str) -> str:
    return (files(__name__) / "templates" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "code": _with_code,
        "kind": lambda block: type(block).__name__,
        "line": cut_line,
        "printable": printable,
        "items": shown_items,
        "view": view_of,
        "svg": lambda block: Markup(svg_of(block)),  # `svg_of` escapes its labels
        "alt_text": alt_text,
    }
    return environment


_BACKTICKS = re.compile(r"`([^`\n]+)`")


def _with_code(text: str) -> "Markup":
    """Escape `text` for HTML, and mark the parts between backticks as code."""
    from markupsafe import Markup, escape

    # Escaping adds no backticks.
    return Markup(_BACKTICKS.sub(r"<code>\1</code>", str(escape(text))))


def page_of(report: Report, features: Sequence[Feature] = ()) -> Page:
    """Make the data of the page from the report, with the sections of the `features`."""
    world = report.world
    variables = "\n".join(shell_lines(report.workarounds))
    commands = (*([("The job needs these variables:", variables)] if variables else []), *exclude_lines(report))
    problems = count_equal(report.recording_problems)
    omitted = len(problems) - _NOTES_SHOWN
    closing = [f"{omitted:,} more notes are in the JSON report"] if omitted > 0 else []
    return Page(
        verdict="degraded" if report.degraded else report.verdict.value,
        verdict_text=report.verdict_text,
        sentence=cut_line(report.sentence),
        head=cut_line(f"{report.verdict_text}: {count(world.size, 'rank')} on {count(len(world.hosts), 'host')}"),
        facts=tuple(Fact(cut_line(name), cut_line(value)) for name, value in _facts(report)),
        commands=tuple(Fact(cut_line(title), printable(text)) for title, text in commands),
        findings=tuple(
            FindingBox(finding.severity.value, cut_line(finding.code), cut_line(finding.title), parts)
            for finding, parts in finding_boxes(report.findings)[:_BOXES_SHOWN]
        ),
        sections=tuple(_ordered_sections(report, features)),
        file_problems=(*map(cut_line, problems[:_NOTES_SHOWN]), *closing),
        foot=cut_line(f"ddpdiag {report.version}, run {report.run_id}, {report.created}"),
    )


def _ordered_sections(report: Report, features: Sequence[Feature]) -> Iterator[Section]:
    """Yield the inventory, then the sections of the features, then all other sections."""
    all_sections = [*sections(report)]
    yield from (section for section in all_sections if section.name == "inventory")
    for feature in features:
        yield from feature.blocks(report)
    yield from (section for section in all_sections if section.name != "inventory")


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    world = report.world
    yield "ranks", f"{world.size:,}"
    hosts = fold_hosts(world.hosts, limit=_NAMES_SHOWN)
    yield "hosts", f"{len(world.hosts):,} ({hosts})" if world.hosts else "none known"
    gpus = {uuid for row in report.ranks if (uuid := row.get("gpu_uuid")) is not None}
    if gpus:
        yield "GPUs", f"{len(gpus):,}"
    yield "backend", world.backend
    yield "launcher", world.launcher
    yield "took", f"{seconds(report.seconds)} (limit {seconds(report.budget_seconds)})"
    if report.created:
        yield "run", report.created
