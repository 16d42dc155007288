"""Two users of one host, with real uids: neither can end, read or join the other's run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.record import folder_name

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become two users"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv, to become two users"),
]

ANNE, BOB = 12_001, 12_002
RUN_ID = "both"
SECONDS = 90.0


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder as /tmp is: everybody may write, and nobody may touch what others made."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


class Rank:
    """One rank of a user, started by hand; all have one MASTER_PORT and one run id."""

    def __init__(self, user: int, rank: int, port: int, tmp: Path, *options: str, home: str = "") -> None:
        self.json = tmp / f"{user}-{rank}.json"
        # It may read Python, wherever that lies; it may not write, signal or connect as root does.
        capability = "+dac_read_search"
        become = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
        become = (*become, f"--inh-caps={capability}", f"--ambient-caps={capability}")
        place = ("--rank", str(rank), "--world-size", "2", "--local-rank", str(rank), "--json", str(self.json))
        where = ("--master-addr", "127.0.0.1", "--master-port", str(port), "--run-id", RUN_ID, "--budget", "40")
        command = (sys.executable, "-m", "ddpdiag", "check", *place, *where, "--select", "LCH001,LCH003,COL001")
        own = Path(home) if home else tmp / f"home-{user}"  # for the user's key file
        if not home and not own.exists():
            own.mkdir(mode=0o700)
            os.chown(own, user, user)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp), "HOME": str(own)}
        self.process = subprocess.Popen(
            [*become, *command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )

    def ended(self) -> tuple[int, str]:
        try:
            said, _nothing = self.process.communicate(timeout=SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, said


def run_folder_of(tmp: Path, user: int) -> Path:
    """The folder of a user's run, as soon as it is there."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for path in tmp.glob(f"{folder_name('')}*"):
            if path.stat().st_uid == user:
                return path
        time.sleep(0.02)
    raise AssertionError("no folder")


@pytest.mark.parametrize("home", ["", "/nonexistent"], ids=["homes", "no home"])
def test_two_runs_with_one_port_do_not_meet(tmp: Path, home: str) -> None:
    port = free_port("127.0.0.1")
    ranks = [Rank(user, rank, port, tmp, home=home) for rank in (0, 1) for user in (ANNE, BOB)]
    ends = [rank.ended() for rank in ranks]
    assert [code for code, _said in ends] == [0] * 4, ends
    for rank in ranks[:2]:
        report = json.loads(rank.json.read_text())
        assert (report["verdict"], report["findings"], len(report["ranks"])) == ("fit", [], 2), report
    files = [path.name for path in tmp.iterdir() if not path.name.startswith("home-")]
    assert sorted(files) == [f"{user}-0.json" for user in (ANNE, BOB)]
    for user in (ANNE, BOB) if home else ():
        shutil.rmtree(f"/tmp/ddpdiag-key-{user}")


def test_a_rank_of_another_user_does_not_join_and_the_run_does_not_notice(tmp: Path) -> None:
    port = free_port("127.0.0.1")
    first = Rank(ANNE, 0, port, tmp)
    folder = run_folder_of(tmp, ANNE)
    strange = Rank(BOB, 1, port, tmp, "--join-timeout", "6")
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, ANNE)
    time.sleep(1)  # he has tried by now
    own = Rank(ANNE, 1, port, tmp)
    assert [first.ended()[0], own.ended()[0]] == [0, 0]
    code, said = strange.ended()
    assert code == 3, said
    assert "no process of this user offers the run's secret" in said or "no process listens there" in said
    assert json.loads(first.json.read_text())["findings"] == []
