"""Variables of NCCL that lead to no port, or to a GID that is not there."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host.rdma_ports.data import Data, HostPorts, compare, gid_index, gid_kind
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.net.adapters import Port, port_rule

_NAMES, _LISTED = 8, 16


def severity_of(seen: Seen[Data]) -> Severity:
    """What breaks jobs between hosts is worth a warning on one host alone, or where NCCL worked all the same.

    A network plug-in need not go over these ports.
    """
    return Severity.ERROR if len(seen.world.hosts) > 1 and not seen.own_backend_works else Severity.WARNING


def allows_none_up(own: HostPorts) -> bool:
    """Is NCCL_IB_HCA set, and are there ports that NCCL could take, but none that it allows and that is up?"""
    return own.by_nccl and bool(own.data.rule) and bool(own.data.verbs_ports) and not own.up


def without_ports(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """NCCL_IB_HCA that leaves NCCL no port; one finding for all hosts that have the same value and ports."""
    groups: dict[tuple[str, ...], list[HostPorts]] = defaultdict(list)
    for own in hosts:
        if allows_none_up(own):
            groups[(own.data.rule, *_states(own, own.ports), *_states(own, own.data.verbs_ports))].append(own)
    for alike in groups.values():
        yield _without_ports(seen, alike)
    # A container image may name adapters that a cloud's machines lack.
    bare = [own for own in hosts if own.by_nccl and own.data.rule and not own.data.adapters]
    if bare and len(seen.world.hosts) > 1 and len(bare) == len(hosts):
        rule = bare[0].data.rule
        yield seen.finding(
            "hca",
            "NCCL_IB_HCA is set, and no host has an RDMA device",
            f"NCCL_IB_HCA={rule} on {_who(bare)}, but /sys/class/infiniband shows no adapter on any host: NCCL uses "
            "sockets.",
            severity=Severity.WARNING,
            evidence={"NCCL_IB_HCA": rule, "ports": []},
            fix="Look at `lspci | grep -i -E 'mellanox|infiniband'`, and load the adapters' driver (mlx5_ib) if they "
            "are there; else unset NCCL_IB_HCA.",
        )


def _without_ports(seen: Seen[Data], alike: Sequence[HostPorts]) -> Finding:
    first = alike[0]
    rule = first.data.rule
    there = names_text(_states(first, first.data.verbs_ports), _NAMES)
    if first.ports:
        title, what = "allows no port that is up", f"only {names_text(_states(first, first.ports), _NAMES)}"
        fix = "Bring these ports up (`ibstat`, cable, switch port, subnet manager)"
    else:
        title, what = "allows no RDMA port", "none of them"
        fix = "Correct it (`ibv_devices` lists the names)"
    return seen.finding(
        "hca",
        f"NCCL_IB_HCA={rule} {title} on {_who(alike)}",
        f"{_who(alike)}: the RDMA ports are {there}, and NCCL_IB_HCA={rule} allows {what}; a port that is up expected. "
        "NCCL falls back to sockets.",
        # NCCL works over sockets, but not as it was asked to. Who excludes all ports may mean it.
        severity=Severity.WARNING if port_rule(rule).excludes or len(seen.world.hosts) == 1 else Severity.ERROR,
        nodes=[own.name for own in alike],
        evidence={"NCCL_IB_HCA": rule, "ports": [*_states(first, first.data.verbs_ports)[:_LISTED]]},
        fix=f"{fix}, or unset NCCL_IB_HCA: NCCL then takes every port that is up.",
    )


def _states(own: HostPorts, ports: Iterable[Port]) -> list[str]:
    return [port.name + ("" if port.active else f" ({port.state or 'state unknown'})") for port in ports]


def _who(hosts: Sequence[HostPorts]) -> str:
    return names_text([own.name for own in hosts])


def unmatched(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """Names in NCCL_IB_HCA that a host does not have, beside others that it has.

    What is left out ("^") need not be there. Where other hosts have the name, this host lacks a port, which the
    comparison says.
    """
    groups: dict[str, list[HostPorts]] = defaultdict(list)
    for own in hosts:
        if own.by_nccl and own.up:
            groups[own.data.rule].append(own)
    for rule, alike in groups.items():
        everywhere = set.intersection(*(set(_unmatched(own)) for own in alike))
        for word in (word for word in _unmatched(alike[0]) if word in everywhere):
            yield _unmatched_word(seen, rule, word, alike)


def _unmatched_word(seen: Seen[Data], rule: str, word: str, alike: Sequence[HostPorts]) -> Finding:
    names = names_text([port.name for port in alike[0].data.verbs_ports], _NAMES)
    return seen.finding(
        "unmatched",
        f"NCCL_IB_HCA names {word}, and no host has such a port",
        f"NCCL_IB_HCA={rule} on {_who(alike)}: no port matches {word}; {alike[0].name} has {names}. NCCL takes the "
        "ports that match, and says nothing of this one.",
        evidence={"NCCL_IB_HCA": rule, "name": word},
        fix=f"Correct {word} in NCCL_IB_HCA (`ibv_devices` lists the names), or remove it.",
    )


def _unmatched(own: HostPorts) -> list[str]:
    rule = port_rule(own.data.rule)
    if rule.excludes:
        return []
    ports = own.data.verbs_ports
    missing = (word for word in rule.words if not any(rule.fits(word, port.adapter, port.number) for port in ports))
    return [":".join(filter(None, word)) for word in missing]


def gid_indices(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """NCCL_IB_GID_INDEX that means nothing on a RoCE port, or something else than on most hosts."""
    with_index = [own for own in hosts if own.by_nccl and gid_index(own.data) is not None]
    using = [own for own in with_index if (kinds := _kinds(own)) and "?" not in kinds.values()]
    empty = [own for own in using if "none" in _kinds(own).values()]
    for own in empty:
        yield _gid_index(seen, own, [name for name, kind in _kinds(own).items() if kind == "none"], "a GID")
    others = [own for own in using if own not in empty]
    usual, odd, _ = compare(others, lambda own: tuple(sorted(set(_kinds(own).values()))))
    for own in odd:
        expected = sorted({kind for other in usual for kind in _kinds(other).values()})
        ports = [name for name, kind in _kinds(own).items() if kind not in expected]
        if ports:
            text = f"{names_text(expected)} (as on {len(usual)} of {len(others)} hosts)"
            yield _gid_index(seen, own, ports, text)


def _kinds(own: HostPorts) -> dict[str, str]:
    """The type of the GID that NCCL_IB_GID_INDEX names, by port; ports without any GID show none to this container."""
    index = gid_index(own.data) or 0
    return {port.name: gid_kind(own, port, index) for port in own.up if own.data.gids.get(port.name)}


def _gid_index(seen: Seen[Data], own: HostPorts, ports: Sequence[str], expected: str) -> Finding:
    index, kinds = gid_index(own.data), _kinds(own)
    text = ", ".join(f"{name}: {kinds[name]}" for name in ports[:_NAMES])
    routed = sorted({gid.index for name in ports for gid in own.data.gids[name] if gid.is_routed})
    places = f"RoCE v2 with an address is at {', '.join(map(str, routed))}" if routed else "none of its GIDs is routed"
    return seen.finding(
        "gid-index",
        f"NCCL_IB_GID_INDEX={index} does not fit the RDMA ports of {own.name}",
        f"{own.name}: NCCL_IB_GID_INDEX={index} leads to these types of GID: {text}; {expected} expected; {places}. "
        "Connections over these ports fail.",
        severity=severity_of(seen),
        nodes=[own.name],
        evidence={
            "NCCL_IB_GID_INDEX": index,
            "ports": [*ports[:_LISTED]],
            "gid_types": [kinds[name] for name in ports[:_LISTED]],
        },
        fix="Unset NCCL_IB_GID_INDEX: since NCCL 2.21 it finds the GID itself. For an older one set it to the place at "
        "which `show_gids` shows v2 with an IPv4 address.",
    )
