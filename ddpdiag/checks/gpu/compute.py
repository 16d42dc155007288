"""Speed of each GPU: matrix products and copies within its memory.

The slowest GPU sets the pace of a DDP job. Each rank multiplies matrices on its GPU in bf16 (fp16 before Ampere), and
copies within the GPU's memory, for less than half a second (`--depth deep`: some seconds, so that heat shows). The
rates are compared with other GPUs of that model in the run; NVML shows what limits the clocks meanwhile. If one GPU is
slow, all are measured again; a GPU is slow only if both measurements show it.

`ddpdiag host --torch` measures the GPUs of the host one after the other. A slice of a GPU (MIG), or a GPU that two
ranks use at once, is compared with no other. The rate of a copy counts what is read and what is written.

Findings:

Causes: heat, a power brake, a lower power limit (GPU005) or locked clocks, another process on the GPU; if none of these
is seen, the card. Fix: as the finding says.

Confirm by hand: `dcgmi diag -r 3`; `nvidia-smi dmon -s pc` while a job runs; stas00's mamf-finder.py; nvbandwidth's
device_local_copy.

Sources: Sinha et al., SC22, arXiv 2208.11035 (speed of equal GPUs varies by 8 %, at most 22 %); stas00, ml-engineering,
maximum achievable matmul FLOPS.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, action_text, cards_of, finding_of
from ddpdiag.checks.gpu.clocks import HARMFUL, RECHECK_CLOCKS, events_text, slowdown_cause
from ddpdiag.checks.hosts import hosts_of, ranks_text
from ddpdiag.checks.rates import severity_of_rate
from ddpdiag.comparison import median_without
from ddpdiag.model import Finding, Kind, Scalar, Severity, Trial
from ddpdiag.model.measurements import Compute
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.health import Health
from ddpdiag.probes.gpu.visibility import device_index
from ddpdiag.text import begun, count, flops_text, rate_text, share_text

FINDINGS = {
    "slow": FindingSpec(
        "less than `peer_ratio` of the median of the other GPUs of that model in this run. A warning; an error below "
        "`broken_ratio`; a note where another process uses the GPU.",
        slows_job=True,
    ),
    "throttled": FindingSpec.warning(
        "hardware slowdown, software or hardware thermal slowdown, or a power brake, seen several times under load."
    ),
    "unmeasured": FindingSpec.note(
        "cuBLAS does not start, or the GPU has no memory left; the reason is shown. The training stage finds whether a "
        "job can train there."
    ),
}

SETTINGS = {
    # Equal GPUs of one fleet vary by 8 % on average and 22 % at most (Sinha et al., SC22).
    "peer_ratio": 0.75,
    # A tenth is no variation: the GPU is broken.
    "broken_ratio": 0.1,
}
# The time to measure one more GPU, including the creation of its CUDA context.
_RESERVE_SECONDS = 2.0
MEMORY = "memory"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
# An event counts if so many readings show it, because NVML shows some events for an instant when clocks change.
_MIN_READINGS = 2


class Data(Struct, frozen=True, kw_only=True):
    """The measurements of one rank: of the GPU that the rank uses, or of all GPUs if a host is tested alone."""

    devices: tuple[Compute, ...] = ()


class MeasuredGpu(NamedTuple):
    """A GPU, the rank that measured it, and the measurements in order (`runs`).

    `card` has GPU003's reading, else torch's data. `run_pids` are this run's processes on the host. GPUs with the same
    `model` (name, number of processors) are compared; None: a slice (MIG) or a GPU that two ranks used, not compared.
    """

    rank: int
    card: Card
    runs: tuple[Compute, ...]
    run_pids: frozenset[int]
    model: tuple[str, int | None] | None


def batch_rates(run: Compute) -> dict[str, tuple[float, ...]]:
    """Return the rates of all batches, by kind: "bf16" or "fp16" in flop/s, "memory" in bytes/s."""
    rates = {_PRECISIONS.get(run.dtype, run.dtype): run.flop_per_s, MEMORY: run.copy_bytes_per_s}
    return {kind: values for kind, values in rates.items() if values}


def best_rates(run: Compute) -> dict[str, float]:
    """Return the best rate of each kind ("bf16", "memory"), because other work can only slow a batch down."""
    return {kind: max(values) for kind, values in batch_rates(run).items()}


def measured_gpus(seen: Seen[Data]) -> tuple[MeasuredGpu, ...]:
    """Return all GPUs that were measured, in the order of their ranks."""
    runs: dict[tuple[int, int], list[Compute]] = defaultdict(list)
    for row in seen.rows:
        for device in row.data.devices:
            runs[row.place.rank, device.index or 0].append(device)
    # Cards by (host, UUID) and (host, PCI address). A slice has another UUID than its GPU, but the same address.
    known: dict[tuple[str, str | None], Card] = {}
    for card in cards_of(seen):
        known |= {(card.host.name, name): card for name in (card.health.pci, card.health.uuid) if name}
    used = Counter(each[0].uuid for each in runs.values() if each[0].uuid)
    hosts = {rank: host for host in hosts_of(seen) for rank in host.ranks}
    pids: dict[str, set[int]] = defaultdict(set)
    for (rank, _), each in runs.items():
        pids[hosts[rank].name] |= {run.pid for run in each}
    units: list[MeasuredGpu] = []
    for (rank, index), each in sorted(runs.items()):
        first, host = each[0], hosts[rank]
        if read := known.get((host.name, first.uuid)) or known.get((host.name, first.pci)):
            card = read._replace(ranks=tuple(sorted({*read.ranks, rank})))
        else:
            health = Health(index=index, uuid=first.uuid, pci=first.pci, name=first.device)
            card = Card(host, health, (rank,))
        is_slice = bool(card.health.mig) or " MIG " in first.device
        model = None if is_slice or used[first.uuid or ""] > 1 else (first.device, first.processors)
        measured = tuple(run for run in each if run.flop_per_s) or (first,)
        units.append(MeasuredGpu(rank, card, measured, frozenset(pids[host.name]), model))
    return tuple(units)


def other_pids(unit: MeasuredGpu) -> list[int]:
    """Return the pids of processes that use the GPU and do not belong to this run."""
    before = {process.pid for process in unit.card.health.processes or ()}
    # In a container NVML shows the host's pids, or none. They are comparable only if the rank's own pid is among them.
    during = {pid for run in unit.runs if run.pids and run.pid in run.pids for pid in run.pids}
    return sorted((before | during) - unit.run_pids)


def harmful_events(run: Compute) -> int:
    """Return the bits of the harmful clock events that several readings during the matrix products show."""
    times = {bit: sum(bool((load.events or 0) & bit) for load in run.loads) for bit in HARMFUL}
    return sum(bit for bit, shown in times.items() if shown >= min(_MIN_READINGS, len(run.loads)) > 0)


def _median_load(run: Compute, name: str) -> float | None:
    """Return the median of the field `name` of the readings during the matrix products; None if NVML has no value."""
    values = [value for load in run.loads if (value := getattr(load, name)) is not None]
    return median(values) if values else None


def measure(ctx: Context) -> Data:
    import torch

    from ddpdiag.workloads.compute import measure_rates

    gpus = torch.cuda.device_count()
    if not gpus:
        # Other checks find out why there is none.
        return Data(devices=(Compute(device="", why_unmeasured="torch shows no GPU to this rank"),))
    # A host that is tested alone has no other rank for its other GPUs.
    chosen = range(gpus) if ctx.options.alone else (device_index(ctx.place.local_rank, gpus) or 0,)
    measured: list[Compute] = []
    for index in chosen:
        if measured and time.monotonic() > ctx.end - _RESERVE_SECONDS:
            measured.append(Compute(device="", index=index, why_unmeasured=f"no time was left for GPU {index}"))
        else:
            measured.append(measure_rates(ctx, torch.device("cuda", index)))
    return Data(devices=tuple(measured))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial with one rank of each GPU, and the same once more if a GPU is slow or its clocks are lowered."""
    if not seen.trials:
        ranks = _measuring_ranks(seen)
        return (new_trial(seen, groups=tuple((rank,) for rank in ranks)),) if ranks else ()
    units = measured_gpus(seen)
    if len(seen.trials) > 1 or not (any(_shortfalls(seen, units)) or any(map(_is_throttled, units))):
        return ()
    groups = tuple(group for group in seen.trials[0].groups if group[0] in seen.world.living_ranks)
    return (new_trial(seen, groups=groups),) if groups else ()


def _measuring_ranks(seen: Seen[Data]) -> list[int]:
    """Return one rank for each GPU that torch shows (GPU002), and ranks without GPU002's data that may use a GPU."""
    known = seen.of(devices.CHECK).by_rank
    takers: dict[object, int] = {}
    for rank in seen.world.living_ranks:
        gpu = known[rank].gpu if rank in known else None
        if gpu is not None or (rank not in known and seen.world.arrivals[rank].gpus):
            takers.setdefault((gpu and gpu.uuid) or rank, rank)
    return list(takers.values())


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip this check if no host has a visible GPU, or if torch shows none."""
    no_gpu = None if seen.trials or plan(seen) else unneeded(devices.NO_GPU_IN_TORCH)
    return devices.skip(seen) or no_gpu


def report(seen: Seen[Data]) -> Contribution:
    """Add the best rates of each rank's GPU to the report; for a rank with several GPUs, the lowest of these."""
    columns: dict[int, dict[str, float]] = defaultdict(dict)
    for unit in measured_gpus(seen):
        for kind in best_rates(unit.runs[-1]):
            rate = max(best_rates(run).get(kind, 0.0) for run in unit.runs)
            row, column = columns[unit.rank], f"{kind}_{_unit_suffix(kind)}"
            row[column] = min(rate, row.get(column, rate))
    return Contribution(columns={rank: dict(row) for rank, row in columns.items()})


def _unit_suffix(kind: str) -> str:
    return "bytes_per_s" if kind == MEMORY else "flop_per_s"


class Shortfall(NamedTuple):
    """A rate that is too low in all measurements. `rate` is the last one, and `usual` the median of its peers then.

    `shares` has, for each measurement, the rate as a share of the peers' median.
    """

    kind: str
    rate: float
    usual: float
    shares: tuple[float, ...]
    severity: Severity


def _shortfalls(seen: Seen[Data], units: Sequence[MeasuredGpu]) -> list[list[Shortfall]]:
    """Return the shortfalls of each GPU, compared with the other GPUs of its model."""
    rates: dict[tuple[int, object, str], list[float]] = defaultdict(list)
    for unit in units:
        for at, run in enumerate(unit.runs):
            for kind, rate in best_rates(run).items():
                rates[at, unit.model, kind].append(rate)
    for values in rates.values():
        values.sort()
    least, broken = seen.setting("peer_ratio"), seen.setting("broken_ratio")
    shortfalls: list[list[Shortfall]] = [[] for _ in units]
    for unit, found in zip(units, shortfalls, strict=True):
        runs = [best_rates(run) for run in unit.runs]
        for kind, rate in runs[-1].items() if unit.model is not None else ():
            peers = [rates[at, unit.model, kind] for at in range(len(runs))]
            usual = [median_without(row, run[kind]) for row, run in zip(peers, runs, strict=True) if len(row) > 1]
            shares = tuple(run[kind] / value for run, value in zip(runs, usual, strict=False))
            severity = severity_of_rate(shares, min_share=least, error_below=broken) if shares else None
            # A GPU that is slow in only one of two measurements is no finding.
            if severity is not None and severity is not Severity.NOTE:
                found.append(Shortfall(kind, rate, usual[-1], shares, severity))
    return shortfalls


def _is_throttled(unit: MeasuredGpu) -> bool:
    return all(map(harmful_events, unit.runs))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    units = measured_gpus(seen)
    models: dict[object, list[MeasuredGpu]] = defaultdict(list)
    for unit in units:
        models[unit.model].append(unit)
    for unit, shortfalls in zip(units, _shortfalls(seen, units), strict=True):
        if shortfalls:
            yield finding_of(seen, unit.card, _slow_fault(unit, models[unit.model], shortfalls))
        elif _is_throttled(unit):
            cause = _cause(unit, (), ())
            evidence: dict[str, Scalar | list[Scalar]] = {
                "clock_events": f"{harmful_events(unit.runs[-1]):#x}",
                "cause": cause.word,
            }
            title = "a GPU lowers its clocks under load"
            text = f"{cause.text}; none is expected"
            fault = Fault("throttled", title, text, Action.MONITOR, cause.advice, evidence, recheck=RECHECK_CLOCKS)
            yield finding_of(seen, unit.card, fault)
    reasons: dict[str, list[int]] = defaultdict(list)
    for unit in units:
        if unit.runs[-1].why_unmeasured:
            reasons[unit.runs[-1].why_unmeasured].append(unit.rank)
    for reason, ranks in reasons.items():
        yield seen.finding(
            "unmeasured",
            "the speed of GPUs was not measured",
            f"{begun(ranks_text(ranks))}: {reason}.",
            ranks=ranks,
            evidence={"reason": reason},
            fix="A job that multiplies matrices may fail in the same way. End other processes that fill the memory of "
            "these GPUs (`nvidia-smi`). If there are none, run `pip check`, which shows an nvidia-cublas that does "
            "not fit torch.",
        )


class Cause(NamedTuple):
    """The reason why a GPU is slow, as far as the data shows it: a word for scripts, a sentence, and the advice."""

    word: str
    text: str
    advice: str


def _slow_fault(unit: MeasuredGpu, peers: Sequence[MeasuredGpu], shortfalls: Sequence[Shortfall]) -> Fault:
    pids = other_pids(unit)
    cause = _cause(unit, peers, pids)
    evidence: dict[str, Scalar | list[Scalar]] = {"cause": cause.word}
    for one in shortfalls:
        end = _unit_suffix(one.kind)
        evidence |= {f"{one.kind}_{end}": one.rate, f"{one.kind}_usual_{end}": one.usual}
    share = min(one.shares[-1] for one in shortfalls)
    subject = "the memory of a GPU" if {one.kind for one in shortfalls} == {MEMORY} else "a GPU"
    return Fault(
        "slow",
        f"{subject} is {'much ' if share < 0.5 else ''}slower than others of its model",
        f"{'; '.join(_slow_text(one, len(peers) - 1) for one in shortfalls)}. {begun(cause.text)}",
        Action.NONE,
        cause.advice,
        evidence | {"slower_share": 1 - share},
        Severity.NOTE if pids else min((one.severity for one in shortfalls), key=[*Severity].index),
    )


def _slow_text(shortfall: Shortfall, peers: int) -> str:
    show = rate_text if shortfall.kind == MEMORY else flops_text
    what = "copies within its memory" if shortfall.kind == MEMORY else f"{shortfall.kind} matrix products"
    return (
        f"{what} run at {show(shortfall.rate)}, {share_text(shortfall.shares[-1])} of the median of "
        f"{count(peers, 'other GPU')} of its model ({show(shortfall.usual)})"
    )


def _cause(unit: MeasuredGpu, peers: Sequence[MeasuredGpu], pids: Sequence[int]) -> Cause:
    """Return the first cause that explains a slow GPU: other processes, heat, power, or else "unknown"."""
    run, card = unit.runs[-1], unit.card
    if pids:
        text = f"Another process uses it: pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
        return Cause("others", text, f"Find and end the other process on {card.host.name} (`nvidia-smi`).")
    clock, clocks = _median_load(run, "sm_hz"), ""
    usual = [hertz for peer in peers if peer is not unit and (hertz := _median_load(peer.runs[-1], "sm_hz"))]
    if clock is not None:
        others = f", {median(usual) / 1e6:.0f} MHz on the others" if usual else ""
        clocks = f" (SM clock {clock / 1e6:.0f} MHz{others})"
    if events := harmful_events(run):
        celsius = _median_load(run, "celsius")
        heat = f", at {celsius:.0f} C" if celsius is not None else ""
        text = f"{events_text(events, events)} while it computes{heat}, and lowers its clocks{clocks}"
        word, advice = slowdown_cause(events)
        return Cause(word, text, advice)
    reset = action_text(card.host.name, card.smi_id, Action.RESET)
    return Cause(
        "unknown",
        f"NVML shows no slowdown for heat or power, and no other process{clocks}",
        f"If its clock is lower than that of the others, as root undo locked clocks (`nvidia-smi -i {card.smi_id} -rgc`"
        f"), and see GPU005 for its power limit. Otherwise: {reset} If it stays slow, run `dcgmi diag -r 3` there.",
    )


# Less than a second of work, some seconds with --depth deep; the first products load kernels.
CHECK: Check[Data] = Check(__name__, "GPU012", "compute", Stage.GPU, Scope.RANK, Kind.TORCH, deadline=30.0)
