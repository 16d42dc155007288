"""`ddpdiag history`: read the reports of many runs, answer, and write the files that options name."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ddpdiag.cli.options import option_name
from ddpdiag.cli.outputs import check_output_files, progress_line, show, terminal_style
from ddpdiag.codec import indented_json, readable
from ddpdiag.errors import ExitCode, UsageError, did_you_mean
from ddpdiag.history import HistoryArgs, parquet
from ddpdiag.history.answers import History, answer, host_answer, time_text
from ddpdiag.history.blocks import host_sections, samples, sections, verdict_of
from ddpdiag.history.rows import DAY_SECONDS, Run
from ddpdiag.history.store import ReadSummary, Source, Store, find_sources
from ddpdiag.render import html, prometheus
from ddpdiag.render.blocks import Section, Text
from ddpdiag.render.files import write
from ddpdiag.render.html.views import Fact, cut_line
from ddpdiag.render.markup import draw_pieces, fit_pieces
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.text import count

# Clocks of hosts differ by seconds; a run that begins an hour ahead has a wrong clock.
_MAX_AHEAD_SECONDS = 3_600.0
# Runs of later years are refused when they are read.
_ALL_TIME = (0.0, datetime(9999, 1, 1, tzinfo=UTC).timestamp())
_OUTPUTS = ("json", "html", "markdown", "prometheus", "write_failing_hosts")


def run(words: Sequence[str], args: HistoryArgs) -> int:
    """Read the reports that `words` name, show the answers, and return the exit code: 1 if anything recurs."""
    sources = find_sources(words)
    _check_outputs(args, sources)
    if math.isnan(args.days):
        raise UsageError("--days nan: expected a number of days")
    now = time.time()
    until = args.until if args.until is not None else now
    since = until - args.days * DAY_SECONDS
    store = Store(args.index)
    try:
        with progress_line(quiet=args.quiet) as progress:
            summary = store.read(sources, progress.tell)
            if not summary.files:
                raise UsageError(f"{readable(words[0])}: no report (*.json) and no recording (*.jsonl) in it")
            if args.parquet is not None:
                progress.tell("writing Parquet ...")
                parquet.write(args.parquet, store.runs(*_ALL_TIME), store.readings(*_ALL_TIME))
            progress.tell("judging ...")
            # Runs that seem to begin after now do not count, even if the window ends later.
            end = min(until, now + _MAX_AHEAD_SECONDS)
            runs, readings = list(store.runs(since, end)), store.readings(since, end)
            problems = _problems(store, summary, runs, now + _MAX_AHEAD_SECONDS)
            history = answer(runs, readings, since_seconds=since, until_seconds=until, problems=problems)
    finally:
        store.close()
    shown = _sections(history, runs, args.host)
    sentence, code = history.sentence, ExitCode(history.exit_code)
    if args.host is not None:
        sentence, code = host_answer(history, args.host)
    verdict = verdict_of(sentence, code)
    _write_files(args, history, code, verdict, shown, until)
    stream = sys.stderr if "-" in (getattr(args, name) for name in _OUTPUTS) else sys.stdout
    width, color = terminal_style(stream, args.color)
    page = Page(color=color, width=width)
    paint(page, (verdict,) if args.quiet else (*shown, verdict), details=args.details)
    show(page.text().rstrip() + "\n", stream)
    return code


def _check_outputs(args: HistoryArgs, sources: Sequence[Source]) -> None:
    if args.html is not None:
        html.check_available()
    if args.parquet is not None:
        parquet.check_available()
    paths = {option_name(name): path for name in _OUTPUTS if (path := getattr(args, name)) is not None}
    check_output_files(paths, [*([args.index] if args.index is not None else []), *(each.path for each in sources)])


def _problems(store: Store, summary: ReadSummary, runs: Sequence[Run], ahead: float) -> list[str]:
    """Sentences about files and runs that do not count."""
    problems = [f"skipped: {problem}" for _path, problem in summary.problems]
    if summary.unread:
        problems.append(f"{count(summary.unread, 'new file')} not read: the index is read-only (--index)")
    if summary.duplicates:
        problems.append(f"{count(summary.duplicates, 'file')} of runs that other files also hold")
    number, last, later = store.bounds(ahead)
    if not number:
        first = f"; the first: {summary.problems[0][1]}" if summary.problems else ""
        raise UsageError(f"no run in {count(summary.files, 'file')}{first}")
    for path, run_id, begin in later:
        problems.append(
            f"{path}: run {run_id} begins in the future ({time_text(begin)}): the clock of its host was wrong"
        )
    if not runs and number > len(later):
        outside = f", the last at {time_text(last)}" if last is not None else ""
        problems.append(f"{count(number - len(later), 'run')} outside of this time{outside} (--days, --until)")
    return problems


def _sections(history: History, runs: Sequence[Run], host: str | None) -> tuple[Section, ...]:
    if host is None:
        return tuple(sections(history))
    own = tuple(host_sections(history, runs, host))
    if not own:
        known = {row.host for run in runs for row in run.hosts}
        raise UsageError(f"--host {readable(host)}: no run of it since {history.since}{did_you_mean(host, known)}")
    return own


def _write_files(
    args: HistoryArgs, history: History, code: ExitCode, verdict: Text, shown: Sequence[Section], until: float
) -> None:
    contents: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: indented_json(history),
        "html": lambda: html.render_page(_html_page(history, args.host, code, verdict, shown)),
        "markdown": lambda: "\n".join(fit_pieces(draw_pieces((verdict, *shown)))).rstrip() + "\n",
        "prometheus": lambda: prometheus.render_samples(samples(history, until)),
        "write_failing_hosts": lambda: "".join(f"{host}\n" for host in history.failing_hosts),
    }
    for name, content in contents.items():
        if (path := getattr(args, name)) is not None:
            write(path, content())


def _html_page(
    history: History, host: str | None, code: ExitCode, verdict: Text, shown: Sequence[Section]
) -> html.Page:
    failing = ",".join(history.failing_hosts) if host is None else ""
    return html.Page(
        verdict=code.name.lower(),
        verdict_text=verdict.lead,
        sentence=cut_line(verdict.text),
        head=cut_line(f"History of {host or count(history.hosts, 'host')}"),
        facts=(
            Fact("runs", f"{history.runs:,}"),
            Fact("hosts", f"{history.hosts:,}"),
            Fact("from", history.since),
            Fact("to", history.until),
        ),
        commands=(Fact("Leave these hosts out:", f"sbatch -x {failing} ..."),) if failing else (),
        findings=None,
        sections=tuple(shown),
        file_problems=(),
        foot=cut_line(f"ddpdiag history, {history.until}"),
    )
