"""A benchmark for scripts: nccl-tests' JSON, version 3, with further keys, and a line for each row as CSV.

The keys, microseconds and GB/s of the JSON are those of nccl-tests' src/util.cu; further keys name their unit.
Where version 3 writes "true", "nan" or "unchecked", a truth value, a number or null is written, and a non-finite number
as `ddpdiag.codec` spells it. The CSV has SI units.
"""

import csv
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from io import StringIO

import msgspec

from ddpdiag.bench.rows import Calls, calls, devices, measured, parts, reaches, short_pci
from ddpdiag.codec import encode, readable
from ddpdiag.model import Report, Severity, Verdict
from ddpdiag.model.bench import Bench, BenchRank, BenchRow, Blocking, Measured, RankTime
from ddpdiag.render.page import one_line

SCHEMA = "ddpdiag.bench/1"
_VERSION = 3

Json = None | bool | int | float | str | msgspec.Struct | Sequence["Json"] | dict[str, "Json"]
_Devices = dict[int, BenchRank]


def to_json(report: Report) -> str:
    """`report.bench` as indented JSON with a newline at the end."""
    bench = measured(report)
    who = {line.rank: line for line in devices(bench)}
    average = bench.average_busbw_bytes_per_s
    document: dict[str, Json] = {
        "schema": SCHEMA,
        "version": _VERSION,
        "start_time": bench.created or None,
        "args": bench.asked.args,
        "env": [f"{name}={value}" for name, value in bench.env.items()],
        "nccl_version": _nccl_code(bench.nccl_version),
        "torch_version": bench.torch_version,
        "config": _config(bench.asked, list(who.values())),
        "results": [_result(row, who, per_iteration=bench.asked.per_iteration) for row in bench.rows],
        "out_of_bounds": {"count": bench.wrong, "okay": None if bench.wrong is None else bench.wrong == 0},
        "average_bus_bandwidth": {"bandwidth": average and average / 1e9, "okay": reaches(bench, parts(bench))},
        "series": bench.series,
        "per_rank": bench.ranks,
        "remarks": bench.notes,
        "complete": bench.complete,
        "verdict": _verdict(report),
        "findings": report.findings,
        "errors": [f"{f.code}: {f.title}" for f in report.findings if f.severity is Severity.ERROR],
        "exit_code": report.exit_code,
        "timings": report.timings,
        "end_time": _end(bench.created, report.seconds),
    }
    return msgspec.json.format(encode(document), indent=2).decode() + "\n"


def _nccl_code(version: str | None) -> int | None:
    """NCCL_VERSION_CODE, as ncclGetVersion has it: "2.27.5" is 22705."""
    with suppress(ValueError):
        major, minor, patch = map(int, (version or "").split(".")[:3])
        return major * 10_000 + minor * 100 + patch
    return None


def _end(created: str, seconds: float) -> str | None:
    with suppress(ValueError, OverflowError):
        return (datetime.fromisoformat(created) + timedelta(seconds=seconds)).isoformat()
    return None


def _config(asked: Bench, ranks: Sequence[BenchRank]) -> dict[str, Json]:
    step: dict[str, Json] = {"step_bytes": asked.step_bytes} if asked.step_bytes else {"step_factor": asked.factor}
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": asked.min_bytes,
        "maximum_bytes": asked.max_bytes,
        **step,
        "warmup_iters": asked.warmup,
        "iterations": asked.iterations,
        "aggregated_iterations": asked.aggregate,
        "run_cycles": asked.cycles,
        "validation": asked.checks,
        "graph": 0,
        "blocking_collectives": None if asked.blocking is None else asked.blocking is not Blocking.PIPELINED,
        "blocking": None if asked.blocking is None else asked.blocking.name.lower(),
        "average": asked.average.name.lower(),
        "min_busbw_bytes_per_s": asked.min_busbw_bytes_per_s,
        "per_iter_timing": asked.per_iteration,
        "per_iter_skip": 0,
        "parallel_init": False,
        "devices": [
            {
                "rank": line.rank,
                "group": 0,
                "pid": line.pid,
                "hostname": line.node,
                "device": line.device_index,
                "device_hex": None if line.pci is None else short_pci(line.pci),
                "device_info": line.device,
                "gpu_uuid": line.gpu_uuid,
                "pci_bus_id": line.pci,
                "local_rank": line.local_rank,
            }
            for line in ranks
        ],
    }


def _result(row: BenchRow, who: _Devices, *, per_iteration: bool) -> dict[str, Json]:
    shown = row.natural()
    body: dict[str, Json] = {"size": row.size_bytes, "count": row.count, "type": row.dtype, "redop": row.op}
    body["root"] = row.root
    for name, mode in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        body[name] = None if mode is None else _mode(mode, who)
        if per_iteration and mode is not None and (of := calls(mode)) is not None:
            body[f"{name}_per_iter"] = _per_iter(of, mode.ranks)
    return body | {
        "actual_iterations": shown.calls if shown else 0,
        "experiment_name": "",
        "backend": row.backend,
        "collective": row.collective,
        "cycle": row.cycle,
    }


def _mode(mode: Measured, who: _Devices) -> dict[str, Json]:
    spans = (*_SPREAD, "max", "mean", "stdev")
    return {
        "time": mode.seconds * 1e6,
        "alg_bw": mode.algbw_bytes_per_s / 1e9,
        "bus_bw": mode.busbw_bytes_per_s / 1e9,
        "nwrong": mode.wrong,
        "calls": mode.calls,
        "transfer_seconds": mode.transfer_seconds,
        "skew_seconds": mode.skew_seconds,
        "per_rank": [
            {
                "rank": of.rank,
                "host": who[of.rank].node if of.rank in who else None,
                "gpu_uuid": who[of.rank].gpu_uuid if of.rank in who else None,
                **{f"{name}_seconds": getattr(of.seconds, name) for name in spans},
                "cv": of.seconds.cv,
                "calls": of.seconds.count,
                "lag_seconds": of.lag_seconds,
                "wrong": of.wrong,
            }
            for of in mode.ranks
        ],
    }


def _per_iter(of: Calls, ranks: Sequence[RankTime]) -> dict[str, Json]:
    """nccl-tests' statistics over the calls, in microseconds; the single times only if all ranks have them."""
    seconds_by_name = {"min": of.min, "max": of.max, "avg": of.mean, "p50": of.p50, "p95": of.p95, "p99": of.p99}
    body: dict[str, Json] = {
        "skipped_iterations": 0,
        **{f"{name}_us": value * 1e6 for name, value in (seconds_by_name | {"stdev": of.stdev}).items()},
        "cv_pct": of.cv * 100,
        "times_us": [seconds * 1e6 for seconds in of.times],
    }
    if of.times and len(ranks) > 1:
        body["per_process_max_times_us"] = [[seconds * 1e6 for seconds in rank.times] for rank in ranks]
    return body


def _verdict(report: Report) -> dict[str, Json]:
    """The verdict and what led to it: errors, or without any the warnings, unless all is well."""
    # What led to the verdict: errors, or without any the warnings, unless all is well.
    errors, warnings = ([f for f in report.findings if f.severity is s] for s in (Severity.ERROR, Severity.WARNING))
    findings = [] if report.verdict is Verdict.FIT else errors or warnings
    first = findings[0] if findings else None
    return {
        "status": report.verdict.value,
        "sentence": report.sentence,
        "culprits": [
            {"code": f.code, "ranks": f.ranks, "nodes": f.nodes, "gpus": f.gpus, "links": f.links}
            for f in findings
            if f.ranks or f.nodes or f.gpus or f.links
        ],
        "cause": first.message if first else None,
        "action": (first.fix or None) if first else None,
        "evidence": [{"code": f.code, **f.evidence} for f in findings],
    }


# CSV -----------------------------------------------------------------------------------------------------------------


_ROW = ("backend", "collective", "cycle", "size_bytes", "count", "dtype", "op", "root")
_MODE = ("seconds", "algbw_bytes_per_s", "busbw_bytes_per_s", "wrong", "calls", "transfer_seconds", "skew_seconds")
_SPREAD = ("min", "median", "p95", "p99")
# New columns go to the end: scripts may count.
COLUMNS = (
    *(*_ROW, "mode", *_MODE, "slowest_rank", "slowest_host"),
    *(*(f"slowest_{name}_seconds" for name in _SPREAD), "slowest_cv"),
)


def to_csv(report: Report) -> str:
    """`report.bench` as CSV with a header. What is not known is empty; a non-finite number is nan, inf or -inf.

    The slowest rank of a line is the one with the longest mean time.
    """
    bench, text = measured(report), StringIO()
    hosts = {line.rank: readable(one_line(line.node)) for line in devices(bench)}
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in bench.rows:
        key = [getattr(row, name) for name in _ROW]
        key = [readable(one_line(each)) if isinstance(each, str) else each for each in key]
        for name, mode in row.modes().items():
            writer.writerow((*key, name, *(getattr(mode, figure) for figure in _MODE), *_slowest(mode, hosts)))
    return text.getvalue()


def _slowest(mode: Measured, hosts: dict[int, str]) -> tuple[str | float | None, ...]:
    of = max(mode.ranks, key=lambda rank: rank.seconds.mean, default=None)
    if of is None:
        return (None,) * 7
    return (of.rank, hosts.get(of.rank), *(getattr(of.seconds, name) for name in _SPREAD), of.seconds.cv)
