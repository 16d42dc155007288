"""From a report to a `Page`."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ddpdiag.foreign import printable
from ddpdiag.model import Report
from ddpdiag.render import Sections
from ddpdiag.render.html.course import checks_section, timeline_section
from ddpdiag.render.html.findings import boxes
from ddpdiag.render.html.page import Fact, Page, words
from ddpdiag.render.html.pairs import pairs_section
from ddpdiag.render.html.ranks import ranks_section, steps_section
from ddpdiag.render.html.world import environment_section, topology_section
from ddpdiag.render.shell import exclude_lines, shell_line
from ddpdiag.text import bytes_per_s, count, fold_hosts, per_second, seconds

_NAMES_SHOWN, _NOTES_SHOWN = 12, 40
# Below the verdict, where they were measured.
_KEY_FIGURES = {
    "training.samples_per_second": "samples a second",
    "fabric.pair_busbw_bytes_per_s": "busbw of a usual pair",
}


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
        sentence=words(report.sentence),
        head=words(_head(report)),
        facts=tuple(Fact(words(name), words(value)) for name, value in _facts(report)),
        commands="\n".join(_commands(report)),
        findings=boxes(report.findings),
        sections=tuple(section for section in sections if not section.is_empty),
        notes=_notes(report),
        foot=words(f"ddpdiag {report.version}, run {report.run_id}, {report.created}"),
    )


def _head(report: Report) -> str:
    """The name of the page in a list of tabs."""
    world = report.world
    return f"{report.verdict.value.upper()}: {count(world.size, 'rank')} on {count(len(world.nodes), 'host')}"


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
        if isinstance(value, int | float) and not isinstance(value, bool):
            if name in _KEY_FIGURES:
                rate = per_second if name.endswith("per_second") else bytes_per_s
                yield _KEY_FIGURES[name], rate(value)
            elif name.startswith("all_reduce.") and name.endswith(".busbw_bytes_per_s"):
                yield f"all-reduce busbw, {name.split('.')[1]}", bytes_per_s(value)
    yield "took", f"{seconds(report.seconds)} of {seconds(report.budget_seconds)}"
    if report.created:
        yield "run", report.created


def _commands(report: Report) -> Iterator[str]:
    """What to paste: the variables that the job needs, and the lines that leave hosts out; a comment without Slurm."""
    for name, value in report.workarounds.items():
        yield printable(shell_line(name, value))
    for sentence, command in exclude_lines(report):
        yield printable(command if report.world.scheduler else f"# {sentence} {command}")


def _notes(report: Report) -> tuple[str, ...]:
    found = [note if times == 1 else f"{note} ({times:,} times)" for note, times in Counter(report.notes).items()]
    left = len(found) - _NOTES_SHOWN
    return tuple(map(words, found[:_NOTES_SHOWN])) + (
        (f"{left:,} more notes are in the JSON report",) if left > 0 else ()
    )
