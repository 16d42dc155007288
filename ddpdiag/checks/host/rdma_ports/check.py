"""RDMA ports of each host: state, rate, GIDs, firmware, and distance to the GPUs.

NCCL uses every InfiniBand or RoCE port that is up and that NCCL_IB_HCA allows, and does not report the others: a host
with 7 of 8 ports, or with one port at half its rate, slows down all hosts. One rank of each host reads
/sys/class/infiniband; nothing is sent. Ports that the job takes are compared: those that NCCL_IB_HCA allows (prefixes;
exact names after `=`; all but these after `^`; `:port`), or, where NCCL uses sockets (gloo, NCCL_IB_DISABLE=1), those
below the interface that the job offers (RDZ003).

Hosts are compared with hosts that have the same models of GPUs, and what more than half of them have is expected.
Where there is no such majority, as between two hosts that differ, no host is blamed. A host alone is compared with
itself: ports of one board and link layer. What is alike on all hosts is not reported (ports that are disabled, a
frontend card), nor are versions of firmware within one release. Distances to the GPUs are in the ranks' column "nic".

Findings:

Virtual functions that are down, ports of EFA (neither InfiniBand nor Ethernet) and GIDs of iWARP are not judged. What
happens to a port during the run is HST006's, interfaces and their addresses are RDZ003's, and what NCCL chose P2P004's.

Causes: a cable or transceiver that is not seated or dirty, a switch port, a card that fell off the bus, a port that was
disabled, no subnet manager (state INIT), an interface without an address, NCCL_IB_HCA of another cluster.

Fix: do what the finding says; until then, leave the host out.

Confirm by hand: On two hosts, `ibstat; ibdev2netdev; show_gids; nvidia-smi topo -m; grep -H .
/sys/class/infiniband/*/ports/*/{state,phys_state,rate,link_layer} /sys/class/infiniband/*/{fw_ver,board_id}`, and diff.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html),
NCCL_IB_HCA, NCCL_IB_GID_INDEX; NCCL's src/transport/net_ib/init.cc (which ports it takes) and connect.cc (which GID);
Linux's ABI document sysfs-class-infiniband; NVSentinel, NIC health monitor (states, rates, virtual functions).
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from shlex import quote

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import present
from ddpdiag.checks.gpu.cards import takers_of
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.host.rdma_ports.data import (
    LISTED,
    Data,
    HostPorts,
    comparable,
    compare,
    gid_index,
    hosts_with_ports,
)
from ddpdiag.checks.host.rdma_ports.findings import wrong_gid_index
from ddpdiag.checks.host.rdma_ports.judge import compared
from ddpdiag.checks.hosts import answers_by_host, names_text
from ddpdiag.checks.launch import variables
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.iommu import Slot
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import Port, port_rule, rdma_ports
from ddpdiag.probes.net.rdma import (
    ROCE_V2,
    distance,
    gpus_on_bus,
    nccl_settings,
    port_interfaces,
    rdma_adapters,
    roce_gids,
)
from ddpdiag.text import count, link_rate

FINDINGS = {
    "hca": FindingSpec(
        "NCCL_IB_HCA allows no port that is up, so NCCL falls back to sockets: an error between several hosts."
    ),
    "unmatched": FindingSpec.warning("a name in NCCL_IB_HCA that no port of the host has, while other names match."),
    "missing": FindingSpec(
        "fewer ports than most hosts have: a card that is not on the bus or has no driver, or a port with "
        "another link layer. An error where no port is left, else a warning."
    ),
    "down": FindingSpec("fewer ports are up than on most hosts; an error where none is up, else a warning."),
    "slow": FindingSpec.warning("a port has a lower rate than on most hosts."),
    "narrow": FindingSpec.warning("a port has fewer lanes than on most hosts, or an InfiniBand port one lane only."),
    "gid": FindingSpec(
        "a RoCE port without a GID of RoCE v2 that has an address, while most hosts have one: its interface has no "
        "address. NCCL then takes a GID that is good on one link only, and cannot connect: an error between hosts."
    ),
    "gid-index": FindingSpec(
        "NCCL_IB_GID_INDEX names an empty place of a port's table, or another type of GID than on most hosts."
    ),
    "firmware": FindingSpec.warning("firmware of another release than most adapters of that model have."),
    "far": FindingSpec.warning("the nearest port is farther from the GPUs than on most hosts: slot, BIOS or VM."),
    "uneven": FindingSpec("hosts differ in one of these, and no majority says which is right; no host is blamed."),
    "unreadable": FindingSpec.not_seen("a host does not show its RDMA adapters, and the job may need them."),
}

_SHOWN = 8
# NCCL reads both files, after the environment.
_OR_FILE = " (or remove it from /etc/nccl.conf or ~/.nccl.conf)"


def measure(ctx: Context) -> Data:
    return look(os.environ, ctx.step)


def look(env: Mapping[str, str], step: Callable[[str], None]) -> Data:
    """What /sys shows of this host; `step` is called with what is read next, since a driver may wait for an adapter."""
    sys = sys_root(env)
    step("RDMA adapters")
    adapters = rdma_adapters(sys)
    step("RDMA ports")
    ports = rdma_ports(sys)
    step("GIDs")
    gids = {port.name: roce_gids(sys, port) for port in ports if port.link_layer == "Ethernet"}
    return Data(
        adapters=adapters,
        ports=ports,
        gids=gids,
        interfaces={port.name: port_interfaces(sys, port, gids.get(port.name, ())) for port in ports},
        gpus=gpus_on_bus(sys),
        settings=nccl_settings(env),
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Once, unless HST004 saw that no host has an RDMA device, and NCCL_IB_HCA asks for none."""
    rows = seen.of(hst004.CHECK).by_rank.values()
    is_without = bool(rows) and all(row.rdma == () for row in rows)
    # Do several hosts have NCCL_IB_HCA set, as LCH002 saw?
    set_here = (
        own for row in seen.of(variables.CHECK).by_rank.values() for own in (row.variables, *row.files.values())
    )
    asked_for = len(seen.world.hosts) > 1 and any("NCCL_IB_HCA" in own for own in set_here)
    return () if seen.trials or (is_without and not asked_for) else (new_trial(seen),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Nothing to look at where HST004 saw no RDMA device."""
    return unneeded(None if seen.trials or plan(seen) else "no host has an RDMA device")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    ranks = [rank for rank, data in seen.by_rank.items() if data.adapters is None]
    # Within one host, and over gloo, no job needs RDMA.
    if ranks and len(seen.world.hosts) > 1 and seen.world.backend == "nccl":
        nodes = seen.world.nodes_of(ranks)
        yield seen.finding(
            "unreadable",
            f"RDMA adapters of {names_text(nodes)} cannot be read",
            f"On {names_text(nodes)} /sys/class cannot be listed. So it is not known whether "
            f"{'its' if len(nodes) == 1 else 'their'} RDMA ports work.",
            nodes=nodes,
            fix="Mount /sys into the container (`docker run -v /sys:/sys:ro ...`), and run ddpdiag again. Or run "
            f"`ibstat` on {nodes[0]} outside of the container: every port that the job needs should be Active.",
        )
    hosts = hosts_with_ports(seen)
    yield from _without_ports(seen, hosts)
    yield from _unmatched(seen, hosts)
    yield from _gid_indices(seen, hosts)
    for alike in comparable(own for own in hosts if not _allows_none_up(own)):
        yield from compared(seen, alike)


def _allows_none_up(own: HostPorts) -> bool:
    """Is NCCL_IB_HCA set, and are there ports that NCCL could take, but none that it allows and that is up?"""
    return own.by_nccl and bool(own.data.rule) and bool(own.data.verbs_ports) and not own.up


def _without_ports(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """NCCL_IB_HCA that leaves NCCL no port; one finding for all hosts that have the same value and ports."""
    groups: dict[tuple[str, ...], list[HostPorts]] = defaultdict(list)
    for own in hosts:
        if _allows_none_up(own):
            groups[(own.data.rule, *_states(own.ports), *_states(own.data.verbs_ports))].append(own)
    for alike in groups.values():
        first, who = alike[0], names_text([own.name for own in alike])
        rule, states = first.data.rule, _states(first.data.verbs_ports)
        its = "its" if len(alike) == 1 else "their"
        adapters = list(dict.fromkeys(port.adapter for port in first.data.verbs_ports if port.active))
        unset = f"Run `unset NCCL_IB_HCA` in the job script{_OR_FILE}: NCCL then uses every port that is up."
        if first.ports:
            title = f"NCCL_IB_HCA allows only ports that are down on {who}"
            message = (
                f'NCCL_IB_HCA on {who} is "{rule}", which allows only {names_text(_states(first.ports), _SHOWN)}. Of '
                f"{its} {count(len(states), 'RDMA port')} it should allow one that is up; without one NCCL uses TCP "
                "sockets, which are much slower."
            )
            port = first.ports[0]
            fix = (
                f"{unset} Or ask the administrator to bring {port.name} up; `ibstat {quote(port.adapter)} "
                f"{port.number}` shows its state."
            )
        else:
            title = f"NCCL_IB_HCA allows no RDMA port on {who}"
            message = (
                f"NCCL_IB_HCA={rule} is set on {who}, but {its} RDMA ports are {names_text(states, _SHOWN)}. It allows "
                "none of them, so NCCL uses TCP sockets, which are much slower."
            )
            named = f" Or name existing adapters: `export NCCL_IB_HCA={quote(','.join(adapters[:_SHOWN]))}`."
            fix = unset + (named if adapters else "")
        yield seen.finding(
            "hca",
            title,
            message,
            # NCCL works over sockets, but not as it was asked to. Who excludes all ports may mean it.
            severity=Severity.WARNING if port_rule(rule).excludes or len(seen.world.hosts) == 1 else Severity.ERROR,
            nodes=[own.name for own in alike],
            evidence={"NCCL_IB_HCA": rule, "ports": [*states[:LISTED]]},
            fix=fix,
        )
    # A container image may name adapters that a cloud's machines lack.
    bare = [own for own in hosts if own.by_nccl and own.data.rule and not own.data.adapters]
    if bare and len(seen.world.hosts) > 1 and len(bare) == len(hosts):
        rule = bare[0].data.rule
        yield seen.finding(
            "hca",
            "NCCL_IB_HCA is set, but no host has an RDMA adapter",
            f"NCCL_IB_HCA={rule} is set on {names_text([own.name for own in bare])}, but no host shows an RDMA adapter "
            "in /sys/class/infiniband. So NCCL uses TCP sockets.",
            severity=Severity.WARNING,
            evidence={"NCCL_IB_HCA": rule, "ports": []},
            fix=f"Run `lspci | grep -i -E 'mellanox|infiniband'` on {bare[0].name}. If it lists adapters, load their "
            "driver as root (`modprobe mlx5_ib`); otherwise run `unset NCCL_IB_HCA` in the job script"
            f"{_OR_FILE}.",
        )


def _states(ports: Iterable[Port]) -> list[str]:
    return [port.name + ("" if port.active else f" ({port.state or 'state unknown'})") for port in ports]


def _unmatched(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """Names in NCCL_IB_HCA that a host does not have, beside others that it has.

    What is left out ("^") need not be there. Where other hosts have the name, this host lacks a port, which the
    comparison says.
    """
    groups: dict[str, list[HostPorts]] = defaultdict(list)
    for own in hosts:
        if own.by_nccl and own.up:
            groups[own.data.rule].append(own)
    for rule, alike in groups.items():
        everywhere = set.intersection(*(set(_unmatched_words(own)) for own in alike))
        for word in (word for word in _unmatched_words(alike[0]) if word in everywhere):
            names = names_text([port.name for port in alike[0].data.verbs_ports], _SHOWN)
            yield seen.finding(
                "unmatched",
                f"NCCL_IB_HCA names {word}, and no host has such a port",
                f"NCCL_IB_HCA={rule} on {names_text([own.name for own in alike])}: no port matches {word}; "
                f"{alike[0].name} has {names}. NCCL takes the ports that match, and says nothing of this one.",
                evidence={"NCCL_IB_HCA": rule, "name": word},
                fix=f"Correct {word} in NCCL_IB_HCA (`ibv_devices` lists the names), or remove it.",
            )


def _unmatched_words(own: HostPorts) -> list[str]:
    rule = port_rule(own.data.rule)
    if rule.excludes:
        return []
    ports = own.data.verbs_ports
    missing = (word for word in rule.words if not any(rule.fits(word, port.adapter, port.number) for port in ports))
    return [":".join(filter(None, word)) for word in missing]


def _gid_indices(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """NCCL_IB_GID_INDEX that means nothing on a RoCE port, or something else than on most hosts."""
    with_index = [own for own in hosts if own.by_nccl and gid_index(own.data) is not None]
    using = [own for own in with_index if (kinds := _kinds(own)) and "?" not in kinds.values()]
    empty = [own for own in using if "none" in _kinds(own).values()]
    for own in empty:
        kinds = _kinds(own)
        yield wrong_gid_index(seen, own, kinds, [name for name, kind in kinds.items() if kind == "none"], "a GID")
    others = [own for own in using if own not in empty]
    usual, odd, _ = compare(others, lambda own: tuple(sorted(set(_kinds(own).values()))))
    for own in odd:
        expected = sorted({kind for other in usual for kind in _kinds(other).values()})
        ports = [name for name, kind in _kinds(own).items() if kind not in expected]
        if ports:
            where = f", as on {len(usual)} of {len(others)} hosts"
            yield wrong_gid_index(seen, own, _kinds(own), ports, " or ".join(expected), where)


def _kinds(own: HostPorts) -> dict[str, str]:
    """The type of the GID that NCCL_IB_GID_INDEX names, by port: "none" where it is empty, "?" where it is hidden.

    Ports without any GID show none to this container.
    """
    kinds = {}
    for port in own.up:
        if gids := own.data.gids.get(port.name):
            gid = next((gid for gid in gids if gid.index == (gid_index(own.data) or 0)), None)
            kind = "none" if gid is None else gid.kind or "?"
            unrouted = gid is not None and kind == ROCE_V2 and not gid.is_routed
            kinds[port.name] = f"{ROCE_V2} without an address" if unrouted else kind
    return kinds


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """The port that is nearest to each rank's GPU, such as "mlx5_0:1 PIX", where one is nearer than the others."""
    rows = seen.of(present.CHECK).by_rank
    takers = takers_of(seen)
    pci = {gpu.uuid: gpu.pci for row in rows.values() for gpu in row.nvml.gpus if gpu.uuid and gpu.pci}
    cells: dict[int, Mapping[str, Scalar]] = {}
    for own in hosts_with_ports(seen):
        slots = {gpu.slot.pci: gpu.slot for gpu in own.data.gpus}
        for uuid, ranks in takers.items():
            slot = slots.get(pci.get(uuid) or "")
            nearest = _nearest(own, slot) if slot else None
            cells |= {rank: {"nic": nearest} for rank in ranks if nearest and rank in own.host.ranks}
    return cells


def _nearest(own: HostPorts, slot: Slot) -> str | None:
    """The ports that are nearest to a GPU; None where all are as near, as in many virtual machines."""
    places = ((port, own.adapter(port).slot) for port in own.up)
    levels = {port.name: distance(slot, place) for port, place in places if place}
    known = {level for level in levels.values() if level is not None}
    if len(known) < 2:
        return None
    least = min(known)
    return f"{', '.join(name for name, level in levels.items() if level == least)} {least.name}"


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """The fewest ports that are up on a host, the lowest rate, and how far a GPU is from its nearest port at most."""
    hosts = [own for own in hosts_with_ports(seen) if own.ports]
    rates = [port.bytes_per_s for own in hosts for port in own.up if port.bytes_per_s]
    levels = [level for own in hosts for level in own.nearest]
    found: dict[str, Scalar] = {"rdma.ports": min(len(own.up) for own in hosts)} if hosts else {}
    found |= {"rdma.min_port_bytes_per_s": min(rates)} if rates else {}
    return found | ({"rdma.farthest_gpu": max(levels).name} if levels else {})


def inventory(seen: Seen[Data]) -> dict[int, dict[str, str]]:
    """The RDMA ports of each host, by rate and link layer, and how many are down."""
    parts = {}
    for host, rows in answers_by_host(seen):
        ports = next(iter(rows.values())).ports
        up = Counter(
            f"{link_rate(port.bytes_per_s)} {port.link_layer or ('InfiniBand' if port.infiniband else 'Ethernet')}"
            for port in ports
            if port.active
        )
        texts = [f"{number} x {words}" for words, number in up.items()]
        down = len(ports) - up.total()
        parts[host.ranks[0]] = {"RDMA": ", ".join([*texts, *([f"{down} down"] if down else [])]) or NONE}
    return parts


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(columns=columns(seen), inventory=inventory(seen), figures=figures(seen))


CHECK: Check[Data] = Check(__name__, "HST007", "rdma-ports", Stage.HOST, Scope.NODE)
