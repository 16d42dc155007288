"""Whether DistributedDataParallel averaged the gradients, and which rank computed a wrong one; for TRN003."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text, who_text
from ddpdiag.model import Finding
from ddpdiag.model.measurements import Proof
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import begun

D = TypeVar("D")
Sketch = Sequence[float]

# Two ways to add the same numbers differ by rounding. With 1e-7 in each layer at most 1.6e-6 of the largest element was
# seen, with 1e-6 at most 7e-6, with 1e-5 at most 7e-5 (tests/benchmarks/rounding.py). A wrong element is as large as
# others. TensorFloat-32 is switched off.
TOLERANCE = {"float32": 1e-4}

_COMPARE = (
    "Compare torch's version (`python -c 'import torch; print(torch.__version__)'`) and the models of CPU and GPU "
    "between the hosts."
)
_SUMS = "`ddpdiag check --select COL001`, which checks the sums of an all-reduce"


def proof_findings(seen: Seen[D], proofs: Mapping[int, Proof]) -> Iterator[Finding]:
    """The first that explains the others: different first weights, then a wrong gradient, then a wrong mean."""
    if odd := odd_ones_out({rank: proof.first_weights for rank, proof in proofs.items()}):
        who, one = ranks_text(odd.ranks), len(odd.ranks) == 1
        theirs = f"{who_text(seen, odd.ranks)} {'differs' if one else 'differ'} from most"
        yield seen.finding(
            "weights",
            f"{who if odd.ranks else 'ranks'} {'draws' if one else 'draw'} different initial weights",
            f"{len(proofs)} ranks drew {len(odd.groups)} different sets of initial weights from the same seed; all "
            f"must be equal. {begun(theirs) if odd.ranks else 'No set has a majority'}. DDP copies rank 0's weights "
            "to all ranks, so training starts equal, but other random numbers (dropout, shuffling) still differ.",
            ranks=odd.ranks,
            evidence={f"checksum {str(value)[:12]}": list(ranks) for value, ranks in odd.groups.items()},
            fix=f"{_COMPARE} If both are equal, have the memory of that host or GPU tested.",
        )
        return
    if (found := _handed(seen, proofs) or _whole(seen, proofs)) is not None:
        yield found


def tolerance(proof: Proof) -> float:
    """Of the gradient's dtype, as a share."""
    return TOLERANCE.get(proof.dtype, 1e-2)


def _alike(one: Sketch, other: Sketch, proof: Proof) -> bool:
    """A sum under random signs of a vector is about as large as its norm."""
    least = tolerance(proof) * max(proof.norm, 1e-30)
    return all(math.isfinite(a - b) and abs(a - b) <= least for a, b in zip(one, other, strict=True))


def _handed(seen: Seen[D], proofs: Mapping[int, Proof]) -> Finding | None:
    """Compare the gradients that ranks gave to the all-reduce with those that others computed."""
    denied = {
        (checker, rank)
        for checker, proof in proofs.items()
        for rank, sketch in proof.witnessed.items()
        if rank in proofs and not _alike(sketch, proofs[rank].handed, proof)
    }
    if not denied:
        return None
    asked: dict[int, list[int]] = {rank: [] for rank in proofs}
    for checker, proof in proofs.items():
        for rank in proof.witnessed:
            asked.setdefault(rank, []).append(checker)
    suspects = {
        rank
        for rank, checkers in asked.items()
        if len(checkers) > 1 and all((checker, rank) in denied for checker in checkers)
    }
    # What suspects testify counts for nothing.
    handed = {rank for rank in suspects if not suspects.issuperset(asked[rank])}
    # A rank that denies what the checked rank and another checker agree on is one against two.
    outvoted = {w for w, rank in denied if any((other, rank) not in denied for other in asked[rank] if other != w)}
    guilty = tuple(sorted(handed | outvoted))
    explained = all(checker in guilty or rank in guilty for checker, rank in denied)
    blamed = guilty if explained and 2 * len(guilty) < len(proofs) else ()
    if blamed and handed >= set(blamed):
        said = (
            f"{who_text(seen, blamed)} gave the all-reduce a different gradient than two other ranks computed from the "
            "same weights and images"
        )
    elif blamed:
        said = (
            f"{who_text(seen, blamed)} computed a different gradient from the same weights and images than two other "
            "ranks, which agree"
        )
    else:
        pairs = ", ".join(f"rank {checker} and rank {rank}" for checker, rank in sorted(denied))
        said = (
            f"Ranks computed different gradients from the same weights and images ({pairs}); no majority shows which "
            "is wrong"
        )
    most = tolerance(next(iter(proofs.values())))
    return seen.finding(
        "gradient",
        f"{ranks_text(blamed) if blamed else 'a rank'} {'compute' if len(blamed) > 1 else 'computes'} wrong gradients",
        f"{begun(said)}. A difference of at most {most:g} of the gradient's size is allowed.",
        ranks=blamed,
        evidence={"denied_by": [f"rank {checker}: rank {rank}" for checker, rank in sorted(denied)]},
        fix=f"{_COMPARE} Different ones may round differently: install one torch, and use hosts of one model. If all "
        "are equal already, "
        + (
            f"{leave_out(nodes)}, and run `ddpdiag host --torch` on {names_text(nodes)}, which tests its arithmetic."
            if (nodes := seen.world.hosts_of(blamed))
            else "run `ddpdiag host --torch` on each host, which tests its arithmetic."
        ),
    )


def _whole(seen: Seen[D], proofs: Mapping[int, Proof]) -> Finding | None:
    """Compare DDP's gradient with that of one process with all images."""
    errors = {rank: proof.error for rank, proof in proofs.items()}
    wrong = tuple(rank for rank, proof in proofs.items() if not proof.error <= tolerance(proof))
    if not wrong:
        return None
    worst = max((errors[rank] for rank in wrong), key=lambda error: error if math.isfinite(error) else math.inf)
    blamed = wrong if 2 * len(wrong) < len(proofs) else ()
    return seen.finding(
        "unequal",
        "DDP's gradient differs from that of one process" + (f" on {ranks_text(blamed)}" if blamed else ""),
        f"On {who_text(seen, wrong)} DDP's gradient differs from that of one process with all images, by {worst:.1e} "
        f"of the largest element; at most {tolerance(proofs[wrong[0]]):g} is expected.",
        ranks=blamed,
        evidence={"error": worst, "ranks": [*wrong]},
        fix=f"Run `ddpdiag host --torch` on {names_text(seen.world.hosts_of(blamed))}: it tests the arithmetic there."
        if blamed
        else f"Run {_SUMS}.",
    )
