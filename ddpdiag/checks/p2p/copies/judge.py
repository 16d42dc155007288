"""Findings about copies between the GPUs of a host: wrong, slow, slower one way, slower than through the host.

A GPU whose ways are bad is named, and else the pairs; ways that are bad between all GPUs blame the host.
"""

from collections.abc import Iterator, Mapping, Set
from statistics import median, median_low
from typing import NamedTuple, TypeVar

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.matrix import Way, explain, ways_of
from ddpdiag.checks.p2p.copies.data import View
from ddpdiag.checks.p2p.paths import check as paths
from ddpdiag.checks.p2p.paths.data import path_views
from ddpdiag.model import Finding, Severity
from ddpdiag.model.measurements import PairCopies
from ddpdiag.text import rate_text, share_text

D = TypeVar("D")

_SHOWN_WAYS = 4
_ACS = "check ACS and IOMMU (BIOS, `iommu=pt` on the kernel's command line, `lspci -vvv | grep ACSCtl`)"


class Limits(Struct, frozen=True, kw_only=True):
    """Thresholds, under the names of the check's settings."""

    asymmetric_ratio: float
    slow_ratio: float
    indirect_ratio: float
    host_slow_ratio: float
    expected_ratio: float
    hung_seconds: float


class Subject(NamedTuple):
    """Ways that are bad together: the GPUs to blame (of single pairs both ends; of all, none), and in words."""

    kind: str
    gpus: tuple[int, ...]
    ways: tuple[Way, ...]
    where: str


def subjects(view: View, bad: Set[Way], good: Set[Way]) -> Iterator[Subject]:
    """Each thing that explains some of the bad ways."""
    pattern = explain(bad, good - bad)
    for kind, gpus, ways in ways_of(pattern, bad) if pattern is not None else ():
        ordered = tuple(sorted(ways))
        ends = tuple(dict.fromkeys(end for way in ordered for end in way)) if kind == "links" else gpus
        yield Subject(kind, ends, ordered, _where(view, kind, gpus, ordered))


def _where(view: View, kind: str, gpus: tuple[int, ...], ways: tuple[Way, ...]) -> str:
    name = view.host.name
    match kind:
        case "host":
            return f"between {view.full_label(gpus[0])} and the other GPUs of {name}"
        case "sender":
            return f"from {view.full_label(gpus[0])} to the other GPUs of {name}"
        case "receiver":
            return f"from the other GPUs of {name} to {view.full_label(gpus[0])}"
        case "links":
            shown = [" -> ".join(map(view.full_label, way)) for way in ways]
            return f"on {name}, {names_text(shown, _SHOWN_WAYS)}"
        case "islands":
            return f"between groups of GPUs on {name} ({names_text([view.way_label(w) for w in ways], _SHOWN_WAYS)})"
        case _:
            return f"between all GPUs of {name}"


def _finding(
    seen: Seen[D],
    view: View,
    subject: Subject,
    word: str,
    title: str,
    said: str,
    evidence: Mapping[str, float | int | str],
    fix: str,
    severity: Severity | None = None,
) -> Finding:
    return seen.finding(
        word,
        title,
        said,
        severity=severity,
        ranks=view.ranks_of(subject.gpus),
        nodes=(view.host.name,),
        gpus=view.uuids(subject.gpus),
        evidence={"pairs": [view.way_label(way) for way in subject.ways], **evidence},
        fix=fix,
    )


def wrong(seen: Seen[D], view: View) -> Iterator[Finding]:
    """Copies that arrive with other contents, however fast they are."""
    bad = {way for way, pair in view.pairs.items() if pair.wrong}
    for subject in subjects(view, bad, view.pairs.keys()):
        pairs = [view.pairs[way] for way in subject.ways]
        most = max(pairs, key=lambda pair: pair.wrong)
        also = sum(pair.wrong_through_host > 0 for pair in pairs)
        yield _finding(
            seen,
            view,
            subject,
            "wrong",
            f"copies between GPUs of {view.host.name} arrive wrong",
            f"Copies {subject.where} arrive wrong: up to {most.wrong:,} of {most.words:,} words differ, 0 expected; "
            f"{_through_host(also, len(pairs))}.",
            {"wrong_words": most.wrong, "words": most.words, "wrong_pairs_through_host": also},
            f"Do not train on {view.host.name} as it is. "
            + (
                f"Test its GPUs and its memory (`dcgmi diag -r 3`, `dmesg`); {_ACS}."
                if also
                else f"Try the job with NCCL_P2P_DISABLE=1, and {_ACS}."
            ),
        )


def _through_host(also: int, count: int) -> str:
    if not also:
        return "through the host's memory they arrive right, so peer-to-peer access is to blame"
    whose = "they" if also == count else f"those of {also} pairs"
    return f"through the host's memory {whose} arrive wrong as well, so it is not peer-to-peer access alone"


class Short(NamedTuple):
    """Ways that have less than what is usual on the host."""

    subject: Subject
    usual_bytes_per_s: float


def short(view: View, limits: Limits) -> Iterator[Short]:
    """Pairs far below what most GPUs reach on ways of the same kind."""
    for access in (True, False):
        rates = _rates(view, access)
        usual = _usual(rates)
        if usual is None:
            continue
        bad = {way for way, rate in rates.items() if rate < limits.slow_ratio * usual}
        yield from (Short(own, usual) for own in subjects(view, bad, rates.keys()) if own.kind != "everywhere")


def slow(seen: Seen[D], view: View, limits: Limits, found: Short) -> Finding:
    """What is said of them."""
    subject, usual = found
    rate = median(view.pairs[way].bytes_per_s or 0.0 for way in subject.ways)
    around = [gain for way in subject.ways if (gain := _gain(view.pairs[way])) is not None]
    groups = subject.kind == "islands"
    advice = " Try NCCL_P2P_DISABLE=1: through the host's memory they are faster."
    why = " Sockets and NVLink bridges make such groups, and that may be meant." if groups else ""
    return _finding(
        seen,
        view,
        subject,
        "slow",
        f"slow copies between GPUs of {view.host.name}: {rate_text(rate)}",
        f"{rate_text(rate)} {subject.where} (median of {len(subject.ways)}), {share_text(rate / usual)} of the "
        f"{rate_text(usual)} that most of its GPUs reach on most of their ways.{why}",
        {"bytes_per_s": rate, "usual_bytes_per_s": usual, "source": "median of the host's own GPUs"},
        "Compare `nvidia-smi topo -m` and `nvidia-smi nvlink -s`: a link that is down, a narrow slot, another socket."
        f"{advice if around and median(around) < limits.indirect_ratio else ''}",
        # Which GPUs stand next to each other is how the host is built.
        Severity.NOTE if groups else Severity.WARNING,
    )


def _rates(view: View, access: bool) -> dict[Way, float]:
    rates = {way: pair.bytes_per_s or 0.0 for way, pair in view.pairs.items() if pair.access is access}
    return {way: rate for way, rate in rates.items() if rate > 0}


def _usual(rates: Mapping[Way, float]) -> float | None:
    """What most GPUs reach on most of their ways; None of two GPUs, of which neither is usual.

    Not the median of all ways: of four GPUs, one that is slow has its part in half of them.
    """
    ends: dict[int, list[float]] = {}
    for way, rate in rates.items():
        for end in way:
            ends.setdefault(end, []).append(rate)
    return median_low(median_low(own) for own in ends.values()) if len(ends) > 2 else None


def asymmetric(seen: Seen[D], view: View, limits: Limits, told: Set[Way]) -> Iterator[Finding]:
    """Ways that are slower than the same way back; those in `told` are known to be slow already."""
    rates = {way: pair.bytes_per_s for way, pair in view.pairs.items() if pair.bytes_per_s is not None}
    back = {(a, b): rates[b, a] for a, b in rates if (b, a) in rates}
    bad = {way for way, other in back.items() if rates[way] < limits.asymmetric_ratio * other} - told
    for subject in subjects(view, bad, rates.keys()):
        rate, other = (median(of[way] for way in subject.ways) for of in (rates, back))
        yield _finding(
            seen,
            view,
            subject,
            "asymmetric",
            f"copies between GPUs of {view.host.name} are slower one way",
            f"{rate_text(rate)} {subject.where}, and {rate_text(other)} the other way (medians of "
            f"{len(subject.ways)}); at least {share_text(limits.asymmetric_ratio)} of it expected.",
            {"bytes_per_s": rate, "back_bytes_per_s": other, "source": "the same pair the other way"},
            "Compare `nvidia-smi topo -m` and `nvidia-smi -q -d PCIE` (replays); look at risers, switches and ACS.",
        )


def indirect(seen: Seen[D], view: View, limits: Limits, told: Set[Way]) -> Iterator[Finding]:
    """Direct copies that are slower than those through the host's memory, not in `told`, and of use to NCCL."""
    spared = _through_memory(seen, view)
    reachable = {way: pair for way, pair in view.pairs.items() if pair.access and way not in spared}
    known = {way: ratio for way, pair in reachable.items() if (ratio := _gain(pair)) is not None}
    bad = {way for way, ratio in known.items() if ratio < limits.indirect_ratio} - told
    if not bad:
        return
    where = "between all GPUs" if len(bad) == len(known) > 2 else f"on {_ways(view, bad)}"
    gpus = tuple(sorted({end for way in bad for end in way}))
    direct, around = (median(_both_rates(reachable[way])[at] for way in bad) for at in (0, 1))
    yield _finding(
        seen,
        view,
        Subject("links", gpus, tuple(sorted(bad)), where),
        "p2p-slower",
        f"peer-to-peer copies on {view.host.name} are slower than through its memory",
        f"{view.host.name}: {rate_text(direct)} directly {where}, {rate_text(around)} through the host's memory "
        f"(medians of {len(bad)}); directly is expected to be faster (nccl-tests issue 74 is such a case).",
        {"bytes_per_s": direct, "through_host_bytes_per_s": around, "source": "the same pair through the host"},
        f"Try the job with NCCL_P2P_DISABLE=1; {_ACS}.",
    )


def _through_memory(seen: Seen[D], view: View) -> frozenset[Way]:
    """Ways that NCCL does not use directly."""
    hosts = [host for host in path_views(seen.of(paths.CHECK)) if host.host.ranks == view.host.ranks]
    uuids = {frozenset((pair.one.uuid, pair.other.uuid)) for host in hosts for pair in host.through_memory}
    return frozenset(way for way in view.pairs if frozenset(view.uuids(way)) in uuids)


def _gain(pair: PairCopies) -> float | None:
    """How much faster the pair is directly."""
    if pair.bytes_per_s is None or not pair.through_host_bytes_per_s:
        return None
    return pair.bytes_per_s / pair.through_host_bytes_per_s


def _both_rates(pair: PairCopies) -> tuple[float, float]:
    return pair.bytes_per_s or 0.0, pair.through_host_bytes_per_s or 0.0


def _ways(view: View, ways: Set[Way]) -> str:
    return names_text([" -> ".join(map(view.full_label, way)) for way in sorted(ways)], _SHOWN_WAYS)
