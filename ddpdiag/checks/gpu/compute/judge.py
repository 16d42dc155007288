"""Which GPU is wrong, slow or held down, and why; for GPU012.

A GPU is judged by what two measurements have in common. What only one of them shows is worth a warning where values are
wrong, and nothing where it was slow.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.cards import Action, Fault, Watch, action_text, finding_of, usual
from ddpdiag.checks.gpu.clocks import COOLING_FIX, POWER_FIX, WATCH_CLOCKS, events_text
from ddpdiag.checks.gpu.compute.data import (
    MEMORY,
    Data,
    Unit,
    by_model,
    harmful_events,
    load_of,
    nameplate_of,
    others_use,
    precision,
    units_of,
)
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text
from ddpdiag.checks.rates import severity_of_rate
from ddpdiag.comparison.noise import median_without
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import begun, count, flops_text, rate_text, share_text

_SLOW = ("slow", "nameplate")
# Peers at the same load reach the same clocks within some percent (Sinha et al., SC22, figure 5: 1,290 to 1,530 MHz).
_LESS_CLOCK = 0.95
_BRAKE, _POWER_CAP = 0x80, 0x4


class Sign(NamedTuple):
    """What speaks against GPU `number` in one run: `part` ("bf16", "memory") has `value` instead of `expected`."""

    number: int
    word: str
    part: str = ""
    value: float = 0.0
    expected: float = 0.0


Signs = Mapping[tuple[int, str], Sequence[Sign]]


def signs(seen: Seen[Data], units: Sequence[Unit], at: int) -> Iterator[Sign]:
    """All that speaks against GPUs in run number `at`."""
    present = [unit for unit in units if at < len(unit.runs) and unit.runs[at].gemms]
    for unit in present:
        run = unit.runs[at]
        for gemm in run.gemms:
            if gemm.wrong:
                yield Sign(unit.number, "wrong", precision(gemm.dtype), gemm.wrong, gemm.compared)
            # cuBLAS gives the same bits in every run; a CPU's libraries may divide the work in another way.
            if unit.is_gpu and gemm.digests[0] != gemm.digests[1]:
                yield Sign(unit.number, "bits", precision(gemm.dtype))
        if run.wrong_words:
            yield Sign(unit.number, "wrong", MEMORY, run.wrong_words, run.copy_bytes // 4)
        if harmful_events(run) and not unit.is_slice:
            yield Sign(unit.number, "throttled")
    for peers in by_model(present):
        # Other bits than those of most GPUs that must have the same ones.
        odd = [odd_ones_out(products) for products in _comparable(peers, at)]
        yield from (Sign(number, "bits") for number in {number for own in odd if own for number in own.ranks})
        rates: dict[str, list[float]] = defaultdict(list)
        for name, rate in ((name, rate) for peer in peers for name, rate in peer.rates(at).items()):
            rates[name].append(rate)
        ordered = {name: sorted(values) for name, values in rates.items()}
        for unit in peers:
            yield from _slow(seen, unit, ordered, at)


def undecided(peers: Sequence[Unit], at: int) -> tuple[int, ...]:
    """Numbers of GPUs whose products differ where no majority says whose are right."""
    split = [products for products in _comparable(peers, at) if (odd := odd_ones_out(products)) and not odd.ranks]
    return tuple(sorted({number for products in split for number in products}))


def _comparable(peers: Sequence[Unit], at: int) -> Iterator[Mapping[int, str]]:
    """Digests by number, of GPUs of one model with the same driver, cuBLAS, variables and torch."""
    groups: dict[object, dict[int, str]] = defaultdict(dict)
    for unit in peers:
        run = unit.runs[at] if at < len(unit.runs) else None
        if run is not None and run.driver is not None and run.cublas is not None:
            for gemm in run.gemms:
                same = (run.driver, run.cublas, run.variables, run.torch, gemm.dtype, gemm.size)
                groups[same][unit.number] = gemm.digests[0]
    yield from groups.values()


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
            yield _told(seen, unit, _slow_fault(seen, unit, peers_of[unit.number], slow))
        elif _confirmed(unit, "throttled", runs):
            events = harmful_events(unit.runs[-1])
            cause = _held_down(unit, events, "")
            evidence: dict[str, Scalar | list[Scalar]] = {"clock_events": f"{events:#x}", "cause": cause.word}
            title = "a GPU lowers its clocks under load"
            said = f"{cause.said}; none is expected"
            fault = Fault("throttled", title, said, Action.MONITOR, cause.advice, evidence, watch=WATCH_CLOCKS)
            yield _told(seen, unit, fault)
    yield from _differing(seen, units)
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
    """Wrong values, else other bits, which follow from them; what is not only in one run is an error."""
    what = "GPU" if unit.is_gpu else "CPU"
    each = [own for run in runs if (own := run.get((unit.number, "wrong")))]
    if each:
        word, title = "wrong", f"a {what} computes wrong values"
        said = f"{', '.join(map(_wrong_text, each[-1]))}; 0 expected"
    elif each := [own for run in runs if (own := run.get((unit.number, "bits")))]:
        word, title = "bits", "a GPU computes different bits than it should"
        said = (
            "a matrix product has other bits than most GPUs of this model, driver and cuBLAS compute, or than this GPU "
            "computed before; the same bits are expected"
        )
    else:
        return
    twice = len(each) > 1
    times = "in two measurements" if twice else f"in one of {count(len(unit.runs), 'measurement')}"
    evidence: dict[str, Scalar | list[Scalar]] = {"measurements": 2 if twice else 1}
    evidence |= {f"{sign.part}_wrong": int(sign.value) for sign in each[-1] if word == "wrong"}
    action, severity = (Action.ISOLATE, Severity.ERROR) if twice else (Action.MONITOR, Severity.WARNING)
    host = unit.card.host.name
    advice = f"To test it, run `dcgmi diag -r 3` on {host}."
    if not unit.is_gpu:
        advice = f"{begun(leave_out([host]))}. As root run `memtester 1G 1` there to test its memory."
    again = Watch("ddpdiag check --select GPU", "the finding returns", "Before the job")
    yield _told(seen, unit, Fault(word, title, f"{times}, {said}", action, advice, evidence, severity, again))


def _wrong_text(sign: Sign) -> str:
    if sign.part == MEMORY:
        return f"{sign.value:,.0f} of {sign.expected:,.0f} 4-byte words of a copy within its memory are wrong"
    how = f"of a {sign.part} matrix product differ from the fp64 result by more than rounding can explain"
    return f"{sign.value:,.0f} of {sign.expected:,.0f} elements {how}"


class Cause(NamedTuple):
    """Why a GPU is slow, as far as the data says: a word for scripts, a sentence, and advice."""

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


def _told(seen: Seen[Data], unit: Unit, fault: Fault) -> Finding:
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


def _differing(seen: Seen[Data], units: Sequence[Unit]) -> Iterator[Finding]:
    """GPUs that must compute the same bits and do not, of which none can be blamed."""
    for peers in by_model(units):
        again = any(len(unit.runs) > 1 for unit in peers)
        found = {*undecided(peers, 0)} & {*undecided(peers, 1 if again else 0)}
        if own := [unit for unit in peers if unit.number in found]:
            hosts = list(dict.fromkeys(unit.card.host.name for unit in own))
            yield seen.finding(
                "differ",
                "GPUs of one model compute different bits",
                f"{names_text([unit.label for unit in own], 4)} compute matrix products that differ in some bits, with "
                "the same model, driver, cuBLAS and torch. No majority shows which one is right.",
                hosts=(),
                gpus=tuple(unit.card.health.uuid for unit in own if unit.card.health.uuid),
                evidence={"ranks": [unit.rank for unit in own]},
                fix=f"{begun(leave_out(hosts))}, and run `dcgmi diag -r 3` there. If it names a GPU, have it replaced; "
                "if not, ask the administrator to have these GPUs tested by the vendor.",
            )
