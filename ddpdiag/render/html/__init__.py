"""The report as one page: a file to attach to a ticket, read without network and without script.

The page is built in three steps: a `Page` of plain data from the report, pictures by `plots`, and markup by the
templates beside this file. Whatever a host calls itself, and whatever an error says, is escaped there: Jinja2 with
autoescape on, and a policy in the page that forbids all scripts but its own, and all requests. Of many ranks, hosts and
findings the worst are shown, and a sentence says how many there are.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddpdiag.errors import UsageError
from ddpdiag.foreign import printable
from ddpdiag.model import Report
from ddpdiag.render import Sections
from ddpdiag.render.html.findings import boxes
from ddpdiag.render.html.page import Fact, Page, words
from ddpdiag.render.html.ranks import ranks_section, steps_section
from ddpdiag.render.html.run import checks_section, timeline_section
from ddpdiag.render.html.world import environment_section, pairs_section, topology_section
from ddpdiag.render.plots import drawing, page_style
from ddpdiag.render.shell import exclude_lines, shell_lines
from ddpdiag.text import count, fold_hosts, quantity, seconds

if TYPE_CHECKING:
    from jinja2 import Environment

_NAMES_SHOWN, _NOTES_SHOWN = 12, 40
# Below the verdict, where they were measured.
_KEY_FIGURES = {
    "training.samples_per_second": "samples a second",
    "fabric.pair_busbw_bytes_per_s": "busbw of a usual pair",
}


def check_available() -> None:
    """UsageError if Jinja2 or matplotlib is missing; neither is imported."""
    for module, name in (("jinja2", "Jinja2"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise UsageError(f"--html needs {name}: pip install 'ddpdiag[html]'")


def render(report: Report, features: Sequence[Sections] = ()) -> str:
    """The page; UsageError if it cannot be made here."""
    check_available()
    with drawing("--html", "html"), page_style():
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

    return Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def page_of(report: Report, features: Sequence[Sections] = ()) -> Page:
    """What the page says, that of `features` first; within `page_style`, since it draws."""
    sections = (
        *(feature.section(report) for feature in features),
        pairs_section(report),
        ranks_section(report),
        steps_section(report),
        timeline_section(report),
        topology_section(report),
        environment_section(report),
        checks_section(report),
    )
    return Page(
        verdict=report.verdict.value,
        verdict_text=report.verdict_text,
        sentence=words(report.sentence),
        head=words(_head(report)),
        facts=tuple(Fact(words(name), words(value)) for name, value in _facts(report)),
        commands="\n".join(_commands(report)),
        findings=boxes(report.findings),
        sections=tuple(section for section in sections if section.figures or section.tables),
        notes=_notes(report),
        foot=words(f"ddpdiag {report.version}, run {report.run_id}, {report.created}"),
    )


def _head(report: Report) -> str:
    """The name of the page in a list of tabs."""
    world = report.world
    return f"{report.verdict_text}: {count(world.size, 'rank')} on {count(len(world.nodes), 'host')}"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    world = report.world
    yield "ranks", f"{world.size:,}"
    yield (
        "hosts",
        f"{len(world.nodes):,} ({fold_hosts(world.nodes, limit=_NAMES_SHOWN)})" if world.nodes else "none known",
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
    yield "took", f"{seconds(report.seconds)} of {seconds(report.budget_seconds)}"
    if report.created:
        yield "run", report.created


def _commands(report: Report) -> Iterator[str]:
    """What to paste: the variables that the job needs, and the lines that leave hosts out; a comment without Slurm."""
    yield from map(printable, shell_lines(report.workarounds))
    for sentence, command in exclude_lines(report):
        yield printable(command if report.world.scheduler else f"# {sentence} {command}")


def _notes(report: Report) -> tuple[str, ...]:
    found = [note if times == 1 else f"{note} ({times:,} times)" for note, times in Counter(report.notes).items()]
    left = len(found) - _NOTES_SHOWN
    return tuple(map(words, found[:_NOTES_SHOWN])) + (
        (f"{left:,} more notes are in the JSON report",) if left > 0 else ()
    )
