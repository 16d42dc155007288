"""Findings about values that should be equal on all ranks, hosts or GPUs, but differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.stats import OddRanks


def no_majority(blamed: Sequence[object], subject: str = "rank") -> str:
    """Return the sentence that no value has a majority, with a space before it; empty if something is `blamed`."""
    return "" if blamed else f" There is no majority, so no {subject} is blamed."


def odd_finding(
    seen: Seen[Any],
    word: str,
    odd: OddRanks,
    title: str,
    message: str,
    *,
    fix: str,
    severity: Severity | None = None,
    hosts: Sequence[str] | None = None,
    evidence: Mapping[str, Scalar | list[Scalar]] | None = None,
) -> Finding:
    """Create a finding that blames the ranks of `odd` (the minority), or says that no value has a majority.

    By default `evidence` is the value of each group of ranks.
    """
    values = {ranks_text(ranks): None if value is None else str(value) for value, ranks in odd.by_value.items()}
    return seen.finding(
        word,
        title,
        message + no_majority(odd.ranks),
        severity=severity,
        ranks=odd.ranks,
        hosts=hosts,
        evidence=values if evidence is None else evidence,
        fix=fix,
    )
