"""One fork server serves the ranks of a host that are alike; what one of them meets is no matter of the others."""

import contextlib
import json
import os
import signal
import sysconfig
import uuid
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from jobs import CHECK, Job, Start, processes, torchrun

ALONE = (*CHECK, "--nproc-per-node", "2", "--select", "LCH003,COL001", "--json", "{json}")
TORCHRUN = (*torchrun(2), *CHECK, "--select", "LCH003,COL001", "--json", "{json}")

WAYS = ("started by ddpdiag", "torchrun")

# What a script sets before its ranks start, by local rank; ranks 0 and 1 have nothing of their own.
WRAPPER = """\
case $LOCAL_RANK in
  2) exec taskset -c 0 "$@" ;;
  3) OMP_NUM_THREADS=2 exec "$@" ;;
  4) LD_PRELOAD=$LIBRARY exec "$@" ;;
  5) exec unshare --mount "$@" ;;
  6) echo 0 > "$GROUP/cgroup.procs"; exec "$@" ;;
  7) ulimit -s 9000; exec "$@" ;;
  *) exec "$@" ;;
esac
"""


def servers(job: Job) -> list[int]:
    """Pids of the fork servers of a run."""
    return [process.pid for process in processes(job.mark) if process.is_fork_server and not process.is_worker]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group beside that of the tests."""
    root = Path("/sys/fs/cgroup")
    folder = (root / "pids" if (root / "pids").is_dir() else root) / f"ddpdiag-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield folder
    folder.rmdir()


@pytest.fixture
def told(start: Start, group: Path) -> Mapping[int, Mapping]:
    """What the worker of each rank reads of itself."""
    library = next(Path("/usr/lib").glob("*/libm.so.6"), None)
    if library is None or os.geteuid() != 0:
        pytest.skip("needs root and a library to preload")
    check = ("check", "--select", "LCH003,COL001", "--json", "{json}")
    words = ("bash", "-c", WRAPPER, "wrapper", "python", "-m", "ddpdiag", *check)
    variables = {"DDPDIAG_TEST_FAULT": "tell *", "LIBRARY": str(library), "GROUP": str(group)}
    job = start(*torchrun(8, "--no-python"), *words, **variables)
    assert job.wait(120) == 0, job.told()
    job.check_left_nothing()
    return {rank: json.loads(Path(f"{job.reached}.{rank}").read_text()) for rank in range(8)}


@pytest.mark.deep
def test_each_rank_has_what_it_would_have_by_itself(told):
    first = told[0]
    assert told[1]["parent"] == first["parent"], "these two are alike"
    assert len({own["parent"] for own in told.values()}) == 7
    own = {
        name: [rank for rank in told if told[rank][name] != first[name]]
        for name in ("cores", "threads", "libraries", "mounts", "groups", "limits", "folder")
    }
    assert own == {
        "cores": [2] if first["cores"] != [0] else [],
        "threads": [3],
        "libraries": [4],
        "mounts": [5],
        "groups": [6],
        "limits": [7],
        "folder": [],
    }
    assert told[3]["threads"] == 2
    for rank, other in told.items():
        variables = other["variables"]
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == (str(rank), str(rank), "8")
        assert variables["TORCHELASTIC_ERROR_FILE"].split("/")[-2] == str(rank)
    assert len({other["output"] for other in told.values()}) == 1  # memory files of one name, each rank's its own


@pytest.mark.deep
@pytest.mark.parametrize("arguments", [ALONE, pytest.param(TORCHRUN, marks=pytest.mark.deep)], ids=WAYS)
def test_a_crash_of_one_worker_leaves_the_server_to_the_others(start, arguments):
    job = start(*arguments, DDPDIAG_TEST_FAULT="pause 1")
    job.wait_until(job.reached.exists)
    assert len(servers(job)) == 1
    assert job.fork_server(0).pid == job.fork_server(1).pid
    assert {job.worker(rank).parent for rank in (0, 1)} == set(servers(job))
    job.worker(1).kill(signal.SIGSEGV)
    assert job.wait(60) == 1, job.told()
    assert job.blamed == {1}
    job.check_left_nothing()


@pytest.mark.deep
def test_the_end_of_the_server_is_an_outcome_of_its_own_and_blames_no_rank(start):
    job = start(*ALONE, DDPDIAG_TEST_FAULT="pause 1")
    job.wait_until(job.reached.exists)
    job.fork_server(0).kill(signal.SIGKILL)
    assert job.wait(60) == 1, job.told()
    (error,) = job.errors
    assert (error["code"], error["ranks"]) == ("RUN003.died", [])
    assert "the process that imported torch for the ranks of this host" in error["message"]
    job.check_left_nothing()


# TRN001 asks for new workers.
TRAINED = (*CHECK, "--nproc-per-node", "2", "--select", "LCH003,COL001,TRN001", "--json", "{json}")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("arguments", "fault", "signum"),
    [
        (TRAINED, "pause 1", signal.SIGSTOP),
        (ALONE, "slow-import *", signal.SIGKILL),
        (ALONE, "slow-import *", signal.SIGSTOP),
    ],
    ids=["is stopped", "ends in the import", "is stopped in the import"],
)
def test_ranks_start_another_server_where_theirs(start, arguments, fault, signum):
    job = start(*arguments, DDPDIAG_TEST_FAULT=fault)
    job.wait_until(job.reached.exists)
    job.fork_server(0).kill(signum)
    assert job.wait(120) == 0, job.told()
    assert job.errors == []
    job.check_left_nothing()


@pytest.mark.deep
def test_a_rank_whose_python_has_no_torch_is_blamed(start, tmp_path):
    """It must not train with the torch that another rank of its host has imported."""
    venv.create(tmp_path / "venv")
    site = Path(sysconfig.get_path("purelib", vars={"base": tmp_path / "venv", "platbase": tmp_path / "venv"}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("torch"):
            (site / entry.name).symlink_to(entry)
    wrapper = 'p=python; [ $LOCAL_RANK = 1 ] && p=$OTHER; exec "$p" "$@"'
    words = ("bash", "-c", wrapper, "wrapper", *CHECK, "--select", "LCH003,COL001", "--json", "{json}")
    job = start(*torchrun(2, "--no-python"), *words, OTHER=str(tmp_path / "venv/bin/python"))
    assert job.wait(120) == 1, job.told()
    assert job.blamed == {1}
    job.check_left_nothing()


ORDERS = (
    ("supervisor 0", "supervisor 1", "launcher"),
    ("launcher", "supervisor 1", "supervisor 0"),
    ("server", "launcher", "supervisor 0", "supervisor 1"),
    pytest.param(("stop", "supervisor 1", "supervisor 0", "launcher"), marks=pytest.mark.deep),
)


@pytest.mark.parametrize("arguments", [ALONE, pytest.param(TORCHRUN, marks=pytest.mark.deep)], ids=WAYS)
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_nothing_stays_behind_whoever_is_killed_first(start, arguments, order):
    job = start(*arguments, DDPDIAG_TEST_FAULT="sleep 1")
    job.wait_until(job.reached.exists)
    server = job.fork_server(0)
    known = {"supervisor 0": job.supervisor(0), "supervisor 1": job.supervisor(1), "server": server, "stop": server}
    for name in order:
        with contextlib.suppress(ProcessLookupError):
            if name == "launcher":
                job.process.kill()
            else:
                known[name].kill(signal.SIGSTOP if name == "stop" else signal.SIGKILL)
    assert job.left_processes(5.0) == []
