"""Options of `ddpdiag allreduce-bench` (those of nccl-tests, and more), and the files that it reads and writes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from ddpdiag.cli.options import backends, option
from ddpdiag.cli.outputs import Outputs, written
from ddpdiag.errors import UsageError

if TYPE_CHECKING:
    from ddpdiag.model import Report
    from ddpdiag.model.recording import Line

_SIZES, _CALLS, _WHAT, _VERDICT = "Sizes", "Calls", "What is measured", "Verdict"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
DTYPES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
OPS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured and how, as it was typed."""

    minbytes: str = option("8", "Smallest size.", "-b", metavar="SIZE", panel=_SIZES)
    maxbytes: str = option("128M", "Largest size.", "-e", metavar="SIZE", panel=_SIZES)
    stepfactor: float | None = option(None, "Factor between sizes (default: 2).", "-f", metavar="X", panel=_SIZES)
    stepbytes: str | None = option(None, "Step between sizes instead of a factor.", "-i", metavar="SIZE", panel=_SIZES)
    iters: int = option(20, "Timed calls of each size.", "-n", metavar="N", panel=_CALLS)
    warmup_iters: int = option(5, "Untimed calls before them.", "-w", metavar="N", panel=_CALLS)
    agg_iters: int = option(1, "Calls issued at once.", "-m", metavar="N", panel=_CALLS)
    run_cycles: int = option(
        1, "Repeat all of it N times (0: until the time is used up).", "-N", metavar="N", panel=_CALLS
    )
    check: int = option(1, "Calls whose values are checked (0: none).", "-c", metavar="N", panel=_CALLS)
    blocking: int | None = option(
        None,
        "0: a call is issued before the last one ends; 1: wait, and a barrier; 2: wait; 3: wait, and a barrier "
        "that does not count (default: 0 on GPUs, 2 on CPUs).",
        "-z",
        metavar="0-3",
        panel=_CALLS,
    )
    average: int = option(
        3,
        "Time of a row: 0 rank 0, 1 average, 2 fastest rank, 3 slowest rank.",
        "-a",
        metavar="0-3",
        panel=_CALLS,
    )
    per_iter_timing: int = option(0, "1: keep every call.", "-I", metavar="0-1", panel=_CALLS, min=0, max=1)
    timeout: float = option(
        120.0,
        "Limit of the run; fewer calls or sizes are measured if they do not fit.",
        "-T",
        "--budget",
        metavar="SECONDS",
        panel=_CALLS,
        min=5.0,
    )
    collective: tuple[str, ...] = option(
        ("all_reduce",),
        f"{', '.join(COLLECTIVES)} (a,b; default: all_reduce).",
        metavar="NAME",
        panel=_WHAT,
        words=lambda: COLLECTIVES,
    )
    datatype: tuple[str, ...] = option(
        ("float",),
        f"{', '.join(DTYPES)}, all (a,b; default: float).",
        "-d",
        metavar="TYPE",
        panel=_WHAT,
        words=lambda: (*DTYPES, "all"),
    )
    op: tuple[str, ...] = option(
        ("sum",),
        f"{', '.join(OPS)}, all (a,b; default: sum).",
        "-o",
        metavar="OP",
        panel=_WHAT,
        words=lambda: (*OPS, "all"),
    )
    root: str = option("0", "Root of broadcast and reduce, or all.", "-r", metavar="RANK", panel=_WHAT)
    ngpus: int = option(1, "GPUs of a process; only 1 is possible.", "-g", metavar="1", panel=_WHAT, advanced=True)
    backend: tuple[str, ...] = option(
        ("auto",),
        "gloo, nccl or any other backend of torch; several are measured in one run (a,b; default: the job's own).",
        metavar="NAME",
        panel=_WHAT,
        words=backends,
    )
    min_busbw: float | None = option(
        None, "Exit with 1 if the best bus bandwidth is less.", metavar="GB/s", panel=_VERDICT
    )
    baseline: str | None = option(None, "Compare with an earlier run of this world.", metavar="FILE", panel=_VERDICT)


@dataclass(frozen=True, kw_only=True)
class BenchOutputs(Outputs):
    """Files of a benchmark; its JSON follows nccl-tests'."""

    json: str | None = written(
        lambda report, _lines, _path: _files().to_json(report),
        "Write JSON after nccl-tests' version 3 ('-': standard output).",
        "-J",
        "--output-file",
    )
    csv: str | None = written(lambda report, _lines, _path: _files().to_csv(report), "Write all rows as CSV.")
    plot: str | None = written(
        lambda report, _lines, path: _plot(report, path), "Draw bandwidth and latency over size (.svg or .png)."
    )
    save_baseline: str | None = written(
        lambda report, _lines, path: _with_baseline(report, path), "Add this run to that file, for --baseline."
    )

    def check(self, inputs: Sequence[str] = ()) -> None:
        """UsageError for files that cannot be written, and for a plot of unknown kind, or without matplotlib."""
        if self.plot is not None:
            from ddpdiag.render.plots import check_available

            check_available()
            _plot_kind(self.plot)
        if self.save_baseline is not None:
            from ddpdiag.comparison.benchmarks import read_baseline

            read_baseline("--save-baseline", self.save_baseline, missing=())
        super().check(inputs)

    def contents(self, report: "Report", lines: "Iterable[Line]") -> Iterator[tuple[str, Callable[[], str | bytes]]]:
        """nccl-tests' JSON instead of the report's, and the benchmark's own files, if there was a benchmark."""
        for path, content in super().contents(report, lines):
            if report.bench is not None or path not in (self.csv, self.plot, self.save_baseline):
                yield path, content


def _files() -> ModuleType:
    from ddpdiag.bench import files

    return files


def _plot(report: "Report", path: str) -> bytes:
    from ddpdiag.bench import plot

    assert report.bench is not None
    return plot.render(report.bench, _plot_kind(path))


def _plot_kind(path: str) -> Literal["svg", "png"]:
    match Path(path).suffix.lower():
        case ".svg":
            return "svg"
        case ".png":
            return "png"
    raise UsageError(f"--plot {path}: expected a name that ends in .svg or .png")


def _with_baseline(report: "Report", path: str) -> str:
    """The file with this run in it; UsageError for a run that is not fit to compare with."""
    from ddpdiag.comparison.benchmarks import dumps, merge, read_baseline
    from ddpdiag.model import Severity

    bench = report.bench
    # A new baseline is made where there is nothing to compare with.
    own = [f for f in report.findings if f.code.startswith("COL002.") and f.code != "COL002.incomparable"]
    broken = [f for f in report.findings if f.severity is Severity.ERROR]
    if bench is None or own or broken or not bench.complete or not bench.saved:
        why = ", ".join(dict.fromkeys(f.code for f in (*own, *broken))) or "it was cut short"
        raise UsageError(f"--save-baseline {path}: not written, since this run is not fit to compare with: {why}")
    return dumps(merge(read_baseline("--save-baseline", path, missing=()), bench.saved))
