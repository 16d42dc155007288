"""Which variables a forked worker can still change, and which are read too early for that: one proof for each name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec._core
import pytest

from ddpdiag.runtime.supervisor import EXEC_TIME

# Sets a variable after `import torch`, forks, and prints what the child sees of it.
FORKED = """
import os, sys, torch
os.environ[sys.argv[1]] = sys.argv[2]
pid = os.fork()
if pid == 0:
    exec(sys.argv[3])
    sys.stdout.flush()
    os._exit(0)
os.waitpid(pid, 0)
"""
STARTED = """
import sys, torch
exec(sys.argv[3])
"""
THREADS = "print(torch.get_num_threads())"
STORE = "torch.distributed.TCPStore('localhost', 0, 1, True); print('done')"
# Variable, value, what shows its effect, and a text that is there if it had one.
CASES = [
    ("OMP_NUM_THREADS", "1", THREADS, "1\n"),
    ("MKL_NUM_THREADS", "1", THREADS, "1\n"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "print(torch.distributed.get_debug_level())", "DETAIL"),
    ("TORCH_CPP_LOG_LEVEL", "INFO", STORE, "[c10d]"),
    ("LD_LIBRARY_PATH", "{folder}", "import ctypes; ctypes.CDLL('libddpdiag-probe.so'); print('loaded')", "loaded"),
    ("PYTHONPATH", "{folder}", "import ddpdiag_probe; print('imported')", "imported"),
]


def run(script: str, name: str, value: str, shows: str, **env: str) -> str:
    clean = {key: text for key, text in os.environ.items() if key not in {case[0] for case in CASES}}
    arguments = [sys.executable, "-W", "ignore", "-c", script, name, value, shows]
    done = subprocess.run(arguments, env=clean | env, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library and a module that are found only through a variable."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "ddpdiag_probe.py").write_text("")
    shutil.copy(msgspec._core.__file__, folder / "libddpdiag-probe.so")  # any shared library will do
    return folder


@pytest.mark.parametrize(("name", "value", "shows", "effect"), CASES, ids=[case[0] for case in CASES])
def test_it_takes_effect_in_a_started_worker_and_not_in_a_forked_one(
    name: str, value: str, shows: str, effect: str, folder: Path
) -> None:
    if name.endswith("_NUM_THREADS") and (os.cpu_count() or 1) < 2:
        pytest.skip("one core: one thread is the default as well")
    value = value.format(folder=folder)
    assert name.startswith(EXEC_TIME)
    assert effect not in run(FORKED, name, value, shows)
    assert effect in run(STARTED, name, value, shows, **{name: value})


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "TORCH_NCCL_BLOCKING_WAIT", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"])
def test_what_is_read_later_needs_no_new_interpreter(name: str) -> None:
    assert not name.startswith(EXEC_TIME)


def test_a_forked_worker_changes_gloos_interface() -> None:
    shows = (
        "import torch.distributed as d; s = d.TCPStore('localhost', 0, 1, True)\n"
        "try: d.init_process_group('gloo', store=s, rank=0, world_size=1)\n"
        "except RuntimeError as error: print(error)"
    )
    assert "nope0" in run(FORKED, "GLOO_SOCKET_IFNAME", "nope0", shows)
