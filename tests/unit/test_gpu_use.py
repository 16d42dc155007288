"""How busy GPUs are, from NVML in a process of its own."""

import time
from pathlib import Path

import fake_nvml
import pytest

from ddpdiag.watch.observer import read_gpu_uses

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")


def _uses(name: str, seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml.build(name, folder)))
    return read_gpu_uses(time.monotonic() + seconds)


def test_the_one_that_idles_among_those_that_wait(tmp_path, monkeypatch):
    gpus, trouble = _uses("waiting", 20, tmp_path, monkeypatch)
    assert trouble == ""
    assert [use.busy_share for use in gpus] == [1.0] * 5 + [0.0] + [1.0] * 2
    assert (gpus[5].power_watts, gpus[5].pids) == (71.0, (8123,))


def test_what_is_not_supported_is_not_told(tmp_path, monkeypatch):
    gpus, _ = _uses("nothing-supported", 20, tmp_path, monkeypatch)
    assert {(use.busy_share, use.power_watts, use.pids) for use in gpus} == {(None, None, ())}


def test_nvml_that_hangs_is_left(golden, tmp_path, monkeypatch):
    gpus, trouble = _uses("use-hanging", 1.0, tmp_path, monkeypatch)
    assert gpus == ()
    golden(trouble)
