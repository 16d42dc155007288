"""Faults of names, interfaces, MASTER_PORT, the shared directory and the clock (RDZ, but for RDZ004)."""

import sys

import without_flock
from fault import NOBODY, Blame, Fault, prefix, variable
from launch import Bed, Launcher
from network import NET

STORE = "import torch.distributed as dist; s = dist.FileStore({!r}, 2); s.set('k', 'v'); import os; os._exit(0)"


def make_alias_loopback_at_home(network):
    for host in network:
        host.resolve("head", network[0].address)
    network[0].resolve("head", "127.0.0.1")


def silence_name_server(network):
    network[0].call("iptables", "-w", "-A", "INPUT", "-p", "udp", "--dport", "53", "-j", "DROP")
    network[2].resolve("h0", None)
    (network[2].folder / "resolv.conf").write_text(f"nameserver {network[0].address}\noptions timeout:2 attempts:1\n")


def prefer_docker_bridges(network):
    for host in network:
        host.add_bridge("docker0", "172.17.0.1/16")
        host.resolve(host.name, "172.17.0.1")


def prefer_bridge(network):
    network[1].add_bridge("br0", "10.99.0.1/24")
    network[1].variables["GLOO_SOCKET_IFNAME"] = "br0"


def fill_shared_directory(network):
    shared = network.folder / "shared"
    network[1].mount_tmpfs(shared, 1 << 20)
    network[1].call("sh", "-c", f"cat /dev/zero > {shared}/checkpoint.pt 2>/dev/null || true")


def leave_store(network):
    network[0].call(sys.executable, "-c", STORE.format(str(network.folder / "shared/store")))


FAULTS = {
    "coordinator_alias_is_loopback_at_home": Fault(
        about="MASTER_ADDR is an alias that means loopback on its own host, and only there: odd, and the job works.",
        expect=("RDZ002.loopback",),
        blame=Blame(hosts={"h0"}),
        severity="warning",
        exit_code=0,
        before=make_alias_loopback_at_home,
        bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, coordinator="head"),
    ),
    "coordinator_is_loopback_at_home": Fault(
        about="Rank 0's host names itself 127.0.1.1 (G1, L10): the others reach it, and it offers them loopback.",
        expect=("RDZ002.own", "RDZ002.loopback"),
        blame=Blame(hosts={"h0"}),
        before=lambda network: network[0].resolve("h0", "127.0.1.1"),
        options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "own_name_is_loopback": Fault(
        about="Debian's line `127.0.1.1 <host name>` on one of three hosts (G1): gloo offers its peers an address of "
        "their own.",
        expect=("RDZ002.own",),
        blame=Blame(hosts={"h1"}),
        before=lambda network: network[1].resolve("h1", "127.0.1.1"),
        bed=Bed(ranks=(1, 1, 1)),
        options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
    ),
    "own_name_is_unknown": Fault(
        about="A host cannot resolve its own name (G2): gloo falls back to loopback, with a warning that nobody reads.",
        expect=("RDZ002.own",),
        blame=Blame(hosts={"h1"}),
        before=lambda network: network[1].resolve("h1", None),
        options=("--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "reverse_lookup_is_slow": Fault(
        about="The name server says nothing, and one host knows rank 0 by its address alone (R7): each connection "
        "waits for it.",
        expect=("RDZ002.slow",),
        blame=Blame(hosts={"h2"}),
        severity="warning",
        exit_code=0,
        before=silence_name_server,
        bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, coordinator=f"{NET}.1"),
        options=("--stage", "rendezvous"),
    ),
    "interface_is_missing": Fault(
        about="GLOO_SOCKET_IFNAME names an interface that one host does not have (G3): its peers only wait.",
        expect=("RDZ003.missing",),
        blame=Blame(hosts={"h1"}),
        before=variable(1, "GLOO_SOCKET_IFNAME", "eno1"),
        bed=Bed(ranks=(1, 1, 1)),
        options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
    ),
    "docker_bridge_is_preferred": Fault(
        about="Every host's name means its docker0, which has the same address everywhere (G4): peers connect to "
        "themselves.",
        expect=("RDZ003.shared",),
        blame=Blame(hosts={"h0", "h1", "h2"}),
        before=prefer_docker_bridges,
        bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, coordinator=f"{NET}.1"),
        options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
    ),
    "interface_leads_nowhere": Fault(
        about="GLOO_SOCKET_IFNAME names a bridge that leads nowhere on one host (G4).",
        expect=("RDZ003.wrong",),
        blame=Blame(hosts={"h1"}),
        before=prefer_bridge,
        options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
    ),
    "master_port_dropped": Fault(
        about="The firewall of rank 0's host drops MASTER_PORT (R3); ddpdiag's own ports are open.",
        expect=("RDZ005.dropped",),
        blame=Blame(hosts={"h0"}),
        before=lambda network: network[0].block(port=29500),
        options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "master_port_refused_to_one_host": Fault(
        about="The firewall of rank 0's host rejects connections of one host to MASTER_PORT (R4).",
        expect=("RDZ005.refused",),
        blame=Blame(links={"h2 -> h0"}),
        before=lambda network: network[0].block(port=29500, source=network[2], reject=True, new=True),
        options=("--stage", "launch,host,rendezvous", "--set", "RDZ001.deadline_seconds=8"),
    ),
    "master_port_taken": Fault(
        about='Another job holds MASTER_PORT on rank 0\'s host (L8): "address already in use", from every rank.',
        expect=("RDZ005.taken",),
        blame=NOBODY,
        before=lambda network: network[0].hold_port(29500, ["train.py", "--other-job"]),
        options=("--set", "RDZ001.deadline_seconds=6"),
    ),
    "shared_directory_is_full": Fault(
        about="What one host sees in the place of the shared directory has no room left (C3).",
        expect=("RDZ006.unwritable",),
        blame=Blame(hosts={"h1"}),
        before=fill_shared_directory,
        options=("--shared-dir", "{shared}", "--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "shared_directory_without_locks": Fault(
        about="flock fails on one host (R11: NFS without a lock manager): torch's FileStore cannot work there.",
        expect=("RDZ006.locks",),
        blame=Blame(hosts={"h1"}),
        before=prefix(1, sys.executable, "-I", without_flock.__file__),
        options=("--shared-dir", "{shared}", "--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "shared_directory_is_not_shared": Fault(
        about="The file server is not mounted on one host (R11): it writes into an empty directory of its own.",
        expect=("RDZ006.not-shared",),
        blame=Blame(hosts={"h1"}),
        before=lambda network: network[1].mount_tmpfs(network.folder / "shared", 64 << 20),
        options=("--shared-dir", "{shared}", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "shared_directory_is_read_only": Fault(
        about="The shared directory is mounted read-only on one host (R11): torch tries to open the file for five "
        "minutes.",
        expect=("RDZ006.unwritable",),
        blame=Blame(hosts={"h2"}),
        before=lambda network: network[2].bind(network.folder / "shared", network.folder / "shared", read_only=True),
        options=("--shared-dir", "{shared}", "--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
    ),
    "stale_store": Fault(
        about="A crashed job left its store in the shared directory (R10): the next one with that name talks to the "
        "dead.",
        expect=("RDZ006.stale",),
        blame=NOBODY,
        severity="warning",
        exit_code=0,
        before=leave_store,
        bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
        options=("--shared-dir", "{shared}", "--stage", "rendezvous"),
    ),
}
