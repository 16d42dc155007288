"""No file in the current directory, in which strangers may write, runs in a process that ddpdiag starts."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ddpdiag
from ddpdiag.errors import UsageError
from ddpdiag.watch.observer import read_gpu_uses


def check() -> None:
    with pytest.raises(UsageError, match="--stage"):
        ddpdiag.check(stage=["nonsense"])


@pytest.mark.parametrize("start", [check, lambda: read_gpu_uses(time.monotonic() + 20)], ids=["check", "watch"])
def test_a_planted_module_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]
) -> None:
    for name in ("ddpdiag", "json", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    start()
    assert not (tmp_path / "ran").exists()
