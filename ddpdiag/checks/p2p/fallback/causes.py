"""On which hosts a backend fails, and the probable cause, by the override that avoids it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.host import shared_memory
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.p2p.fallback.members import ON_PCIE, VARIABLES, Variable
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Member, Part, Tried
from ddpdiag.checks.registry import by_code
from ddpdiag.model import Finding, Severity, Status
from ddpdiag.probes.gpu.links import JOINED


def cause(seen: Seen[Any], members: Sequence[Member], nodes: Sequence[str]) -> str:
    """A sentence on the first member: the finding of another check, else the usual cause; empty if it is the user's.

    A variable that the user has set and that is taken away is its own cause. `nodes` are the hosts on which it fails,
    if that is known: findings on other hosts explain nothing.
    """
    # "IFNAME eth0" is one of several interfaces, "no NCCL_ALGO" what the user has set.
    kinds = [member.name.partition(" ")[0] for member in members]
    variable = next((VARIABLES[kind] for kind in kinds if kind in VARIABLES and VARIABLES[kind].usual), None)
    if variable is None:
        return ""
    cleared = _is_cleared(seen, variable.member.name, nodes)
    refuted = ON_PCIE if cleared else ()
    finding = next((own for own in _findings(seen, variable, nodes) if own.code not in refuted), None)
    if finding is not None:
        return f"Probable cause: {finding.title} ({finding.code}): {finding.message}"
    return variable.cleared if cleared else f"Usual cause: {variable.usual}."


def _findings(seen: Seen[Any], variable: Variable, nodes: Sequence[str]) -> Iterator[Finding]:
    """Findings of other checks on the same cause, likeliest first."""
    for code in variable.seen_by:
        for finding in seen.findings_of(code.partition(".")[0]):
            hosts = finding.hosts or seen.world.hosts_of(finding.ranks)
            elsewhere = nodes and hosts and not set(nodes) & set(hosts)
            counts = finding.severity is not Severity.NOTE or code in ON_PCIE
            if finding.code.startswith(code) and counts and not elsewhere:
                yield finding


def _is_cleared(seen: Seen[Any], name: str, nodes: Sequence[str]) -> bool:
    """Whether a check looked for the usual cause of this variable and found none."""
    match name:
        case "P2P":
            return _copies_are_right(seen, nodes)
        case "NVLS":
            cards = cards_of(seen.of(memory_errors.CHECK))
            return bool(cards) and all(card.health.fabric.state == JOINED for card in cards)
        case "SHM":
            return bool(seen.of(shared_memory.CHECK).by_rank)
    return False


def _copies_are_right(seen: Seen[Any], nodes: Sequence[str]) -> bool:
    """Whether P2P002 made direct copies between GPUs of these hosts, and all of them ended and were right."""
    copies = seen.of(by_code("P2P002"))
    ranks = {rank for (name, _), own in seen.world.hosts.items() if not nodes or name in nodes for rank in own}
    pairs = [pair for row in copies.rows_so_far if row.place.rank in ranks for pair in row.data.pairs if pair.access]
    ended = all(outcome.status is Status.DONE for outcome in copies.outcomes if outcome.rank in ranks)
    return bool(pairs) and ended and not any(pair.wrong for pair in pairs)


class Places(NamedTuple):
    """Where it fails: in words (" between hosts"), the hosts, and the ranks of one that fails while others work."""

    text: str = ""
    hosts: tuple[str, ...] = ()
    concerned: tuple[int, ...] = ()


def places(seen: Seen[Any], tried: Sequence[Tried], end: Ended, ground: Ground) -> Places:
    """The hosts inside which it fails, as far as the search has separated them."""
    if len(ground.hosts) == 1:
        hosts = seen.world.hosts_of([ground.hosts[0][0]])
        return Places(f" on {hosts[0]}", hosts=hosts)
    if end.inside_works:
        return Places(" between hosts and works inside each host")
    if max(map(len, ground.hosts)) == 1:
        return Places(" between hosts")
    inside = next((own for own in tried if own.step.part is Part.HOSTS and not own.step.members), None)
    if inside is None or not inside.failed or not inside.busbws:
        return Places()
    ranks = tuple(sorted(rank for group in inside.failed for rank in group))
    nodes = seen.world.hosts_of(ranks)
    return Places(f" inside {names_text(nodes)} and works inside the other hosts", nodes, ranks)
