"""Copies between two GPUs that are far below what their path carries, or what most GPUs of the host reach."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.other_users import not_free
from ddpdiag.checks.matrix import Link
from ddpdiag.checks.p2p import paths, transport
from ddpdiag.checks.p2p.copies.data import RankCopies, host_memory_links
from ddpdiag.checks.p2p.copies.judge import (
    Subject,
    rates_by_access,
    siblings_rate,
    slot_rate,
    subjects,
    too_short,
    usual_rate,
)
from ddpdiag.checks.p2p.host_paths import Pair, host_paths
from ddpdiag.checks.p2p.nccl_path import doubts_text
from ddpdiag.model import Finding, Severity
from ddpdiag.model.measurements import Copies
from ddpdiag.probes.gpu.paths import Level
from ddpdiag.text import count, rate_text, share_text

# Each takes some 0.2 s where it is slow.
_MOST_REPEATED = 8
# Half is what P2P002 calls slow.
_PROOF_SHARE = 0.5


class Expected(NamedTuple):
    """What a pair should reach, and the source; `by_peers`: most GPUs of the host do."""

    bytes_per_s: float
    source: str
    by_peers: bool = False


def to_repeat(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> str:
    """What to measure once more, such as "0>1 1>0 3": pairs that are far below and GPUs whose links to the host are (in
    one direction or the other, below those of their model), or as many of these as there is time for."""
    pairs = sorted(_far(seen, copies, _expected(seen, copies)))
    least = seen.number("far_ratio")
    gpus = {
        own.gpu
        for _, links in host_memory_links(all_copies)
        for own in links
        if own.copies.rank == copies.rank and own.bytes_per_s < least * siblings_rate(own, links)
    }
    words = [*(f"{source}>{target}" for source, target in pairs), *map(str, sorted(gpus))]
    return " ".join(words[:: -(-len(words) // _MOST_REPEATED) or 1])


def far_below(seen: Seen[Copies], copies: RankCopies) -> Iterator[tuple[Subject, Finding]]:
    """One for each thing that explains some of the slow pairs."""
    expected = _expected(seen, copies)
    far = _far(seen, copies, expected)
    for subject in subjects(copies, far.keys(), expected.keys()):
        # Which GPUs are close to each other depends on how the host is built.
        if subject.kind != "islands" or not all(far[link].by_peers for link in subject.links):
            yield subject, _finding(seen, subject, {link: far[link] for link in subject.links})


def _far(seen: Seen[Copies], copies: RankCopies, expected: Mapping[Link, Expected]) -> dict[Link, Expected]:
    """The pairs that are far below, with what they should reach."""
    ratio, short = seen.number("far_ratio"), too_short(copies)
    rates = {link: copies.pairs[link].bytes_per_s or 0.0 for link in expected if link not in short}
    return {link: expected[link] for link, rate in rates.items() if 0 < rate < ratio * expected[link].bytes_per_s}


def _expected(seen: Seen[Copies], copies: RankCopies) -> dict[Link, Expected]:
    """What pairs with peer access should reach, by their path; else by what most GPUs of the host do."""
    rates = rates_by_access(copies, access=True)
    usual = usual_rate(rates)
    pairs = {
        frozenset(filter(None, (pair.one.uuid, pair.other.uuid))): pair
        for host in host_paths(seen.of(paths.CHECK))
        if host.host.ranks == copies.host.ranks
        for pair in host.pairs
        if pair not in host.through_memory
    }
    known = {link: pair for link in rates if (pair := pairs.get(frozenset(copies.uuids(link)))) is not None}
    found = {link: own for link, pair in known.items() if (own := _by_path(copies, link, pair)) is not None}
    if usual is not None:
        # Others of that level show what it can do: between sockets all may be slow.
        fast = {known[link].level for link, rate in rates.items() if link in known and rate > usual * _PROOF_SHARE}
        peers = Expected(usual, "most GPUs of the host reach it", by_peers=True)
        found |= {link: peers for link, pair in known.items() if link not in found and pair.level in fast}
    return found


def _by_path(copies: RankCopies, link: Link, pair: Pair) -> Expected | None:
    """NVLinks by the speed that NVML reports, or the slots of two GPUs behind PCIe switches.

    Across a processor the rate of copies depends on its model, and no figure of it is public.
    """
    ends = [copies.cards.get(gpu) for gpu in link]
    nvlinks = min((path.nvlinks or 0 for path in pair.known), default=0)
    if nvlinks:
        up = [own.bytes_per_s for end in ends if end for own in end.health.nvlinks if own.up]
        speeds = [speed for speed in up if speed]
        return Expected(nvlinks * min(speeds), f"{count(nvlinks, 'NVLink')}, by NVML") if speeds else None
    if pair.is_unlinked and pair.level is not None and pair.level <= Level.PXB:
        slot, source = min(map(slot_rate, ends))
        return Expected(slot, source) if slot else None
    return None


_GUESS = "Set NCCL_P2P_DISABLE=1 until the cause is fixed."


def _finding(seen: Seen[Copies], subject: Subject, far: Mapping[Link, Expected]) -> Finding:
    copies = subject.copies
    rate = median(copies.pairs[link].bytes_per_s or 0.0 for link in far)
    again = [pair.bytes_per_s for link in far if (pair := copies.again.get(link)) and pair.bytes_per_s]
    expected = min(far.values())
    doubts = [*_doubts(seen, subject, far)]
    second = f"; {rate_text(median(again))} when measured again" if again else ""
    through = [p.through_host_bytes_per_s for link in far if (p := copies.pairs[link]).through_host_bytes_per_s]
    around = median(each or 0.0 for each in through) if through else 0.0
    faster = around * seen.number("indirect_ratio") > rate
    beside = f" Through the host's memory they reach {rate_text(around)}." if around else ""
    evidence: dict[str, float | int | str] = {
        "bytes_per_s": rate,
        "expected_bytes_per_s": expected.bytes_per_s,
        "source": expected.source,
        **({"again_bytes_per_s": median(again)} if again else {}),
        **({"doubts": "; ".join(doubts)} if doubts else {}),
    }
    return subject.finding(
        seen,
        "far-below",
        f"copies between GPUs of {copies.host.name} are far below what their path carries: {rate_text(rate)}",
        f"Copies {subject.where} reach {rate_text(rate)} (median of {count(len(far), 'pair')}{second}). At least "
        f"{share_text(seen.number('far_ratio'))} of {rate_text(expected.bytes_per_s)} is expected ({expected.source})."
        f"{beside}{doubts_text(doubts)}",
        evidence,
        (f"{_GUESS} " if faster else "")
        + f"On {copies.host.name} run `nvidia-smi nvlink -s`, `nvidia-smi nvlink -e` and `nvidia-smi -q -d "
        "PERFORMANCE,PCIE` "
        "under load, and compare with a host that passes. Reset the GPUs as root, or reboot.",
        Severity.WARNING if doubts else Severity.ERROR,
        guess=_GUESS if faster else "",
    )


def _doubts(seen: Seen[Copies], subject: Subject, far: Mapping[Link, Expected]) -> Iterator[str]:
    """Reasons for a warning instead of an error."""
    copies, ratio = subject.copies, seen.number("far_ratio")
    again = {link: copies.again[link].bytes_per_s for link in far if link in copies.again}
    if not any(again.values()):
        yield "it was measured once only"
    elif any(rate and rate >= ratio * far[link].bytes_per_s for link, rate in again.items()):
        yield "the second measurement does not agree with the first"
    usual = usual_rate(rates_by_access(copies, access=True)) or 0.0
    below_peers = any((copies.pairs[link].bytes_per_s or 0.0) < ratio * usual for link in far)
    if not below_peers and not _is_in_log(seen, subject):
        yield "NCCL's log does not show this path"
    yield from not_free(seen, copies.uuids(dict.fromkeys(end for link in far for end in link)))


def _is_in_log(seen: Seen[Copies], subject: Subject) -> bool:
    """Does NCCL's log show P2P between two of these GPUs, or that NVLinks connect them?"""
    rows = seen.of(transport.CHECK).by_rank
    ranks = {row.gpu_uuid: rank for rank, row in rows.items() if row.gpu_uuid is not None}
    for link in subject.links:
        ends = [ranks[uuid] for uuid in subject.copies.uuids(link) if uuid in ranks]
        for log in (rows[rank].log for rank in ends if len(ends) == 2):
            if log is None:
                continue
            if any(hop.kind == "P2P" and {hop.source, hop.target} == {*ends} for hop in log.hops):
                return True
            if ends[1] in log.nvlinked.get(ends[0], ()):
                return True
    return False
