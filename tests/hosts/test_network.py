"""The test bed itself: what it promises, and that nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import processes
from namespaces import NetworkError
from network import Host, Network
from required import require_hosts

pytestmark = pytest.mark.hosts

# Sends so many bytes to a listener on another host, and prints the seconds until the last one was acknowledged.
_SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 5000), float(sys.argv[3]))
begin = time.monotonic()
link.sendall(bytes(int(sys.argv[2])))
link.shutdown(socket.SHUT_WR)
link.recv(1)
print(time.monotonic() - begin)
"""
# A connection that was cut in its middle does not stand in the way of the next one.
_LISTEN = """
import socket, threading
def drain(link):
    with link:
        while link.recv(1 << 16):
            pass
with socket.create_server(("", 5000)) as server:
    while True:
        threading.Thread(target=drain, args=(server.accept()[0],)).start()
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def listening(tmp_path_factory) -> Iterator[Network]:
    """Three hosts, each with a listener."""
    require_hosts()
    with Network(3, tmp_path_factory.mktemp("network") / "three") as network:
        for host in network:
            host.background(sys.executable, "-c", _LISTEN)
        for host in network:
            host.wait_for_port(5000)
        yield network


@pytest.fixture
def three(listening) -> Iterator[Network]:
    """The same, with whole cables and no firewall at the start of each test."""
    yield listening
    for host in listening:
        host.heal()


def _send(host: Host, peer: Host, size: int = 1, patience: float = 30) -> float:
    """The seconds that it took."""
    return float(host.call(sys.executable, "-c", _SEND, peer.name, size, patience))


def _fails(match: str, host: Host, peer: Host, size: int = 1) -> None:
    with pytest.raises(NetworkError, match=match):
        _send(host, peer, size, 0.5)


def _delayed(host: Host) -> int:
    """How often a limit on the host's cable held a packet back, in either direction."""
    show = ("tc", "-j", "-s", "qdisc", "show", "dev")
    shown = (host.call(*show, "eth0"), host._switch.call(*show, host._port))
    return sum(queue["overlimits"] for text in shown for queue in json.loads(text))


def _marks():
    """What a network leaves where anybody could see it."""
    devices = {path.name for path in Path("/sys/class/net").iterdir()}
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return devices, mounts, sorted(Path("/run/netns").glob("*")), sorted(Path("/etc").glob("netns"))


def test_hosts_reach_each_other_by_name_and_nobody_else(three, hosts):
    _send(three[0], three[2])
    _send(three[1], three[2])
    assert three[1].call("hostname") == "h1\n"
    with pytest.raises(NetworkError, match=r"unreachable|timed out"):
        three[0].call(sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.9', 9), 0.3)")
    # Another network has the same names and addresses; nobody listens there.
    other = hosts(2)
    _fails("refused", other[0], other[1])


def test_nothing_stays(hosts):
    before = _marks()
    network = hosts(2)
    network[0].background("sleep", "1000")
    assert _marks() == before, "while it is there, it is nowhere to be seen"
    network.close()
    assert _marks() == before


def test_nothing_stays_when_the_tests_are_killed(tmp_path):
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(
        "import sys, pathlib, time\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from network import Network\n"
        "network = Network(2, pathlib.Path(sys.argv[1]))\n"
        "network[1].background('sleep', '1000')\n"
        "print('here', flush=True)\n"
        "time.sleep(1000)\n"
    )
    words, variables = [sys.executable, script, tmp_path / "network"], {"DDPDIAG_TEST_MARK": mark}
    tests = subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE)
    try:
        tests.stdout.readline()
        _until(lambda: "sleep 1000" in {process.command for process in processes(mark)})
    finally:
        tests.kill()
        tests.communicate()
    _until(lambda: not processes(mark))


def _until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_failed_setup_leaves_nothing(hosts, tmp_path, monkeypatch):
    before = _marks()
    monkeypatch.setattr("network._SETUP", "exit 7")
    with pytest.raises(NetworkError, match="7"):
        hosts(2)
    assert _marks() == before


def test_names_are_each_hosts_own(hosts):
    network = hosts(2)
    network[1].resolve("h0", "127.0.1.1")
    assert network[0].call("getent", "ahostsv4", "h0").split()[0] == network[0].address
    assert network[1].call("getent", "ahostsv4", "h0").split()[0] == "127.0.1.1"
    network[1].resolve("h0", None)
    with pytest.raises(NetworkError):
        network[1].call("getent", "ahostsv4", "h0")


@pytest.mark.parametrize("incoming", [False, True])
def test_a_slow_host_is_slow_in_the_direction_asked_for(three, incoming):
    slow, other = ((0, 1), (1, 0)) if incoming else ((1, 0), (0, 1))
    three[1].slow("50mbit", incoming=incoming)
    _send(three[other[0]], three[other[1]], MIB)
    assert _delayed(three[1]) == 0
    assert _send(three[slow[0]], three[slow[1]], MIB) > 0.1  # of 0.17 s at 50 Mbit/s
    assert _delayed(three[1]) > 0
    three[1].heal()
    _send(three[slow[0]], three[slow[1]], MIB)
    assert _delayed(three[1]) == 0


def test_a_link_alone_can_be_slow(three):
    three[1].slow("50mbit", towards=three[2])
    _send(three[1], three[0], MIB)
    assert _delayed(three[1]) == 0
    assert _send(three[1], three[2], MIB) > 0.1
    assert _delayed(three[1]) > 0


@pytest.mark.parametrize(("reject", "word"), [(False, "timed out"), (True, "refused")])
def test_a_firewall_drops_or_rejects_a_port_for_one_host(three, reject, word):
    three[2].block(port=5000, source=three[1], reject=reject)
    _fails(word, three[1], three[2])
    _send(three[0], three[2])


def test_one_direction_can_be_blocked(three):
    three[0].block(source=three[1], new=True)
    _send(three[0], three[1])
    _fails("timed out", three[1], three[0])


def test_large_packets_can_vanish(three):
    three[1].swallow_large()
    _send(three[0], three[1], 100)
    _fails("timed out", three[0], three[1], MIB)


def test_packets_can_be_lost(three):
    def again() -> int:
        found = three[0].call("nstat", "-asz", "TcpRetransSegs").split()
        return int(found[found.index("TcpRetransSegs") + 1])

    three[1].lose(0.05)
    before = again()
    _send(three[0], three[1], 16 * MIB)  # in packets of up to 64 KiB
    assert again() > before


def test_a_cable_can_be_pulled_and_put_back(three):
    three[1].cut()
    _fails(r"timed out|No route", three[0], three[1])
    three[1].heal()
    _send(three[0], three[1])  # the kernel may need more than a second to look again for who did not answer


def test_mounts_are_each_hosts_own(hosts, tmp_path):
    network = hosts(2)
    network[1].mount_tmpfs("/dev/shm", 2 << 20)
    shown = tmp_path / "shown"
    shown.mkdir()
    network[1].bind(tmp_path, shown, read_only=True)
    sizes = [int(host.call("stat", "-f", "-c", "%b", "/dev/shm")) for host in network]
    assert sizes[0] > sizes[1]
    with pytest.raises(NetworkError, match="Read-only"):
        network[1].call("touch", shown / "file")
    network[0].call("touch", shown / "file")


def test_another_process_can_hold_a_port(hosts):
    network = hosts(1)
    network[0].hold_port(29500)
    with pytest.raises(NetworkError, match="in use"):
        network[0].call(sys.executable, "-c", "import socket; socket.create_server(('', 29500))")


def test_a_host_can_have_a_bridge_that_leads_nowhere(hosts):
    network = hosts(1)
    network[0].add_bridge("docker0", "172.17.0.1/16")
    assert "172.17.0.1/16" in network[0].call("ip", "-br", "addr", "show", "docker0")
    assert {"docker0", "eth0", "lo"} <= set(network[0].call("ls", "/sys/class/net").split())


def test_a_process_of_a_host_has_the_hosts_limits_and_ends_with_it(hosts):
    network = hosts(1)
    network[0].prefix = ["prlimit", "--nofile=77"]
    done = subprocess.run([*network[0].enter(Path("/")), "sh", "-c", "ulimit -n"], capture_output=True, text=True)
    assert done.stdout == "77\n"
    there = [*network[0].enter(Path("/")), "sh", "-c", "echo there; exec sleep 1000"]
    with subprocess.Popen(there, stdout=subprocess.PIPE) as sleeper:
        sleeper.stdout.readline()
        network.close()
        assert sleeper.wait(60) in (-signal.SIGKILL, 128 + signal.SIGKILL)
