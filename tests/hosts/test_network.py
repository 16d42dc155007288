"""The test bed itself: what it promises, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import NetworkError

pytestmark = pytest.mark.hosts

# Sends so many bytes to a listener on another host, and prints the seconds until the last one was acknowledged.
_SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 5000), float(sys.argv[3]))
begin = time.monotonic()
link.sendall(bytes(int(sys.argv[2])))
link.shutdown(socket.SHUT_WR)
link.settimeout(1.5)
link.recv(1)
print(time.monotonic() - begin)
"""
_LISTEN = """
import socket
with socket.create_server(("", 5000)) as server:
    while True:
        link, _ = server.accept()
        while link.recv(1 << 16):
            pass
        link.close()
"""


def _listen(host):
    host.background(sys.executable, "-c", _LISTEN)
    host.wait_for_port(5000)


def _seconds(host, peer, size=1, patience=1):
    """Seconds that it took; the kernel may need more than one to look for a neighbour again that did not answer."""
    return float(host.call(sys.executable, "-c", _SEND, peer.name, size, patience))


def _marks():
    """What a network leaves where anybody could see it."""
    devices = {path.name for path in Path("/sys/class/net").iterdir()}
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return devices, mounts, sorted(Path("/run/netns").glob("*")), sorted(Path("/etc").glob("netns"))


def test_hosts_reach_each_other_by_name_and_nobody_else(hosts):
    network = hosts(3)
    _listen(network[2])
    assert _seconds(network[0], network[2]) < 1
    assert _seconds(network[1], network[2]) < 1
    assert network[1].call("hostname") == "h1\n"
    with pytest.raises(NetworkError, match=r"unreachable|timed out"):
        network[0].call(sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.9', 9), 0.3)")


def test_networks_do_not_meet(hosts):
    first, second = hosts(2), hosts(2)
    _listen(first[1])
    with pytest.raises(NetworkError, match="refused"):
        _seconds(second[0], second[1])


def test_nothing_stays(hosts):
    before = _marks()
    network = hosts(2)
    network[0].background("sleep", "1000")
    assert _marks() == before, "while it is there, it is nowhere to be seen"
    network.close()
    assert _marks() == before


def test_nothing_stays_when_the_tests_are_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib, time\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from network import Network\n"
        "network = Network(2, pathlib.Path(sys.argv[1]))\n"
        "network[1].background('sleep', '4242.4242')\n"
        "print(network[0]._inside.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, script, tmp_path / "network"], stdout=subprocess.PIPE, text=True) as tests:
        holder = int(tests.stdout.readline())
        tests.kill()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{holder}") or "4242.4242" in _commands():
        assert time.monotonic() < end
        time.sleep(0.05)


def _commands():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue  # it has just ended
    return {word for command in found if command.startswith("sleep ") for word in command.split()}


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


def test_a_slow_host_is_slow_in_the_direction_asked_for(hosts):
    network = hosts(3)
    for host in network:
        _listen(host)
    network[1].slow("50mbit")
    size = 4 << 20  # 0.67 s at 50 Mbit/s
    assert _seconds(network[1], network[0], size) > 0.4
    assert _seconds(network[0], network[1], size) < 0.4
    network[1].heal()
    network[1].slow("50mbit", incoming=True)
    assert _seconds(network[1], network[0], size) < 0.4
    assert _seconds(network[0], network[1], size) > 0.4
    network[1].heal()
    assert _seconds(network[0], network[1], size) < 0.4


def test_a_link_alone_can_be_slow(hosts):
    network = hosts(3)
    for host in network:
        _listen(host)
    network[1].slow("50mbit", towards=network[2])
    assert _seconds(network[1], network[2], 4 << 20) > 0.4
    assert _seconds(network[1], network[0], 4 << 20) < 0.4


@pytest.mark.parametrize(("reject", "word"), [(False, "timed out"), (True, "refused")])
def test_a_firewall_drops_or_rejects_a_port_for_one_host(hosts, reject, word):
    network = hosts(3)
    _listen(network[2])
    network[2].block(port=5000, source=network[1], reject=reject)
    with pytest.raises(NetworkError, match=word):
        _seconds(network[1], network[2])
    assert _seconds(network[0], network[2]) < 1


def test_one_direction_can_be_blocked(hosts):
    network = hosts(2)
    for host in network:
        _listen(host)
    network[0].block(source=network[1], new=True)
    assert _seconds(network[0], network[1]) < 1
    with pytest.raises(NetworkError, match="timed out"):
        _seconds(network[1], network[0])


def test_large_packets_can_vanish(hosts):
    network = hosts(2)
    _listen(network[1])
    network[1].swallow_large()
    assert _seconds(network[0], network[1], 100) < 1
    with pytest.raises(NetworkError, match="timed out"):
        _seconds(network[0], network[1], 1 << 20)


def test_packets_can_be_lost(hosts):
    network = hosts(2)
    _listen(network[1])
    network[1].lose(0.05)
    _seconds(network[0], network[1], 16 << 20)  # in packets of up to 64 KiB
    found = network[0].call("nstat", "-az", "TcpRetransSegs").split()
    assert int(found[found.index("TcpRetransSegs") + 1]) > 0


def test_a_cable_can_be_pulled_and_put_back(hosts):
    network = hosts(2)
    _listen(network[1])
    network[1].cut()
    with pytest.raises(NetworkError, match=r"timed out|No route"):
        _seconds(network[0], network[1])
    network[1].heal()
    assert _seconds(network[0], network[1], patience=5) < 5


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
        assert sleeper.wait(5) in (-signal.SIGKILL, 128 + signal.SIGKILL)
