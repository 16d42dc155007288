"""The report as Prometheus metrics, in the text format that node_exporter's textfile collector reads.

Every metric is a gauge without a timestamp, because the collector accepts none; ddpdiag_run_timestamp_seconds is the
time at which the run began. Names end in base units, as https://prometheus.io/docs/practices/naming/ asks: _seconds,
_bytes, _bytes_per_second, and _ratio for a share of 1. Figures that were not measured have no metric. Neither have
matrices of pairs, which grow with the square of the ranks and are in the JSON report.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpdiag import __version__
from ddpdiag.codec import readable
from ddpdiag.model import Report, Verdict
from ddpdiag.render import Sample
from ddpdiag.render.page import one_line

_RANK_LABELS = ("rank", "local_rank", "host", "gpu_uuid")
_BACKENDS = frozenset({"gloo", "nccl", "mpi", "ucc", "xccl", "rccl", "hccl"})
# Units at the end of the report's names, and at the end of the names of metrics.
_UNIT_SUFFIXES = (("_per_s", "_per_second"), ("_share", "_ratio"))


def render(report: Report) -> bytes:
    """The metrics of the report as UTF-8 text."""
    return render_samples(_samples(report))


def render_samples(samples: Iterable[Sample]) -> bytes:
    """Metrics as UTF-8 text. Their names get the prefix "ddpdiag_"."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SampleCollector(tuple(samples)))
    return generate_latest(registry)


class _SampleCollector(Collector):
    """Gives metrics to `prometheus_client`."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """Yield a family of gauges for each name. Of two samples with the same name and labels only the first is kept,
        because the textfile collector refuses a file with both."""
        families: dict[str, dict[tuple[tuple[str, str], ...], Sample]] = {}
        for sample in self._samples:
            labels = tuple((name, _label_text(value)) for name, value in sample.labels.items())
            families.setdefault("ddpdiag_" + re.sub(r"[^a-zA-Z0-9_]", "_", sample.name), {}).setdefault(labels, sample)
        for name, samples in families.items():
            first = next(iter(samples.values()))
            family = GaugeMetricFamily(name, _label_text(first.help_text))
            for labels, sample in samples.items():
                family.add_sample(name, dict(labels), float(sample.value))
            yield family


def _label_text(value: object) -> str:
    return readable(one_line(str(value)))


def _samples(report: Report) -> Iterator[Sample]:
    yield from _run_samples(report)
    yield from _result_samples(report)
    for name, value in report.measurements.items():
        if isinstance(value, int | float):
            family, labels = _metric_and_labels(name)
            yield Sample(family, f"The run's {name}.", value, labels)
    for row in report.ranks:
        labels = {name: "" if (value := row.get(name)) is None else str(value) for name in _RANK_LABELS}
        for name, value in row.items():
            if name not in _RANK_LABELS and isinstance(value, int | float):
                yield Sample(f"rank_{_with_prometheus_unit(name)}", f"A rank's {name}.", value, labels)


def _run_samples(report: Report) -> Iterator[Sample]:
    world = report.world
    run_labels = {"version": __version__, "run_id": report.run_id, "launcher": world.launcher, "backend": world.backend}
    yield Sample("run_info", "The run, in its labels; always 1.", 1, run_labels)
    if (begin := _timestamp(report.created)) is not None:
        yield Sample("run_timestamp_seconds", "When the run began, in seconds since 1970.", begin, {})
    yield Sample("run_seconds", "Duration of the run.", report.seconds, {})
    yield Sample("run_budget_seconds", "The budget of the run (--budget).", report.budget_seconds, {})
    yield Sample("run_exit_code", "Exit code: 0 FIT, 1 UNFIT, 2 usage, 3 UNKNOWN.", report.exit_code, {})
    yield Sample("world_ranks", "Ranks that are expected.", world.size, {})
    yield Sample("world_ranks_present", "Ranks that joined.", len(report.ranks), {})
    yield Sample("world_hosts", "Hosts with a rank that joined.", len(world.hosts), {})
    for verdict in Verdict:
        labels = {"verdict": verdict.value}
        yield Sample("verdict", "1 for the verdict of the run, 0 for the others.", verdict is report.verdict, labels)
    help_text = "1 where the verdict is fit and a host or rank slows the job down, else 0."
    yield Sample("degraded", help_text, report.degraded, {})
    for state, hosts in (("bad", report.hosts.failing), ("good", report.hosts.healthy)):
        for host in hosts:
            help_text = "1 for a failing host (with --strict, also by a warning), 0 for a healthy one."
            yield Sample("host_bad", help_text, state == "bad", {"host": host})


def _result_samples(report: Report) -> Iterator[Sample]:
    for stage in report.stages:
        yield Sample("stage_seconds", "Duration of the stage.", stage.seconds, {"stage": stage.name})
    for check in report.checks:
        labels = {"check": check.code, "name": check.name, "stage": check.stage}
        help_text = "1 for a check that was skipped."
        yield Sample("check_skipped", help_text, check.skipped_because is not None, labels)
        for status, count in check.statuses.items():
            help_text = "Outcomes of a check by status, over ranks."
            yield Sample("check_outcomes", help_text, count, labels | {"status": status})
    # A finding that blames several hosts counts for each. The host is empty if none is blamed.
    finding_counts = Counter(
        (finding.code, finding.severity.value, host) for finding in report.findings for host in finding.hosts or ("",)
    )
    for (code, severity, host), count in finding_counts.items():
        labels = {"code": code, "severity": severity, "host": host}
        yield Sample("findings", "Findings by code, severity and blamed host.", count, labels)


def _timestamp(created: str) -> float | None:
    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return None


def _metric_and_labels(name: str) -> tuple[str, dict[str, str]]:
    """The metric and its labels: (all_reduce_busbw_bytes_per_second, gloo) for all_reduce.gloo.busbw_bytes_per_s."""
    backends = [part for part in name.split(".") if part in _BACKENDS]
    parts = [part for part in name.split(".") if part not in _BACKENDS]
    if parts[:1] == ["seconds"]:  # "seconds.import"
        parts = [*parts[1:], "seconds"]
    return _with_prometheus_unit("_".join(parts)), {"backend": backends[0]} if backends else {}


def _with_prometheus_unit(name: str) -> str:
    for suffix, replacement in _UNIT_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + replacement
    return name
