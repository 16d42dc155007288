"""RDMA ports of each host: number, state, rate, GIDs and firmware.

NCCL uses every InfiniBand or RoCE port that is up and that NCCL_IB_HCA allows, and does not report the others: a host
with 7 of 8 ports, or with one port at half its rate, slows down all hosts. One rank of each host reads
/sys/class/infiniband; nothing is sent. Ports that NCCL takes are compared, which NCCL_IB_HCA allows (prefixes; exact
names after `=`; all but these after `^`; `:port`); none where NCCL uses sockets (gloo, NCCL_IB_DISABLE=1).

Hosts are compared with hosts that have the same models of GPUs, and what more than half of them have is expected.
Where there is no such majority, as between two hosts that differ, no host is blamed. A host alone is compared with
itself: ports of one board and link layer. What is alike on all hosts is not reported (ports that are disabled, a
frontend card), nor are versions of firmware within one release.

Findings:

Virtual functions that are down, ports of EFA (neither InfiniBand nor Ethernet) and GIDs of iWARP are not judged. What
happens to a port during the run is HST006's, interfaces and their addresses are RDZ003's, and what NCCL chose P2P004's.

Causes: a cable or transceiver that is not seated or dirty, a switch port, a card that fell off the bus, a port that was
disabled, no subnet manager (state INIT), an interface without an address, NCCL_IB_HCA of another cluster.

Fix: do what the finding says; until then, leave the host out.

Confirm by hand: On two hosts, `ibstat; ibdev2netdev; show_gids; grep -H .
/sys/class/infiniband/*/ports/*/{state,phys_state,rate,link_layer} /sys/class/infiniband/*/{fw_ver,board_id}`, and diff.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html),
NCCL_IB_HCA, NCCL_IB_GID_INDEX; NCCL's src/transport/net_ib/init.cc (which ports it takes) and connect.cc (which GID);
Linux's ABI document sysfs-class-infiniband; NVSentinel, NIC health monitor (states, rates, virtual functions).
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from shlex import quote
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import answers_by_host, leave_out, names_text
from ddpdiag.checks.odd import no_majority
from ddpdiag.model import Finding, Scalar, Severity, Trial
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import Port, nccl_takes_port, port_rule, rdma_ports
from ddpdiag.probes.net.rdma import (
    ROCE_V2,
    Adapter,
    Gid,
    gpu_models,
    nccl_settings,
    port_interfaces,
    rdma_adapters,
    roce_gids,
)
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count, link_rate

FINDINGS = {
    "hca": FindingSpec(
        "NCCL_IB_HCA allows no port that is up, so NCCL falls back to sockets: an error between several hosts."
    ),
    "missing": FindingSpec(
        "fewer ports than most hosts have: a card that is not on the bus or has no driver, or a port with "
        "another link layer. An error where no port is left, else a warning."
    ),
    "down": FindingSpec("fewer ports are up than on most hosts; an error where none is up, else a warning."),
    "slow": FindingSpec.warning(
        "a port has a lower rate, often because of fewer lanes, than on most hosts; or an InfiniBand port has one "
        "lane only."
    ),
    "gid": FindingSpec(
        "a RoCE port without a GID of RoCE v2 that has an address, while most hosts have one; or at NCCL_IB_GID_INDEX "
        "another GID than on most hosts or none. NCCL then cannot connect: an error between hosts."
    ),
    "firmware": FindingSpec.warning("firmware of another release than most adapters of that model have."),
    "uneven": FindingSpec.warning(
        "hosts differ in one of these, and no majority says which is right; no host is blamed."
    ),
    "unreadable": FindingSpec.not_seen("a host does not show its RDMA adapters, and the job may need them."),
}


class Data(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RDMA adapters of a host (None: /sys cannot be read), their ports, and by the port's name its GIDs (Ethernet
    only) and interfaces; the models of the GPUs; the variables that decide which ports NCCL takes."""

    adapters: tuple[Adapter, ...] | None = ()
    ports: tuple[Port, ...] = ()
    gids: dict[str, tuple[Gid, ...]] = {}
    interfaces: dict[str, tuple[str, ...]] = {}
    gpu_models: tuple[str, ...] = ()
    settings: dict[str, str] = {}

    @property
    def is_over_verbs(self) -> bool:
        """Whether NCCL's variables let it take RDMA ports."""
        no_verbs = self.settings.get("NCCL_IB_DISABLE", "0") != "0"
        # Plug-ins that build on it are IBext and IBext_v8.
        return not no_verbs and self.settings.get("NCCL_NET", "IB").upper().startswith("IB")

    @property
    def rule(self) -> str:
        """NCCL_IB_HCA."""
        return self.settings.get("NCCL_IB_HCA", "")

    @property
    def gid_index(self) -> int | None:
        """NCCL_IB_GID_INDEX; None where NCCL looks for the GID itself."""
        value = self.settings.get("NCCL_IB_GID_INDEX", "")
        return int(value) if value.isdecimal() else None

    @property
    def verbs_ports(self) -> tuple[Port, ...]:
        """Ports that NCCL's own network can take; others (EFA says "Unknown") are for plug-ins (net_ib/init.cc)."""
        return tuple(port for port in self.ports if port.link_layer in ("InfiniBand", "Ethernet"))


def measure(ctx: Context) -> Data:
    return look(os.environ, ctx.step)


def look(env: Mapping[str, str], step: Callable[[str], None]) -> Data:
    """Read /sys of this host; `step` is called with what is read next, since a driver may wait for an adapter."""
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
        gpu_models=gpu_models(sys),
        settings=nccl_settings(env),
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Once, unless HST004 saw that no host has an RDMA device."""
    rows = seen.of(hst004.CHECK).by_rank.values()
    is_without = bool(rows) and all(row.rdma == () for row in rows)
    return () if seen.trials or is_without else (new_trial(seen),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Nothing to look at where HST004 saw no RDMA device."""
    return unneeded(None if seen.trials or plan(seen) else "no host has an RDMA device")


@dataclass(frozen=True)
class HostPorts:
    """One host and the ports that NCCL takes there, or would if they were up."""

    name: str
    data: Data
    ports: tuple[Port, ...]

    @property
    def up(self) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if port.active)

    @cached_property
    def _adapters(self) -> dict[str, Adapter]:
        return {adapter.name: adapter for adapter in self.data.adapters or ()}

    def adapter(self, port: Port) -> Adapter:
        return self._adapters.get(port.adapter) or Adapter(name=port.adapter)

    def label(self, port: Port) -> str:
        """Such as "mlx5_0:1 (PCI 0000:1b:00.0)"."""
        pci = self.adapter(port).pci
        return f"{port.name} (PCI {pci})" if pci else port.name

    @property
    def layers(self) -> Counter[str]:
        """The number of ports by link layer."""
        return Counter(port.link_layer or "" for port in self.ports)

    @property
    def has_no_allowed_port(self) -> bool:
        """Whether NCCL_IB_HCA is set and allows none of the ports that are up."""
        return bool(self.data.rule and self.data.verbs_ports) and not self.up


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    ranks = [rank for rank, data in seen.by_rank.items() if data.adapters is None]
    # Within one host, and over gloo, no job needs RDMA.
    if ranks and len(seen.world.hosts) > 1 and seen.world.backend == "nccl":
        unreadable = seen.world.hosts_of(ranks)
        yield seen.finding(
            "unreadable",
            f"RDMA adapters of {names_text(unreadable)} cannot be read",
            "/sys/class cannot be listed there, so it is not known whether their RDMA ports work.",
            hosts=unreadable,
            fix="Mount /sys into the container (`docker run -v /sys:/sys:ro ...`), and run ddpdiag again. Or run "
            f"`ibstat` on {unreadable[0]} outside of the container: every port that the job needs should be Active.",
        )
    hosts = tuple(_hosts(seen))
    yield from _allow_nothing(seen, [own for own in hosts if own.has_no_allowed_port])
    # Hosts with other GPUs may have other networks.
    groups: dict[frozenset[str], list[HostPorts]] = defaultdict(list)
    for own in hosts:
        if not own.has_no_allowed_port:
            groups[frozenset(own.data.gpu_models)].append(own)
    for alike in groups.values():
        yield from _judge_group(seen, alike)


def _hosts(seen: Seen[Data]) -> Iterator[HostPorts]:
    """Each host on which NCCL may take RDMA ports, with those ports; none where a job uses gloo."""
    for host, rows in answers_by_host(seen):
        data = next(iter(rows.values()))
        if data.adapters is not None and data.is_over_verbs and seen.world.backend == "nccl":
            # A virtual function that is down is given to no container.
            virtual = {adapter.name for adapter in data.adapters if adapter.virtual}
            given = (port for port in data.verbs_ports if port.active or port.adapter not in virtual)
            ports = tuple(port for port in given if nccl_takes_port(data.rule, port.adapter, port.number))
            yield HostPorts(host.name, data, ports)


def _allow_nothing(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """NCCL_IB_HCA that leaves NCCL no port; one finding for all hosts with the same value."""
    for rule in dict.fromkeys(own.data.rule for own in hosts):
        alike = [own for own in hosts if own.data.rule == rule]
        names, ports = names_text([own.name for own in alike]), alike[0].data.verbs_ports
        states = [f"{port.name} {port.state or 'in an unknown state'}" for port in ports]
        yield seen.finding(
            "hca",
            f"NCCL_IB_HCA allows no RDMA port that is up on {names}",
            f"NCCL_IB_HCA is {rule}, and {alike[0].name} has {names_text(states)}. NCCL therefore uses TCP sockets, "
            "which are much slower.",
            # A rule that excludes all ports may be intended.
            severity=Severity.WARNING if port_rule(rule).excludes or len(seen.world.hosts) == 1 else Severity.ERROR,
            hosts=[own.name for own in alike],
            evidence={"NCCL_IB_HCA": rule, "ports": [*states]},
            fix="Run `unset NCCL_IB_HCA` in the job script (or remove it from /etc/nccl.conf or ~/.nccl.conf): NCCL "
            "then uses every port that is up. Or name adapters whose ports are up.",
        )


class Value(NamedTuple):
    """A property of one port. Levels compare within a group only: numbers by size, texts for equality."""

    group: str
    level: float | str
    text: str

    def is_odd(self, usual: "Value") -> bool:
        """Whether the value is worse than the usual one or, where values have no order, another one."""
        own, expected = self.level, usual.level
        is_ordered = isinstance(own, float) and isinstance(expected, float)
        return self.group == usual.group and (own < expected if is_ordered else own != expected)  # type: ignore[operator]


class Property(NamedTuple):
    """A property of ports that should be equal, the finding of a port that differs, and the command that shows it."""

    word: str
    what: str
    verbs: tuple[str, str]
    predicate: str
    value: Callable[[HostPorts, Port], Value | None]
    effect: str
    fix: Callable[[HostPorts, Sequence[Port]], str]
    command: str = "ibstat"

    def values(self, own: HostPorts) -> dict[Port, Value]:
        """The value of each port that has one; only the state is that of all ports, not only of those that are up."""
        ports = own.ports if self is STATE else own.up
        return {port: value for port in ports if (value := self.value(own, port)) is not None}


def _state(own: HostPorts, port: Port) -> Value:
    details = ", ".join(filter(None, (port.link_layer, "" if port.active else port.physical_state)))
    return Value(port.link_layer or "", float(port.active), f"{port.state or 'in an unknown state'} ({details})")


def _rate(own: HostPorts, port: Port) -> Value:
    lanes = f" ({count(port.lanes, 'lane')})" if port.lanes else ""
    return Value(port.link_layer or "", port.bytes_per_s or 0.0, link_rate(port.bytes_per_s) + lanes)


def _gid(own: HostPorts, port: Port) -> Value | None:
    """Whether NCCL finds a GID that leads beyond the link: RoCE v2 and an address of the interface; -1 for no GID.

    None for InfiniBand, iWARP, types that are hidden from a container, and where NCCL is to use RoCE v1.
    """
    gids, index = own.data.gids.get(port.name, ()), own.data.gid_index
    is_v1 = index is None and own.data.settings.get("NCCL_IB_ROCE_VERSION_NUM", "2") != "2"
    if is_v1 or not any(gid.kind for gid in gids) or own.adapter(port).kind not in ("CA", None):
        return None
    usable = [gid for gid in gids if index in (None, gid.index)]
    at = "" if index is None else f" at index {index} (NCCL_IB_GID_INDEX)"
    if any(gid.is_routed for gid in usable):
        return Value("", 1.0, f"a RoCE v2 GID with an IP address{at}")
    kinds = sorted({"link-local RoCE v2" if gid.kind == ROCE_V2 else gid.kind or "?" for gid in usable})
    return Value("", 0.0 if usable else -1.0, f"only {' and '.join(kinds)} GIDs{at}" if usable else f"no GID{at}")


def _firmware(own: HostPorts, port: Port) -> Value | None:
    """The release: 28.39.1002 of mlx5 is of release 28.39, where 28 is the chip; else the first number.

    Versions within a release are bug fixes, which may differ.
    """
    adapter = own.adapter(port)
    parts = (adapter.firmware or "").split(".")
    release = ".".join(parts[: 2 if (adapter.driver or "").startswith("mlx") else 1])
    return Value(adapter.model or "", release, f"firmware {adapter.firmware}") if release and adapter.model else None


def _fix_cable(own: HostPorts, port: Port) -> str:
    return (
        f"As root run `mlxlink -d {quote(port.adapter)} -m` on {own.name}: it shows the link's rate, lanes and errors. "
        "Ask the administrator to reseat or replace the cable and the transceiver, then to try another port of the "
        "switch."
    )


def _fix_state(own: HostPorts, ports: Sequence[Port]) -> str:
    """By the states of the first port (InfiniBand architecture specification, PortInfo)."""
    port, fix = ports[0], _fix_cable(own, ports[0])
    if port.state in ("INIT", "ARMED"):
        fix = (
            "The link works, but no subnet manager activates the port. Ask the administrator to start or check the "
            "subnet manager: `sminfo` shows whether one answers."
        )
    elif port.physical_state == "Disabled":
        fix = (
            f"As root enable the port on {own.name}: `mlxlink -d {quote(port.adapter)} -a UP`. Ask the administrator "
            "first why it is disabled: operators disable ports whose links fail again and again."
        )
    return f"{fix} Until then {leave_out([own.name])}."


def _fix_rate(own: HostPorts, ports: Sequence[Port]) -> str:
    return f"{_fix_cable(own, ports[0])} If it belongs to another network, {_exclude(ports)}."


def _exclude(ports: Sequence[Port]) -> str:
    names = ",".join(port.name for port in ports)
    return f"leave it out in NCCL_IB_HCA (`export NCCL_IB_HCA={quote(f'^={names}')}` leaves out only this)"


def _fix_gid(own: HostPorts, ports: Sequence[Port]) -> str:
    interface = quote(next(iter(own.data.interfaces.get(ports[0].name, ())), "INTERFACE"))
    index = ""
    if own.data.gid_index is not None:
        index = "Run `unset NCCL_IB_GID_INDEX` in the job script: since version 2.21 NCCL finds the GID itself. "
    return (
        f"{index}`show_gids` on {own.name} should list a v2 GID with an IP address. If there is none, run as root `ip "
        f"link set {interface} up; ip addr add ADDRESS/PREFIX dev {interface}`. Or {_exclude(ports)}."
    )


def _fix_firmware(own: HostPorts, ports: Sequence[Port]) -> str:
    adapter = quote(ports[0].adapter)
    return (
        f"If the other checks pass, you can train. Ask the administrator to install the expected firmware on "
        f"{own.name} (`flint -d {adapter} -i IMAGE burn`), and to reboot it."
    )


STATE = Property("down", "their RDMA ports", ("is", "are"), "not up", _state, "", _fix_state)
RATE = Property(
    "slow",
    "the rates of their RDMA ports",
    ("is", "are"),
    "slower than expected",
    _rate,
    " A job runs at the rate of its slowest port.",
    _fix_rate,
)
GID = Property(
    "gid",
    "the GIDs of their RoCE ports",
    ("has", "have"),
    "no RoCE v2 GID with an IP address",
    _gid,
    " Without one NCCL cannot connect the port.",
    _fix_gid,
    "show_gids",
)
FIRMWARE = Property(
    "firmware",
    "the firmware of their RDMA adapters",
    ("has", "have"),
    "another firmware release than expected",
    _firmware,
    "",
    _fix_firmware,
    "mlxfwmanager --query",
)


def _severity(seen: Seen[Data]) -> Severity:
    """The severity of what breaks jobs between hosts: a warning on one host alone, or where NCCL worked all the same.

    A network plug-in need not go over these ports.
    """
    return Severity.ERROR if len(seen.world.hosts) > 1 and not seen.job_backend_works else Severity.WARNING


def _judge_group(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """Findings about hosts of one kind. The properties of ports are compared between hosts with as many ports."""
    for own in hosts:
        yield from _odd_port_finding(seen, GID, own, _without_index(own), "", _severity(seen))
    if len(hosts) == 1:
        yield from _judge_alone(seen, hosts[0])
    else:
        usual = _usual_hosts(STATE, hosts)
        for own in hosts:
            if usual and (missing := (usual[0].layers - own.layers).total()):
                yield _missing_ports(seen, own, usual, len(hosts), missing)
        yield from _compare(seen, STATE, hosts)
        for what in (RATE, GID, FIRMWARE):
            yield from _compare(seen, what, [own for own in usual if what is not GID or not _without_index(own)])


def _without_index(own: HostPorts) -> dict[Port, Value]:
    """The ports whose table has no GID at NCCL_IB_GID_INDEX, each with what is expected."""
    expected = Value("", 1.0, "a RoCE v2 GID with an IP address")
    return {port: expected for port, value in GID.values(own).items() if value.level == -1.0}


def _groups(what: Property, hosts: Sequence[HostPorts]) -> dict[object, list[HostPorts]]:
    """Hosts by the values of their ports, in any order."""
    groups: dict[object, list[HostPorts]] = defaultdict(list)
    for own in hosts:
        groups[tuple(sorted(value[:2] for value in what.values(own).values()))].append(own)
    return groups


def _usual_hosts(what: Property, hosts: Sequence[HostPorts]) -> list[HostPorts]:
    """The hosts that have what more than half of them have; none without a majority."""
    return next((alike for alike in _groups(what, hosts).values() if 2 * len(alike) > len(hosts)), [])


def _compare(seen: Seen[Data], what: Property, hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """A finding for each host whose ports differ from those of most hosts, or one if there is no majority."""
    usual = _usual_hosts(what, hosts)
    for own in hosts if usual else ():
        works = what is RATE or what is FIRMWARE or (what is STATE and own.up)
        severity = Severity.WARNING if works else _severity(seen)
        where = f", as on {len(usual)} of {len(hosts)} hosts"
        yield from _odd_port_finding(seen, what, own, _odd_ports(what, own, usual), where, severity)
    groups = list(_groups(what, hosts).values())
    firsts = [alike[0] for alike in groups]
    differ = any(one.layers != other.layers or _odd_ports(what, one, [other]) for one in firsts for other in firsts)
    if not usual and differ:
        yield seen.finding(
            "uneven",
            f"hosts differ in {what.what}",
            " ".join(f"{names_text([own.name for own in alike])}: {_values_text(what, alike[0])}." for alike in groups)
            + no_majority((), "host"),
            severity=Severity.NOTE if what is FIRMWARE else None,
            evidence={"hosts": [own.name for own in hosts]},
            fix=f"Run `{what.command}` on {names_text([own.name for own in firsts])}, and ask the administrator which "
            "host is as it should be. With a third host of the same kind ddpdiag names the one that differs.",
        )


def _values_text(what: Property, own: HostPorts) -> str:
    """Such as "7 ports 400 Gbit/s (4 lanes), mlx5_3:1 200 Gbit/s (4 lanes)"; a few that differ are named."""
    ports: dict[str, list[str]] = defaultdict(list)
    for port, value in what.values(own).items():
        ports[value.text].append(port.name)
    parts = (
        f"{', '.join(names) if 4 * len(names) <= len(own.ports) else count(len(names), 'port')} {text}"
        for text, names in ports.items()
    )
    return ", ".join(parts) or "no RDMA port"


def _odd_ports(what: Property, own: HostPorts, usual: Sequence[HostPorts]) -> dict[Port, Value]:
    """The ports that differ from those of the usual hosts, each with the value that is expected."""
    values, elsewhere = what.values(own), [what.values(other) for other in usual]
    here, there = Counter(value[:2] for value in values.values()), Counter(value[:2] for value in elsewhere[0].values())
    suspects = {port: value for port, value in values.items() if (here - there)[value[:2]]}
    by_name = {
        port: _majority([like for ports in elsewhere for other, like in ports.items() if other.name == port.name])
        for port in suspects
    }
    sure = {port: like for port, like in by_name.items() if like is not None and suspects[port].is_odd(like)}
    if sure:
        return sure
    # Names may mean other cards here.
    lacking = [like for like in elsewhere[0].values() if (there - here)[like[:2]]]
    odd = {port: next(filter(value.is_odd, lacking), None) for port, value in suspects.items()}
    return {port: like for port, like in odd.items() if like is not None}


def _majority(values: Iterable[Value]) -> Value | None:
    """The value that more than half of these have."""
    listed = list(values)
    odd = odd_ones_out({number: value[:2] for number, value in enumerate(listed)})
    return next((value for value in listed if odd is None or value[:2] == odd.usual), None)


def _judge_alone(seen: Seen[Data], own: HostPorts) -> Iterator[Finding]:
    """Compare the ports of one host with each other: three at least of the same model, board and link layer.

    A frontend's card is another board than those of the GPUs' network, or has another link layer.
    """
    families: dict[tuple[str | None, ...], list[Port]] = defaultdict(list)
    for port in own.ports:
        adapter = own.adapter(port)
        families[adapter.model, adapter.board, port.link_layer].append(port)
    # A single lane is what is left of four, whatever other ports have.
    lanes = {p: Value("", 0.0, "4 lanes, or 2 on a split cable,") for p in own.up if p.infiniband and p.lanes == 1}
    for family in families.values():
        for what in (STATE, RATE, GID, FIRMWARE):
            values = {port: value for port, value in what.values(own).items() if port in family}
            usual = _majority(values.values()) if len(family) > 2 else None
            odd = {port: usual for port, value in values.items() if usual is not None and value.is_odd(usual)}
            where = f", as on {len(values) - len(odd)} of {len(values)} ports of this board"
            yield from _odd_port_finding(seen, what, own, odd, where, Severity.WARNING)
            lanes = {port: like for port, like in lanes.items() if what is not RATE or port not in odd}
    yield from _odd_port_finding(seen, RATE, own, lanes, "", Severity.WARNING)


def _odd_port_finding(
    seen: Seen[Data], what: Property, own: HostPorts, odd: Mapping[Port, Value], where: str, severity: Severity
) -> Iterator[Finding]:
    """The finding for the ports of a host that differ; nothing without such ports."""
    if not odd:
        return
    values, ports = what.values(own), list(odd)
    is_one = len(ports) == 1
    subject = f"RDMA port {ports[0].name}" if is_one else f"{len(ports)} RDMA ports"
    named = names_text([f"{own.label(port)} {what.verbs[0]} {values[port].text}" for port in ports])
    expected = " or ".join(dict.fromkeys(like.text for like in odd.values()))
    yield seen.finding(
        what.word,
        f"{subject} on {own.name} {what.verbs[not is_one]} {what.predicate}",
        f"{named}; {expected} is expected{where}.{what.effect}",
        severity=severity,
        hosts=[own.name],
        evidence={
            "ports": [port.name for port in ports],
            "values": [values[port].text for port in ports],
            "expected": expected,
        },
        fix=what.fix(own, ports),
    )


def _missing_ports(seen: Seen[Data], own: HostPorts, usual: Sequence[HostPorts], hosts: int, missing: int) -> Finding:
    """A host with fewer ports of a link layer; the PCI addresses are those where only most other hosts have a card."""
    places = Counter(adapter.pci for other in usual for adapter in other.data.adapters or () if adapter.pci)
    here = {adapter.pci for adapter in own.data.adapters or ()}
    gone = sorted(pci for pci, times in places.items() if 2 * times > len(usual) and pci not in here)
    # Without a card, the addresses behind it may be others.
    gone = gone if len(gone) <= missing else []
    at = f" Most hosts have an adapter at PCI {names_text(gone)}; {own.name} has none there." if gone else ""
    fix = (
        f"Run `lspci -nn | grep -i -E 'infiniband|ethernet'` on {own.name}. If the card is not listed, ask the "
        f"administrator to power-cycle {own.name}. If it is listed, `dmesg -T | grep -i mlx5` (as root) shows why the "
        "driver does not use it."
    )
    if len(own.ports) >= len(usual[0].ports):
        fix = (
            f"As root compare `mlxconfig -d ADAPTER q LINK_TYPE_P1` (1 is InfiniBand, 2 is Ethernet) on {own.name} and "
            f"{usual[0].name}, set it like there with `mlxconfig -d ADAPTER set LINK_TYPE_P1=1`, and reboot."
        )
    return seen.finding(
        "missing",
        f"{own.name} has {count(missing, 'RDMA port')} fewer than most hosts",
        f"{own.name} has {_layers_text(own)}; {len(usual)} of {hosts} hosts have {_layers_text(usual[0])}.{at}",
        severity=Severity.WARNING if own.up else _severity(seen),
        hosts=[own.name],
        evidence={"ports": [port.name for port in own.ports], "missing": missing, "missing_pci": [*gone]},
        fix=f"{fix} Until then {leave_out([own.name])}.",
    )


def _layers_text(own: HostPorts) -> str:
    """Such as "7 InfiniBand ports and 1 Ethernet port"."""
    return " and ".join(count(number, f"{layer} port") for layer, number in own.layers.items()) or "no RDMA port"


def report(seen: Seen[Data]) -> Contribution:
    """The ports of each host, the fewest that are up on a host, and the lowest rate."""
    hosts = [own for own in _hosts(seen) if own.ports]
    rates = [port.bytes_per_s for own in hosts for port in own.up if port.bytes_per_s]
    figures: dict[str, Scalar] = {"rdma.ports": min(len(own.up) for own in hosts)} if hosts else {}
    figures |= {"rdma.min_port_bytes_per_s": min(rates)} if rates else {}
    inventory = {}
    for host, rows in answers_by_host(seen):
        ports = next(iter(rows.values())).ports
        up = Counter(f"{link_rate(port.bytes_per_s)} {port.link_layer or NONE}" for port in ports if port.active)
        texts = [f"{number} x {words}" for words, number in up.items()]
        down = len(ports) - up.total()
        inventory[host.ranks[0]] = {"RDMA": ", ".join([*texts, *([f"{down} down"] if down else [])]) or NONE}
    return Contribution(inventory=inventory, figures=figures)


CHECK: Check[Data] = Check(__name__, "HST007", "rdma-ports", Stage.HOST, Scope.HOST)
