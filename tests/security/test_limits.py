"""A process that may open few files says so, and has no bug."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("most", [8, 20])
def test_too_few_open_files_are_one_sentence(tmp_path: Path, most: int) -> None:
    check = (sys.executable, "-m", "ddpdiag", "check", "--nproc-per-node", "2", "--select", "LCH001")
    command = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *check]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert f"this process may open {most} (ulimit -n)" in done.stderr
    assert "Traceback" not in done.stderr
