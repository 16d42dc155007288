"""Findings of TRN003 on different first weights, on ranks with wrong gradients, and on wrong means of gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text, subject_text
from ddpdiag.model import Finding
from ddpdiag.model.measurements import Proof
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import begun

D = TypeVar("D")
Sketch = Sequence[float]
# The tolerated difference, as a share of the gradient. Different orders of addition round differently. An error of 1e-7
# in each layer changed the gradient by at most 1.6e-6 of its largest element, 1e-6 by 7e-6, and 1e-5 by 7e-5
# (tests/benchmarks/rounding.py). A fault changes an element by about its own size. TensorFloat-32 is switched off.
TOLERANCE = {"float32": 1e-4}
_COMPARE = (
    "Compare torch's version (`python -c 'import torch; print(torch.__version__)'`) and the models of CPU and GPU "
    "between the hosts."
)


def proof_findings(seen: Seen[D], proofs: Mapping[int, Proof]) -> Iterator[Finding]:
    """At most one finding: different weights, else a wrong gradient, else a wrong mean. Each may cause the next."""
    if odd := find_odd_ranks({rank: proof.first_weights for rank, proof in proofs.items()}):
        odd_ranks, is_single = ranks_text(odd.ranks), len(odd.ranks) == 1
        odd_text = f"{subject_text(seen, odd.ranks)} {'differs' if is_single else 'differ'} from most"
        yield seen.finding(
            "weights",
            f"{odd_ranks if odd.ranks else 'ranks'} {'draws' if is_single else 'draw'} different initial weights",
            f"{len(proofs)} ranks drew {len(odd.by_value)} different sets of initial weights from the same seed; all "
            f"must be equal. {begun(odd_text) if odd.ranks else 'No set has a majority'}. DDP copies rank 0's weights "
            "to all ranks, so training starts equal, but other random numbers (dropout, shuffling) still differ.",
            ranks=odd.ranks,
            evidence={f"checksum {str(value)[:12]}": list(ranks) for value, ranks in odd.by_value.items()},
            fix=f"{_COMPARE} If both are equal, have the memory of that host or GPU tested.",
        )
        return
    if (found := _gradient_finding(seen, proofs) or _mean_finding(seen, proofs)) is not None:
        yield found


def tolerance(proof: Proof) -> float:
    """The largest accepted rounding error for the gradient's dtype, as a share of the gradient's norm (sketches) or of
    the gradient's largest element (`gradient_error`)."""
    return TOLERANCE.get(proof.dtype, 1e-2)


def _sketches_agree(first: Sketch, second: Sketch, proof: Proof) -> bool:
    """Whether two sketches of the gradient in `proof` agree. Each sum of a sketch is about as large as its norm."""
    tolerated = tolerance(proof) * max(proof.gradient_norm, 1e-30)
    return all(math.isfinite(a - b) and abs(a - b) <= tolerated for a, b in zip(first, second, strict=True))


def _gradient_finding(seen: Seen[D], proofs: Mapping[int, Proof]) -> Finding | None:
    """The finding about ranks whose own gradient differs from the one that other ranks computed for them, or None."""
    disagreements = {  # the checker computed another gradient for the rank than the rank passed to DDP
        (checker, rank)
        for checker, proof in proofs.items()
        for rank, sketch in proof.expected_sketches.items()
        if rank in proofs and not _sketches_agree(sketch, proofs[rank].input_sketch, proof)
    }
    if not disagreements:
        return None
    checkers_by_rank: dict[int, list[int]] = {rank: [] for rank in proofs}
    for checker, proof in proofs.items():
        for rank in proof.expected_sketches:
            checkers_by_rank.setdefault(rank, []).append(checker)
    suspects = {
        rank
        for rank, checkers in checkers_by_rank.items()
        if len(checkers) > 1 and all((checker, rank) in disagreements for checker in checkers)
    }
    # All checkers disagree with a suspect. A suspect is faulty if at least one of its checkers is no suspect.
    faulty_suspects = {rank for rank in suspects if not suspects.issuperset(checkers_by_rank[rank])}
    # A checker is faulty if it disagrees with a rank, and another checker agrees with this rank.
    faulty_checkers = {
        checker
        for checker, rank in disagreements
        if any((other, rank) not in disagreements for other in checkers_by_rank[rank] if other != checker)
    }
    faulty_ranks = tuple(sorted(faulty_suspects | faulty_checkers))
    is_explained = all(checker in faulty_ranks or rank in faulty_ranks for checker, rank in disagreements)
    blamed = faulty_ranks if is_explained and 2 * len(faulty_ranks) < len(proofs) else ()
    if blamed and faulty_suspects >= set(blamed):
        sentence = (
            f"{subject_text(seen, blamed)} gave the all-reduce a different gradient than two other ranks computed from "
            "the same weights and images"
        )
    elif blamed:
        sentence = (
            f"{subject_text(seen, blamed)} computed a different gradient from the same weights and images than two "
            "other ranks, which agree"
        )
    else:
        pairs = ", ".join(f"rank {checker} and rank {rank}" for checker, rank in sorted(disagreements))
        sentence = (
            f"Ranks computed different gradients from the same weights and images ({pairs}); no majority shows which "
            "is wrong"
        )
    limit, hosts = tolerance(next(iter(proofs.values()))), seen.world.host_names(blamed)
    command = "run `ddpdiag host --torch` on"
    test = f"{leave_out(hosts)}, and {command} {names_text(hosts)}" if hosts else f"{command} each host"
    return seen.finding(
        "gradient",
        f"{ranks_text(blamed) if blamed else 'a rank'} {'compute' if len(blamed) > 1 else 'computes'} wrong gradients",
        f"{begun(sentence)}. A difference of at most {limit:g} of the gradient's size is allowed.",
        ranks=blamed,
        evidence={"denied_by": [f"rank {checker}: rank {rank}" for checker, rank in sorted(disagreements)]},
        fix=f"{_COMPARE} Different ones may round differently: install one torch, and use hosts of one model. If all "
        f"are equal already, {test}, which tests its arithmetic.",
    )


def _mean_finding(seen: Seen[D], proofs: Mapping[int, Proof]) -> Finding | None:
    """The finding about ranks on which DDP's gradient differs from that of one process with all images, or None."""
    errors = {rank: proof.gradient_error for rank, proof in proofs.items()}
    wrong_ranks = tuple(rank for rank, proof in proofs.items() if not proof.gradient_error <= tolerance(proof))
    if not wrong_ranks:
        return None
    worst = max((errors[rank] for rank in wrong_ranks), key=lambda error: error if math.isfinite(error) else math.inf)
    blamed = wrong_ranks if 2 * len(wrong_ranks) < len(proofs) else ()
    return seen.finding(
        "unequal",
        "DDP's gradient differs from that of one process" + (f" on {ranks_text(blamed)}" if blamed else ""),
        f"On {subject_text(seen, wrong_ranks)} DDP's gradient differs from that of one process with all images, by "
        f"{worst:.1e} of the largest element; at most {tolerance(proofs[wrong_ranks[0]]):g} is expected.",
        ranks=blamed,
        evidence={"error": worst, "ranks": [*wrong_ranks]},
        fix=f"Run `ddpdiag host --torch` on {names_text(seen.world.host_names(blamed))}: it tests the arithmetic there."
        if blamed
        else "Run `ddpdiag check --select COL001`, which checks the sums of an all-reduce.",
    )
