"""All commands but `check` work where torch, numpy and NVML cannot even be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEALTHY = Path(__file__).parent.parent / "recordings" / "healthy-2-ranks.jsonl"
SCRIPT = Path(__file__).parent / "scripts" / "torchrun_script.py"

# Python imports a module of this name at its start. Not an ImportError: nobody may even try.
SITECUSTOMIZE = """\
import sys

class Tried(BaseException):
    pass

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "pynvml"):
            raise Tried(name)

sys.meta_path.insert(0, Blocked)
"""


@pytest.fixture
def blocked(tmp_path: Path) -> dict[str, str]:
    """Variables with which the three cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {"PYTHONPATH": str(tmp_path)}


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DDPDIAG_"))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("module", ["torch", "torch.distributed", "numpy", "pynvml"])
def test_the_block_blocks(blocked, module):
    assert "Tried" in python("-c", f"import {module}", **blocked).stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--help"], "explain"),
        (["check", "--help"], "--nproc-per-node"),
        (["train", "--help"], "--strategy"),
        (["watch", "--help"], "--stall"),
        (["watch", "-q", "--", "echo", "watched"], "watched"),
        (["host", "--help"], "--expect-gpus"),
        (["explain", "COL001"], "COL001"),
        (["explain", "Duplicate GPU"], "GPU002"),
        (["manual"], "## GPU002"),
        (["checks"], "TRN001"),
        (["judge", str(HEALTHY)], "FIT"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_needs_none_of_them(blocked, arguments, word):
    done = python("-m", "ddpdiag", *arguments, **blocked)
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [(["lint", str(SCRIPT)], 0), (["compare", str(HEALTHY), str(HEALTHY)], 3)],
    ids=["lint", "compare"],
)
def test_files_are_read_without_them(golden, blocked, arguments, exit_code):
    done = python("-m", "ddpdiag", *arguments, **blocked)
    assert (done.returncode, done.stderr) == (exit_code, "")
    golden(done.stdout.splitlines()[-1])


def test_a_recording_is_judged_alike_without_them(blocked):
    arguments = ("-m", "ddpdiag", "judge", str(HEALTHY), "--details", "--json", "-")
    without, with_all = python(*arguments, **blocked), python(*arguments)
    assert (without.returncode, without.stdout, without.stderr) == (0, with_all.stdout, with_all.stderr)
    report = json.loads(without.stdout)
    assert report["verdict"] == "fit"
    assert [row["host"] for row in report["ranks"]] == ["n0", "n0"]
    assert "training" in [stage["name"] for stage in report["stages"] if stage["status"] == "done"]
