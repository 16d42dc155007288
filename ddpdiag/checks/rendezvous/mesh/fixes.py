"""What to do about links between hosts, with the commands to type. Part of RDZ004."""

from collections.abc import Mapping
from shlex import quote

from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.checks.rendezvous.mesh.data import Mesh, Subject
from ddpdiag.probes.net.interfaces import Interface

_RULES = "`nft list ruleset` or `iptables -L -n`"
_OPEN = {
    "receiver": f"As root open TCP ports {{ports}} for the other hosts in the firewall of {{who}} ({_RULES} shows its "
    "rules).",
    "sender": "As root let {who} connect to TCP ports {ports} of the other hosts: look at the outgoing rules of its "
    f"firewall ({_RULES}).",
    "host": f"As root open TCP ports {{ports}} in both directions in the firewall of {{who}} ({_RULES} shows its "
    "rules).",
    **dict.fromkeys(
        ("links", "pair"),
        "As root open TCP ports {ports} between these hosts, in the firewalls of both "
        f"({_RULES} shows the rules) and of the network between them.",
    ),
}
_OPEN_ALL = (
    "As root open TCP ports {ports} between all hosts. Or open fewer, for example 40000-40999: set them on every host "
    "(`sysctl -w net.ipv4.ip_local_port_range='40000 40999'`), and run again with `--port-range 40000-40999`."
)
_OTHER_INTERFACE = "use {}: `export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE`"
_USUAL_MTU = 1500
# Headers of IPv4 and ICMP.
_HEADER_BYTES = 28


def _until(subject: Subject) -> str:
    return f" Until then {leave_out(subject.nodes)}." if subject.nodes else ""


def open_ports(subject: Subject, ports: str) -> str:
    """Where connections are refused or get no answer."""
    return _OPEN.get(subject.kind, _OPEN_ALL).format(ports=ports, who=names_text(subject.nodes)) + _until(subject)


def find_route(subject: Subject, sender: str, receiver: str, address: str | None) -> str:
    """Where there is no route, such as from this sender to this receiver."""
    other = _OTHER_INTERFACE.format("its interface")
    return (
        f"Run `ip route get {quote(address or 'ADDRESS')}` on {sender} and `ip -br addr` on {receiver}. If there is "
        "no route "
        f"and the hosts share another network, {other}. If there is one, a firewall answers in its place: as root look "
        f"at the rules of {receiver} ({_RULES}). Otherwise ask the administrator to add the route.{_until(subject)}"
    )


def ask_who_answers(subject: Subject, word: str) -> str:
    """Where connections are accepted, and then no data arrive, or they are closed."""
    who, between = "these hosts", "these hosts"
    if subject.nodes:
        who = names_text(subject.nodes)
        between = f"{who} and the other hosts"
    overloaded = "accepts connections but does not serve them" if word == "silent" else "may close connections at once"
    return (
        f"Run `uptime` on {who}: an overloaded host {overloaded}. If the load is low, ask the network administrator "
        f"which proxy, load balancer or intrusion filter is between {between}.{_until(subject)}"
    )


def find_mtu(subject: Subject, mesh: Mesh, interfaces: Mapping[int, Interface]) -> str:
    """Where large packets are lost."""
    sender, receiver = next(iter(subject.cells))
    own, other = interfaces.get(sender), interfaces.get(receiver)
    size = (own.mtu if own and own.mtu else _USUAL_MTU) - _HEADER_BYTES
    return (
        f"Run `ping -M do -s {size} {quote(mesh.names[receiver])}` on {mesh.names[sender]}, then with smaller sizes: "
        "the "
        f"largest that passes, plus {_HEADER_BYTES}, is the MTU of the path. As root set this MTU on every host (`ip "
        f"link set dev {quote(other.name if other else 'INTERFACE')} mtu MTU`), or let TCP find it (`sysctl -w "
        "net.ipv4.tcp_mtu_probing=1`). Without root "
        f"{leave_out(subject.nodes) if subject.nodes else 'ask the administrator'}."
    )


def compare(subject: Subject, mesh: Mesh, interfaces: Mapping[int, Interface], *, is_slow: bool) -> str:
    """Where links are slow or lose packets: what to compare between hosts."""
    (sender, receiver), cell = next(iter(subject.cells.items()))
    blamed = next((rank for rank, name in mesh.names.items() if name in subject.nodes), sender)
    known = interfaces.get(blamed)
    name = quote(known.name if known else "INTERFACE")
    counters, speed = f"`ip -s link show {name}` (errors, dropped)", f"`ethtool {name}` (Speed, Duplex)"
    match subject.kind:
        case "host":
            commands = f"{speed} and {counters}"
        case "sender":
            commands = f"`tc qdisc show dev {name}` (shapers) and {speed}"
        case "receiver":
            commands = f"{counters} and `ethtool -S {name}`"
        case "pair":
            return f"Run {speed}, `tc qdisc show dev {name}` (shapers) and {counters} on both hosts, and compare."
        case "links":
            return (
                f"Run `ip route get {quote(cell.address or 'ADDRESS')}` on {mesh.names[sender]}, and ask the network "
                "administrator to look at the switches and cables between these hosts."
            )
        case _ if is_slow:
            return (
                f"Run {speed} on the hosts: Speed should be that of the fast network. If another interface is faster, "
                f"{_OTHER_INTERFACE.format('it')}."
            )
        case _:
            return (
                f"Run {counters} on the hosts, and ask the network administrator to look at the switches between them."
            )
    other = next((host for host in mesh.names.values() if host not in subject.nodes), mesh.names[receiver])
    return (
        f"Run {commands} on {names_text(subject.nodes)}, and compare with {other}. Ask the administrator to try "
        f"another cable and another switch port.{_until(subject)}"
    )
