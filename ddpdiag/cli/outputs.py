"""Where a report goes: the terminal, and the files that were asked for."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from msgspec import structs

from ddpdiag.cli.options import Color
from ddpdiag.codec import encode_line
from ddpdiag.errors import Unwritten, UsageError
from ddpdiag.model import Report
from ddpdiag.model.recording import Line

if TYPE_CHECKING:
    from ddpdiag.render.progress_lines import Counter
    from ddpdiag.render.sections import Sections


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files to write ('-' is standard output), and how much the terminal shows; `quiet`: nothing before the report."""

    json: str | None = None
    markdown: str | None = None
    record: str | None = None
    exclude_file: str | None = None
    good_hosts: str | None = None
    env_file: str | None = None
    prometheus: str | None = None
    junit: str | None = None
    nagios: bool = False
    html: str | None = None
    details: bool = False
    timings: bool = False
    quiet: bool = False
    color: Color = Color.AUTO

    def check(self, inputs: Sequence[str] = ()) -> None:
        """UsageError now rather than after a minute of measuring, or over what is read."""
        from ddpdiag.render.files import check_writable

        if self.html is not None:
            from ddpdiag.render import html

            html.check_available()
        if self.nagios and self.takes_stdout:
            option = next(option for option, path in self._files.items() if path == "-")
            raise UsageError(f"{option} -: with --nagios standard output has one line, so give it a file")
        options: dict[str, str] = {}
        for option, path in self._files.items():
            place = path if path == "-" else os.path.realpath(path)
            if place in options:
                raise UsageError(f"{options[place]} and {option} both name {path}; give each its own file")
            options[place] = option
            if any(is_one_file(path, file) for file in inputs):
                raise UsageError(f"{option} {path} would overwrite a file that is read; give it another one")
        for path in self._files.values():
            check_writable(path)

    @property
    def _files(self) -> dict[str, str]:
        """The file of each option that was given."""
        files = {
            "--json": self.json,
            "--markdown": self.markdown,
            "--record": self.record,
            "--exclude-file": self.exclude_file,
            "--good-hosts": self.good_hosts,
            "--env-file": self.env_file,
            "--prometheus": self.prometheus,
            "--junit": self.junit,
            "--html": self.html,
        }
        return {option: path for option, path in files.items() if path is not None}

    def page(self, report: Report, *, tty: bool, color: bool, width: int) -> str:
        """What the terminal shows: a benchmark in nccl-tests' form, strategies as a table, else a report."""
        if self.exclude_file is not None or self.good_hosts is not None:
            new = (remark for remark in report.hosts.remarks if remark not in report.notes)
            report = structs.replace(report, notes=(*report.notes, *new))
        # Only the one that is shown is imported: what a Prolog takes, each job waits for.
        if self.nagios:
            from ddpdiag.render import nagios

            return nagios.render(report)
        if features := features_of(report):
            return features[-1].render(
                report, tty=tty, color=color, width=width, details=self.details, timings=self.timings
            )
        from ddpdiag.render import terminal

        return terminal.render(report, color=color, width=width, details=self.details, timings=self.timings)

    def contents(self, report: Report, lines: Iterable[Line]) -> Iterator[tuple[str, Callable[[], str | bytes]]]:
        """Each file that was asked for, and how its content is made."""
        if not self._files:
            return
        from ddpdiag.render import exports, json, markdown

        makers: dict[str, Callable[[], str | bytes]] = {
            "--json": lambda: json.render(report),
            "--markdown": lambda: markdown.render(report, features_of(report)),
            "--record": lambda: b"".join(map(encode_line, lines)),
            "--exclude-file": lambda: _lines(report.hosts.bad),
            "--good-hosts": lambda: _lines(report.hosts.good),
            "--env-file": lambda: exports.render(report),
            "--prometheus": lambda: _metrics(report),
            "--junit": lambda: _cases(report),
            "--html": lambda: _web_page(report),
        }
        for option, path in self._files.items():
            if option in makers:
                yield path, makers[option]

    def exit_code(self, report: Report) -> int:
        """The report's, or that of a Nagios plug-in."""
        if not self.nagios:
            return report.exit_code
        from ddpdiag.render import nagios

        return nagios.state_of(report)

    @property
    def takes_stdout(self) -> bool:
        """Does a file format go to standard output? Then the report for people goes to standard error."""
        return "-" in self._files.values()


def features_of(report: Report) -> tuple["Sections", ...]:
    """The features that have a part in this report; of others nothing is imported."""
    features: list[Sections] = []
    if report.bench is not None:
        from ddpdiag.bench import sections as bench

        features.append(bench)
    if report.train is not None:
        from ddpdiag.strategies import sections as strategies

        features.append(strategies)
    return tuple(features)


def _metrics(report: Report) -> bytes:
    from ddpdiag.render import prometheus  # its client library takes 60 ms to import

    return prometheus.render(report, features_of(report))


def _cases(report: Report) -> bytes:
    from ddpdiag.render import junit

    return junit.render(report)


def _web_page(report: Report) -> str | bytes:
    from ddpdiag.render import html

    return html.render(report, features_of(report))


def _lines(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def is_one_file(path: str, other: str) -> bool:
    """Do both name the same file?"""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return False


def terminal(stream: TextIO | None, when: Color = Color.AUTO) -> tuple[int, bool]:
    """Columns of the terminal (80 where there is none), and whether to use colour (https://no-color.org)."""
    tty = is_terminal(stream)
    auto = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    color = when is Color.ALWAYS or (when is Color.AUTO and auto)
    return (shutil.get_terminal_size().columns if tty else 80), color


def is_terminal(stream: TextIO | None) -> bool:
    """Does somebody look at it, rather than a program or a log? With or without colour."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def counter(*, quiet: bool, patience_seconds: float = 0.0) -> "Iterator[Counter]":
    """For what has no stages: how far it is, on standard error. Nothing in a log within `patience_seconds`."""
    from ddpdiag.render.progress_lines import Counter
    from ddpdiag.render.streams import Display, display_of

    display = Display.NONE if quiet else display_of(sys.stderr, os.environ)
    progress = Counter(sys.stderr, display, patience_seconds)
    try:
        yield progress
    finally:
        progress.close()


def publish(
    report: Report, lines: Iterable[Line], outputs: Outputs, stdout: TextIO | None, stderr: TextIO | None
) -> None:
    """Write the files first, then show the report; Unwritten, after all was tried, for what could not be written.

    A stream is None where it was closed before the start. With --nagios nothing is shown of a report whose files could
    not be written: the one line is the error's, as the exit code is.
    """
    failed = _write_files(report, lines, outputs)
    if failed and outputs.nagios:
        raise Unwritten("; ".join((*failed, report.sentence)), report.exit_code)
    stream = stderr if outputs.takes_stdout else stdout
    width, color = terminal(stream, outputs.color)
    try:
        show(outputs.page(report, tty=is_terminal(stream), color=color, width=width), stream)
    except UsageError as error:
        failed.append(str(error))
    if failed:
        raise Unwritten("; ".join(failed), report.exit_code)


def show(text: str, stream: TextIO | None) -> None:
    """Show `text`; UsageError, with the reason, where nothing can be written. BrokenPipeError: the reader left."""
    from ddpdiag.render import files

    try:
        files.show(text, stream)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the stream was closed under us
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot write to the terminal or pipe: {reason}") from error


def _write_files(report: Report, lines: Iterable[Line], outputs: Outputs) -> list[str]:
    """Write what was asked for; a sentence for each file that could not be written."""
    from ddpdiag.render import files

    failed: list[str] = []
    for path, content in outputs.contents(report, lines):
        try:
            files.write(path, content())
        except (UsageError, OSError, ValueError) as error:
            failed.append(str(error))
    return failed
