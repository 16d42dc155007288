"""Findings about copies between the GPUs of a host, and to its memory: wrong, slow, slower in one direction.

A GPU whose links fail is named, and else the pairs; where links between all GPUs fail, the host is blamed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from statistics import median, median_low
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.cards import Card
from ddpdiag.checks.gpu.other_users import not_free
from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.checks.matrix import Link, explain, links_of
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.copies.data import Measured, RankCopies, host_memory_links
from ddpdiag.checks.p2p.host_paths import host_paths
from ddpdiag.model import Finding, Severity
from ddpdiag.model.measurements import Copies, PairCopies
from ddpdiag.text import begun, count, rate_text, share_text

_SHOWN_LINKS = 4
# GB/s of one lane that copies reach, by generation: 55 GB/s measured on 16 lanes of generation 5 (nvbandwidth, 88 % of
# what they carry), and in proportion for the others. AzNHC's limits (21 GB/s on 16 lanes of generation 4, 48 of 5) are
# 76 % and 87 % of this.
_LANE_BYTES_PER_S = {1: 0.215e9, 2: 0.43e9, 3: 0.86e9, 4: 1.72e9, 5: 3.44e9, 6: 6.88e9}
# A copy that takes less shows its start as much as its bytes: its rate is too low. 64 MiB take 84 us at 800 GB/s; where
# many pairs share little time, copies are shorter. Chosen here, and not measured on a GPU.
_LEAST_SECONDS = 50e-6
_WORD_BYTES = 4  # those of `words`
# P2P003 finds out whether NCCL works without such copies.
GUESS = "Try the job with NCCL_P2P_DISABLE=1."
ACS = (
    "As root run `lspci -vvv | grep ACSCtl`: `SrcValid+` means that ACS is on. If so, turn it off in the BIOS, and add "
    "iommu=pt to the kernel's command line."
)


class Subject(NamedTuple):
    """Links that fail together: the GPUs to blame (of single pairs both ends; of all, none), and in words.

    `usual_bytes_per_s` is what others reach, where that is the question.
    """

    copies: RankCopies
    kind: str
    gpus: tuple[int, ...]
    links: tuple[Link, ...]
    where: str
    usual_bytes_per_s: float = 0.0

    def finding(
        self,
        seen: Seen[Copies],
        word: str,
        title: str,
        said: str,
        evidence: Mapping[str, float | int | str],
        fix: str,
        severity: Severity | None = None,
        guess: str = "",
    ) -> Finding:
        return seen.finding(
            word,
            title,
            said,
            severity=severity,
            ranks=self.copies.ranks_of(self.gpus),
            hosts=(self.copies.host.name,),
            gpus=self.copies.uuids(self.gpus),
            evidence={"pairs": [self.copies.link_label(link) for link in self.links], **evidence},
            fix=fix,
            guess=guess,
        )


def subjects(copies: RankCopies, bad: Set[Link], good: Set[Link]) -> Iterator[Subject]:
    """Each thing that explains some of the failing links."""
    pattern = explain(bad, good - bad)
    for kind, gpus, links in links_of(pattern, bad) if pattern is not None else ():
        ordered = tuple(sorted(links))
        ends = tuple(dict.fromkeys(end for link in ordered for end in link)) if kind == "links" else gpus
        yield Subject(copies, kind, ends, ordered, _where(copies, kind, gpus, ordered))


def _where(copies: RankCopies, kind: str, gpus: tuple[int, ...], links: tuple[Link, ...]) -> str:
    name = copies.host.name
    match kind:
        case "host":
            return f"between {copies.full_label(gpus[0])} and the other GPUs of {name}"
        case "sender":
            return f"from {copies.full_label(gpus[0])} to the other GPUs of {name}"
        case "receiver":
            return f"from the other GPUs of {name} to {copies.full_label(gpus[0])}"
        case "links":
            return f"on {name}, {_links(copies, links)}"
        case "islands":
            return (
                f"between groups of GPUs on {name} ({names_text([copies.link_label(w) for w in links], _SHOWN_LINKS)})"
            )
        case _:
            return f"between all GPUs of {name}"


def wrong(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    """Copies that arrive with other contents, however fast they are."""
    bad = {link for link, pair in copies.pairs.items() if pair.wrong}
    for subject in subjects(copies, bad, copies.pairs.keys()):
        pairs = [copies.pairs[link] for link in subject.links]
        most = max(pairs, key=lambda pair: pair.wrong)
        also = sum(pair.wrong_through_host > 0 for pair in pairs)
        whose = "they" if also == len(pairs) else f"those of {count(also, 'pair')}"
        through_host = (
            f"{whose} arrive wrong as well, so peer-to-peer access is not the only cause"
            if also
            else "they arrive right, so peer-to-peer access is at fault"
        )
        yield subject.finding(
            seen,
            "wrong",
            f"copies between GPUs of {copies.host.name} arrive corrupted",
            f"Copies {subject.where} arrive corrupted: up to {most.wrong:,} of {most.words:,} words of {_WORD_BYTES} "
            f"bytes differ, 0 expected. Through the host's memory {through_host}.",
            {"wrong_words": most.wrong, "words": most.words, "wrong_pairs_through_host": also},
            (
                f"{begun(leave_out([copies.host.name]))}. Test its GPUs and memory there (`dcgmi diag -r 3`, `dmesg "
                "-T`)."
                if also
                else f"Do not train on {copies.host.name} as it is. {GUESS} {ACS}"
            ),
            guess="" if also else GUESS,
        )


def short(seen: Seen[Copies], copies: RankCopies, told: Set[Link]) -> Iterator[Subject]:
    """Pairs below what most GPUs reach on links of the same kind; those in `told` are known to be slow already."""
    for access in (True, False):
        rates = rates_by_access(copies, access=access)
        usual = usual_rate(rates)
        if usual is None:
            continue
        least = seen.number("slow_ratio") * usual
        bad = {link for link, rate in rates.items() if rate < least} - told - too_short(copies)
        found = (own for own in subjects(copies, bad, rates.keys()) if own.kind != "everywhere")
        yield from (own._replace(usual_bytes_per_s=usual) for own in found)


def slow(seen: Seen[Copies], subject: Subject) -> Finding:
    """The finding about them."""
    copies, usual = subject.copies, subject.usual_bytes_per_s
    rate = median(copies.pairs[link].bytes_per_s or 0.0 for link in subject.links)
    around = [gain for link in subject.links if (gain := _gain(copies.pairs[link])) is not None]
    groups = subject.kind == "islands"
    advice = " Or set NCCL_P2P_DISABLE=1: copies through the host's memory are faster here."
    why = " Sockets and NVLink bridges form such groups; this may be intended." if groups else ""
    return subject.finding(
        seen,
        "slow",
        f"slow copies between GPUs of {copies.host.name}: {rate_text(rate)}",
        f"Copies {subject.where} reach {rate_text(rate)}{_median_text(subject.links)}. Most pairs of GPUs of "
        f"{copies.host.name} reach {rate_text(usual)}.{why}",
        {"bytes_per_s": rate, "usual_bytes_per_s": usual, "source": "median of the host's own GPUs"},
        "Nothing to do if this is intended (`nvidia-smi topo -m` shows how the GPUs are connected)."
        if groups
        else f"On {copies.host.name} run `nvidia-smi nvlink -s` (a link is down?), `nvidia-smi topo -m` (GPUs on "
        "different sockets?) and `nvidia-smi -q -d PCIE` (fewer "
        f"lanes?).{advice if around and median(around) < seen.number('indirect_ratio') else ''}",
        # Which GPUs are close to each other depends on how the host is built.
        Severity.NOTE if groups else Severity.WARNING,
    )


def rates_by_access(copies: RankCopies, *, access: bool) -> dict[Link, float]:
    """Rates of the pairs with peer access, or of those without."""
    return {link: pair.bytes_per_s for link, pair in copies.pairs.items() if pair.access is access and pair.bytes_per_s}


def too_short(copies: RankCopies) -> set[Link]:
    """Pairs whose copies were too short for a rate."""
    timed = {link: pair for link, pair in copies.pairs.items() if pair.words and pair.bytes_per_s}
    return {link for link, pair in timed.items() if pair.words * _WORD_BYTES < _LEAST_SECONDS * (pair.bytes_per_s or 0)}


def usual_rate(rates: Mapping[Link, float]) -> float | None:
    """What most GPUs reach on most of their links; None of two GPUs, of which neither is usual.

    Not the median of all links: of four GPUs, one that is slow has its part in half of them.
    """
    ends: dict[int, list[float]] = {}
    for link, rate in rates.items():
        for end in link:
            ends.setdefault(end, []).append(rate)
    return median_low(median_low(own) for own in ends.values()) if len(ends) > 2 else None


def asymmetric(seen: Seen[Copies], copies: RankCopies, told: Set[Link]) -> Iterator[Finding]:
    """Links that are slower than the same link back; those in `told` are known to be slow already."""
    rates = {link: pair.bytes_per_s for link, pair in copies.pairs.items() if pair.bytes_per_s is not None}
    back = {(a, b): rates[b, a] for a, b in rates if (b, a) in rates}
    least = seen.number("asymmetric_ratio")
    bad = {link for link, other in back.items() if rates[link] < least * other} - told - too_short(copies)
    for subject in subjects(copies, bad, rates.keys()):
        rate, other = (median(of[link] for link in subject.links) for of in (rates, back))
        yield subject.finding(
            seen,
            "asymmetric",
            f"copies between GPUs of {copies.host.name} are slower in one direction",
            f"Copies {subject.where} reach {rate_text(rate)}, but {rate_text(other)} in the other direction"
            f"{_median_text(subject.links)}. At least {share_text(least)} of the other direction is expected.",
            {"bytes_per_s": rate, "back_bytes_per_s": other, "source": "the same pair in the other direction"},
            f"Run `nvidia-smi -q -d PCIE` on {copies.host.name} for the replay counters, and `nvidia-smi topo -m` for "
            "what is between these GPUs. Have the riser and the PCIe switch there checked.",
        )


def indirect(seen: Seen[Copies], copies: RankCopies, told: Set[Link]) -> Iterator[Finding]:
    """Direct copies that are slower than those through the host's memory, not in `told`, and of use to NCCL."""
    hosts = [host for host in host_paths(seen.of(paths.CHECK)) if host.host.ranks == copies.host.ranks]
    # NCCL uses the host's memory there by itself.
    spared = {frozenset((pair.one.uuid, pair.other.uuid)) for host in hosts for pair in host.through_memory}
    direct_pairs = {link: pair for link, pair in copies.pairs.items() if pair.access}
    reachable = {link: pair for link, pair in direct_pairs.items() if frozenset(copies.uuids(link)) not in spared}
    known = {link: ratio for link, pair in reachable.items() if (ratio := _gain(pair)) is not None}
    least = seen.number("indirect_ratio")
    bad = {link for link, ratio in known.items() if ratio < least} - told - too_short(copies)
    if not bad:
        return
    where = "between all GPUs" if len(bad) == len(known) > 2 else f"on {_links(copies, sorted(bad))}"
    gpus = tuple(sorted({end for link in bad for end in link}))
    direct = median(reachable[link].bytes_per_s or 0.0 for link in bad)
    around = median(reachable[link].through_host_bytes_per_s or 0.0 for link in bad)
    yield Subject(copies, "links", gpus, tuple(sorted(bad)), where).finding(
        seen,
        "p2p-slower",
        f"direct copies between GPUs of {copies.host.name} are slower than copies through the host's memory",
        f"{copies.host.name}: direct copies {where} reach {rate_text(direct)}, copies through the host's memory reach "
        f"{rate_text(around)}{_median_text(bad)}. Direct copies are expected to be faster.",
        {"bytes_per_s": direct, "through_host_bytes_per_s": around, "source": "the same pair through the host"},
        f"{GUESS} {ACS}",
    )


def _gain(pair: PairCopies) -> float | None:
    """How much faster the pair is directly."""
    if pair.bytes_per_s is None or not pair.through_host_bytes_per_s:
        return None
    return pair.bytes_per_s / pair.through_host_bytes_per_s


def _median_text(links: Collection[Link]) -> str:
    return f" (medians of {len(links)} pairs)" if len(links) > 1 else ""


def _links(copies: RankCopies, links: Sequence[Link]) -> str:
    """With UUID and address where there is one link; the finding names the GPUs."""
    names = [" -> ".join(map(copies.full_label if len(links) == 1 else copies.label, link)) for link in links]
    return names_text(names, _SHOWN_LINKS)


def host_wrong(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    """Copies from or to the host's memory that arrive with other contents."""
    for index, gpu in copies.gpus.items():
        for words, link in ((gpu.wrong_to, "to"), (gpu.wrong_from, "from")):
            if words:
                yield seen.finding(
                    "host-wrong",
                    f"copies {'from the host to a GPU' if link == 'to' else 'from a GPU to the host'} arrive corrupted",
                    f"Copies {link} {copies.full_label(index)} on {copies.host.name} changed {count(words, 'word')} of "
                    f"{_WORD_BYTES} bytes; 0 expected.",
                    ranks=copies.ranks_of((index,)),
                    hosts=(copies.host.name,),
                    gpus=copies.uuids((index,)),
                    evidence={"wrong_words": words},
                    fix=f"{begun(leave_out([copies.host.name]))}. Test its GPUs and memory there (`dcgmi diag -r 3`, "
                    "`dmesg -T`).",
                )


def host_slow(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """GPUs below others of their model on the host, or far below their slot; each GPU and direction once."""
    least_of_usual, least_of_slot = seen.number("host_slow_ratio"), seen.number("expected_ratio")
    # A virtual machine shows the generation of a made-up bus, not that of the host's slot.
    guests = {own.host.ranks for own in host_paths(seen.of(paths.CHECK)) if own.around.virtual}
    for there, links in host_memory_links(all_copies):
        for own in links:
            usual = siblings_rate(own, links)
            slot, source = slot_rate(own.copies.cards.get(own.gpu))
            if own.bytes_per_s < least_of_usual * usual:
                # An error, if nothing else uses the GPU, and it is far below others of its model twice.
                again = own.copies.again_gpus.get(own.gpu)
                second = (again.to_bytes_per_s if there else again.from_bytes_per_s) if again is not None else None
                far = second is not None and max(own.bytes_per_s, second) < seen.number("far_ratio") * usual
                far = far and not any(not_free(seen, own.copies.uuids((own.gpu,))))
                yield _slow(seen, own, there, usual, "GPUs of its model there reach in the median", far=far)
            elif own.bytes_per_s < least_of_slot * slot and own.copies.host.ranks not in guests:
                yield _slow(seen, own, there, slot, source)


def siblings_rate(own: Measured, links: Sequence[Measured]) -> float:
    """What GPUs of its model on the host reach in the median; 0 of two, of which neither is usual."""
    siblings = [other.bytes_per_s for other in links if other.model == own.model]
    # Of an even split the lower half: behind another socket than the memory all are slower.
    return median_low(siblings) if len(siblings) > 2 else 0.0


def slot_rate(card: Card | None) -> tuple[float, str]:
    """What a GPU's PCIe link should carry (0: not known), and in words.

    By the width as it is and the generation that is possible, which a card that is idle lets fall (GPU003).
    """
    link = card.health.pcie if card else None
    lane = _LANE_BYTES_PER_S.get(link.generation_max or 0) if link else None
    if link is None or lane is None or not link.width:
        return 0.0, ""
    shown = f"PCIe {link.generation_max} x{link.width}"
    return link.width * lane, f"copies over {shown} reach (from nvbandwidth's 55 GB/s over PCIe 5 x16)"


def _slow(
    seen: Seen[Copies], own: Measured, there: bool, expected: float, source: str, *, far: bool = False
) -> Finding:
    copies, name = own.copies, own.copies.host.name
    card = copies.cards.get(own.gpu)
    link = card.health.pcie if card else None
    causes = (
        "Possible causes: fewer lanes or a lower generation under load, another socket's memory, an IOMMU, a busy host."
    )
    if link is not None and link.width and link.width_max and link.width < link.width_max:
        causes = f"Its link has {link.width} of {link.width_max} lanes (GPU004)."
    return seen.finding(
        "host-slow",
        f"slow copies {'to' if there else 'from'} a GPU of {name}: {rate_text(own.bytes_per_s)}",
        f"Copies from {'the host' if there else copies.full_label(own.gpu)} to "
        f"{copies.full_label(own.gpu) if there else 'the host'} on {name} reach {rate_text(own.bytes_per_s)}, "
        f"{share_text(own.bytes_per_s / expected)} of the {rate_text(expected)} that {source}"
        f"{', in two measurements' if far else ''}. {causes}",
        severity=Severity.ERROR if far else Severity.WARNING,
        ranks=copies.ranks_of((own.gpu,)),
        hosts=(name,),
        gpus=copies.uuids((own.gpu,)),
        evidence={
            "bytes_per_s": own.bytes_per_s,
            "expected_bytes_per_s": expected,
            "source": source,
            "to_device": there,
        },
        fix=f"Compare `nvidia-smi -q -d PCIE -i {copies.smi_id(own.gpu)}` on {name} under load and `nvidia-smi topo "
        f"-m` with another GPU. Reboot {name}; if the GPU stays slow, have the card reseated.",
    )
