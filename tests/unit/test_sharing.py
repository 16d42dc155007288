"""Which ranks share a fork server."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from required import require_hosts

from ddpdiag.runtime.supervisor import sharing

pytestmark = pytest.mark.skipif(not sharing.is_possible(), reason="needs Linux")
ENV = {"PATH": "/bin", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "name",
    ["RANK", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "PMIX_RANK",
     "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_ERROR_FILE", "SLURM_PROCID"],
)  # fmt: skip
def test_a_rank_may_differ_in_what_is_its_own(name):
    assert sharing.variable_that_differs(ENV, {**ENV, name: "7"}) is None
    assert sharing.socket_name(ENV, 0) == sharing.socket_name({**ENV, name: "7"}, 0)


@pytest.mark.parametrize("name", ["PATH", "WORLD_SIZE", "OMP_NUM_THREADS", "LD_PRELOAD", "TORCH_CPP_LOG_LEVEL"])
def test_a_rank_may_differ_in_nothing_else(name):
    assert sharing.variable_that_differs(ENV, {**ENV, name: "7"}) == name
    assert sharing.socket_name(ENV, 0) != sharing.socket_name({**ENV, name: "7"}, 0)
    without = {key: value for key, value in ENV.items() if key != name}
    assert sharing.variable_that_differs(without, {**without, name: "7"}) == name


def test_a_secret_is_compared_but_is_no_part_of_the_name_that_all_users_read():
    other = {**ENV, "DDPDIAG_TOKEN": "7"}
    assert sharing.socket_name(ENV, 0) == sharing.socket_name(other, 0)
    assert sharing.variable_that_differs(ENV, other) == "DDPDIAG_TOKEN"


def test_attempts_have_names_of_their_own():
    assert None not in (names := {sharing.socket_name(ENV, attempt) for attempt in (0, 1)})
    assert len(names) == 2


def tell_interpreter(*words: str, at: Path = Path(sys.executable), **variables: str) -> str:
    code = "from ddpdiag.runtime.supervisor import sharing; print(sharing.interpreter_digest())"
    env = {**os.environ, **variables}
    return subprocess.run([at, *words, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_another_python_is_no_part_of_a_shared_server(tmp_path):
    """A rank in another virtual environment, or with other flags, has another torch or none."""
    usual = tell_interpreter()
    assert tell_interpreter() == usual
    venv.create(tmp_path / "venv", with_pip=False)
    paths = os.pathsep.join(filter(None, sys.path))
    (tmp_path / "sitecustomize.py").touch()
    others = {
        "environment": tell_interpreter(at=tmp_path / "venv/bin/python", PYTHONPATH=paths),
        "path": tell_interpreter(PYTHONPATH=str(tmp_path / "elsewhere")),
        "flags": tell_interpreter("-O"),
        "start": tell_interpreter(PYTHONPATH=str(tmp_path)),
    }
    assert usual not in others.values()
    assert len({*others.values()}) == len(others)


def test_what_the_kernel_shows_is_the_same_for_a_process_and_itself():
    own = sharing.inherited_traits()
    assert {"control group", "limits", "cwd", "net namespace", "user, capabilities or cores"} <= set(own)
    assert sharing.first_difference(own, sharing.inherited_traits()) is None
    assert sharing.first_difference(own, {**own, "cwd": "/elsewhere"}) == "cwd"
    assert sharing.first_difference({**own, "new namespace": "1"}, own) == "new namespace"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for namespaces and capabilities")
@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        ("env", None),
        ("nice -n 1", "priority and scheduling policy"),
        ("prlimit --stack=9000000", "limits"),
        ("env -C /", "cwd"),
        *((f"unshare --{kind}", f"{kind[:3]} namespace") for kind in ("ipc", "uts")),
        ("unshare --mount", "mnt namespace"),
        ("unshare --cgroup", "cgroup namespace"),
        *(
            (wrapper, "user, capabilities or cores")
            for wrapper in (
                "setpriv --no-new-privs", "setpriv --groups 12345",
                "setpriv --bounding-set=-net_raw --inh-caps=-net_raw",
            )
        ),
    ],
)  # fmt: skip
def test_what_a_wrapper_of_one_rank_changes_is_named(wrapper, name):
    if "unshare" in wrapper:
        require_hosts()
    words = (*wrapper.split(), "sh", "-c", "echo up; exec sleep 60")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as rank:
        rank.stdout.readline()
        other = sharing.inherited_traits(rank.pid)
        rank.kill()
    assert sharing.first_difference(sharing.inherited_traits(), other) == name


def test_the_soft_limit_of_open_files_does_not_count():
    """Rank 0 raises its own."""
    import resource

    own, (soft, hard) = sharing.inherited_traits(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert sharing.first_difference(own, sharing.inherited_traits()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("name", "counts"),
    [("OMP_NUM_THREADS", True), ("KMP_AFFINITY", True), ("GOMP_CPU_AFFINITY", True), ("MKL_NUM_THREADS", True),
     ("MALLOC_ARENA_MAX", True), ("LD_LIBRARY_PATH", True), ("PYTHONPATH", True), ("PYTORCH_ALLOC_CONF", True),
     ("PYTORCH_CUDA_ALLOC_CONF", True), ("TORCH_DISTRIBUTED_DEBUG", True), ("NCCL_P2P_DISABLE", False)],
)  # fmt: skip
def test_what_is_read_at_exec_or_import_needs_a_worker_of_its_own(name, counts):
    assert bool(sharing.EXEC_TIME_VARIABLES.fullmatch(name)) == counts
