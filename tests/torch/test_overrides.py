"""Which variables a forked worker can still change, and which are read too early for that: one proof for each name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec._core
import pytest

from ddpdiag.runtime.supervisor.sharing import EXEC_TIME_VARIABLES

# Imports torch, and for each case forks a child that runs what shows an effect; what it says is in a file. With "fork"
# the variable is set in the child, else it was there from the start.
SCRIPT = """
import json, os, sys, torch
folder, how, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for name, value, shows in cases:
    if (pid := os.fork()) == 0:
        said = os.open(f"{folder}/{how}-{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        if how == "fork":
            os.environ[name] = value
        exec(shows)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""
THREADS = "print(torch.get_num_threads())"
STORE = "torch.distributed.TCPStore('localhost', 0, 1, True); print('done')"
GLOO = """
import torch.distributed as d; s = d.TCPStore('localhost', 0, 1, True)
try: d.init_process_group('gloo', store=s, rank=0, world_size=1)
except RuntimeError as error: print(error)
"""
# Variable, value, what shows its effect, and a text that is there if it had one.
CASES = {
    "OMP_NUM_THREADS": ("1", THREADS, "1\n"),
    "MKL_NUM_THREADS": ("1", THREADS, "1\n"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "print(torch.distributed.get_debug_level())", "DETAIL"),
    "TORCH_CPP_LOG_LEVEL": ("INFO", STORE, "[c10d]"),
    "LD_LIBRARY_PATH": ("{folder}", "import ctypes; ctypes.CDLL('libddpdiag-probe.so'); print('loaded')", "loaded"),
    "PYTHONPATH": ("{folder}", "import ddpdiag_probe; print('imported')", "imported"),
    "GLOO_SOCKET_IFNAME": ("nope0", GLOO, "nope0"),
}
# The names of one started process; two that do the same cannot be told apart in one.
STARTED = (("MKL_NUM_THREADS",), tuple(name for name in CASES if name[:4] not in ("MKL_", "GLOO")))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each process said, and a library and a module that are found only through a variable."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "ddpdiag_probe.py").write_text("")
    shutil.copy(msgspec._core.__file__, folder / "libddpdiag-probe.so")  # any shared library will do
    clean = {name: text for name, text in os.environ.items() if name not in CASES}
    values = {name: value.format(folder=folder) for name, (value, *_) in CASES.items()}

    def start(how: str, *names: str, **variables: str) -> subprocess.Popen:
        cases = json.dumps([(name, values[name], CASES[name][1]) for name in names])
        words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), how, cases]
        return subprocess.Popen(words, env=clean | variables, stderr=subprocess.DEVNULL)

    running = [start("start", *names, **{name: values[name] for name in names}) for names in STARTED]
    running.append(start("fork", *CASES))
    assert [process.wait(120) for process in running] == [0, 0, 0]
    return folder


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name in CASES if name != "GLOO_SOCKET_IFNAME"])
def test_it_takes_effect_in_a_started_worker_and_not_in_a_forked_one(name: str, said: Path) -> None:
    if name.endswith("_NUM_THREADS") and (os.cpu_count() or 1) < 2:
        pytest.skip("one core: one thread is the default as well")
    effect = CASES[name][2]
    assert EXEC_TIME_VARIABLES.fullmatch(name)
    assert effect not in (said / f"fork-{name}").read_text()
    assert effect in (said / f"start-{name}").read_text()


@pytest.mark.deep
def test_a_forked_worker_changes_gloos_interface(said: Path) -> None:
    assert "nope0" in (said / "fork-GLOO_SOCKET_IFNAME").read_text()


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "TORCH_NCCL_BLOCKING_WAIT", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"])
def test_what_is_read_later_needs_no_new_interpreter(name: str) -> None:
    assert not EXEC_TIME_VARIABLES.fullmatch(name)
