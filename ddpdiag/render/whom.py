"""Whom some findings name, each kind in words; every renderer folds and escapes these in its own way."""

from collections.abc import Callable, Iterable, Sequence

from ddpdiag.model import Finding
from ddpdiag.render.hosts import fold_hosts, fold_ranks


def whom(
    findings: Iterable[Finding], listed: Callable[[Sequence[str]], str], limit: int | None, *, hosts: bool = True
) -> list[tuple[str, str]]:
    """Such as [("ranks", "0-2"), ("host", "n1")]: ranks and hosts folded up to `limit`, GPUs and links as `listed`."""
    kept = list(findings)
    ranks = {rank for finding in kept for rank in finding.ranks}
    nodes = tuple(dict.fromkeys(node for finding in kept for node in finding.nodes)) if hosts else ()
    gpus = tuple(dict.fromkeys(gpu for finding in kept for gpu in finding.gpus))
    links = tuple(dict.fromkeys(link for finding in kept for link in finding.links))
    kinds = (
        ("rank", len(ranks), fold_ranks(ranks, limit=limit)),
        ("host", len(nodes), fold_hosts(nodes, limit=limit)),
        ("GPU", len(gpus), listed(gpus)),
        ("link", len(links), listed(links)),
    )
    return [(noun if number == 1 else noun + "s", text) for noun, number, text in kinds if number]
