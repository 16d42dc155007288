"""Several hosts on one machine: namespaces on a bridge, with everything that may go wrong between hosts.

    with Network(3, folder) as network:            # hosts h0, h1, h2 with addresses 192.168.120.1, .2, .3
        network[1].resolve("h0", "127.0.1.1")      # an entry in its /etc/hosts
        network[2].block(port=29500)               # a firewall
        subprocess.run([*network[1].enter(folder), "ping", "-c1", "h0"])

A host has its own addresses, host name, /etc/hosts, /etc/resolv.conf, /dev/shm, /sys, firewall, queues, mounts and
process numbers; it shares disk, memory, cores and clock with the others. The bridge lives in a namespace of its own,
so that networks neither see each other nor the machine's: all may have the same names and addresses. Nothing is left
behind, whatever happens; see `namespaces`. It needs root, and iproute2, iptables, nftables and util-linux;
`reason_against` says what is missing. netem, fq, prio and dummy devices are not in every kernel, so faults are made of
tbf, htb, iptables and nftables.
"""

import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from namespaces import Namespaces, NetworkError

# gloo lets the host that offers the higher address connect (measured, torch 2.13): one that offers 127.0.1.1 on a
# network below 127 need not be reached, and all goes well. On this one it hangs.
NET = "192.168.120"
_TOOLS = ("ip", "tc", "iptables", "nft", "unshare", "nsenter", "mount")
_BRIDGE = "bridge0"
_DEVICE = "eth0"
_LIMIT = ("burst", "64kb", "latency", "50ms")
_SHM_BYTES = 1 << 30
# A second mount of sysfs shows this network's devices; the control groups are mounted below it once more.
_SETUP = """
set -e
hostname "$1"
mkdir -p "$2/cgroup"
mount --rbind /sys/fs/cgroup "$2/cgroup"
mount -t sysfs none /sys
mount --rbind "$2/cgroup" /sys/fs/cgroup
umount -l "$2/cgroup"
mount -t tmpfs -o size="$5" none /dev/shm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
ip link set lo up
ip addr add "$3/24" dev "$4"
ip link set "$4" up
ip route add default via "$6"
"""
# ETHTOOL_STXCSUM by SIOCETHTOOL (linux/ethtool.h, linux/sockios.h): what `ethtool -K DEVICE tx off` does.
_COMPUTE_CHECKSUMS = """
import array, fcntl, socket, struct, sys
value = array.array("B", struct.pack("II", 0x17, 0))
request = struct.pack("16sP", sys.argv[1].encode(), value.buffer_info()[0])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    fcntl.ioctl(sock, 0x8946, request)
"""


class Host:
    """One host. `variables` and `prefix` (a command such as taskset) are for all that is started on it."""

    def __init__(self, index: int, folder: Path, switch: Namespaces) -> None:
        self.index = index
        self.name = f"h{index}"
        self.address = f"{NET}.{index + 1}"
        self.folder = folder
        self.variables: dict[str, str] = {}
        self.prefix: list[str] = []
        self._names: dict[str, str] = {}
        self._port = f"port{index}"  # of the bridge
        self._switch = switch
        self._inside = Namespaces()
        self._background: list[subprocess.Popen] = []
        self._damages = False

    def set_up(self, names: dict[str, str]) -> None:
        """Cable, address, name, files; `names` are those of all hosts."""
        self.folder.mkdir(parents=True)
        self._names = {"localhost": "127.0.0.1", **names}
        self._write_names()
        # Else every look-up waits for a name server that cannot be reached, for 10 s.
        (self.folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        self._switch.cable(self._port, self._inside, _DEVICE)
        self._switch.call("ip", "link", "set", self._port, "master", _BRIDGE, "up")
        arguments = (self.name, self.folder, self.address, _DEVICE, _SHM_BYTES, f"{NET}.254")
        self.call("sh", "-c", _SETUP, "sh", *arguments)

    def enter(self, folder: Path) -> list[str]:
        """What to put before a command so that it runs on this host."""
        return [*self._inside.enter(folder), *self.prefix]

    def call(self, *command: object) -> str:
        """Run a short command on this host; its output, or a NetworkError."""
        return self._inside.call(*map(str, command))

    def background(self, *command: object) -> None:
        """Start something that runs as long as the network."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        words = [*self._inside.enter(Path("/")), *map(str, command)]
        self._background.append(subprocess.Popen(words, start_new_session=True, **quiet))

    def close(self) -> None:
        """End everything on this host."""
        self._inside.close()
        for process in self._background:
            process.wait(10)

    # Names and files -------------------------------------------------------------------------------------------------

    def resolve(self, name: str, address: str | None) -> None:
        """Let a name have another address in /etc/hosts; None: let it be unknown."""
        self._names.pop(name, None)
        if address is not None:
            self._names[name] = address
        self._write_names()

    def _write_names(self) -> None:
        # In place: the bind mount shows this very file.
        (self.folder / "hosts").write_text("".join(f"{address}\t{name}\n" for name, address in self._names.items()))

    def mount_tmpfs(self, target: Path | str, size_bytes: int) -> None:
        """An empty file system of this size."""
        self.call("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", target)

    def bind(self, source: Path | str, target: Path | str, *, read_only: bool = False) -> None:
        """Show `source` at `target`, on this host only."""
        self.call("mount", "--bind", source, target)
        if read_only:
            self.call("mount", "-o", "remount,bind,ro", target)

    # Interfaces ------------------------------------------------------------------------------------------------------

    def add_bridge(self, name: str, address: str) -> None:
        """An interface that leads nowhere, such as docker0 with 172.17.0.1/16."""
        self.call("ip", "link", "add", name, "type", "bridge")
        self.call("ip", "addr", "add", address, "dev", name)
        self.call("ip", "link", "set", name, "up")

    def plug(self, device: str, address: str) -> None:
        """A second cable to the switch, with an address such as 192.168.121.1/24."""
        port = f"{device}-{self.index}"  # of the bridge
        self._switch.cable(port, self._inside, device)
        self._switch.call("ip", "link", "set", port, "master", _BRIDGE, "up")
        self.call("ip", "addr", "add", address, "dev", device)
        self.call("ip", "link", "set", device, "up")

    def hold_port(self, port: int, words: Sequence[str] = ("other-job",)) -> None:
        """Another process listens on a port; its command line ends with `words`."""
        listen = "import socket, time; s = socket.create_server(('', %d)); time.sleep(1e6)"
        self.background("python3", "-I", "-c", listen % port, *words)
        self.wait_for_port(port)

    def wait_for_port(self, port: int) -> None:
        """Until somebody listens on it."""
        look = f"for i in $(seq 100); do ss -tln | grep -q ':{port} ' && exit; sleep 0.05; done; exit 1"
        self.call("sh", "-c", look)

    def move(self, bridge: str) -> None:
        """Put its cable into another bridge of the switch."""
        self._switch.call("ip", "link", "set", self._port, "master", bridge)

    # Faults ----------------------------------------------------------------------------------------------------------

    def block(
        self, *, port: int | str | None = None, source: "Host | None" = None, reject: bool = False, new: bool = False
    ) -> None:
        """Drop (or reject) TCP that comes in: to a port or range (LOW:HIGH), from one host, or only what opens a
        connection (`new`: the other direction still works)."""
        rule = ["-p", "tcp"]
        rule += ["--dport", str(port)] if port is not None else []
        rule += ["-s", source.address] if source is not None else []
        rule += ["--syn"] if new else []
        self._add_rule(*rule, "-j", *(("REJECT", "--reject-with", "tcp-reset") if reject else ("DROP",)))

    def lose(self, share: float, source: "Host | None" = None) -> None:
        """Lose a share of the packets that come in, at random."""
        rule = ["-s", source.address] if source is not None else []
        self._add_rule(*rule, "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")

    def damage(self, per_cent: int, senders: Iterable["Host"]) -> None:
        """Give so many of the TCP segments that come in a wrong checksum.

        Nobody looks at checksums that the sender's device was to compute, and a veth pair computes none: so the kernels
        of these senders have to.
        """
        for sender in senders:
            sender.call("python3", "-I", "-c", _COMPUTE_CHECKSUMS, _DEVICE)
        self._damages = True
        chain = "add chain ip damage in { type filter hook prerouting priority -300; }"
        rule = f"meta l4proto tcp numgen random mod 100 < {per_cent} tcp checksum set 0xdead"
        self.call("nft", f"add table ip damage; {chain}; add rule ip damage in {rule}")

    def swallow_large(self, above_bytes: int = 1400, source: "Host | None" = None) -> None:
        """A black hole for large packets, as a smaller MTU on the way makes one where ICMP is filtered."""
        rule = ["-s", source.address] if source is not None else []
        self._add_rule(*rule, "-m", "length", "--length", f"{above_bytes + 1}:65535", "-j", "DROP")

    def _add_rule(self, *rule: str) -> None:
        self.call("iptables", "-w", "-A", "INPUT", "-i", _DEVICE, *rule)

    def slow(self, rate: str, *, incoming: bool = False, towards: "Host | None" = None) -> None:
        """Limit what goes out (or comes in) to a rate such as 100mbit; with `towards`, only what goes to one host."""
        if towards is not None:
            self._slow_towards(rate, towards)
            return
        limit = ("root", "tbf", "rate", rate, *_LIMIT)
        if incoming:
            self._switch.call("tc", "qdisc", "add", "dev", self._port, *limit)
        else:
            self.call("tc", "qdisc", "add", "dev", _DEVICE, *limit)

    def _slow_towards(self, rate: str, peer: "Host") -> None:
        """One class for one peer; what is in no class goes at full speed."""
        self.call("tc", "qdisc", "add", "dev", _DEVICE, "root", "handle", "1:", "htb")
        own = ("classid", "1:10", "htb", "rate", rate, "burst", "64kb", "quantum", "60000")
        self.call("tc", "class", "add", "dev", _DEVICE, "parent", "1:", *own)
        self.call("tc", "qdisc", "add", "dev", _DEVICE, "parent", "1:10", "handle", "10:", "bfifo", "limit", "256kb")
        match = ("match", "ip", "dst", f"{peer.address}/32", "flowid", "1:10")
        self.call("tc", "filter", "add", "dev", _DEVICE, "parent", "1:", "protocol", "ip", "prio", "1", "u32", *match)

    def cut(self) -> None:
        """Pull the cable out, at the switch."""
        self._switch.call("ip", "link", "set", self._port, "down")

    def heal(self) -> None:
        """Undo every fault of the network; names, mounts and interfaces stay as they are."""
        self.call("iptables", "-w", "-F", "INPUT")
        if self._damages:
            self.call("nft", "delete table ip damage")
            self._damages = False
        for run, device in ((self.call, _DEVICE), (self._switch.call, self._port)):
            if " qdisc noqueue " not in f" {run('tc', 'qdisc', 'show', 'dev', device, 'root')} ":
                run("tc", "qdisc", "del", "dev", device, "root")
        self._switch.call("ip", "link", "set", self._port, "up")


class Network:
    """Hosts on one bridge; a context manager. `folder` takes their files, and stays."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self.hosts: tuple[Host, ...] = ()
        self.undo = ExitStack()  # for what a fault makes outside of the hosts; runs when all their processes are gone
        try:
            self._switch = Namespaces()
            self.undo.callback(self._switch.close)
            self._switch.call("ip", "link", "add", _BRIDGE, "type", "bridge")
            self._switch.call("ip", "link", "set", _BRIDGE, "up")
            for index in range(count):
                self.hosts += (Host(index, folder / f"h{index}", self._switch),)
            for host in self.hosts:
                host.set_up({other.name: other.address for other in self.hosts})
        except BaseException:
            self.close()
            raise

    def split(self, hosts: Iterable[Host], rate: str) -> None:
        """Put these hosts behind a switch of their own; one trunk of a rate such as 100mbit joins it to the others'."""
        second = "bridge1"
        self._switch.call("ip", "link", "add", second, "type", "bridge")
        self._switch.call("ip", "link", "set", second, "up")
        self._switch.call("ip", "link", "add", "trunk0", "type", "veth", "peer", "name", "trunk1")
        for end, bridge in (("trunk0", _BRIDGE), ("trunk1", second)):
            self._switch.call("ip", "link", "set", end, "master", bridge, "up")
            self._switch.call("tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, *_LIMIT)
        for host in hosts:
            host.move(second)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host, then the bridge."""
        with self.undo:
            for host in self.hosts:
                self.undo.callback(host.close)
            self.hosts = ()


@functools.cache
def reason_against() -> str | None:
    """Why no network can be made here, or None. It tries."""
    if platform.system() != "Linux":
        return f"namespaces need Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "namespaces need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        with tempfile.TemporaryDirectory() as folder, Network(1, Path(folder) / "try") as network:
            network[0].slow("100mbit")
            network[0].lose(0.01)
    except NetworkError as error:
        return str(error)
    return None
