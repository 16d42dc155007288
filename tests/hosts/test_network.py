"""The test bed itself: hosts reach each other and nobody else, and nothing of it stays.

That its faults take effect is shown by the gallery (tests/faults), which names each of them.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import processes
from namespaces import NetworkError
from network import Host

pytestmark = pytest.mark.hosts


def _marks():
    """What a network leaves where anybody could see it."""
    devices = {path.name for path in Path("/sys/class/net").iterdir()}
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return devices, mounts, sorted(Path("/run/netns").glob("*")), sorted(Path("/etc").glob("netns"))


def connect(host: Host, name: str) -> str:
    return host.call(sys.executable, "-c", f"import socket; socket.create_connection(('{name}', 5000), 1)")


def test_hosts_reach_each_other_by_name_and_nobody_else(hosts):
    three = hosts(3)
    three[2].hold_port(5000)
    connect(three[0], "h2")
    connect(three[1], "h2")
    assert three[1].call("hostname") == "h1\n"
    with pytest.raises(NetworkError, match=r"unreachable|timed out|No route"):
        connect(three[0], "192.0.2.9")
    # Another network has the same names and addresses; nobody listens there.
    with pytest.raises(NetworkError, match="refused"):
        connect(hosts(3)[0], "h2")


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
