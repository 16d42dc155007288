"""Arithmetic and memory of each GPU: as fast as its peers, and right.

The slowest GPU sets the pace of a DDP job, and one that computes wrong values spoils all of it. Each rank multiplies
matrices on its GPU, in bf16 (fp16 before Ampere) and in fp32 without TensorFloat-32, and copies within the GPU's
memory, for less than half a second (`--depth deep`: some seconds, so that heat shows). The rates are compared with
other GPUs of that model in the run and with the data sheet; NVML shows what limits the clocks meanwhile. Some rows of
each product are compared with fp64. If one measurement of a GPU is wrong or slow, all are repeated; a GPU is slow only
if both measurements show it.

`ddpdiag host --torch` measures the GPUs of the host one after the other. First products are not measured: they load
kernels and raise the clocks. A slice of a GPU (MIG), or a GPU that two ranks use at once, is compared with no other.
The rate of a copy counts what is read and what is written.

Findings:

Causes: heat, a power brake, a lower power limit or locked clocks, another process on the GPU; if none of these is seen,
the card. Fix: as the finding says; take a host whose GPU computes wrong values out of jobs.

Confirm by hand: `dcgmi diag -r 3`; `nvidia-smi dmon -s pc` while a job runs; stas00's mamf-finder.py; nvbandwidth's
device_local_copy.

Sources: Higham, Accuracy and Stability of Numerical
Algorithms, 3.5; Sinha et al., SC22, arXiv 2208.11035 (speed of equal GPUs varies by 8 %, at most 22 %); stas00,
ml-engineering, maximum achievable matmul FLOPS; NVIDIA's data sheets, with sparsity left out.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, action_text, cards_of, finding_of, usual
from ddpdiag.checks.gpu.clocks import COOLING_FIX, HARMFUL, POWER_FIX, WATCH_CLOCKS, events_text
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
    "wrong": FindingSpec(
        "elements of a product deviate from fp64 by more than rounding can, or words of a copy within the memory "
        "differ. An error if both measurements show it, a warning if one does."
    ),
    "slow": FindingSpec(
        "less than `peer_ratio` of the median of the other GPUs of that model in this run. A warning; an error below "
        "`broken_ratio`; good to know where another process uses the GPU.",
        slows=True,
    ),
    "nameplate": FindingSpec(
        "less than `nameplate_ratio` of the products, or `memory_ratio` of the copies, that the data sheet promises. "
        "Severity as above."
    ),
    "throttled": FindingSpec.warning(
        "hardware slowdown, software or hardware thermal slowdown, or a power brake, seen several times under load."
    ),
    "unmeasured": FindingSpec.note(
        "cuBLAS does not start, or the GPU has no memory left; the reason is shown. Whether a job can train "
        "there is for the training stage to say."
    ),
}

SETTINGS = {
    # Equal GPUs of one fleet vary by 8 % on average and 22 % at most (Sinha et al., SC22).
    "peer_ratio": 0.75,
    # Half of the worst share of the data sheet that is published of any GPU: 51 % (stas00, ml-engineering; NVIDIA's
    # reach 80 to 87 %).
    "nameplate_ratio": 0.25,
    # Not measured on GPUs, and no published share is cited: half of the 80 % that a copy should reach at least.
    "memory_ratio": 0.4,
    # A tenth is no variation: the GPU is broken.
    "broken_ratio": 0.1,
}
# For one GPU more, with a context that has to be made.
_RESERVE_SECONDS = 2.0
MEMORY = "memory"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Seen in fewer looks it is a flicker: NVML also shows some for an instant when clocks change.
_LEAST_LOOKS = 2
# Peers at the same load reach the same clocks within some percent (Sinha et al., SC22, figure 5: 1,290 to 1,530 MHz).
_LESS_CLOCK = 0.95
_BRAKE = 0x80


class Data(Struct, frozen=True, kw_only=True):
    """The measurements of one rank: of the GPU that it takes, or of all GPUs where a host is tested alone."""

    devices: tuple[Compute, ...] = ()


class Unit(NamedTuple):
    """One GPU and its measurements in order; `own_pids` are those of this run's ranks on its host.

    `card` is what GPU003 knows of the GPU; where it knows nothing, what torch says.
    """

    rank: int
    card: Card
    runs: tuple[Compute, ...]
    own_pids: frozenset[int]
    shared: bool

    @property
    def is_slice(self) -> bool:
        """Whether it is a part of a GPU (MIG)."""
        return bool(self.card.health.mig) or " MIG " in self.runs[0].device

    @property
    def model(self) -> tuple[str, int | None] | None:
        """The model and number of processors, which peers share; None for a slice and a GPU that two ranks used."""
        return None if self.is_slice or self.shared else (self.runs[0].device, self.runs[0].processors)

    @property
    def best(self) -> dict[str, float]:
        """The best rate of each kind in any run."""
        rates: dict[str, float] = {}
        for run in self.runs:
            rates |= {name: max(rate, rates.get(name, rate)) for name, rate in best_of(run).items()}
        return rates


def batches_of(run: Compute) -> dict[str, tuple[float, ...]]:
    """The rates of all batches of each kind."""
    rates = {_PRECISIONS.get(gemm.dtype, gemm.dtype): gemm.flop_per_s for gemm in run.gemms}
    return {name: values for name, values in (rates | {MEMORY: run.copy_bytes_per_s}).items() if values}


def best_of(run: Compute) -> dict[str, float]:
    """The best rate of each kind, "bf16", "fp32" and "memory": other work only makes a batch slower."""
    return {name: max(values) for name, values in batches_of(run).items()}


def units_of(seen: Seen[Data]) -> tuple[Unit, ...]:
    """All GPUs that were measured, by rank."""
    runs: dict[tuple[int, int], list[Compute]] = defaultdict(list)
    for row in seen.rows:
        for device in row.data.devices:
            runs[row.place.rank, device.index or 0].append(device)
    # By host and UUID, and by host and PCI address: a slice of a GPU has a UUID of its own, and its GPU's address.
    known: dict[tuple[str, str | None], Card] = {}
    for card in cards_of(seen):
        known |= {(card.host.name, name): card for name in (card.health.pci, card.health.uuid) if name}
    used = Counter(each[0].uuid for each in runs.values() if each[0].uuid)
    hosts = {rank: host for host in hosts_of(seen) for rank in host.ranks}
    pids: dict[str, set[int]] = defaultdict(set)
    for (rank, _), each in runs.items():
        pids[hosts[rank].name] |= {run.pid for run in each}
    units: list[Unit] = []
    for (rank, index), each in sorted(runs.items()):
        first, host = each[0], hosts[rank]
        if read := known.get((host.name, first.uuid)) or known.get((host.name, first.pci)):
            card = read._replace(takers=tuple(sorted({*read.takers, rank})))
        else:
            health = Health(index=index, uuid=first.uuid, pci=first.pci, name=first.device)
            card = Card(host, health, first.driver, (rank,))
        measured = tuple(run for run in each if run.gemms) or (first,)
        units.append(Unit(rank, card, measured, frozenset(pids[host.name]), used[first.uuid or ""] > 1))
    return tuple(units)


def by_model(units: Sequence[Unit]) -> dict[object, list[Unit]]:
    """GPUs of one model with as many processors, in all hosts: what may be compared."""
    models: dict[object, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.model is not None:
            models[unit.model].append(unit)
    return models


def other_pids(unit: Unit) -> list[int]:
    """The pids of other processes that use the GPU."""
    held = {process.pid for process in unit.card.health.processes or ()}
    # In a container NVML shows other pids, or none: only where this process is among them do they mean something.
    during = {pid for run in unit.runs if run.pids and run.pid in run.pids for pid in run.pids}
    return sorted((held | during) - unit.own_pids)


def harmful_events(run: Compute) -> int:
    """Bits of harmful clock events that several looks during the products show."""
    times = {bit: sum(bool((look.events or 0) & bit) for look in run.during) for bit in HARMFUL}
    return sum(bit for bit, shown in times.items() if shown >= min(_LEAST_LOOKS, len(run.during)) > 0)


def load_of(run: Compute, name: str) -> float | None:
    """The median of a figure of its loads while it computed."""
    known = [value for look in run.during if (value := getattr(look, name)) is not None]
    return median(known) if known else None


class Nameplate(NamedTuple):
    """Products in half and in single precision, and reads and writes of memory, per second."""

    half_flop_per_s: float
    single_flop_per_s: float
    memory_bytes_per_s: float


def _plate(half_teraflops: float, single_teraflops: float, memory_gigabytes: float) -> Nameplate:
    return Nameplate(half_teraflops * 1e12, single_teraflops * 1e12, memory_gigabytes * 1e9)


# Nameplates of GPUs: products without sparsity, and the bandwidth of its memory. A GPU is found by its
# whole name, as CUDA has it: "GH200 480GB" is no "H200", and one board comes with several memories. A model that is not
# listed has no nameplate. Half precision is bf16, or fp16 where tensor cores know nothing else. Where a data sheet has
# the rate with sparsity, half of it is taken, as its footnote says.
_NAMEPLATES = {
    # NVIDIA Blackwell data sheet (HGX B200, GB200 NVL72: 4.5 and 5 PFLOPS of FP16 with sparsity for each GPU).
    "B200": _plate(2250, 75, 7700),
    "GB200": _plate(2500, 80, 8000),
    # NVIDIA H200 data sheet (1,979 and 1,671 TFLOPS with sparsity).
    "H200": _plate(989, 67, 4800),
    "H200 NVL": _plate(835, 60, 4800),
    # NVIDIA GH200 Grace Hopper Superchip data sheet: 96 GB of HBM3 (the name counts the processor's memory) or 144 GB
    # of HBM3e.
    "GH200 480GB": _plate(989, 67, 4000),
    "GH200 120GB": _plate(989, 67, 4000),
    "GH200 144G HBM3e": _plate(989, 67, 4900),
    # NVIDIA H100 data sheet (SXM 1,979, PCIe 1,513 TFLOPS with sparsity).
    "H100 80GB HBM3": _plate(989, 67, 3350),
    "H100 PCIe": _plate(756, 51, 2000),
    # NVIDIA A100 data sheet.
    "A100-SXM4-40GB": _plate(312, 19.5, 1555),
    "A100-PCIE-40GB": _plate(312, 19.5, 1555),
    "A100-SXM4-80GB": _plate(312, 19.5, 2039),
    "A100 80GB PCIe": _plate(312, 19.5, 1935),
    # NVIDIA A30 and A40 data sheets.
    "A30": _plate(165, 10.3, 933),
    "A40": _plate(149.7, 37.4, 696),
    # NVIDIA L4 data sheet (242 TFLOPS with sparsity) and L40S data sheet.
    "L4": _plate(121, 30.3, 300),
    "L40S": _plate(362, 91.6, 864),
    # NVIDIA V100 and T4 data sheets: fp16.
    "V100-SXM2-16GB": _plate(125, 15.7, 900),
    "V100-SXM2-32GB": _plate(125, 15.7, 900),
    "V100-PCIE-16GB": _plate(112, 14, 900),
    "V100-PCIE-32GB": _plate(112, 14, 900),
    "T4": _plate(65, 8.1, 320),
}


def nameplate_of(device: str) -> Nameplate | None:
    """The nameplate of the GPU of that name; drivers put its maker or its series in front."""
    return _NAMEPLATES.get(device.removeprefix("NVIDIA ").removeprefix("Tesla "))


def measure(ctx: Context) -> Data:
    import torch

    from ddpdiag.workloads.compute import compute

    gpus = torch.cuda.device_count()
    if not gpus:
        # Other checks find out why there is none.
        reason = "torch shows no GPU to this rank"
        return Data(devices=(Compute(device="", torch=str(torch.__version__), unmeasured=reason),))
    # A host that is tested alone has no other rank for its other GPUs.
    chosen = range(gpus) if ctx.options.alone else (device_index(ctx.place.local_rank, gpus) or 0,)
    measured: list[Compute] = []
    for index in chosen:
        if measured and time.monotonic() > ctx.end - _RESERVE_SECONDS:
            reason = f"no time was left for GPU {index}"
            measured.append(Compute(device="", torch=str(torch.__version__), index=index, unmeasured=reason))
        else:
            measured.append(compute(ctx, torch.device("cuda", index)))
    return Data(devices=tuple(measured))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One rank of each GPU; all of them once more where a measurement of one is wrong or slow."""
    if not seen.trials:
        ranks = _takers(seen)
        return (new_trial(seen, groups=tuple((rank,) for rank in ranks)),) if ranks else ()
    if len(seen.trials) > 1 or not any(signs[0] for signs in _signs(seen, units_of(seen))):
        return ()
    groups = tuple(group for group in seen.trials[0].groups if group[0] in seen.world.living)
    return (new_trial(seen, groups=groups),) if groups else ()


def _takers(seen: Seen[Data]) -> list[int]:
    """Ranks that torch shows a GPU to, one for each GPU; all that may use one where torch was not asked (GPU002)."""
    known = seen.of(devices.CHECK).by_rank
    ranks: list[int] = []
    taken: set[str] = set()
    for rank in seen.world.living:
        gpu = known[rank].gpu if rank in known else None
        if gpu is None and (rank in known or not seen.world.arrivals[rank].gpus):
            continue
        uuid = gpu.uuid if gpu is not None else None
        if uuid is None or uuid not in taken:
            ranks.append(rank)
            taken |= {uuid} if uuid else set()
    return ranks


def skip(seen: Seen[Data]) -> SkipReason | None:
    """As GPU002; or torch shows no GPU."""
    no_gpu = None if seen.trials or plan(seen) else unneeded(devices.NO_GPU_IN_TORCH)
    return devices.skip(seen) or no_gpu


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """The best rates of each rank's GPU; of several GPUs, those of the slowest."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for unit in units_of(seen):
        for name, rate in unit.best.items():
            own, column = rows[unit.rank], f"{name}_{_unit(name)}"
            own[column] = min(rate, own.get(column, rate))
    return {rank: dict(own) for rank, own in rows.items()}


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The slowest and the median of all GPUs."""
    rates: dict[str, list[float]] = defaultdict(list)
    for unit in units_of(seen):
        for name, rate in unit.best.items():
            rates[name].append(rate)
    found: dict[str, Scalar] = {}
    for name, values in rates.items():
        end = _unit(name)
        found |= {f"compute.{name}.min_{end}": min(values), f"compute.{name}.median_{end}": median(values)}
    return found


def _unit(name: str) -> str:
    return "bytes_per_s" if name == MEMORY else "flop_per_s"


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(columns=columns(seen), figures=figures(seen))


class Sign(NamedTuple):
    """A rate or a number of right values that is not as expected."""

    value: float
    expected: float

    @property
    def share(self) -> float:
        """The share of what is expected."""
        return self.value / self.expected


# Signs by the finding's word and the part, such as ("slow", "bf16") or ("wrong", "memory").
Signs = Mapping[tuple[str, str], Sign]


def _signs(seen: Seen[Data], units: Sequence[Unit]) -> Iterator[list[Signs]]:
    """For each unit its signs in each of its runs."""
    rates: dict[tuple[int, object, str], list[float]] = defaultdict(list)
    for unit in units:
        for at, run in enumerate(unit.runs):
            for part, rate in best_of(run).items() if unit.model is not None else ():
                rates[at, unit.model, part].append(rate)
    for peers in rates.values():
        peers.sort()
    for unit in units:
        yield [
            _defects(unit, run) | _shortfalls(seen, unit, run, {p: rates[at, unit.model, p] for p in best_of(run)})
            for at, run in enumerate(unit.runs)
        ]


def _defects(unit: Unit, run: Compute) -> dict[tuple[str, str], Sign]:
    signs = {
        ("wrong", _PRECISIONS.get(gemm.dtype, gemm.dtype)): Sign(gemm.wrong, gemm.compared)
        for gemm in run.gemms
        if gemm.wrong
    }
    if run.wrong_words:
        signs["wrong", MEMORY] = Sign(run.wrong_words, run.copy_bytes // 4)
    if harmful_events(run) and not unit.is_slice:
        signs["throttled", ""] = Sign(0.0, 1.0)
    return signs


def _shortfalls(
    seen: Seen[Data], unit: Unit, run: Compute, peers: Mapping[str, Sequence[float]]
) -> dict[tuple[str, str], Sign]:
    """Rates below those of the peers (sorted, with this GPU's) and of the data sheet."""
    signs: dict[tuple[str, str], Sign] = {}
    plate = nameplate_of(run.device)
    for part, rate in best_of(run).items() if unit.model is not None else ():
        others = median_without(peers[part], rate) if len(peers[part]) > 1 else 0.0
        if rate < seen.number("peer_ratio") * others:
            signs["slow", part] = Sign(rate, others)
        if plate is not None:
            known = {MEMORY: plate.memory_bytes_per_s, "fp32": plate.single_flop_per_s}
            nominal = known.get(part, plate.half_flop_per_s)
            if rate < seen.number("memory_ratio" if part == MEMORY else "nameplate_ratio") * nominal:
                signs["nameplate", part] = Sign(rate, nominal)
    return signs


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    units = units_of(seen)
    models = by_model(units)
    for unit, runs in zip(units, _signs(seen, units), strict=True):
        wrong = [{part: sign for (word, part), sign in signs.items() if word == "wrong"} for signs in runs]
        if any(wrong):
            yield finding_of(seen, unit.card, _wrong([parts for parts in wrong if parts], len(runs)))
        # Signs that all measurements show.
        common = [key for key in runs[-1] if all(key in signs for signs in runs)]
        slow = [key for key in common if key[0] in ("slow", "nameplate")]
        if slow:
            yield finding_of(seen, unit.card, _slow(seen, unit, models[unit.model], slow, runs))
        elif ("throttled", "") in common:
            events = harmful_events(unit.runs[-1])
            cause = _held_down(unit, events, "")
            evidence: dict[str, Scalar | list[Scalar]] = {"clock_events": f"{events:#x}", "cause": cause.word}
            title = "a GPU lowers its clocks under load"
            said = f"{cause.said}; none is expected"
            fault = Fault("throttled", title, said, Action.MONITOR, cause.advice, evidence, watch=WATCH_CLOCKS)
            yield finding_of(seen, unit.card, fault)
    reasons: dict[str, list[int]] = defaultdict(list)
    for unit in units:
        if unit.runs[-1].unmeasured:
            reasons[unit.runs[-1].unmeasured].append(unit.rank)
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


def _wrong(runs: Sequence[Mapping[str, Sign]], measurements: int) -> Fault:
    """Wrong values: an error if two measurements show them, a warning if one does."""
    is_certain, newest = len(runs) > 1, runs[-1]
    times = "in two measurements" if is_certain else f"in one of {count(measurements, 'measurement')}"
    wrong = ", ".join(
        f"{sign.value:,.0f} of {sign.expected:,.0f} "
        + (
            "4-byte words of a copy within its memory are wrong"
            if part == MEMORY
            else f"elements of a {part} matrix product differ from the fp64 result by more than rounding can explain"
        )
        for part, sign in newest.items()
    )
    return Fault(
        "wrong",
        "a GPU computes wrong values",
        f"{times}, {wrong}; 0 expected",
        Action.ISOLATE if is_certain else Action.MONITOR,
        "To test it, run `dcgmi diag -r 3` there.",
        {"measurements": len(runs)} | {f"{part}_wrong": int(sign.value) for part, sign in newest.items()},
        Severity.ERROR if is_certain else Severity.WARNING,
        Watch("ddpdiag check --select GPU", "the finding returns", "Before the job"),
    )


class Cause(NamedTuple):
    """The reason why a GPU is slow, as far as the data shows it: a word for scripts, a sentence, and advice."""

    word: str
    said: str
    advice: str


def _slow(
    seen: Seen[Data], unit: Unit, peers: Sequence[Unit], keys: Sequence[tuple[str, str]], runs: Sequence[Signs]
) -> Fault:
    word, newest = keys[0][0], runs[-1]
    pids = other_pids(unit)
    is_memory = {part for _, part in keys} == {MEMORY}
    cause = _cause(unit, peers, pids, only_memory=is_memory)
    shares = [min(signs[key].share for key in keys) for signs in runs]
    severity = severity_of_rate(shares, least=1.0, error_below=seen.number("broken_ratio"))
    evidence: dict[str, Scalar | list[Scalar]] = {"cause": cause.word}
    for key in keys:
        unit_name, which = _unit(key[1]), "usual" if key[0] == "slow" else "nameplate"
        evidence |= {f"{key[1]}_{unit_name}": newest[key].value}
        evidence |= {f"{key[1]}_{which}_{unit_name}": newest[key].expected}
    if word == "slow":
        evidence["slower_share"] = 1 - min(newest[key].share for key in keys if key[0] == word)
    whom = "others of its model" if word == "slow" else "its data sheet says"
    return Fault(
        word,
        f"{'the memory of a GPU' if is_memory else 'a GPU'} is {'much ' if shares[-1] < 0.5 else ''}slower than {whom}",
        f"{'; '.join(_slow_text(key, newest[key], len(peers) - 1) for key in keys)}. {begun(cause.said)}",
        Action.NONE,
        cause.advice,
        evidence,
        Severity.NOTE if pids else severity,
    )


def _slow_text(key: tuple[str, str], sign: Sign, peers: int) -> str:
    word, part = key
    show = rate_text if part == MEMORY else flops_text
    what = "copies within its memory" if part == MEMORY else f"{part} matrix products"
    rate = f"{what} run at {show(sign.value)}, {share_text(sign.share)} of"
    if word == "nameplate":
        return f"{rate} the {show(sign.expected)} of its data sheet"
    if peers == 1:
        return f"{rate} what the other GPU of this model reaches ({show(sign.expected)})"
    return f"{rate} what the other {peers} GPUs of this model reach ({show(sign.expected)}, median)"


def _cause(unit: Unit, peers: Sequence[Unit], pids: Sequence[int], *, only_memory: bool) -> Cause:
    """The first that explains it: others, heat or power, a lower limit, lower clocks; else none."""
    run, card = unit.runs[-1], unit.card
    if pids:
        said = f"Another process uses it: pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
        return Cause("others", said, f"Find and end the other process on {card.host.name} (`nvidia-smi`).")
    name, which = ("memory_hz", "memory") if only_memory else ("sm_hz", "SM")
    clock, clocks = load_of(run, name), ""
    others_clocks = [own for peer in peers if peer is not unit and (own := load_of(peer.runs[-1], name)) is not None]
    usual_clock = median(others_clocks) if others_clocks else None
    if clock is not None:
        others = "" if usual_clock is None else f", {usual_clock / 1e6:.0f} MHz on the others"
        clocks = f" ({which} clock {clock / 1e6:.0f} MHz{others})"
    if events := harmful_events(run):
        return _held_down(unit, events, clocks)
    limit = card.health.clocks.power_limit_watts
    most = usual([watts for peer in peers if (watts := peer.card.health.clocks.power_limit_watts) is not None])
    if limit is not None and most is not None and limit < most:
        said = f"Its power limit is {limit:g} W, {most:g} W on most of its model{clocks}"
        return Cause(
            "power-limit", said, f"As root run `nvidia-smi -i {card.smi_id} -pl {most:g}` on {card.host.name}."
        )
    if clock is not None and usual_clock is not None and clock < _LESS_CLOCK * usual_clock:
        said = f"Its clocks are lower{clocks}, but NVML reports no slowdown for heat or power"
        undo = f"`nvidia-smi -i {card.smi_id} -rgc`, also `-rmc` and `-rac`"
        return Cause("clocks", said, f"As root undo locked clocks on {card.host.name}: {undo}.")
    said = f"Its clocks{clocks}, power limit, temperature and other processes do not explain it"
    reset = action_text(card.host.name, card.smi_id, Action.RESET)
    return Cause("unknown", said, f"{reset} If it stays slow, run `dcgmi diag -r 3` there.")


def _held_down(unit: Unit, events: int, clocks: str) -> Cause:
    celsius = load_of(unit.runs[-1], "celsius")
    heat = f", at {celsius:.0f} C" if celsius is not None else ""
    said = f"{events_text(events, events)} while it computes{heat}, and lowers its clocks{clocks}"
    return Cause("power-brake", said, POWER_FIX) if events & _BRAKE else Cause("heat", said, COOLING_FIX)


# Less than a second of work, some seconds with --depth deep; the first products load kernels.
CHECK: Check[Data] = Check(__name__, "GPU012", "compute", Stage.GPU, Scope.RANK, Kind.TORCH, deadline=30.0)
