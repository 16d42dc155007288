"""What the fork server imports beside the first trials."""

import socket
import subprocess
import sys
import time

import pytest

SERVE = """
import socket, sys
from ddpdiag.runtime.supervisor import worker
worker.LAZY_IMPORTS = ("lazy_probe",)
worker._serve(socket.socket(fileno=int(sys.argv[1])))
"""


@pytest.mark.parametrize("enough", [False, True])
def test_what_ddp_loads_is_imported_unless_nothing_will_be_trained(tmp_path, enough):
    (tmp_path / "lazy_probe.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if enough:
        ours.send(b'{"type":"enough"}')
    environ = {"PYTHONPATH": f"{tmp_path}:{':'.join(path for path in sys.path if path)}"}
    command = [sys.executable, "-c", SERVE, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ) as server:
        theirs.close()
        end = time.monotonic() + 20
        while not enough and not (tmp_path / "imported").exists() and time.monotonic() < end:
            time.sleep(0.01)
        ours.shutdown(socket.SHUT_WR)  # what was sent is read first, then the end
        assert server.wait(20) == 0
    ours.close()
    assert (tmp_path / "imported").exists() != enough
