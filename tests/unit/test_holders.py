"""Who has a port, on loopback only."""

import os
import re
import socket
import subprocess
import sys

import pytest

from ddpdiag.probes.host.programs import duration_text, port_user, user_name
from ddpdiag.probes.net.tcp_connect import free_port

SCRIPT = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"


def holder_text(*arguments, **variables):
    """What is said of a child that listens."""
    command = [sys.executable, "-c", f"{SCRIPT}; sys.stdin.read()", *arguments]
    env = {**os.environ, **variables}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        text = port_user(int(process.stdout.readline())) or ""
        process.communicate("")
    assert text.startswith(f"pid {process.pid} (")
    return text


def test_the_holder_of_a_port_is_named_even_if_it_only_connects(golden):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        texts = [port_user(own.getsockname()[1]) or "" for own in (server, client)]
    assert all(text.startswith(f"pid {os.getpid()} (") for text in texts)
    golden(*(re.sub(r"\d+ \(.*\)", "PID (...)", text) for text in texts))


def test_a_free_port_has_no_holder():
    assert port_user(free_port()) is None


def test_a_holders_secrets_are_not_shown():
    assert "hunter" not in holder_text("--token=hunter2", "--api-key", "hunter3", SLURM_JOB_TOKEN="hunter4")
    assert "hunter" not in holder_text("--pass", "hunter 5 hunter", "--psk=hunter6", "http://me:hunter7@host")


def test_a_holder_is_shown_with_its_user_its_age_and_its_job():
    text = holder_text(SLURM_JOB_ID="4711")
    assert f"user {user_name(os.getuid())}" in text
    assert text.endswith("s, SLURM_JOB_ID 4711)")


def test_a_job_name_that_is_no_plain_text_is_not_shown():
    assert "SLURM" not in holder_text(SLURM_JOB_ID="47\x1b[31m")


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (90, "1.5 min"), (7200, "2.0 h"), (172_800, "2.0 d")])
def test_ages_are_told_in_their_own_unit(seconds, text):
    assert duration_text(seconds) == text
