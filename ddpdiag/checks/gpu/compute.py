"""Arithmetic and memory of each GPU: as fast as its peers, and right.

The slowest GPU sets the pace of a DDP job, and one that computes wrong values spoils all of it. Each rank multiplies
matrices on its GPU, in bf16 (fp16 before Ampere) and in fp32 without TensorFloat-32, and copies within the GPU's
memory, for less than half a second (`--depth deep`: some seconds, so that heat shows). The rates are compared with
other GPUs of that model in the run and with the data sheet; NVML shows what limits the clocks meanwhile. Some rows of
each product are compared with fp64. If one measurement of a GPU is wrong or slow, all are repeated; a GPU is slow only
if both measurements show it.

`ddpdiag host --torch` measures the GPUs of the host one after the other. First products are not measured: they load
kernels and raise the clocks. A slice of a GPU (MIG), or a GPU that two ranks use at once, is compared with no other.
CPUs are measured with `--depth standard`: their values are judged, their speed is not, since other processes use their
cores. The rate of a copy counts what is read and what is written.

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

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, Watch, action_text, cards_of, finding_of, usual
from ddpdiag.checks.gpu.clocks import COOLING_FIX, HARMFUL, POWER_FIX, WATCH_CLOCKS, events_text
from ddpdiag.checks.gpu.devices import NO_GPU_IN_TORCH
from ddpdiag.checks.hosts import hosts_of, leave_out, ranks_text
from ddpdiag.checks.rates import severity_of_rate
from ddpdiag.comparison import median_without
from ddpdiag.model import Depth, Finding, Kind, Scalar, Severity, Trial
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
    # A desktop keeps its GPU busy for a few percent.
    "busy_share": 0.1,
}
_ON_CPU = "on_cpu"
# For one GPU more, with a context that has to be made.
_RESERVE_SECONDS = 2.0
MEMORY = "memory"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Seen in fewer looks it is a flicker: NVML also shows some for an instant when clocks change.
_LEAST_LOOKS = 2


class Data(Struct, frozen=True, kw_only=True):
    """What one rank measured: the GPU that it takes (or its CPU); all GPUs where a host is asked alone."""

    devices: tuple[Compute, ...] = ()


class Unit(NamedTuple):
    """One GPU, or the CPU of a rank, and its answers in order; `mine` are the pids of this run's ranks on its host.

    `card` is what GPU003 knows of the GPU; where it knows nothing, what torch says.
    """

    number: int
    rank: int
    card: Card
    runs: tuple[Compute, ...]
    mine: frozenset[int]
    shared: bool

    @property
    def label(self) -> str:
        """Such as "GPU 5 on n0 (GPU-3f1c..., PCI 0000:65:00.0)"."""
        return self.card.label if self.is_gpu else f"CPU of rank {self.rank} on {self.card.host.name}"

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, not a CPU."""
        return self.runs[0].index is not None

    @property
    def is_slice(self) -> bool:
        """Whether it is a part of a GPU (MIG)."""
        return bool(self.card.health.mig) or " MIG " in self.runs[0].device

    @property
    def model(self) -> tuple[str, int | None] | None:
        """The model and number of processors, which peers share.

        None for units that are compared with no other: a CPU, whose cores other processes use as well, a slice of a
        GPU, and a GPU that two ranks used at the same time.
        """
        alone = self.is_gpu and not self.is_slice and not self.shared
        return (self.runs[0].device, self.runs[0].processors) if alone else None

    @property
    def best(self) -> dict[str, float]:
        """The best of each kind in any run."""
        found: dict[str, float] = {}
        for at in range(len(self.runs)):
            found |= {name: max(rate, found.get(name, rate)) for name, rate in self.rates(at).items()}
        return found

    def rates(self, at: int) -> dict[str, float]:
        """The best of each kind in that run, "bf16", "fp32" and "memory": what disturbs only makes slower."""
        batches = batches_of(self.runs[at]) if at < len(self.runs) else {}
        return {name: max(values) for name, values in batches.items()}


def batches_of(run: Compute) -> dict[str, tuple[float, ...]]:
    """The rates of all batches of each kind."""
    found = {precision(gemm.dtype): gemm.flop_per_s for gemm in run.gemms}
    return {name: values for name, values in (found | {MEMORY: run.copy_bytes_per_s}).items() if values}


def precision(dtype: str) -> str:
    """Such as "bf16"."""
    return _PRECISIONS.get(dtype, dtype)


def units_of(seen: Seen[Data]) -> tuple[Unit, ...]:
    """All GPUs and CPUs that were measured, by rank."""
    runs: dict[tuple[int, int | None], list[Compute]] = defaultdict(list)
    for row in seen.rows:
        for device in row.data.devices:
            runs[row.place.rank, device.index].append(device)
    # By host and UUID, and by host and PCI address: a slice of a GPU has a UUID of its own, and its GPU's address.
    known: dict[tuple[str, str | None], Card] = {}
    for card in cards_of(seen.of(memory_errors.CHECK)):
        known |= {(card.host.name, name): card for name in (card.health.pci, card.health.uuid) if name}
    used = Counter(own[0].uuid for own in runs.values() if own[0].uuid)
    hosts = {rank: host for host in hosts_of(seen) for rank in host.ranks}
    pids: dict[str, set[int]] = defaultdict(set)
    for (rank, _), own in runs.items():
        pids[hosts[rank].name] |= {run.pid for run in own}
    units: list[Unit] = []
    for (rank, index), own in sorted(runs.items(), key=lambda run: (run[0][0], run[0][1] or 0)):
        first, host = own[0], hosts[rank]
        if asked := known.get((host.name, first.uuid)) or known.get((host.name, first.pci)):
            card = asked._replace(takers=tuple(sorted({*asked.takers, rank})))
        else:
            health = Health(index=index or 0, uuid=first.uuid, pci=first.pci, name=first.device)
            card = Card(host, health, first.driver, (rank,))
        computed = tuple(run for run in own if run.gemms) or (first,)
        units.append(Unit(len(units), rank, card, computed, frozenset(pids[host.name]), used[first.uuid or ""] > 1))
    return tuple(units)


def by_model(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """GPUs of one model with as many processors, in all hosts: what may be compared."""
    models: dict[object, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.model is not None:
            models[unit.model].append(unit)
    yield from models.values()


def others_use(unit: Unit, busy_share: float) -> str:
    """Describe the other users of the GPU, such as "pid 4711"; empty if there is none."""
    first = unit.runs[0]
    held = {process.pid for process in unit.card.health.processes or ()}
    # In a container NVML shows other pids, or none: only where this process is among them do they mean something.
    seen = {pid for run in unit.runs if run.pids and run.pid in run.pids for pid in run.pids}
    if pids := sorted((held | seen) - unit.mine):
        return f"pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
    # Before its first product a free GPU is idle.
    busy = first.before.busy_share if first.before is not None else None
    return f"something that kept it busy ({busy:.0%}) before" if busy is not None and busy > busy_share else ""


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

    if ctx.trial.params[_ON_CPU]:
        return Data(devices=(compute(ctx, torch.device("cpu")),))
    count = torch.cuda.device_count()
    if not count:
        # Why there is none is for other checks to find out.
        reason = "torch shows no GPU to this rank"
        return Data(devices=(Compute(device="", torch=str(torch.__version__), unmeasured=reason),))
    # A host that is asked alone has no other rank for its other GPUs.
    chosen = range(count) if ctx.options.alone else (device_index(ctx.place.local_rank, count) or 0,)
    found: list[Compute] = []
    for index in chosen:
        if found and time.monotonic() > ctx.end - _RESERVE_SECONDS:
            reason = f"no time was left for GPU {index}"
            found.append(Compute(device="", torch=str(torch.__version__), index=index, unmeasured=reason))
        else:
            found.append(compute(ctx, torch.device("cuda", index)))
    return Data(devices=tuple(found))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One rank of each GPU; all of them once more where a measurement of one is wrong or slow."""
    on_cpu = not seen.world.gpus
    if not seen.trials:
        ranks = seen.world.living if on_cpu else _takers(seen)
        return (new_trial(seen, groups=tuple((rank,) for rank in ranks), params={_ON_CPU: on_cpu}),) if ranks else ()
    units = units_of(seen)
    if len(seen.trials) > 1 or not any(signs(seen, units, 0)):
        return ()
    groups = tuple(group for group in seen.trials[0].groups if group[0] in seen.world.living)
    return (new_trial(seen, groups=groups, params={_ON_CPU: on_cpu}),) if groups else ()


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
    """Without GPUs a quick check leaves it out."""
    if not seen.world.gpus and seen.options.depth is Depth.QUICK:
        return inapplicable("no GPU is visible on any host; CPUs are measured with --depth standard")
    return None if seen.trials or plan(seen) else unneeded(NO_GPU_IN_TORCH)


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


# Judgement ----------------------------------------------------------------------------------------------------------


_SLOW = ("slow", "nameplate")
# Peers at the same load reach the same clocks within some percent (Sinha et al., SC22, figure 5: 1,290 to 1,530 MHz).
_LESS_CLOCK = 0.95
_BRAKE, _POWER_CAP = 0x80, 0x4


class Sign(NamedTuple):
    """A sign against GPU `number` in one run: `part` ("bf16", "memory") has `value` instead of `expected`."""

    number: int
    word: str
    part: str = ""
    value: float = 0.0
    expected: float = 0.0


Signs = Mapping[tuple[int, str], Sequence[Sign]]


def signs(seen: Seen[Data], units: Sequence[Unit], at: int) -> Iterator[Sign]:
    """The signs against GPUs in run number `at`."""
    present = [unit for unit in units if at < len(unit.runs) and unit.runs[at].gemms]
    for unit in present:
        run = unit.runs[at]
        for gemm in run.gemms:
            if gemm.wrong:
                yield Sign(unit.number, "wrong", precision(gemm.dtype), gemm.wrong, gemm.compared)
        if run.wrong_words:
            yield Sign(unit.number, "wrong", MEMORY, run.wrong_words, run.copy_bytes // 4)
        if harmful_events(run) and not unit.is_slice:
            yield Sign(unit.number, "throttled")
    for peers in by_model(present):
        rates: dict[str, list[float]] = defaultdict(list)
        for name, rate in ((name, rate) for peer in peers for name, rate in peer.rates(at).items()):
            rates[name].append(rate)
        ordered = {name: sorted(values) for name, values in rates.items()}
        for unit in peers:
            yield from _slow(seen, unit, ordered, at)


def _slow(seen: Seen[Data], unit: Unit, ordered: Mapping[str, Sequence[float]], at: int) -> Iterator[Sign]:
    plate = nameplate_of(unit.runs[0].device)
    for part, rate in unit.rates(at).items():
        others = median_without(ordered[part], rate) if len(ordered[part]) > 1 else 0.0
        if rate < seen.number("peer_ratio") * others:
            yield Sign(unit.number, "slow", part, rate, others)
        if plate is not None:
            known = {MEMORY: plate.memory_bytes_per_s, "fp32": plate.single_flop_per_s}
            nominal = known.get(part, plate.half_flop_per_s)
            if rate < seen.number("memory_ratio" if part == MEMORY else "nameplate_ratio") * nominal:
                yield Sign(unit.number, "nameplate", part, rate, nominal)


# Findings ------------------------------------------------------------------------------------------------------------


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    units = units_of(seen)
    runs: list[dict[tuple[int, str], list[Sign]]] = [defaultdict(list), defaultdict(list)]
    for at, found in enumerate(runs):
        for sign in signs(seen, units, at):
            found[sign.number, sign.word].append(sign)
    peers_of = {unit.number: peers for peers in by_model(units) for unit in peers}
    for unit in units:
        yield from _wrong(seen, unit, runs)
        if slow := [sign for word in _SLOW for sign in _confirmed(unit, word, runs)]:
            yield _unit_finding(seen, unit, _slow_fault(seen, unit, peers_of[unit.number], slow))
        elif _confirmed(unit, "throttled", runs):
            events = harmful_events(unit.runs[-1])
            cause = _held_down(unit, events, "")
            evidence: dict[str, Scalar | list[Scalar]] = {"clock_events": f"{events:#x}", "cause": cause.word}
            title = "a GPU lowers its clocks under load"
            said = f"{cause.said}; none is expected"
            fault = Fault("throttled", title, said, Action.MONITOR, cause.advice, evidence, watch=WATCH_CLOCKS)
            yield _unit_finding(seen, unit, fault)
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


def _confirmed(unit: Unit, word: str, runs: Sequence[Signs]) -> list[Sign]:
    """Signs that all measurements of this GPU show, as the last one has them."""
    each = [runs[at].get((unit.number, word), ()) for at in range(min(len(unit.runs), len(runs)))]
    common = set.intersection(*({sign.part for sign in own} for own in each))
    return [sign for sign in each[-1] if sign.part in common]


def _wrong(seen: Seen[Data], unit: Unit, runs: Sequence[Signs]) -> Iterator[Finding]:
    """Wrong values: an error if both measurements show them, a warning if one does."""
    what = "GPU" if unit.is_gpu else "CPU"
    each = [own for run in runs if (own := run.get((unit.number, "wrong")))]
    if not each:
        return
    title, said = f"a {what} computes wrong values", f"{', '.join(map(_wrong_text, each[-1]))}; 0 expected"
    twice = len(each) > 1
    times = "in two measurements" if twice else f"in one of {count(len(unit.runs), 'measurement')}"
    evidence: dict[str, Scalar | list[Scalar]] = {"measurements": 2 if twice else 1}
    evidence |= {f"{sign.part}_wrong": int(sign.value) for sign in each[-1]}
    action, severity = (Action.ISOLATE, Severity.ERROR) if twice else (Action.MONITOR, Severity.WARNING)
    host = unit.card.host.name
    advice = f"To test it, run `dcgmi diag -r 3` on {host}."
    if not unit.is_gpu:
        advice = f"{begun(leave_out([host]))}. As root run `memtester 1G 1` there to test its memory."
    again = Watch("ddpdiag check --select GPU", "the finding returns", "Before the job")
    yield _unit_finding(
        seen, unit, Fault("wrong", title, f"{times}, {said}", action, advice, evidence, severity, again)
    )


def _wrong_text(sign: Sign) -> str:
    if sign.part == MEMORY:
        return f"{sign.value:,.0f} of {sign.expected:,.0f} 4-byte words of a copy within its memory are wrong"
    how = f"of a {sign.part} matrix product differ from the fp64 result by more than rounding can explain"
    return f"{sign.value:,.0f} of {sign.expected:,.0f} elements {how}"


class Cause(NamedTuple):
    """The reason why a GPU is slow, as far as the data shows it: a word for scripts, a sentence, and advice."""

    word: str
    said: str
    advice: str


def _slow_fault(seen: Seen[Data], unit: Unit, peers: Sequence[Unit], found: Sequence[Sign]) -> Fault:
    word = found[0].word
    used = others_use(unit, seen.number("busy_share"))
    parts = {sign.part for sign in found}
    cause = _cause(unit, peers, used, only_memory=parts == {MEMORY})
    ratio = min(sign.value / sign.expected for sign in found)
    rule = severity_of_rate([ratio] * len(unit.runs), least=1.0, error_below=seen.number("broken_ratio"))
    severity = Severity.NOTE if used else rule or Severity.WARNING
    evidence: dict[str, Scalar | list[Scalar]] = {"cause": cause.word}
    for sign in found:
        unit_of = "bytes_per_s" if sign.part == MEMORY else "flop_per_s"
        which = "usual" if sign.word == "slow" else "nameplate"
        evidence |= {f"{sign.part}_{unit_of}": sign.value, f"{sign.part}_{which}_{unit_of}": sign.expected}
    if word == "slow":
        evidence["slower_share"] = 1 - min(sign.value / sign.expected for sign in found if sign.word == word)
    what = "the memory of a GPU" if parts == {MEMORY} else "a GPU"
    whom = "others of its model" if word == "slow" else "its data sheet says"
    return Fault(
        word,
        f"{what} is {'much ' if ratio < 0.5 else ''}slower than {whom}",
        f"{'; '.join(_slow_text(sign, len(peers) - 1) for sign in found)}. {begun(cause.said)}",
        Action.NONE,
        cause.advice,
        evidence,
        severity,
    )


def _slow_text(sign: Sign, peers: int) -> str:
    show = rate_text if sign.part == MEMORY else flops_text
    share = share_text(sign.value / sign.expected)
    what = "copies within its memory" if sign.part == MEMORY else f"{sign.part} matrix products"
    if sign.word == "nameplate":
        return f"{what} run at {show(sign.value)}, {share} of the {show(sign.expected)} of its data sheet"
    others = "the other GPU of this model reaches" if peers == 1 else f"the other {peers} GPUs of this model reach"
    median_of = "" if peers == 1 else ", median"
    return f"{what} run at {show(sign.value)}, {share} of what {others} ({show(sign.expected)}{median_of})"


def _cause(unit: Unit, peers: Sequence[Unit], used: str, *, only_memory: bool) -> Cause:
    """The first that explains it: others, heat or power, a lower limit, lower clocks; else none."""
    run, card = unit.runs[-1], unit.card
    if used:
        said = f"Another process uses it: {used}"
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
    limits = [watts for peer in peers if (watts := peer.card.health.clocks.power_limit_watts) is not None]
    limit, most = card.health.clocks.power_limit_watts, usual(limits)
    if limit is not None and most is not None and limit < most:
        said = f"Its power limit is {limit:g} W, {most:g} W on most of its model{clocks}"
        advice = f"As root run `nvidia-smi -i {card.smi_id} -pl {most:g}` on {card.host.name}."
        return Cause("power-limit", said, advice)
    if clock is not None and usual_clock is not None and clock < _LESS_CLOCK * usual_clock:
        capped = run.during and all((look.events or 0) & _POWER_CAP for look in run.during)
        at = " at the power limit" if capped else ""
        said = f"Its clocks are lower{clocks}{at}, but NVML reports no slowdown for heat or power"
        undo = f"`nvidia-smi -i {card.smi_id} -rgc`, also `-rmc` and `-rac`"
        advice = f"As root undo locked clocks on {card.host.name}: {undo}."
        return Cause("clocks", said, advice)
    said = f"Its clocks{clocks}, power limit, temperature and other processes do not explain it"
    reset = action_text(card.host.name, card.smi_id, Action.RESET)
    return Cause("unknown", said, f"{reset} If it stays slow, run `dcgmi diag -r 3` there.")


def _held_down(unit: Unit, events: int, clocks: str) -> Cause:
    celsius = load_of(unit.runs[-1], "celsius")
    heat = f", at {celsius:.0f} C" if celsius is not None else ""
    said = f"{events_text(events, events)} while it computes{heat}, and lowers its clocks{clocks}"
    if events & _BRAKE:
        return Cause("power-brake", said, POWER_FIX)
    return Cause("heat", said, COOLING_FIX)


def _unit_finding(seen: Seen[Data], unit: Unit, fault: Fault) -> Finding:
    """A finding about this GPU or CPU alone."""
    if unit.is_gpu:
        return finding_of(seen, unit.card, fault)
    return seen.finding(
        fault.word,
        fault.title,
        f"{unit.label}: {fault.said}.",
        severity=fault.severity,
        ranks=(unit.rank,),
        evidence=fault.evidence,
        fix=fault.advice,
    )


# Less than a second of work, some seconds with --depth deep; the first products load kernels.
CHECK: Check[Data] = Check(__name__, "GPU012", "compute", Stage.GPU, Scope.RANK, Kind.TORCH, deadline=30.0)
