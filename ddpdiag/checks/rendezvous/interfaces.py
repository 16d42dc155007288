"""The interface that every host offers to its peers.

gloo takes the first address of the interface that GLOO_SOCKET_IFNAME names, or else the address of the host's own name.
NCCL takes the interfaces that NCCL_SOCKET_IFNAME allows, or else `ib*`, then all but docker*, lo* and virbr*; veth*,
br-*, tun* and other networks that exist on one host only are not left out. A library that takes the wrong one offers an
address that its peers cannot reach, and all ranks hang. gloo takes exact names, separated by commas; NCCL takes
prefixes, exact names after `=`, and all but these after `^` (`^docker0` alone brings back lo).

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
from ddpdiag.checks.hosts import Host, answers_by_host, names_text
from ddpdiag.checks.rendezvous import mesh
from ddpdiag.checks.rendezvous.links import Offer, offers
from ddpdiag.model import Finding, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.interfaces import (
    Interface,
    Wanted,
    bare,
    bindable,
    chosen_address,
    gloo_names,
    interface_of,
    interfaces,
    library_of,
    nccl_choice,
    nccl_takes,
    network_namespace,
    source_towards,
    wanted,
)
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
        "the address belongs to another interface than the route to the coordinator; an error if the other hosts could "
        "not connect to it in RDZ004, no finding if all of them could."
    ),
    "unreadable": FindingSpec.not_seen("the interfaces of a host could not be read."),
}

_NAME_SECONDS = 5.0
_ROUTE = '`ip route get ADDRESS`, with another host\'s address, shows it behind "dev"'
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


class Data(Struct, frozen=True, kw_only=True):
    """One host: its interfaces (None: they cannot be listed), and the local addresses that its own name resolves to.

    `names` are the variables, `source` is the source address on the route to the coordinator, `network` is the number
    of the network namespace (containers may share one).
    """

    interfaces: tuple[Interface, ...] | None
    own_addresses: tuple[str, ...]
    names: Wanted
    source: str | None
    network: int | None = None


class Choice(Struct, frozen=True):
    """The address that a library will offer on a host, and `route`, the interface that leads to the coordinator."""

    library: str
    severity: Severity
    host: Host
    data: Data
    known: tuple[Interface, ...]
    address: str | None
    route: Interface | None

    @property
    def variable(self) -> str | None:
        """The value of the library's variable, or None if it is not set."""
        return self.data.names.nccl if self.library == "nccl" else self.data.names.gloo

    @property
    def setting(self) -> str:
        return f"{_VARIABLES[self.library]}={self.variable}"

    def fix(self, *, one_for_all: bool) -> str:
        """The fix with the value to set. `one_for_all`: the interface has the same name on all hosts."""
        variable, name = _VARIABLES[self.library], self.host.name
        if self.route is None:
            return f"Set {variable} on {name} to the interface that leads to the other hosts; {_ROUTE}."
        leads = f"{self.route.name} leads to rank 0's host."
        if one_for_all:
            return f"Set {variable}={self.route.name} in the job script, for all hosts: on each of them {leads}"
        return f"Set {variable}={self.route.name} for the ranks on {name} only: there {leads}"


def measure(ctx: Context) -> Data:
    """List the interfaces, look up the host's own name, and ask the kernel for the route to the coordinator."""
    ctx.step("look up the own name")
    own = bindable(resolve(socket.gethostname(), 0, _NAME_SECONDS) or ())
    coordinator = os.environ.get("MASTER_ADDR", "")
    ctx.step(f"look up {coordinator}")
    addresses = resolve(coordinator, 0, _NAME_SECONDS) or ()
    return Data(
        interfaces=interfaces(sys_root(os.environ)),
        own_addresses=own,
        names=wanted(os.environ),
        source=source_towards(addresses),
        network=network_namespace(),
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    """Findings on variables that select no usable interface, and on addresses that other hosts cannot use."""
    choices: list[Choice] = []
    for host, rows in answers_by_host(seen):
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
        with_nccl = library_of(seen.world.backend) == "nccl" or data.names.nccl
        libraries = ("nccl", "gloo") if with_nccl else ("gloo",)
        route = interface_of(data.source, data.interfaces)
        for library in libraries:
            severity = Severity.ERROR if seen.world.backend == library else Severity.WARNING
            address = chosen_address(library, data.names, data.own_addresses, data.interfaces)
            choice = Choice(library, severity, host, data, data.interfaces, address, route)
            choices.append(choice)
            yield from _useless(seen, choice) if choice.variable else ()
    met = offers(seen.of(mesh.CHECK))
    for library in _VARIABLES:
        by_address: dict[str, list[Choice]] = {}
        for choice in choices:
            if choice.library == library and choice.address is not None:
                by_address.setdefault(choice.address, []).append(choice)
        shared = {a: own for a, own in by_address.items() if len(own) > 1 and not is_loopback(a) and "%" not in a}
        for address, own in shared.items():
            yield from _shared(seen, address, own)
        for choice in choices:
            if choice.library == library and choice.address is not None and choice.address not in shared:
                yield from _elsewhere(seen, choice, choice.address, met)


def _finding(
    seen: Seen[Data], word: str, choice: Choice, title: str, message: str, *, severity: Severity | None = None
) -> Finding:
    env = _env(seen)
    return seen.finding(
        word,
        title,
        message,
        severity=severity or choice.severity,
        hosts=[choice.host.name],
        evidence={"address": choice.address, "source_towards_coordinator": choice.data.source},
        fix=choice.fix(one_for_all=bool(env)),
        env=env,
    )


def _env(seen: Seen[Data]) -> Mapping[str, str]:
    """Both variables with the interface that leads to the coordinator; empty if its name differs between hosts."""
    routes = [interface_of(data.source, data.interfaces or ()) for data in seen.by_rank.values()]
    names = {route.name if route else "lo" for route in routes}
    return dict.fromkeys(_VARIABLES.values(), names.pop()) if len(names) == 1 and names != {"lo"} else {}


def _useless(seen: Seen[Data], choice: Choice) -> Iterator[Finding]:
    """Findings that the variable names no usable interface."""
    name = choice.host.name
    named = _named(choice)
    if missing := [word for word, interface in named if interface is None]:
        has = names_text([interface.name for interface in choice.known])
        exact = choice.library == "gloo" and missing[0][0] in "^="
        advice = " gloo takes exact names only; ^ and = are for NCCL_SOCKET_IFNAME." if exact else ""
        message = f"{choice.setting} is set on {name}, but {name} has no such interface. It has {has}.{advice}"
        yield _finding(seen, "missing", choice, f"{name} has no interface {missing[0]}", message)
    for word, interface in named:
        if interface is not None and not (interface.addresses and interface.running):
            state = "is down or has no carrier" if interface.addresses else "has no IP address"
            message = f"{choice.setting} is set on {name}, but {word} {state} there."
            yield _finding(seen, "unusable", choice, f"{word} on {name} {state}", message)


def _named(choice: Choice) -> list[tuple[str, Interface | None]]:
    """The names in the variable, each with its interface (None: missing). For NCCL one, if it has no usable choice."""
    if choice.library == "gloo":
        by_name = {interface.name: interface for interface in choice.known}
        return [(name, by_name.get(name)) for name in gloo_names(choice.variable)]
    rule = choice.variable or ""
    if len(rule) < 2 or nccl_choice(rule, choice.known):
        return []
    fitting = next((interface for interface in choice.known if nccl_takes(rule, interface.name)), None)
    return [(fitting.name if fitting else rule, fitting)]


def _shared(seen: Seen[Data], address: str, choices: Sequence[Choice]) -> Iterator[Finding]:
    """The finding that several hosts offer one address, unless they are containers in one network namespace."""
    networks = {(seen.world.arrivals[own.host.ranks[0]].host_id, own.data.network) for own in choices}
    if len(networks) == 1 and choices[0].data.network is not None:
        return
    names = [choice.host.name for choice in choices]
    interface = interface_of(address, choices[0].known)
    fix = choices[0].fix(one_for_all=bool(_env(seen)))
    if interface is not None and any(choice.route == interface for choice in choices):
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
        env=_env(seen),
    )


def _elsewhere(seen: Seen[Data], choice: Choice, address: str, met: Mapping[int, Offer]) -> Iterator[Finding]:
    """The finding that other hosts cannot use the address, or that the route to them uses another interface."""
    name, interface = choice.host.name, interface_of(address, choice.known)
    if is_loopback(address) or "%" in address:
        # RDZ002 reports a host's own name that resolves to loopback.
        if choice.variable or choice.library == "nccl" or "%" in address:
            kind = "link-local" if "%" in address else "loopback"
            yield _finding(
                seen,
                "unusable",
                choice,
                f"{choice.library} on {name} offers a {kind} address",
                f"{f'With {choice.setting} ' if choice.variable else ''}{choice.library} on {name} offers {address} to "
                f"the other ranks. No other host can connect to a {kind} address.",
            )
        return
    # RDZ004 tried the address that the job's library offers.
    is_tested = library_of(seen.world.backend) == choice.library
    offer = next((met[rank] for rank in choice.host.ranks if rank in met), None)
    reached = offer.is_reached if is_tested and offer is not None and offer.address == address else None
    astray = interface is not None and choice.route is not None and interface.name != choice.route.name
    if reached is False or (astray and reached is None):
        towards = f"{choice.route.name} ({choice.data.source})" if choice.route else "another interface"
        so = "and no other host could connect to" if reached is False else "so other hosts may not reach"
        title = f"{choice.library} on {name} offers {bare(address)}, which others may not reach"
        if astray and interface and choice.route:
            title = f"{choice.library} on {name} uses {interface.name} instead of {choice.route.name}"
        yield _finding(
            seen,
            "wrong",
            choice,
            title,
            f"{choice.library} on {name} offers its address{f' on {interface.name}' if interface else ''} "
            f"({bare(address)}) to the other ranks. The route to rank 0's host uses {towards}, {so} {bare(address)}.",
            severity=choice.severity if reached is False else Severity.WARNING,
        )


def inventory(seen: Seen[Data]) -> dict[int, dict[str, str]]:
    """The interface that the job's sockets use on each host, and its speed."""
    if len(seen.world.hosts) == 1:
        return {rank: {"network": "not used (one host)"} for rank in seen.world.places}
    parts, library = {}, library_of(seen.world.backend)
    for host, rows in answers_by_host(seen):
        data = next(iter(rows.values()))
        if data.interfaces is not None:
            address = chosen_address(library, data.names, data.own_addresses, data.interfaces)
            if (own := interface_of(address, data.interfaces)) is not None:
                parts[host.ranks[0]] = {"network": f"{own.name} ({link_rate(own.bytes_per_s)})"}
    return parts


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(inventory=inventory(seen))


skip = mesh.skip  # within one host every address works
CHECK: Check[Data] = Check(__name__, "RDZ003", "interface", Stage.RENDEZVOUS, Scope.HOST, deadline=15)
