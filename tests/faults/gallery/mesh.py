"""Faults of the network between hosts: ports that are closed, links that are slow, packets that vanish (RDZ004)."""

from fault import NOBODY, Blame, Fault
from launch import Bed


def slow(host, rate):
    """In both directions."""

    def before(network):
        network[host].slow(rate)
        network[host].slow(rate, incoming=True)

    return before


def drop_mesh_everywhere(network):
    for host in network:
        host.block(port="32768:60999", new=True)


def open_two_ports_only(network):
    for host in network:
        host.block(port="1:29499", new=True)
        host.block(port="29502:65535", new=True)


FAULTS = {
    "large_packets_vanish": Fault(
        about="A smaller MTU on the way to one host, and ICMP filtered (G6): small messages pass, large ones never "
        "arrive.",
        expect=("RDZ004.black-hole",),
        blame=Blame(hosts={"h2"}),
        before=lambda network: network[2].swallow_large(),
        options=("--stage", "rendezvous,collective", "--set", "COL001.deadline_seconds=6"),
    ),
    "mesh_dropped_everywhere": Fault(
        about="Every host's firewall lets only a few ports through (R5): the cause is shared, and no host stands out.",
        expect=("RDZ004.dropped",),
        blame=NOBODY,
        before=drop_mesh_everywhere,
        options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "one_direction_is_dropped": Fault(
        about="Of three hosts one cannot open connections to one other; the way back works (R5).",
        expect=("RDZ004.dropped",),
        blame=Blame(links={"h2 -> h1"}),
        before=lambda network: network[1].block(port="32768:60999", source=network[2], new=True),
        options=("--stage", "launch,host,rendezvous", "--set", "RDZ001.deadline_seconds=8"),
    ),
    "only_two_ports_are_open": Fault(
        about="Every host's firewall lets MASTER_PORT and --control-port through and nothing else (R5): the rendezvous "
        "works, then gloo hangs.",
        expect=("RDZ004.dropped",),
        blame=NOBODY,
        before=open_two_ports_only,
        options=("--control-port", "29501", "--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
    ),
    "ports_dropped_by_one_host": Fault(
        about="A firewall of one host drops connections to the ports that process groups use (R3, R5): torch hangs.",
        expect=("RDZ004.dropped",),
        blame=Blame(hosts={"h0"}),
        before=lambda network: network[0].block(port="32768:60999", new=True),
        bed=Bed(ranks=(1, 1, 1)),
        options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
        good={"h1", "h2"},
    ),
    "ports_dropped_where_nobody_connects": Fault(
        about="A firewall drops connections to the one host that connects to all others over gloo (R5): no harm yet, "
        "but a trap. Of two ranks the one that offers the higher address connects, and the host that is closed here "
        "has the highest.",
        expect=("RDZ004.dropped",),
        blame=Blame(hosts={"h2"}),
        severity="warning",
        exit_code=0,
        before=lambda network: network[2].block(port="32768:60999", new=True),
        bed=Bed(ranks=(1, 1, 1)),
        options=("--set", "RDZ001.deadline_seconds=8"),
        good={"h0", "h1"},
    ),
    "packets_get_lost": Fault(
        about="One host loses five packets of a hundred (G7): a bad cable, a dying port.",
        expect=("RDZ004.loss", "RDZ004.slow"),
        blame=Blame(hosts={"h1"}),
        before=lambda network: network[1].lose(0.05),
        options=("--stage", "launch,host,rendezvous"),
    ),
    "ports_refused_by_one_host": Fault(
        about="A firewall of one host rejects connections to the ports that process groups use (R4, R5).",
        expect=("RDZ004.refused",),
        blame=Blame(hosts={"h1"}),
        before=lambda network: network[1].block(port="32768:60999", reject=True, new=True),
        options=("--stage", "launch,host,rendezvous", "--set", "RDZ001.deadline_seconds=8"),
    ),
    "host_is_slow": Fault(
        about="One host's cable came up at a fraction of its rate (G5, S7); an all-reduce is as slow for everybody.",
        expect=("RDZ004.slow",),
        blame=Blame(hosts={"h1"}),
        before=slow(1, "20mbit"),
        options=("--stage", "rendezvous,collective"),
        good={"h0", "h2"},
    ),
    "host_receives_slowly": Fault(
        about="A policer slows down what one host receives; what it sends is fast (S7).",
        expect=("RDZ004.slow",),
        blame=Blame(hosts={"h2"}),
        before=lambda network: network[2].slow("20mbit", incoming=True),
        options=("--stage", "rendezvous"),
    ),
    "link_between_two_is_slow": Fault(
        about="Two hosts, and a slow link between them: nobody can tell which side is at fault.",
        expect=("RDZ004.slow",),
        blame=Blame(links={"h0 -> h1", "h1 -> h0"}),
        severity="warning",
        exit_code=0,
        before=slow(1, "100mbit"),
        bed=Bed(ranks=(1, 1)),
        options=("--stage", "launch,host,rendezvous"),
    ),
    "link_is_slow": Fault(
        about="One host is slow towards one other (S7: a bad inter-switch link); both are fast with the third.",
        expect=("RDZ004.slow",),
        blame=Blame(links={"h1 -> h2"}),
        before=lambda network: network[1].slow("20mbit", towards=network[2]),
        options=("--stage", "rendezvous"),
        deep=False,
    ),
    "outgoing_is_slow": Fault(
        about="What one host sends is slow, what it receives is not (a bad transceiver, a wrong duplex).",
        expect=("RDZ004.slow",),
        blame=Blame(hosts={"h2"}),
        before=lambda network: network[2].slow("100mbit"),
        options=("--stage", "launch,host,rendezvous"),
    ),
}
