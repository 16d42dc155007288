"""Ranks that never came or are gone, runs that were cut short, and what harms no job (RUN001, RUN002, RUN004)."""

import signal

from fault import NOBODY, Blame, Fault
from launch import Bed, Launcher


def leave_ipv6_only(network):
    for host in network:
        host.call("ip", "addr", "add", f"fd00::{host.index + 1}/64", "dev", "eth0", "nodad")
        host.resolve("h0", "fd00::1")
    network[2].call("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")


def cut_off_with_file_server(network, running):
    # What is mounted over a folder hides it from no process that has it open already: rank 0 can write nothing there.
    network[0].call("mount", "-o", "remount,bind,ro", network.folder / "shared")
    network[0].mount_tmpfs(running.folder, 1 << 20)
    network[0].cut()


def tell_all_to_leave(network, running):
    for rank in range(3):
        running.launched(rank).kill(signal.SIGTERM)


FAULTS = {
    "coordinator_is_elsewhere_on_one_host": Fault(
        about="An old line in /etc/hosts of one host gives the coordinator the address of another machine (SL4).",
        expect=("RUN001.absent",),
        blame=Blame(ranks={2}),
        exit_code=3,
        says={"rank2": "refused"},
        before=lambda network: network[2].resolve("h0", network[1].address),
        options=("--join-timeout", "8", "--stage", "rendezvous,collective"),
    ),
    "coordinator_is_ipv6_only": Fault(
        about="The coordinator has an IPv6 address only, and one host has IPv6 switched off (R15): its rank cannot "
        "come.",
        expect=("RUN001.absent",),
        blame=Blame(ranks={2}),
        exit_code=3,
        says={"rank2": "unreachable"},
        before=leave_ipv6_only,
        options=("--stage", "launch", "--join-timeout", "8", "--shared-dir", "{shared}"),
    ),
    "coordinator_unknown_on_one_host": Fault(
        about="One host cannot resolve the coordinator's name (R1): torch says only that the client socket timed out.",
        expect=("RUN001.absent",),
        blame=Blame(ranks={2}),
        exit_code=3,
        says={"rank2": "cannot be resolved"},
        before=lambda network: network[2].resolve("h0", None),
        options=("--join-timeout", "8"),
    ),
    "host_missing": Fault(
        about="A host of three never starts its ranks (L11).",
        expect=("RUN001.absent",),
        blame=Blame(ranks={2, 3}),
        exit_code=3,
        bed=Bed(ranks=(2, 2, 2), launcher=Launcher.HOST, absent={2, 3}),
        options=("--join-timeout", "8", "--stage", "launch,host,rendezvous,collective"),
    ),
    "rank_0_dropped_for_one_host": Fault(
        about="A firewall drops all that one of three hosts sends to rank 0's (R3): that host itself says what it met.",
        expect=("RUN001.absent",),
        blame=Blame(ranks={2}),
        exit_code=3,
        says={"rank2": "a firewall drops"},
        before=lambda network: network[0].block(source=network[2]),
        options=("--join-timeout", "8"),
    ),
    "rank_missing": Fault(
        about='A rank was never started (R6): torch says "3/4 clients joined" and not which one is missing.',
        expect=("RUN001.absent",),
        blame=Blame(ranks={3}),
        exit_code=3,
        bed=Bed(ranks=(2, 2), launcher=Launcher.ENV, absent={3}),
        options=("--join-timeout", "8"),
    ),
    "two_hosts_lose_each_other": Fault(
        about="The cable between two hosts is pulled while a collective runs: nobody can say whose end it was.",
        expect=("RUN002.link",),
        blame=Blame(links={"h0 -> h1", "h1 -> h0"}),
        inject="pause 2",
        when_reached=lambda network, running: network[1].cut(),
        bed=Bed(ranks=(2, 2)),
        options=("--stage", "collective"),
        keeps={"h1"},
        good=set(),
    ),
    "host_cut_off_in_the_middle": Fault(
        about="A switch port goes down while a collective runs: the ranks behind it fall silent, and the others wait.",
        expect=("RUN002.lost",),
        blame=Blame(hosts={"h1"}),
        inject="pause 2",
        when_reached=lambda network, running: network[1].cut(),
        bed=Bed(ranks=(2, 2, 1)),
        options=("--stage", "collective"),
        keeps={"h1"},
        good={"h0", "h2"},
    ),
    "host_of_rank_0_cut_off": Fault(
        about="The host of rank 0 loses its network, and with it the file server; the others record that in the "
        "shared directory.",
        expect=("RUN002.lost",),
        blame=Blame(ranks={0}),
        inject="pause 1",
        before=lambda network: network[0].bind(network.folder / "shared", network.folder / "shared"),
        when_reached=cut_off_with_file_server,
        options=("--shared-dir", "{shared}", "--stage", "launch,host,collective"),
        keeps={"rank0", "rank1", "rank2"},
        good={"h1", "h2"},
    ),
    "launcher_kills_the_witnesses": Fault(
        about="What torchrun started for a rank is killed: within 0.1 s torchrun tells all others of that host to "
        "leave (L5).",
        expect=("RUN002.lost",),
        blame=Blame(ranks={2}),
        inject="pause 2",
        when_reached=lambda network, running: running.launched(2).kill(signal.SIGKILL),
        bed=Bed(ranks=(4,)),
        options=("--stage", "launch,host,rendezvous,collective"),
    ),
    # On one host by default: tests/processes/test_rank0_lost.py.
    "rank_0_killed_with_shared_directory": Fault(
        about="Rank 0's process is killed, but all records go to a shared directory, which is judged.",
        expect=("RUN002.lost",),
        blame=Blame(ranks={0}),
        inject="pause 1",
        when_reached=lambda network, running: running.launched(0).kill(signal.SIGKILL),
        options=("--shared-dir", "{shared}", "--stage", "launch,host,collective"),
        keeps={"rank0", "rank1", "rank2"},
        good={"h1", "h2"},
    ),
    "budget_spent": Fault(
        about="More is asked for than the budget allows: what was not seen is unknown, and nobody's fault.",
        expect=("RUN004.budget",),
        blame=NOBODY,
        exit_code=3,
        bed=Bed(ranks=(2,), launcher=Launcher.ALONE),
        options=("--set", "RDZ001.repeat=10000"),
        budget=25,
    ),
    "run_told_to_leave": Fault(
        about="The scheduler's time limit ends all processes while a rank hangs (SIGTERM): nobody here is to blame for "
        "that.",
        expect=("RUN004.told",),
        blame=NOBODY,
        exit_code=143,
        inject="sleep 1",
        when_reached=tell_all_to_leave,
    ),
    "only_board_ports_are_dropped": Fault(
        about="A firewall drops the ports that ddpdiag itself would choose, and none that a job needs: with an open "
        "one as --control-port there is no fault at all.",
        expect=(),
        blame=NOBODY,
        exit_code=0,
        before=lambda network: network[0].block(port="30000:32767", source=network[2]),
        options=("--control-port", "29501", "--join-timeout", "8"),
    ),
    "rank_0_killed": Fault(
        about="Rank 0's process is killed: it alone could report, so each of the others says that it is gone, and "
        "where its own record lies.",
        expect=(),
        blame=NOBODY,
        says={"rank1": "lost rank 0", "rank2": "lost rank 0"},
        inject="pause 1",
        when_reached=lambda network, running: running.launched(0).kill(signal.SIGKILL),
        options=("--stage", "launch,host,collective"),
        reports=False,
        keeps={"rank0", "rank1", "rank2"},
    ),
}
