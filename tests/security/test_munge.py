"""Hosts of Slurm that share no home share munged's key, and by it the secret of a run."""

import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.secret import Origin, RunSecret, SecretServer, ask_by_munge

SECRET = b"s" * 32
# What munge(1) and unmunge(1) do, without munged and without secrecy: the uid, and then the payload.
MUNGE = """#!/bin/sh
[ -z "$MUNGE_IS_DOWN" ] || exit 6
printf '%s:' "${MUNGE_UID:-$(id -u)}"; base64 -w0
"""
UNMUNGE = """#!/bin/sh
IFS=: read -r uid payload
printf 'STATUS:  %s\\nUID:     %s\\n\\n' "${UNMUNGE_STATUS:-0}" "$uid"
printf '%s' "$payload" | base64 -d || exit 8
exit ${UNMUNGE_STATUS:-0}
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"munge": MUNGE, "unmunge": UNMUNGE}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))


def across_hosts(ports: tuple[int, ...], **environ: str) -> RunSecret:
    job = {"SLURM_JOB_ID": "1"} | environ
    return RunSecret("run", job, starts_all_ranks=False, is_local=False, host="127.0.0.1", munge_ports=ports)


def test_a_rank_has_the_secret_and_the_port_of_its_users_rank_0() -> None:
    ports = (free_port("127.0.0.1"), free_port("127.0.0.1"))
    rank_0, rank = across_hosts(ports), across_hosts(ports)
    wire = rank_0.wire_of_rank_0()
    assert (wire.is_locked, rank_0.origin) == (True, Origin.MUNGE)
    assert rank.find_rank_0() is None  # not yet; and never without
    rank_0.offer(1234)
    try:
        found = rank.find_rank_0()
        assert found is not None
        assert (found.wire._secret, found.port) == (wire._secret, 1234)
        # A second rank 0 takes the first one's, so that they recognize each other.
        assert across_hosts(ports).wire_of_rank_0()._secret == wire._secret
    finally:
        rank_0.close()
    assert across_hosts(ports).find_rank_0() is None


@pytest.mark.parametrize(
    ("run_id", "environ", "opens"),
    [
        ("run", {}, True),
        ("run", {"UNMUNGE_STATUS": "17"}, True),  # replayed: the ranks of one host may all open it
        ("run", {"UNMUNGE_STATUS": "8"}, False),  # no credential
        ("run", {"UNMUNGE_STATUS": "14"}, False),  # invalid
        ("run", {"UNMUNGE_STATUS": "18"}, False),  # for another user
        ("run", {"MUNGE_UID": "12345"}, False),
        ("another", {}, False),
    ],
)
def test_ranks_of_the_run_and_its_user_alone_open_the_secret(
    monkeypatch: pytest.MonkeyPatch, run_id: str, environ: dict[str, str], opens: bool
) -> None:
    port = free_port("127.0.0.1")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    offer = SecretServer("run", SECRET, 1234, [port])
    try:
        assert ask_by_munge(run_id, "127.0.0.1", [port]) == ((SECRET, 1234) if opens else None)
    finally:
        offer.close()


@pytest.mark.parametrize("said", [b"", b"MUNGE:", b"0:eyJ9:", b"\0" * 10_000], ids=["nothing", "half", "odd", "noise"])
def test_a_stranger_on_the_first_port_is_passed_over(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            peer, _address = stranger.accept()
            peer.sendall(said)
            peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        port = free_port("127.0.0.1")
        ports = (stranger.getsockname()[1], port)
        offer = SecretServer("run", SECRET, 1234, ports)
        try:
            assert ask_by_munge("run", "127.0.0.1", ports) == (SECRET, 1234)
        finally:
            offer.close()
            thread.join()


def test_a_stranger_who_says_nothing_costs_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        begin = time.monotonic()
        assert ask_by_munge("run", "127.0.0.1", [stranger.getsockname()[1]]) is None
        assert time.monotonic() - begin < 5


def test_taken_ports_are_named_with_their_holder() -> None:
    with socket.create_server(("", 0)) as stranger, pytest.raises(UsageError, match="DDPDIAG_TOKEN"):
        SecretServer("run", SECRET, 1234, [stranger.getsockname()[1]])


@pytest.mark.parametrize("environ", [{"DDPDIAG_TOKEN": "t"}, {}], ids=["token", "munged is down"])
def test_it_is_asked_last_and_only_where_it_works(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setenv("MUNGE_IS_DOWN", "1")
    secrets = across_hosts((1,), **environ)
    secrets.wire_of_rank_0()
    assert secrets.origin is (Origin.TOKEN if environ else Origin.NONE)


def test_outside_of_slurm_it_is_not_asked() -> None:
    secrets = RunSecret("run", {}, starts_all_ranks=False, is_local=False, host="127.0.0.1", munge_ports=(1,))
    assert not secrets.wire_of_rank_0().is_locked
