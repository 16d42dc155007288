"""Hosts and what hangs together (topology), and what ranks run with (environment)."""

from collections.abc import Iterable, Mapping, Sequence

from ddpdiag.model import Report, Scalar, Severity
from ddpdiag.model.setting import Setting, Value
from ddpdiag.render.html.page import Cell, Column, Section, Table, words
from ddpdiag.render.html.pairs import way_tables
from ddpdiag.render.terminal.ranks import Row
from ddpdiag.text import ABSENT, bytes_per_s, count, fold_hosts, fold_ranks, label, quantity

HOSTS_SHOWN, LEAVES_SHOWN, SETTINGS_SHOWN, FIGURES_SHOWN = 64, 64, 200, 200
_NAMES_SHOWN, _OPEN_ROWS = 16, 16
# Figures named by hosts, whose own names may hold dots and underscores.
_BY_HOST = ("coordinator", "interface")


def topology_section(report: Report) -> Section:
    """Hosts with their ranks, leaf switches, and the ways between GPUs."""
    return Section(
        name="topology",
        title="Topology",
        tables=(*_hosts(report), *_leaves(report), *way_tables(report)),
    )


def _hosts(report: Report) -> tuple[Table, ...]:
    rows: dict[str, list[Row]] = {}
    for row in report.ranks:
        rows.setdefault(str(row.get("node")), []).append(row)
    marks = _marks(report)
    leaf_of = {host: leaf for leaf, hosts in report.world.leaves.items() for host in hosts}
    order = sorted(rows, key=lambda host: marks.get(host, ("", "", 2))[2])
    shown = order[:HOSTS_SHOWN] if len(order) > HOSTS_SHOWN else list(rows)
    if not shown:
        return ()
    has_leaves, has_rates = bool(leaf_of), any("host_busbw_bytes_per_s" in row for row in report.ranks)
    heads = [Column("host"), Column("state"), Column("ranks"), Column("GPUs", right=True)]
    heads += [Column("leaf")] * has_leaves + [Column("best pair", right=True)] * has_rates
    left = len(order) - len(shown)
    return (
        Table(
            name="hosts",
            caption=count(len(shown), "host") + (f" of {len(order):,}" if left else ""),
            columns=tuple(heads),
            rows=tuple(
                (
                    *_host(host, rows[host], marks),
                    *([Cell(words(leaf_of.get(host, ABSENT)))] * has_leaves),
                    *([_best(rows[host])] * has_rates),
                )
                for host in shown
            ),
            note=f"Blamed hosts come first; {left:,} more are in the JSON report." if left else "",
            sortable=True,
            folded=len(shown) > _OPEN_ROWS,
        ),
    )


def _host(host: str, rows: Sequence[Row], marks: Mapping[str, tuple[str, str, int]]) -> tuple[Cell, ...]:
    ranks = [rank for row in rows if isinstance(rank := row.get("rank"), int)]
    gpus = {uuid for row in rows if (uuid := row.get("gpu_uuid")) is not None}
    word, mark, _ = marks.get(host, ("not blamed", "", 2))
    return (
        Cell(words(host), words(host)),
        Cell(word, word, mark),
        Cell(fold_ranks(ranks, limit=_NAMES_SHOWN), min(ranks, default=-1)),
        Cell(str(len(gpus)) if gpus else ABSENT, len(gpus)),
    )


def _best(rows: Sequence[Row]) -> Cell:
    rates = [rate for row in rows if isinstance(rate := row.get("host_busbw_bytes_per_s"), int | float)]
    return Cell(bytes_per_s(max(rates)), max(rates)) if rates else Cell(ABSENT)


def _marks(report: Report) -> dict[str, tuple[str, str, int]]:
    """The worst that each host is blamed for: a word, its mark, its place in the order."""
    found: dict[str, tuple[str, str, int]] = {}
    for severity, entry in ((Severity.WARNING, ("warning", "warn", 1)), (Severity.ERROR, ("error", "bad", 0))):
        for finding in report.findings:
            if finding.severity is severity:
                found.update(dict.fromkeys(finding.nodes, entry))
    return found


def _leaves(report: Report) -> tuple[Table, ...]:
    leaves = report.world.leaves
    if not leaves:
        return ()
    left = len(leaves) - LEAVES_SHOWN
    return (
        Table(
            name="leaves",
            caption=count(len(leaves), "leaf switch").replace("switchs", "switches"),
            columns=(Column("leaf"), Column("hosts", right=True), Column("names")),
            rows=tuple(
                (Cell(words(leaf)), Cell(str(len(hosts))), Cell(words(fold_hosts(hosts, limit=_NAMES_SHOWN))))
                for leaf, hosts in list(leaves.items())[:LEAVES_SHOWN]
            ),
            note=f"{left:,} more are in the JSON report." if left > 0 else "",
            folded=True,
        ),
    )


def environment_section(report: Report) -> Section:
    """Where ranks differ, then what all have alike, and the figures of the run."""
    differing = [setting for setting in report.settings if not setting.alike]
    alike = [setting for setting in report.settings if setting.alike]
    sentence = ""
    if report.settings:
        sentence = (
            f"{count(len(differing), 'setting')} of {len(report.settings):,} differ between ranks."
            if differing
            else f"All {len(report.settings):,} recorded versions, variables and lines of files are alike on all ranks."
        )
    return Section(
        name="environment",
        title="Environment",
        sentence=sentence,
        tables=(*_differences(differing), *_alike(alike), *_measurements(report.measurements)),
    )


def _differences(settings: Sequence[Setting]) -> tuple[Table, ...]:
    if not settings:
        return ()
    rows = [
        (
            Cell(words(setting.kind)),
            Cell(words(setting.name)),
            Cell("not set" if value.value is None else words(value.value)),
            Cell(_ranks(value)),
        )
        for setting in settings[:SETTINGS_SHOWN]
        for value in setting.values
    ]
    return (
        Table(
            name="differences",
            caption="What differs between ranks",
            columns=(Column("kind"), Column("name"), Column("value"), Column("ranks")),
            rows=tuple(rows),
            note=_rest(settings),
        ),
    )


def _ranks(value: Value) -> str:
    left = value.count - len(value.ranks)
    return f"{fold_ranks(value.ranks)}{f' +{left:,} more' if left else ''}"


def _alike(settings: Sequence[Setting]) -> tuple[Table, ...]:
    if not settings:
        return ()
    return (
        Table(
            name="alike",
            caption="Alike on all ranks",
            columns=(Column("kind"), Column("name"), Column("value")),
            rows=tuple(
                tuple(Cell(words(text)) for text in (own.kind, own.name, own.values[0].value or ""))
                for own in settings[:SETTINGS_SHOWN]
            ),
            note=_rest(settings),
            folded=True,
        ),
    )


def _rest(settings: Sequence[Setting]) -> str:
    left = len(settings) - SETTINGS_SHOWN
    return f"{left:,} more are in the JSON report." if left > 0 else ""


def _measurements(measurements: Mapping[str, Scalar]) -> tuple[Table, ...]:
    if not measurements:
        return ()
    shown: Iterable[tuple[str, Scalar]] = list(measurements.items())[:FIGURES_SHOWN]
    return (
        Table(
            name="measurements",
            caption="Figures of the run",
            columns=(Column("name"), Column("value", right=True)),
            rows=tuple((Cell(words(named(name))), Cell(words(quantity(name, value)))) for name, value in shown),
            folded=True,
        ),
    )


def named(name: str) -> str:
    """What a figure of the run is called: `all_reduce.gloo.bytes` is "all reduce, gloo, size"."""
    kind, dot, host = name.partition(".")
    return f"{kind}, {host}" if dot and kind in _BY_HOST else ", ".join(label(name).split("."))
