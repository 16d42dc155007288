"""The outputs of a report: the text on the terminal, and the files that options name."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

from ddpdiag.cli.exit_codes import ExitCodes
from ddpdiag.cli.options import DISPLAY, FILES, VERDICT, Color, DisplayArgs, option_name, parse_percentage
from ddpdiag.errors import OutputNotWritten, UsageError
from ddpdiag.model.declared import option

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.model.news import Listener
    from ddpdiag.model.recording import Line
    from ddpdiag.render import Feature
    from ddpdiag.render.progress import ProgressLine

    Content = Callable[[Report, Iterable[Line], str], str | bytes]


def content_by(module: str, *, features: bool = False) -> "Content":
    """Return a function that makes a file's content by calling `render` of a module.

    With `features`, the features of the report (benchmark, strategies) are a second argument of `render`. The module is
    imported only when the function is called, because the import of Prometheus' client takes 60 ms.
    """

    def content(report: "Report", _lines: "Iterable[Line]", _path: str) -> str | bytes:
        arguments = (report, features_of(report)) if features else (report,)
        text: str | bytes = import_module(module).render(*arguments)
        return text

    return content


def file_option(content: "Content", help: str, *names: str, panel: str = FILES, advanced: bool = False) -> str | None:
    """Declare an option that names a file to write. `content` is the function that makes the content of this file."""
    return option(None, help, *names, metavar="FILE", panel=panel, advanced=advanced, variable=False, content=content)


def as_json(report: "Report", _lines: "Iterable[Line]", _path: str) -> str:
    from ddpdiag.codec import indented_json

    return indented_json(report)


def as_recording(_report: "Report", lines: "Iterable[Line]", _path: str) -> bytes:
    from ddpdiag.codec import encode_line

    return b"".join(map(encode_line, lines))


@dataclass(frozen=True, kw_only=True)
class Outputs(DisplayArgs):
    """The options of a report: the files to write ('-' is standard output), the display, and what is an error."""

    json: str | None = file_option(as_json, "The JSON report ('-': standard output).")
    markdown: str | None = file_option(
        content_by("ddpdiag.render.markdown", features=True), "The report as Markdown, for tickets.", advanced=True
    )
    record: str | None = file_option(as_recording, "The recording, for `ddpdiag judge`.")
    html: str | None = file_option(
        content_by("ddpdiag.render.html", features=True), "The report as one HTML page, for tickets."
    )
    write_failing_hosts: str | None = file_option(
        lambda report, _lines, _path: _as_lines(report.hosts.failing),
        "The failing hosts, one per line (srun -x ./FILE).",
    )
    write_slow_hosts: str | None = file_option(
        lambda report, _lines, _path: _as_lines(report.hosts.slow),
        "The hosts that slow the job down, one per line, the slowest first.",
        advanced=True,
    )
    write_healthy_hosts: str | None = file_option(
        lambda report, _lines, _path: _as_lines(report.hosts.healthy),
        "The healthy hosts, one per line, the fastest first if pairs of hosts were measured.",
        advanced=True,
    )
    write_workaround: str | None = file_option(
        content_by("ddpdiag.render.shell"),
        "Variables that avoid the faults found, for a shell to source; these faults become warnings.",
    )
    prometheus: str | None = file_option(
        content_by("ddpdiag.render.prometheus"), "Prometheus metrics (text format).", advanced=True
    )
    strict: bool = option(False, "Warnings count as errors: exit code 1, their hosts fail.", panel=VERDICT)
    exit_codes: ExitCodes = option(
        ExitCodes.DDPDIAG,
        "Exit codes for preflight containers (k8s) or node-problem-detector (npd; prints one line).",
        panel=VERDICT,
        variable=False,  # `ddpdiag.check()` and torchrun's entry points start `ddpdiag check` and read its exit code
    )
    max_slowdown: float | None = option(
        None,
        "A host or rank that is slower than others by more is an error (10%).",
        metavar="PERCENT",
        panel=VERDICT,
        parse=parse_percentage,
    )
    details: bool = option(False, "Show all checks, and lists in full.", panel=DISPLAY)

    def check(self, inputs: Sequence[str] = ()) -> None:
        """Raise UsageError, before measuring, if an output file cannot be written or would overwrite an input."""
        if self.html is not None:
            from ddpdiag.render import html

            html.check_available()
        check_output_files(self._files, inputs)

    @property
    def _files(self) -> dict[str, str]:
        """The path of the file for each option that names one, such as "--json"."""
        options = (each.name for each in fields(self) if "content" in each.metadata)
        paths = {option_name(name): getattr(self, name) for name in options}
        return {option: path for option, path in paths.items() if path is not None}

    def page(self, report: "Report", *, color: bool, width: int) -> str:
        """The text for the terminal: a benchmark in the form of nccl-tests, strategies as a table, else a report."""
        if self.exit_codes is ExitCodes.NPD:
            from ddpdiag.render import npd

            return npd.render(report)
        if self.write_failing_hosts is not None or self.write_healthy_hosts is not None:
            from msgspec import structs

            # The user asked for lists of hosts, so the sentences about these lists are shown as well.
            caveats = (sentence for sentence in report.hosts.caveats if sentence not in report.recording_problems)
            report = structs.replace(report, recording_problems=(*report.recording_problems, *caveats))
        from ddpdiag.render import terminal

        if self.quiet:
            return terminal.render_quiet(report, color=color, width=width)
        if features := features_of(report):
            # A feature may have its own form, as the benchmark does.
            if render := getattr(features[-1], "render", None):
                return str(render(report, color=color, width=width, details=self.details))
            return terminal.render_feature(report, features, color=color, width=width, details=self.details)
        return terminal.render(report, color=color, width=width, details=self.details)

    def listener(self, display: "Listener") -> "Listener":
        """The listener to the news of a run: `display`, or one that passes news on to it."""
        return display

    def contents(self, report: "Report", lines: "Iterable[Line]") -> Iterator[tuple[str, Callable[[], str | bytes]]]:
        """Yield the path of each file that options name, with a function that makes its content."""
        for each in fields(self):
            path = getattr(self, each.name)
            if "content" in each.metadata and path is not None:
                yield path, partial(each.metadata["content"], report, lines, path)

    @property
    def writes_to_stdout(self) -> bool:
        """Whether an option writes a file to standard output. The text for people then goes to standard error."""
        return "-" in self._files.values()


@dataclass(frozen=True, kw_only=True)
class CompareOutputs(Outputs):
    json: str | None = option(
        None, "Write the changes as JSON ('-': standard output).", metavar="FILE", panel=FILES, variable=False
    )


@dataclass(frozen=True, kw_only=True)
class JudgeOutputs(Outputs):
    record: str | None = file_option(as_recording, "Write the parts as one recording.")


def rules() -> list[str]:
    """The codes of the rules of `ddpdiag lint`."""
    from ddpdiag.lint.rules import all_rules

    return [rule.code for rule in all_rules()]


@dataclass(frozen=True, kw_only=True)
class LintArgs(Outputs):
    select: tuple[str, ...] = option((), "Only rules with these codes or prefixes (a,b).", metavar="CODE", words=rules)
    ignore: tuple[str, ...] = option(
        (), "Skip the rules with these codes or prefixes (a,b).", metavar="CODE", words=rules
    )
    details: bool = option(False, "Show notes, and what could not be judged.", panel=DISPLAY)
    github: bool = option(False, "Also print annotations, which GitHub Actions shows at the lines.", panel=DISPLAY)


# Reports -------------------------------------------------------------------------------------------------------------


def features_of(report: "Report") -> tuple["Feature", ...]:
    """The modules of the features that have a part in this report. Other features are not imported."""
    features: list[Feature] = []
    if report.bench is not None:
        from ddpdiag.bench import blocks as bench

        features.append(bench)
    if report.train is not None:
        from ddpdiag.strategies import blocks as strategies

        features.append(strategies)
    return tuple(features)


def _as_lines(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def check_output_files(path_of: Mapping[str, str], inputs: Iterable[str] = ()) -> None:
    """Raise UsageError if a file, by its option, cannot be written, is named twice, or would overwrite an input."""
    from ddpdiag.codec import readable
    from ddpdiag.render.files import check_writable

    sources, option_of = tuple(inputs), dict[str, str]()
    for name, path in path_of.items():
        if (other := option_of.setdefault(path if path == "-" else os.path.realpath(path), name)) != name:
            raise UsageError(f"{other} and {name} both name {readable(path)}; give each its own file")
        if any(is_one_file(path, source) for source in sources):
            raise UsageError(f"{name} {readable(path)} would overwrite a file that is read; give it another one")
    for name, path in path_of.items():
        try:
            check_writable(path)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error


def is_one_file(path: str, other: str) -> bool:
    """Whether both paths lead to the same file, which may not exist yet."""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return path != "-" and os.path.realpath(path) == os.path.realpath(other)


def terminal_style(stream: TextIO | None, color_option: Color = Color.AUTO) -> tuple[int, bool]:
    """The columns of the terminal (80 without a terminal), and whether to use colours (https://no-color.org)."""
    tty = is_terminal(stream)
    is_colored_by_default = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    color = color_option is Color.ALWAYS or (color_option is Color.AUTO and is_colored_by_default)
    return (shutil.get_terminal_size().columns if tty else 80), color


def is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal. False for a pipe, a file, and None."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def progress_line(*, quiet: bool) -> "Iterator[ProgressLine]":
    """Context manager: a line on standard error for the progress of work without stages; empty with `quiet`."""
    from ddpdiag.render.files import Display, display_of
    from ddpdiag.render.progress import ProgressLine

    display = Display.NONE if quiet else display_of(sys.stderr, os.environ)
    progress = ProgressLine(sys.stderr, display)
    try:
        yield progress
    finally:
        progress.close()


def publish(
    report: "Report", lines: "Iterable[Line]", outputs: Outputs, stdout: TextIO | None, stderr: TextIO | None
) -> None:
    """Write the files, then show the report. A stream is None if it was closed before the start.

    Raises OutputNotWritten, but only after all outputs were tried, if at least one could not be written.
    Raises BrokenPipeError if standard output is a pipe that its reader closed.
    """
    from ddpdiag.render import files

    errors: list[str] = []
    closed_pipe: BrokenPipeError | None = None
    for path, content in outputs.contents(report, lines):
        try:
            files.write(path, content())
        except BrokenPipeError as error:
            closed_pipe = error
        except (UsageError, OSError, ValueError) as error:
            errors.append(str(error))
    stream = stderr if outputs.writes_to_stdout else stdout
    width, color = terminal_style(stream, outputs.color)
    try:
        if not (outputs.quiet and outputs.writes_to_stdout):  # a quiet run writes only errors to standard error
            show(outputs.page(report, color=color, width=width), stream)
    except UsageError as error:
        errors.append(str(error))
    if errors:
        raise OutputNotWritten("; ".join(errors), report.exit_code)
    if closed_pipe is not None:
        raise closed_pipe


def show(text: str, stream: TextIO | None) -> None:
    """Write `text` to the stream. UsageError with the reason if this fails. BrokenPipeError if the pipe is closed."""
    from ddpdiag.render import files

    try:
        files.show(text, stream)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the stream was closed meanwhile
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot write to the terminal or pipe: {reason}") from error
