"""The outputs of a report: the terminal, and the files that options name."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

from ddpdiag.cli.options import FILES, OUT, VERDICT, Color, DisplayOptions, option, spelled
from ddpdiag.errors import Unwritten, UsageError

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.model.recording import Line
    from ddpdiag.render import Feature
    from ddpdiag.render.progress import ProgressLine

    Content = Callable[[Report, Iterable[Line], str], str | bytes]


def rendered(module: str, *, features: bool = False) -> "Content":
    """A function that makes a file's content by `render` of a module, with features if the format shows them.

    It imports the module when it is called, because Prometheus' client takes 60 ms.
    """

    def content(report: "Report", _lines: "Iterable[Line]", _path: str) -> str | bytes:
        own = (features_of(report),) if features else ()
        text: str | bytes = import_module(module).render(report, *own)
        return text

    return content


def written(content: "Content", help: str, *names: str, panel: str = FILES, advanced: bool = False) -> str | None:
    """An option that names a file to write. `content` makes the content of this file."""
    return option(None, help, *names, metavar="FILE", panel=panel, advanced=advanced, variable=False, content=content)


def as_json(report: "Report", _lines: "Iterable[Line]", _path: str) -> str:
    from ddpdiag.codec import pretty

    return pretty(report)


def recording(_report: "Report", lines: "Iterable[Line]", _path: str) -> bytes:
    from ddpdiag.codec import encode_line

    return b"".join(map(encode_line, lines))


@dataclass(frozen=True, kw_only=True)
class Outputs(DisplayOptions):
    """Files to write ('-' is standard output), how much the terminal shows, and what the exit code depends on."""

    json: str | None = written(as_json, "The JSON report ('-': standard output).")
    markdown: str | None = written(
        rendered("ddpdiag.render.markdown", features=True), "The report as Markdown, for tickets.", advanced=True
    )
    record: str | None = written(recording, "The recording, for `ddpdiag judge`.")
    html: str | None = written(
        rendered("ddpdiag.render.html", features=True), "The report as one HTML page, for tickets."
    )
    write_failing_hosts: str | None = written(
        lambda report, _lines, _path: _one_a_line(report.hosts.failing),
        "The failing hosts, one per line (srun -x ./FILE).",
    )
    write_healthy_hosts: str | None = written(
        lambda report, _lines, _path: _one_a_line(report.hosts.healthy),
        "The healthy hosts, one per line, the fastest first if pairs of hosts were measured.",
        advanced=True,
    )
    write_workaround: str | None = written(
        rendered("ddpdiag.render.shell"),
        "Variables that avoid the faults found, for a shell to source; these faults become warnings.",
    )
    prometheus: str | None = written(
        rendered("ddpdiag.render.prometheus"), "Prometheus metrics (text format).", advanced=True
    )
    strict: bool = option(False, "Warnings count as errors: exit code 1, their hosts fail.", panel=VERDICT)
    details: bool = option(False, "Show all checks, and lists in full.", panel=OUT)

    def check(self, inputs: Sequence[str] = ()) -> None:
        """Raise UsageError before anything is measured, if a file cannot be written or would overwrite an input."""
        from ddpdiag.render.files import check_writable

        if self.html is not None:
            from ddpdiag.render import html

            html.check_available()
        takers: dict[str, str] = {}
        for name, path in self._files.items():
            place = path if path == "-" else os.path.realpath(path)
            if place in takers:
                raise UsageError(f"{takers[place]} and {name} both name {path}; give each its own file")
            takers[place] = name
            if any(is_one_file(path, file) for file in inputs):
                raise UsageError(f"{name} {path} would overwrite a file that is read; give it another one")
        for name, path in self._files.items():
            try:
                check_writable(path)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from error

    @property
    def _files(self) -> dict[str, str]:
        """The file of each option that was given."""
        named = {spelled(each.name): getattr(self, each.name) for each in fields(self) if "content" in each.metadata}
        return {option: path for option, path in named.items() if path is not None}

    def page(self, report: "Report", *, color: bool, width: int) -> str:
        """The text for the terminal: a benchmark in nccl-tests' form, strategies as a table, else a report."""
        if self.write_failing_hosts is not None or self.write_healthy_hosts is not None:
            from msgspec import structs

            new = (note for note in report.hosts.notes if note not in report.notes)
            report = structs.replace(report, notes=(*report.notes, *new))
        from ddpdiag.render import terminal

        if self.quiet:
            return terminal.render_quiet(report, color=color, width=width)
        if features := features_of(report):
            # The benchmark has nccl-tests' own form.
            if own := getattr(features[-1], "render", None):
                return str(own(report, color=color, width=width, details=self.details))
            return terminal.render_feature(report, features, color=color, width=width, details=self.details)
        return terminal.render(report, color=color, width=width, details=self.details)

    def contents(self, report: "Report", lines: "Iterable[Line]") -> Iterator[tuple[str, Callable[[], str | bytes]]]:
        """Each file that the options name, and a function that makes its content."""
        for each in fields(self):
            path = getattr(self, each.name)
            if "content" in each.metadata and path is not None:
                yield path, partial(each.metadata["content"], report, lines, path)

    @property
    def takes_stdout(self) -> bool:
        """Whether a file format goes to standard output; then the report for people goes to standard error."""
        return "-" in self._files.values()


# Options of single commands ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CompareOutputs(Outputs):
    json: str | None = option(
        None, "Write the changes as JSON ('-': standard output).", metavar="FILE", panel=FILES, variable=False
    )


@dataclass(frozen=True, kw_only=True)
class JudgeOutputs(Outputs):
    record: str | None = written(recording, "Write the parts as one recording.")


def rules() -> list[str]:
    """The codes of the rules of `ddpdiag lint`."""
    from ddpdiag.lint.rules import all_rules

    return [rule.code for rule in all_rules()]


@dataclass(frozen=True, kw_only=True)
class LintOptions(Outputs):
    select: tuple[str, ...] = option((), "Only rules with these codes or prefixes (a,b).", metavar="CODE", words=rules)
    ignore: tuple[str, ...] = option(
        (), "Skip the rules with these codes or prefixes (a,b).", metavar="CODE", words=rules
    )
    details: bool = option(False, "Show notes, and what could not be judged.", panel=OUT)
    github: bool = option(False, "Also print annotations, which GitHub Actions shows at the lines.", panel=OUT)


# Reports -------------------------------------------------------------------------------------------------------------


def features_of(report: "Report") -> tuple["Feature", ...]:
    """The features that have a part in this report; of others nothing is imported."""
    features: list[Feature] = []
    if report.bench is not None:
        from ddpdiag.bench import blocks as bench

        features.append(bench)
    if report.train is not None:
        from ddpdiag.strategies import blocks as strategies

        features.append(strategies)
    return tuple(features)


def _one_a_line(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def is_one_file(path: str, other: str) -> bool:
    """Whether both name the same file."""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return False


def terminal(stream: TextIO | None, when: Color = Color.AUTO) -> tuple[int, bool]:
    """Columns of the terminal (80 where there is none), and whether to use colour (https://no-color.org)."""
    tty = is_terminal(stream)
    auto = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    color = when is Color.ALWAYS or (when is Color.AUTO and auto)
    return (shutil.get_terminal_size().columns if tty else 80), color


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it is a terminal rather than a pipe or a log."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def counter(*, quiet: bool) -> "Iterator[ProgressLine]":
    """Show the progress of work without stages on standard error, unless `quiet`."""
    from ddpdiag.render.files import Display, display_of
    from ddpdiag.render.progress import ProgressLine

    display = Display.NONE if quiet else display_of(sys.stderr, os.environ)
    progress = ProgressLine(sys.stderr, display)
    try:
        yield progress
    finally:
        progress.close()


def write_files(report: "Report", lines: "Iterable[Line]", outputs: Outputs) -> list[str]:
    """Write the files that options name. Returns a sentence for each file that could not be written."""
    from ddpdiag.render import files

    failed: list[str] = []
    for path, content in outputs.contents(report, lines):
        try:
            files.write(path, content())
        except (UsageError, OSError, ValueError) as error:
            failed.append(str(error))
    return failed


def publish(
    report: "Report", lines: "Iterable[Line]", outputs: Outputs, stdout: TextIO | None, stderr: TextIO | None
) -> None:
    """Write the files first, then show the report. Raises Unwritten at the end if any output could not be written.

    A stream is None if it was closed before the start.
    """
    failed = write_files(report, lines, outputs)
    stream = stderr if outputs.takes_stdout else stdout
    width, color = terminal(stream, outputs.color)
    try:
        if not (outputs.quiet and outputs.takes_stdout):  # a quiet run writes only errors to standard error
            show(outputs.page(report, color=color, width=width), stream)
    except UsageError as error:
        failed.append(str(error))
    if failed:
        raise Unwritten("; ".join(failed), report.exit_code)


def show(text: str, stream: TextIO | None) -> None:
    """Show `text`. Raises UsageError, with the reason, if that fails, and BrokenPipeError if the reader left."""
    from ddpdiag.render import files

    try:
        files.show(text, stream)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the stream was closed under us
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot write to the terminal or pipe: {reason}") from error
