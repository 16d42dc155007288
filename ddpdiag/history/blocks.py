"""The answers of `ddpdiag history` as sections of blocks, which every format draws, and as metrics."""

from collections.abc import Iterator, Sequence

from msgspec import structs

from ddpdiag.errors import ExitCode
from ddpdiag.history.answers import History, time_text
from ddpdiag.history.drift import MIN_DAYS, MIN_PEERS, Drift
from ddpdiag.history.recurrence import MIN_RUNS, Recurrence, Recurring
from ddpdiag.history.rows import ARROW, Run, State
from ddpdiag.render import Sample
from ddpdiag.render.blocks import Block, Cell, Column, HeatMap, Items, Mark, Section, Table, Text
from ddpdiag.text import count, fold_hosts, label, share_text

_NAMES_SHOWN = 16
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_BARS_SHOWN = 24
_MARKS = {State.UNKNOWN: Mark.NONE, State.HEALTHY: Mark.GOOD, State.WARNED: Mark.WARNING, State.FAILING: Mark.ERROR}


_VERDICTS = {
    ExitCode.FIT: ("NOTHING RECURS", Mark.GOOD),
    ExitCode.UNFIT: ("RECURRING", Mark.ERROR),
    ExitCode.UNKNOWN: ("UNKNOWN", Mark.WARNING),
}


def verdict_of(sentence: str, exit_code: int) -> Text:
    """The last block: the answer in a sentence."""
    return Text(sentence, *_VERDICTS[ExitCode(exit_code)])


def sections(history: History) -> Iterator[Section]:
    """Yield the sections that are not empty."""
    hosts, gpus = history.recurring_hosts, history.recurring_gpus
    parts: tuple[tuple[str, str, Iterator[Block]], ...] = (
        ("hosts", "Recurring hosts", _recurrence_blocks(hosts, "host")),
        ("gpus", "Recurring GPUs", _recurrence_blocks(gpus, "GPU")),
        ("pairs", "Pairs that fail together", _pair_blocks(history)),
        ("slower", "Hosts and links that get slower", _drift_blocks(history)),
        ("rises", "Errors that become more frequent", _rise_blocks(history)),
        ("new", "New findings", _appearance_blocks(history)),
        ("days", "Day by day", _day_blocks(history)),
        ("judged", "What was judged", _scope_blocks(history)),
    )
    for name, title, blocks in parts:
        if shown := tuple(blocks):
            yield Section(title, shown, name)


def _recurrence_blocks(answer: Recurrence, noun: str) -> Iterator[Block]:
    if answer.recurring:
        yield _recurring_table(answer.recurring, noun)
        yield Text(
            f"Failures of one day without a healthy run between count once. check: where it differs most. others: the "
            f"share of the other {noun}s. alone: failures for which no other {noun} was blamed."
        )
    if answer.recovered:
        healthy = (
            f"{each.name}: {each.healthy_since:,} healthy runs since {_day(each.last_seconds)}"
            for each in answer.recovered
        )
        yield Items(tuple(healthy), "Failed again and again, but not any more")


def _recurring_table(rows: Sequence[Recurring], noun: str) -> Table:
    columns = [
        Column(noun, no_wrap=True),
        *map(Column, ("check", "failed", "runs", "95 %", "others", "alone", "last")),
    ]
    has_hosts = any(len(each.hosts) > 1 for each in rows)
    return Table(
        columns=(*columns, *([Column("hosts")] if has_hosts else []), Column("findings")),
        rows=tuple(
            (
                each.name,
                each.check or "any",
                each.incidents,
                each.runs,
                f"{100 * each.low_share:.0f}-{100 * each.high_share:.0f} %",
                share_text(each.fleet_share),
                each.alone,
                _day(each.last_seconds)[5:],
                *([fold_hosts(each.hosts, limit=_NAMES_SHOWN)] if has_hosts else []),
                _codes_text(each.codes),
            )
            for each in rows
        ),
        noun=noun,
    )


def _codes_text(codes: dict[str, int]) -> str:
    return ", ".join(f"{code} {number}x" for code, number in codes.items())


def _day(seconds: float) -> str:
    return time_text(seconds)[:10]


def _pair_blocks(history: History) -> Iterator[Block]:
    rows = [
        (" and ".join(pair.hosts), pair.days, pair.runs, _codes_text(pair.codes))
        for pair in history.recurring_hosts.pairs
    ]
    if rows:
        columns = (Column("pair", no_wrap=True), *map(Column, ("days", "runs", "findings")))
        yield Table(columns=columns, rows=tuple(rows), noun="pair")
        yield Text(
            "The evidence does not show which of the two is at fault, or the path between them. Run "
            "`ddpdiag check` on each with another host."
        )


def _drift_blocks(history: History) -> Iterator[Block]:
    if not history.drifts:
        return
    yield Table(
        columns=(
            Column("host or link", no_wrap=True),
            *map(Column, ("figure", "a week", "95 %", "in all", "days", "course")),
        ),
        rows=tuple(
            (
                each.subject,
                label(each.name),
                *_pace_cells(each),
                f"-{share_text(each.loss_share)}",
                each.days,
                sparkline(each.series),
            )
            for each in history.drifts
        ),
        noun="figure",
        note="Compared with the other hosts of the same run, or of the same day. The course is the median of each day.",
    )


def _pace_cells(drift: Drift) -> tuple[str, str | None]:
    if drift.step_seconds is not None:
        return f"at once, {_day(drift.step_seconds)[5:]}", None
    low, high = 100 * drift.low_share_per_week, 100 * drift.high_share_per_week
    return f"-{100 * drift.loss_share_per_week:.1f} %", f"{low:.1f}-{high:.1f} %"


def _rise_blocks(history: History) -> Iterator[Block]:
    if history.rises:
        yield Table(
            columns=(
                Column("host", no_wrap=True),
                *map(Column, ("part", "counter", "before", "now", "others", "days", "course")),
            ),
            rows=tuple(
                (
                    each.host,
                    each.part,
                    label(each.counter),
                    *map(round, (each.before, each.now, each.others)),
                    each.days,
                    sparkline(each.series),
                )
                for each in history.rises
            ),
            noun="counter",
            note="Errors a day, or resent segments of a million, in the first and in the last third of the days. "
            "others: the median of the other GPUs, ports or hosts.",
        )


def sparkline(values: Sequence[float]) -> str:
    """Bars from the lowest to the highest value, at most 24; neighbouring values share a bar by their mean."""
    size = max(1, -(-len(values) // _BARS_SHOWN))
    means = [sum(part) / len(part) for at in range(0, len(values), size) for part in [values[at : at + size]]]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _appearance_blocks(history: History) -> Iterator[Block]:
    for each in history.appearances:
        text = (
            f"{each.code} ({each.title}) first appeared at {time_text(each.first_seconds)} on {each.first_host}, run "
            f"{each.first_run}, after {count(each.clean_runs, 'run')} without it. {count(each.runs, 'run')} have it; "
            f"it blames {count(each.hosts, 'host')}."
        )
        if (version := each.version) is not None:
            text += (
                f" It appeared together with {version.fact}, first seen at {time_text(version.first_seconds)}: "
                f"{version.found:,} of {version.host_days:,} host-days with it have the finding, and "
                f"{version.found_without:,} of {version.host_days_without:,} with another version."
            )
        yield Text(text, mark=Mark.WARNING if each.version is not None else Mark.NONE)


def _day_blocks(history: History) -> Iterator[Block]:
    rows = tuple((each.host, tuple(zip(each.failing, each.runs, strict=True))) for each in history.days)
    if rows:
        yield HeatMap(noun="host", column_noun="day", columns=history.day_names, rows=rows)


def _scope_blocks(history: History) -> Iterator[Block]:
    hosts = history.recurring_hosts
    yield Text(
        f"{count(history.runs, 'run')} of {count(history.hosts, 'host')} from {history.since} to {history.until}, "
        f"{history.host_runs:,} host-runs."
    )
    if hosts.detectable_share is not None:
        yield Text(
            f"A host with {count(hosts.median_runs, 'run')} (the median) is found with a probability of 80 % if it "
            f"fails in {share_text(hosts.detectable_share)} of its runs or more; the others fail in "
            f"{share_text(hosts.fleet_share)}."
        )
    if hosts.unjudged:
        names = fold_hosts(hosts.unjudged, limit=_NAMES_SHOWN)
        yield Text(
            f"{count(len(hosts.unjudged), 'host')} had fewer than {MIN_RUNS} runs with a result, which is UNKNOWN, not "
            f"healthy: {names}.",
            mark=Mark.WARNING,
        )
    if history.series_unjudged:
        yield Text(
            f"{history.series_judged:,} series of figures and counters were judged for slow changes; "
            f"{history.series_unjudged:,} had fewer than {MIN_DAYS} days with {MIN_PEERS} others to compare with."
        )
    if history.problems:
        yield Items(history.problems, "Not counted")


# One host -------------------------------------------------------------------------------------------------------------


def host_sections(history: History, runs: Sequence[Run], name: str) -> Iterator[Section]:
    """Yield the trends of a host, its runs, the newest first, and the changes of its versions and GPUs."""
    drifts = tuple(each for each in history.drifts if name in each.subject.split(ARROW))
    own = structs.replace(history, drifts=drifts, rises=tuple(each for each in history.rises if each.host == name))
    yield from (section for section in sections(own) if section.name in ("slower", "rises"))
    rows, changes = [], []
    facts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    for run in runs:
        row = next((row for row in run.hosts if row.host == name), None)
        if row is None:
            continue
        time = time_text(run.begin_seconds)
        if row.facts and facts and row.facts != facts:
            changes.append(f"{time}: {_changed(facts, row.facts)}")
        if row.gpus and gpus and row.gpus != gpus:
            changes.append(f"{time}: GPUs {_changed(gpus, row.gpus)}")
        facts, gpus = row.facts or facts, row.gpus or gpus
        blames = [blame for blame in run.blames if name in blame.hosts]
        findings = ", ".join(dict.fromkeys(_with_company(blame.code, len(blame.hosts)) for blame in blames))
        state = Cell(row.state.name.lower(), _MARKS[row.state])
        rows.append((time, state, len(run.hosts), findings or None, run.run_id))
    columns = (Column("time", no_wrap=True), *map(Column, ("state", "hosts", "findings", "run")))
    if rows:
        yield Section(f"Runs of {name}", (Table(columns=columns, rows=tuple(reversed(rows)), noun="run"),), "host-runs")
    if changes:
        yield Section(f"Changes of {name}", (Items(tuple(changes)),), "host-changes")


def _with_company(code: str, hosts: int) -> str:
    return code if hosts == 1 else f"{code} (with {count(hosts - 1, 'other host')})"


def _changed(old: Sequence[str], new: Sequence[str]) -> str:
    gone, added = [each for each in old if each not in new], [each for each in new if each not in old]
    return f"{', '.join(gone) or 'none'} -> {', '.join(added) or 'none'}"


# Metrics --------------------------------------------------------------------------------------------------------------


def samples(history: History, until_seconds: float) -> Iterator[Sample]:
    """Yield the metrics: the totals, and values for each host that is named."""
    hosts = history.recurring_hosts
    yield Sample("history_until_timestamp_seconds", "The end of the window, in seconds since 1970.", until_seconds, {})
    yield Sample("history_runs", "Runs in the window.", history.runs, {})
    yield Sample("history_hosts", "Hosts in the window.", history.hosts, {})
    yield Sample("history_unjudged_hosts", "Hosts with too few runs to be judged.", len(hosts.unjudged), {})
    yield Sample(
        "history_fleet_failure_ratio", "Failures for each run of a host, of the others.", hosts.fleet_share, {}
    )
    for state, rows in (("recurring", hosts.recurring), ("recovered", hosts.recovered)):
        yield Sample("history_failing_hosts", "Hosts that fail again and again, by state.", len(rows), {"state": state})
        for each in rows:
            labels = {"host": each.name, "state": state}
            yield Sample("history_host_failures", "Failures of a host, once a day.", each.incidents, labels)
            yield Sample("history_host_failure_ratio", "Failures for each run.", each.incidents / each.runs, labels)
    for gpu in history.recurring_gpus.recurring:
        yield Sample("history_gpu_failures", "Failures of a GPU.", gpu.incidents, {"gpu_uuid": gpu.name})
    for slower in history.drifts:
        labels = {"subject": slower.subject, "figure": slower.name}
        help_text = "Loss of a figure of a host or link in the window, beside the others."
        yield Sample("history_drift_ratio", help_text, slower.loss_share, labels)
    for rise in history.rises:
        labels = {"host": rise.host, "part": rise.part, "counter": rise.counter}
        help_text = "Errors a day (resent_segments: of a million) lately, where they become more frequent."
        yield Sample("history_error_rate", help_text, rise.now, labels)
