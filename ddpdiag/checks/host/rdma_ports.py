"""RDMA ports of each host: number, state, rate, GIDs and firmware.

NCCL uses every InfiniBand or RoCE port that is up and that NCCL_IB_HCA allows, and does not report the others: a host
with 7 of 8 ports, or with one port at half its rate, slows down all hosts. Hosts are compared with hosts that have the
same models of GPUs, and the values that more than half of them have are expected. On a single host, ports of the same
board and link layer are compared. Ports that are equal on all hosts are not reported (disabled ones, a frontend card).

Findings:

Virtual functions that are down, ports of EFA (neither InfiniBand nor Ethernet) and GIDs of iWARP are not judged.
Counters of ports are HST006's, interfaces and their addresses RDZ003's, and NCCL's choice P2P004's.

Causes: a cable or transceiver, a switch port, a card that fell off the bus, a port that was disabled, no subnet manager
(state INIT), an interface without an address, NCCL_IB_HCA of another cluster.

Fix: do what the finding says; until then, leave the host out.

Confirm by hand: On two hosts, `ibstat; ibdev2netdev; show_gids; grep -H .
/sys/class/infiniband/*/ports/*/{state,phys_state,rate,link_layer} /sys/class/infiniband/*/{fw_ver,board_id}`, and diff.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html),
NCCL_IB_HCA, NCCL_IB_GID_INDEX; NCCL's src/transport/net_ib/init.cc (which ports it takes) and connect.cc (which GID);
Linux's ABI document sysfs-class-infiniband; NVSentinel, NIC health monitor (states, rates, virtual functions).
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from shlex import quote
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import data_by_host, leave_out, names_text
from ddpdiag.checks.odd import no_majority
from ddpdiag.model import Finding, Severity, Trial
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import Port, nccl_allows_port, port_rule, rdma_ports
from ddpdiag.probes.net.rdma import Adapter, Gid, gpu_device_ids, nccl_settings, rdma_adapters, roce_gids
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import count, link_rate

FINDINGS = {
    "hca": FindingSpec(
        "NCCL_IB_HCA allows no port that is up, so NCCL falls back to sockets: an error between several hosts."
    ),
    "missing": FindingSpec(
        "fewer ports of a link layer than most hosts have: a card that is not on the bus or has no driver, or a port "
        "with another link layer. An error where no port is left, else a warning."
    ),
    "down": FindingSpec("fewer ports are up than on most hosts; an error where none is up, else a warning."),
    "slow": FindingSpec.warning("a port has a lower rate, often because of fewer lanes, than on most hosts."),
    "gid": FindingSpec(
        "a RoCE port without a GID of RoCE v2 that has an address (at NCCL_IB_GID_INDEX, if that is set), while most "
        "hosts have one. NCCL then cannot connect: an error between hosts."
    ),
    "firmware": FindingSpec.warning("firmware of an older release than most adapters of that model have."),
    "uneven": FindingSpec.warning(
        "hosts differ in one of these, and no majority says which is right; no host is blamed."
    ),
    "unreadable": FindingSpec.unchecked("a host does not show its RDMA adapters, and the job may need them."),
}


class Data(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RDMA adapters of a host (None: /sys cannot be read), their ports, the GIDs of Ethernet ports by the port's name,
    the models of the GPUs, and `settings`, the values of the variables that decide which ports NCCL uses."""

    adapters: tuple[Adapter, ...] | None = ()
    ports: tuple[Port, ...] = ()
    gids: dict[str, tuple[Gid, ...]] = {}
    gpu_models: tuple[str, ...] = ()
    settings: dict[str, str] = {}

    @property
    def allows_verbs(self) -> bool:
        """Whether NCCL's variables allow NCCL to use RDMA ports."""
        is_disabled = self.settings.get("NCCL_IB_DISABLE", "0") != "0"
        # IBext and IBext_v8 are plug-ins that build on IB.
        return not is_disabled and self.settings.get("NCCL_NET", "IB").upper().startswith("IB")

    @property
    def nccl_ib_hca(self) -> str:
        """The value of NCCL_IB_HCA; empty if it is unset."""
        return self.settings.get("NCCL_IB_HCA", "")

    @property
    def verbs_ports(self) -> tuple[Port, ...]:
        """The ports that NCCL can use without a plug-in (net_ib/init.cc). EFA's have the link layer "Unknown"."""
        return tuple(port for port in self.ports if port.link_layer in ("InfiniBand", "Ethernet"))


def measure(ctx: Context) -> Data:
    return read_rdma_data(os.environ, ctx.step)


def read_rdma_data(env: Mapping[str, str], step: Callable[[str], None]) -> Data:
    """Read this host's RDMA ports from /sys. `step` announces each part, because a driver may hang in any of them."""
    sys = sys_root(env)
    step("RDMA adapters")
    adapters = rdma_adapters(sys)
    step("RDMA ports")
    ports = rdma_ports(sys)
    step("GIDs")
    gids = {port.name: roce_gids(sys, port) for port in ports if port.link_layer == "Ethernet"}
    return Data(adapters=adapters, ports=ports, gids=gids, gpu_models=gpu_device_ids(sys), settings=nccl_settings(env))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial, unless HST004 found that no host has an RDMA device."""
    return () if seen.trials or skip(seen) else (new_trial(seen),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    rows = seen.of(hst004.CHECK).by_rank.values()
    return unneeded("no host has an RDMA device" if rows and all(row.rdma == () for row in rows) else None)


class HostPorts(NamedTuple):
    """A host with its name and data, and those of its ports that NCCL may use."""

    name: str
    data: Data
    ports: tuple[Port, ...]

    @property
    def active_ports(self) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if port.active)

    def adapter(self, port: Port) -> Adapter:
        """The adapter of a port; one without details if /sys does not show it."""
        adapters = self.data.adapters or ()
        return next((adapter for adapter in adapters if adapter.name == port.adapter), Adapter(name=port.adapter))

    @property
    def layer_counts(self) -> Counter[str]:
        """The number of ports by link layer."""
        return Counter(port.link_layer or "" for port in self.ports)


class PortValue(NamedTuple):
    """The value of a property of one port. Values of one `group` can be compared: a lower `level` is worse."""

    group: str
    level: tuple[float, ...]
    text: str


def _state_value(host: HostPorts, port: Port) -> PortValue:
    physical = f" ({port.physical_state})" if port.physical_state and not port.active else ""
    return PortValue(port.link_layer or "", (port.active,), f"state {port.state or 'unknown'}{physical}")


def _rate_value(host: HostPorts, port: Port) -> PortValue | None:
    lanes = f" ({count(port.lanes, 'lane')})" if port.lanes else ""
    level = (port.bytes_per_s or 0.0,)
    return PortValue(port.link_layer or "", level, link_rate(port.bytes_per_s) + lanes) if port.active else None


def _gid_value(host: HostPorts, port: Port) -> PortValue | None:
    """Whether NCCL finds a GID with an IP address; None for InfiniBand, iWARP, and if the types of GIDs are hidden."""
    gids, index = host.data.gids.get(port.name, ()), host.data.settings.get("NCCL_IB_GID_INDEX", "")
    if not port.active or not any(gid.kind for gid in gids) or host.adapter(port).kind not in ("CA", None):
        return None
    is_usable = any(gid.is_routed for gid in gids if index in ("", str(gid.index)))
    at = f" at NCCL_IB_GID_INDEX={index}" if index else ""
    return PortValue("", (is_usable,), f"{'a' if is_usable else 'no'} RoCE v2 GID with an IP address{at}")


def _firmware_value(host: HostPorts, port: Port) -> PortValue | None:
    """The firmware's release, such as 28.39 for 28.39.1002; the third number (bug fixes) may differ between ports."""
    adapter = host.adapter(port)
    release = tuple(float(part) for part in (adapter.firmware or "").split(".")[:2] if part.isdecimal())
    known = port.active and release and adapter.model
    return PortValue(adapter.model or "", release, f"firmware {adapter.firmware}") if known else None


class Property(NamedTuple):
    """A property in which ports should be equal, and the finding on a port whose value is worse. `word` is the second
    part of the finding's code, `predicate` ends its title. `value` reads the property of a port (None: it has none).
    `fix` is a format with fields for the host, the adapter, and how to leave out host or ports."""

    word: str
    predicate: str
    value: Callable[[HostPorts, Port], PortValue | None]
    fix: str

    def values(self, host: HostPorts) -> dict[Port, PortValue]:
        """The value of each port of the host, without ports that have no value."""
        return {port: value for port in host.ports if (value := self.value(host, port)) is not None}


_CABLE = (
    "As root run `mlxlink -d {adapter} -m` on {host}: it shows the link's rate, lanes and errors. Ask the "
    "administrator to reseat or replace the cable and the transceiver, then to try another port of the switch."
)
STATE = Property(
    "down",
    "down",
    _state_value,
    f"{_CABLE} In state INIT the link works, but no subnet manager activates the port: `sminfo` shows whether one "
    "answers. A port that is Disabled may have been switched off because its link failed (`mlxlink -d {adapter} -a "
    "UP`). Until then {without_host}.",
)
PROPERTIES = (
    STATE,
    Property(
        "slow", "slower than expected", _rate_value, f"{_CABLE} If it belongs to another network, {{without_ports}}."
    ),
    Property(
        "gid",
        "without a RoCE v2 GID that has an IP address",
        _gid_value,
        "Unset NCCL_IB_GID_INDEX if it is set: since version 2.21 NCCL finds the GID itself. `show_gids` on {host} "
        "should list a v2 GID with an IP address. If there is none, run as root `ip addr add ADDRESS/PREFIX dev "
        "INTERFACE`. Or {without_ports}.",
    ),
    Property(
        "firmware",
        "with older firmware than expected",
        _firmware_value,
        "If the other checks pass, you can train. Ask the administrator to install the expected firmware on {host} "
        "(`flint -d {adapter} -i IMAGE burn`), and to reboot it.",
    ),
)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    unreadable_ranks = [rank for rank, data in seen.by_rank.items() if data.adapters is None]
    # A job on one host, or over gloo, needs no RDMA.
    if unreadable_ranks and len(seen.world.hosts) > 1 and seen.world.backend == "nccl":
        unreadable = seen.world.host_names(unreadable_ranks)
        yield seen.finding(
            "unreadable",
            f"RDMA adapters of {names_text(unreadable)} cannot be read",
            "/sys/class cannot be listed there, so it is not known whether their RDMA ports work.",
            hosts=unreadable,
            fix="Mount /sys into the container (`docker run -v /sys:/sys:ro ...`), and run ddpdiag again. Or run "
            f"`ibstat` on {unreadable[0]} outside of the container: every port that the job needs should be Active.",
        )
    # Hosts with different GPUs may have different networks.
    hosts_by_gpus: dict[frozenset[str], list[HostPorts]] = defaultdict(list)
    hosts_by_rule: dict[str, list[HostPorts]] = defaultdict(list)
    for host in _hosts_with_rdma(seen):
        if host.data.nccl_ib_hca and host.data.verbs_ports and not host.active_ports:
            hosts_by_rule[host.data.nccl_ib_hca].append(host)
        else:
            hosts_by_gpus[frozenset(host.data.gpu_models)].append(host)
    for rule, hosts in hosts_by_rule.items():
        yield _no_port_allowed(seen, rule, hosts)
    for hosts in hosts_by_gpus.values():
        yield from _judge_single_host(seen, hosts[0]) if len(hosts) == 1 else _judge_group(seen, hosts)


def _hosts_with_rdma(seen: Seen[Data]) -> Iterator[HostPorts]:
    """Each host on which NCCL may use RDMA, with the ports that NCCL may use; no host if the job uses gloo."""
    for host, rows in data_by_host(seen):
        data = next(iter(rows.values()))
        if data.adapters is not None and data.allows_verbs and seen.world.backend == "nccl":
            # A virtual function that is down is assigned to no container or virtual machine, so it is left out.
            virtual_names = {adapter.name for adapter in data.adapters if adapter.virtual}
            assigned = [port for port in data.verbs_ports if port.active or port.adapter not in virtual_names]
            allowed = (port for port in assigned if nccl_allows_port(data.nccl_ib_hca, port.adapter, port.number))
            yield HostPorts(host.name, data, tuple(allowed))


def _no_port_allowed(seen: Seen[Data], rule: str, hosts: Sequence[HostPorts]) -> Finding:
    """The finding on hosts on which NCCL_IB_HCA (`rule`) allows no port that is up."""
    names = [host.name for host in hosts]
    states = [f"{port.name} {port.state or 'in an unknown state'}" for port in hosts[0].data.verbs_ports]
    return seen.finding(
        "hca",
        f"NCCL_IB_HCA allows no RDMA port that is up on {names_text(names)}",
        f"NCCL_IB_HCA is {rule}, and {names[0]} has {names_text(states)}. NCCL therefore uses TCP sockets, which are "
        "much slower.",
        # A value that excludes all ports ("^mlx5") may be intended.
        severity=Severity.WARNING if port_rule(rule).excludes or len(seen.world.hosts) == 1 else Severity.ERROR,
        hosts=names,
        evidence={"NCCL_IB_HCA": rule, "ports": [*states]},
        fix="Run `unset NCCL_IB_HCA` in the job script (or remove it from /etc/nccl.conf or ~/.nccl.conf): NCCL then "
        "uses every port that is up. Or name adapters whose ports are up.",
    )


def _judge_group(seen: Seen[Data], hosts: Sequence[HostPorts]) -> Iterator[Finding]:
    """Findings on differences between hosts with equal GPUs."""
    # If the job's backend works, a network plug-in may do without these ports.
    severity = Severity.WARNING if seen.job_backend_works else Severity.ERROR
    # The other properties are compared only between hosts on which as many ports are up as on most hosts.
    comparable = _usual_hosts(STATE, hosts)
    for host in hosts:
        if comparable and (missing := (comparable[0].layer_counts - host.layer_counts).total()):
            importance = Severity.WARNING if host.active_ports else severity
            yield _missing_ports(seen, host, comparable[0], missing, importance)
    for prop in PROPERTIES:
        compared = hosts if prop is STATE else comparable
        usual_hosts = _usual_hosts(prop, compared)
        for host in compared if usual_hosts else ():
            if worse := _worse_ports(prop.values(host), prop.values(usual_hosts[0])):
                where = f"on {len(usual_hosts)} of {len(compared)} hosts"
                is_serious = prop.word == "gid" or not host.active_ports
                yield _port_finding(seen, prop, host, worse, where, severity if is_serious else Severity.WARNING)
        if compared and not usual_hosts:
            hosts_by_values: dict[str, list[str]] = defaultdict(list)
            for host in compared:
                hosts_by_values[_values_text(prop, host)].append(host.name)
            texts = [f"{names_text(names)}: {text}." for text, names in hosts_by_values.items()]
            yield seen.finding(
                "uneven",
                "hosts differ in their RDMA ports",
                " ".join(texts) + no_majority((), "host"),
                severity=Severity.NOTE if prop.word == "firmware" else None,
                evidence={"hosts": [host.name for host in compared]},
                fix=f"Run `ibstat; show_gids` on {names_text([names[0] for names in hosts_by_values.values()])}, and "
                "ask the administrator which host is as it should be.",
            )


def _usual_hosts(prop: Property, hosts: Sequence[HostPorts]) -> list[HostPorts]:
    """The hosts whose values of `prop` equal those of more than half of the hosts; empty without a majority."""
    values = [tuple(sorted(value[:2] for value in prop.values(host).values())) for host in hosts]
    odd = find_odd_ranks(dict(enumerate(values)))
    return [host for host, value in zip(hosts, values, strict=True) if odd is None or value == odd.majority]


def _values_text(prop: Property, host: HostPorts) -> str:
    """The values of a host's ports in words: "7 x 400 Gbit/s (4 lanes), 1 x 200 Gbit/s (4 lanes)"."""
    counts = Counter(value.text for value in prop.values(host).values())
    return ", ".join(f"{number} x {text}" for text, number in counts.items()) or "no RDMA port"


def _worse_ports(values: Mapping[Port, PortValue], usual: Mapping[Port, PortValue]) -> dict[Port, PortValue]:
    """The ports of a host that are worse than those of a usual host, each with the expected value. Not the
    ports are compared, but how many have each value: a value is missing if more ports of the usual host have it."""
    counts, usual_counts = (Counter(value[:2] for value in ports.values()) for ports in (values, usual))
    missing_values = [value for value in usual.values() if (usual_counts - counts)[value[:2]]]
    worse: dict[Port, PortValue] = {}
    for port, value in values.items():
        better = [other for other in missing_values if other.group == value.group and other.level > value.level]
        if better and (counts - usual_counts)[value[:2]]:
            worse[port] = better[0]
    # Of two slow ports, one may be slow on all hosts. So ports are preferred whose namesake on the usual host has the
    # expected value. If there are none (a name may belong to another card there), all worse ports are returned.
    levels = {port.name: value.level for port, value in usual.items()}
    return {port: value for port, value in worse.items() if levels.get(port.name) == value.level} or worse


def _judge_single_host(seen: Seen[Data], host: HostPorts) -> Iterator[Finding]:
    """Findings on ports that are worse than most ports of the same model, board and link layer (at least three). A card
    for a frontend network is not compared with the cards of the GPUs' network: its board or link layer differs."""
    families: dict[tuple[str | None, ...], list[Port]] = defaultdict(list)
    for port in host.ports:
        families[host.adapter(port).model, host.adapter(port).board, port.link_layer].append(port)
    for prop, family in product(PROPERTIES, families.values()):
        values = {port: value for port, value in prop.values(host).items() if port in family}
        odd = find_odd_ranks({index: value.level for index, value in enumerate(values.values())})
        usual = next((value for value in values.values() if odd and value.level == odd.majority), None)
        worse = {port: usual for port, value in values.items() if usual and value.level < usual.level}
        if len(family) > 2 and worse:
            where = f"on {len(values) - len(worse)} of {len(values)} ports of this board"
            yield _port_finding(seen, prop, host, worse, where, Severity.WARNING)


def _port_finding(
    seen: Seen[Data], prop: Property, host: HostPorts, worse: Mapping[Port, PortValue], where: str, severity: Severity
) -> Finding:
    """The finding on ports of one host that are worse than the values in `worse`; `where` says who has these values."""
    values, names = prop.values(host), [port.name for port in worse]
    pci = {port: f" (PCI {adapter.pci})" if (adapter := host.adapter(port)).pci else "" for port in worse}
    expected = " or ".join(dict.fromkeys(value.text for value in worse.values()))
    return seen.finding(
        prop.word,
        f"{host.name} has {count(len(names), 'RDMA port')} {prop.predicate}",
        f"{names_text([f'{port.name}{pci[port]} has {values[port].text}' for port in worse])}; {expected} is expected, "
        f"as {where}.",
        severity=severity,
        hosts=[host.name],
        evidence={"ports": [*names], "values": [values[port].text for port in worse], "expected": expected},
        fix=prop.fix.format(
            host=host.name,
            adapter=quote(next(iter(worse)).adapter),
            without_host=leave_out([host.name]),
            without_ports=f"leave it out: `export NCCL_IB_HCA={quote('^=' + ','.join(names))}`",
        ),
    )


def _missing_ports(seen: Seen[Data], host: HostPorts, usual: HostPorts, number: int, severity: Severity) -> Finding:
    """The finding on a host with `number` fewer ports than a usual host, with the PCI addresses of missing cards."""
    present = {adapter.pci for adapter in host.data.adapters or ()}
    missing_pci = [adapter.pci for adapter in usual.data.adapters or () if adapter.pci and adapter.pci not in present]
    # If a card is missing, cards behind it may have changed their addresses.
    missing_pci = missing_pci if len(missing_pci) <= number else []
    at = f", and an adapter at PCI {names_text(missing_pci)}, where {host.name} has none" if missing_pci else ""
    return seen.finding(
        "missing",
        f"{host.name} has {count(number, 'RDMA port')} fewer than most hosts",
        f"{host.name} has {_layers_text(host)}; most hosts, such as {usual.name}, have {_layers_text(usual)}{at}.",
        severity=severity,
        hosts=[host.name],
        evidence={"ports": [port.name for port in host.ports], "missing": number, "missing_pci": [*missing_pci]},
        fix=f"Run `lspci -nn | grep -i -E 'infiniband|ethernet'` on {host.name}. If the card is not listed, ask the "
        f"administrator to power-cycle {host.name}. If it is listed, `dmesg -T | grep -i mlx5` (as root) shows why the "
        "driver does not use it, and `mlxconfig -d ADAPTER q LINK_TYPE_P1` which link layer is set (1 is InfiniBand, 2 "
        f"is Ethernet). Until then {leave_out([host.name])}.",
    )


def _layers_text(host: HostPorts) -> str:
    """The number of ports by link layer in words: "7 InfiniBand ports and 1 Ethernet port"."""
    return " and ".join(count(number, f"{layer} port") for layer, number in host.layer_counts.items()) or "no RDMA port"


def report(seen: Seen[Data]) -> Contribution:
    """Contribute to the report the RDMA ports of each host: the number of ports by rate and link layer."""
    inventory = {}
    for host, rows in data_by_host(seen):
        ports = next(iter(rows.values())).ports
        kinds = Counter(
            f"{link_rate(port.bytes_per_s)} {port.link_layer or NONE}" if port.active else "down" for port in ports
        )
        texts = [f"{number} {'' if kind == 'down' else 'x '}{kind}" for kind, number in kinds.items()]
        inventory[host.ranks[0]] = {"RDMA": ", ".join(texts) or NONE}
    return Contribution(inventory=inventory)


CHECK: Check[Data] = Check(__name__, "HST007", "rdma-ports", Stage.HOST, Scope.HOST)
