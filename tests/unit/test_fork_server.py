"""What the fork server imports beside the first trials."""

import os
import socket
import subprocess
import sys
import time

import pytest

SERVE = """
import socket, sys
from ddpdiag.runtime.supervisor import fork_server
fork_server.LAZY_IMPORTS = ("lazy_probe",)
fork_server.import_torch = lambda: 0.1
fork_server.main(int(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("enough", [False, True])
def test_what_ddp_loads_is_imported_unless_nothing_will_be_trained(tmp_path, enough):
    (tmp_path / "lazy_probe.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if enough:
        ours.send(b'{"type":"enough"}')
    environ = {"PYTHONPATH": f"{tmp_path}:{':'.join(path for path in sys.path if path)}"}
    life_end, life = os.pipe()
    command = [sys.executable, "-c", SERVE, str(life_end), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[life_end, theirs.fileno()], env=environ) as server:
        theirs.close()
        os.close(life_end)
        end = time.monotonic() + 20
        while not enough and not (tmp_path / "imported").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert ours.recv(100) == b'{"type":"imported","seconds":0.1}'
        if enough:
            time.sleep(0.5)
        os.close(life)
        assert server.wait(20) in (0, -9)
    ours.close()
    assert (tmp_path / "imported").exists() != enough
