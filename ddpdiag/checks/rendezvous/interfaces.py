"""The interface that every host offers to its peers.

gloo takes the first address of the interface that GLOO_SOCKET_IFNAME names. If the variable is unset, gloo takes the
address of the host's own name. NCCL takes the interfaces that NCCL_SOCKET_IFNAME allows. If it is unset, NCCL takes
`ib*`, else all but docker*, lo* and virbr*, and so perhaps veth*, br-* or tun*, which exist on one host only. The
address of a wrong interface cannot be reached from other hosts, and all ranks hang. GLOO_SOCKET_IFNAME lists exact
names, separated by commas. NCCL_SOCKET_IFNAME lists prefixes, exact names after `=`, or excluded names after `^`
(`^docker0` excludes docker0 only, so NCCL may take lo).

Findings and their causes (an error for the library that the job uses, otherwise a warning):

A host's own name that resolves to loopback is RDZ002's finding.

Fix: export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface that leads to the other hosts; each finding
shows it.

Confirm by hand: On every host `ip -br addr; ip route get ADDRESS; getent hosts $(hostname); env | grep SOCKET_IFNAME`.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html),
NCCL_SOCKET_IFNAME; NCCL's src/misc/socket.cc (the order of interfaces); gloo's transport/tcp/device.cc.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import Host, data_by_host, names_text
from ddpdiag.checks.rendezvous import mesh
from ddpdiag.checks.rendezvous.links import reached_offers
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net import interfaces as net
from ddpdiag.probes.net.tcp_connect import is_loopback, resolve
from ddpdiag.text import link_rate

FINDINGS = {
    "missing": FindingSpec(
        "the variable names an interface that this host does not have: names differ between hosts (eno1, eth0)."
    ),
    "unusable": FindingSpec(
        "the interface exists, but other hosts cannot use it: no carrier, no address, or only a loopback or link-local "
        "one."
    ),
    "shared": FindingSpec(
        "several hosts would offer the same address, such as 172.17.0.1 of docker0, or that of a cloned machine."
    ),
    "wrong": FindingSpec(
        "the address belongs to another interface than the route to MASTER_ADDR; an error if the other hosts could "
        "not connect to it in RDZ004, no finding if all of them could."
    ),
    "unreadable": FindingSpec.unchecked("the interfaces of a host could not be read."),
}

_NAME_SECONDS = 5.0
_ROUTE = '`ip route get ADDRESS`, with another host\'s address, shows it behind "dev"'
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


class Data(Struct, frozen=True, kw_only=True):
    """A host's interfaces (None: they cannot be listed), and those of its addresses to which its own name resolves.
    `variables` holds GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. `source_address` is the host's address on the route to
    MASTER_ADDR. `network_namespace` is the namespace's number; containers of a host may share one."""

    interfaces: tuple[net.Interface, ...] | None
    own_addresses: tuple[str, ...]
    variables: net.Ifnames
    source_address: str | None
    network_namespace: int | None = None

    def interface_for(self, library: str) -> net.Interface | None:
        """The interface whose address a library ("gloo" or "nccl") will offer; None if it is not known."""
        known = self.interfaces or ()
        return net.interface_of(net.chosen_address(library, self.variables, self.own_addresses, known), known)


class Choice(Struct, frozen=True):
    """The `address` that a library ("gloo" or "nccl") will offer on a host (None: it finds no address). `severity` is
    that of findings on this choice. `route_interface` is the interface of the route to MASTER_ADDR."""

    library: str
    severity: Severity
    host: Host
    data: Data
    interfaces: tuple[net.Interface, ...]
    address: str | None
    route_interface: net.Interface | None

    @property
    def variable_value(self) -> str | None:
        """The value of the library's variable, or None if it is not set."""
        return self.data.variables.nccl if self.library == "nccl" else self.data.variables.gloo

    @property
    def assignment(self) -> str:
        return f"{_VARIABLES[self.library]}={self.variable_value}"

    def fix(self, *, has_common_name: bool) -> str:
        """The fix: the variable with the value to set. `has_common_name`: the value is right for all hosts."""
        variable, host = _VARIABLES[self.library], self.host.name
        if self.route_interface is None:
            return f"Set {variable} on {host} to the interface that leads to the other hosts; {_ROUTE}."
        name = self.route_interface.name
        if has_common_name:
            reason = f"on each of them {name} leads to rank 0's host."
            return f"Set {variable}={name} in the job script, for all hosts: {reason}"
        return f"Set {variable}={name} for the ranks on {host} only: there {name} leads to rank 0's host."


def measure(ctx: Context) -> Data:
    """List the interfaces, look up the host's own name, and ask the kernel for the route to MASTER_ADDR."""
    ctx.step("look up the own name")
    own_addresses = net.filter_own(resolve(socket.gethostname(), 0, _NAME_SECONDS) or ())
    master_addr = os.environ.get("MASTER_ADDR", "")
    ctx.step(f"look up {master_addr}")
    master_addresses = resolve(master_addr, 0, _NAME_SECONDS) or ()
    return Data(
        interfaces=net.interfaces(sys_root(os.environ)),
        own_addresses=own_addresses,
        variables=net.ifnames(os.environ),
        source_address=net.source_towards(master_addresses),
        network_namespace=net.network_namespace(),
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on interfaces that cannot be listed, variables that select no usable one, and unusable addresses."""
    choices: list[Choice] = []
    for host, rows in data_by_host(seen):
        data = next(iter(rows.values()))
        if data.interfaces is None:
            yield seen.finding(
                "unreadable",
                f"the interfaces of {host.name} cannot be listed",
                f"{host.name} does not report its network interfaces. So it is not known which of them a job would "
                "use.",
                hosts=[host.name],
                fix=f"Run `ip -br addr` in the job on {host.name}. If it fails in a container, mount /proc, and allow "
                "netlink sockets in the seccomp profile (`docker run --security-opt seccomp=unconfined` allows every "
                "call).",
            )
            continue
        # A job over nccl also uses gloo. In other jobs NCCL is checked only if its variable is set.
        needs_nccl = net.library_of(seen.world.backend) == "nccl" or data.variables.nccl
        route = net.interface_of(data.source_address, data.interfaces)
        for library in ("nccl", "gloo") if needs_nccl else ("gloo",):
            severity = Severity.ERROR if seen.world.backend == library else Severity.WARNING
            address = net.chosen_address(library, data.variables, data.own_addresses, data.interfaces)
            choice = Choice(library, severity, host, data, data.interfaces, address, route)
            choices.append(choice)
            yield from _unusable_names(seen, choice) if choice.variable_value else ()
    is_reached_by_offer = reached_offers(seen.of(mesh.CHECK))
    for library in _VARIABLES:
        by_address: dict[str, list[Choice]] = {}
        for choice in choices:
            if choice.library == library and choice.address is not None:
                by_address.setdefault(choice.address, []).append(choice)
        # Loopback and link-local addresses (with "%") are equal on many hosts, and another finding reports them.
        shared = {a: own for a, own in by_address.items() if len(own) > 1 and not is_loopback(a) and "%" not in a}
        for address, choices_of_address in shared.items():
            yield from _shared_address(seen, address, choices_of_address)
        for choice in choices:
            if choice.library == library and choice.address is not None and choice.address not in shared:
                yield from _unusable_address(seen, choice, choice.address, is_reached_by_offer)


def _choice_finding(
    seen: Seen[Data], word: str, choice: Choice, title: str, message: str, *, severity: Severity | None = None
) -> Finding:
    """The finding on one choice, with the fix that sets the variable; `severity` replaces that of the choice."""
    env = _common_env(seen)
    return seen.finding(
        word,
        title,
        message,
        severity=severity or choice.severity,
        hosts=[choice.host.name],
        evidence={"address": choice.address, "source_towards_coordinator": choice.data.source_address},
        fix=choice.fix(has_common_name=bool(env)),
        env=env,
    )


def _common_env(seen: Seen[Data]) -> Mapping[str, str]:
    """Both variables, set to the interface that leads to MASTER_ADDR; empty if its name differs or is not known."""
    routes = [net.interface_of(data.source_address, data.interfaces or ()) for data in seen.by_rank.values()]
    names = {route.name if route else "lo" for route in routes}
    return dict.fromkeys(_VARIABLES.values(), names.pop()) if len(names) == 1 and names != {"lo"} else {}


def _unusable_names(seen: Seen[Data], choice: Choice) -> Iterator[Finding]:
    """Findings on interfaces that the variable names, and that do not exist or cannot be used."""
    host = choice.host.name
    named_interfaces = _named_interfaces(choice)
    if missing := [name for name, interface in named_interfaces if interface is None]:
        existing = names_text([interface.name for interface in choice.interfaces])
        is_syntax_of_nccl = choice.library == "gloo" and missing[0][0] in "^="
        advice = " gloo takes exact names only; ^ and = are for NCCL_SOCKET_IFNAME." if is_syntax_of_nccl else ""
        message = f"{choice.assignment} is set on {host}, but {host} has no such interface. It has {existing}.{advice}"
        yield _choice_finding(seen, "missing", choice, f"{host} has no interface {missing[0]}", message)
    for name, interface in named_interfaces:
        if interface is not None and not (interface.addresses and interface.running):
            state = "is down or has no carrier" if interface.addresses else "has no IP address"
            message = f"{choice.assignment} is set on {host}, but {name} {state} there."
            yield _choice_finding(seen, "unusable", choice, f"{name} on {host} {state}", message)


def _named_interfaces(choice: Choice) -> list[tuple[str, net.Interface | None]]:
    """The interface names in the variable, each with its interface (None: it does not exist). NCCL's variable has a
    rule: the list has the first interface that it allows (else the rule with None); it is empty if NCCL can use one."""
    if choice.library == "gloo":
        by_name = {interface.name: interface for interface in choice.interfaces}
        return [(name, by_name.get(name)) for name in net.gloo_interface_names(choice.variable_value)]
    rule = choice.variable_value or ""
    if len(rule) < 2 or net.nccl_interfaces(rule, choice.interfaces):
        return []
    match = next(
        (interface for interface in choice.interfaces if net.nccl_allows_interface(rule, interface.name)), None
    )
    return [(match.name if match else rule, match)]


def _shared_address(seen: Seen[Data], address: str, choices: Sequence[Choice]) -> Iterator[Finding]:
    """The finding on hosts that offer the same address. Empty if they are containers in one network namespace."""
    namespaces = {(seen.world.arrivals[own.host.ranks[0]].host_id, own.data.network_namespace) for own in choices}
    if len(namespaces) == 1 and choices[0].data.network_namespace is not None:
        return
    names = [choice.host.name for choice in choices]
    interface = net.interface_of(address, choices[0].interfaces)
    fix = choices[0].fix(has_common_name=bool(_common_env(seen)))
    if interface is not None and any(choice.route_interface == interface for choice in choices):
        fix = "Give each of these hosts its own IP address (as root): `ip -br addr` shows them."
    yield seen.finding(
        "shared",
        f"{len(names)} hosts offer the same address, {address}",
        f"On {names_text(names)} {choices[0].library} offers {address} ({interface.name if interface else '?'}) to the "
        "other ranks. A rank that connects to this address reaches its own host instead of the other one.",
        severity=choices[0].severity,
        hosts=names,
        evidence={"address": address},
        fix=fix,
        env=_common_env(seen),
    )


def _unusable_address(
    seen: Seen[Data], choice: Choice, address: str, is_reached_by_offer: Mapping[tuple[int, str], bool]
) -> Iterator[Finding]:
    """The finding on an address that other hosts cannot use, or that is not on the interface that leads to rank 0."""
    name, interface = choice.host.name, net.interface_of(address, choice.interfaces)
    if is_loopback(address) or "%" in address:
        # RDZ002 reports a host's own name that resolves to loopback.
        if choice.variable_value or choice.library == "nccl" or "%" in address:
            kind = "link-local" if "%" in address else "loopback"
            yield _choice_finding(
                seen,
                "unusable",
                choice,
                f"{choice.library} on {name} offers a {kind} address",
                f"{f'With {choice.assignment} ' if choice.variable_value else ''}{choice.library} on {name} offers "
                f"{address} to the other ranks. No other host can connect to a {kind} address.",
            )
        return
    # RDZ004 tested only the address that the job's own library offers.
    is_tested = net.library_of(seen.world.backend) == choice.library
    known_offers = ((rank, address) for rank in choice.host.ranks if (rank, address) in is_reached_by_offer)
    is_reached = next((is_reached_by_offer[offer] for offer in known_offers), None) if is_tested else None
    route = choice.route_interface
    is_other = interface is not None and route is not None and interface.name != route.name
    if is_reached is False or (is_other and is_reached is None):
        route_text = f"{route.name} ({choice.data.source_address})" if route else "another interface"
        consequence = "and no other host could connect to" if is_reached is False else "so other hosts may not reach"
        shown_address = net.strip_zone(address)
        title = f"{choice.library} on {name} offers {shown_address}, which others may not reach"
        if is_other and interface and route:
            title = f"{choice.library} on {name} uses {interface.name} instead of {route.name}"
        yield _choice_finding(
            seen,
            "wrong",
            choice,
            title,
            f"{choice.library} on {name} offers its address{f' on {interface.name}' if interface else ''} "
            f"({shown_address}) to the other ranks. The route to rank 0's host uses {route_text}, {consequence} "
            f"{shown_address}.",
            severity=choice.severity if is_reached is False else Severity.WARNING,
        )


def report(seen: Seen[Data]) -> Contribution:
    """Contribute the interface that the job's sockets use on each host, with its speed, or that they use no network."""
    if len(seen.world.hosts) == 1:
        return Contribution(inventory={rank: {"network": "not used (one host)"} for rank in seen.world.places})
    inventory, library = {}, net.library_of(seen.world.backend)
    for host, rows in data_by_host(seen):
        if (interface := next(iter(rows.values())).interface_for(library)) is not None:
            inventory[host.ranks[0]] = {"network": f"{interface.name} ({link_rate(interface.bytes_per_s)})"}
    return Contribution(inventory=inventory)


skip = mesh.skip  # on a single host every address works
CHECK: Check[Data] = Check(__name__, "RDZ003", "interface", Stage.RENDEZVOUS, Scope.HOST, deadline=15)
