"""The load of one GPU: the real pynvml over a stand-in for NVIDIA's library."""

import os
import subprocess
import sys
from pathlib import Path

import fake_nvml
import pytest
from msgspec import Struct

from ddpdiag.codec import decode
from ddpdiag.model.measurements import GpuLoad

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")
pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

LOAD = """
import sys
from msgspec import Struct
from ddpdiag.codec import encode
from ddpdiag.model.measurements import GpuLoad
from ddpdiag.probes.gpu.health import watched
class Answer(Struct):
    load: GpuLoad | None
    pids: tuple[int, ...] | None
with watched(None if sys.argv[1] == "none" else sys.argv[1]) as gpu:
    print(encode(Answer(gpu.load(), gpu.pids())).decode())
"""


class Answer(Struct):
    load: GpuLoad | None
    pids: tuple[int, ...] | None


def answer(name: str, uuid: str, folder: Path) -> Answer:
    """LD_LIBRARY_PATH is read when a process starts."""
    environ = os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build(name, folder))}
    command = [sys.executable, "-c", LOAD, uuid]
    found = subprocess.run(command, env=environ, capture_output=True, timeout=30, check=True).stdout
    return decode(found, Answer)


def test_clocks_power_and_heat_of_a_gpu_that_computes(tmp_path: Path) -> None:
    found = answer("computing", fake_nvml.uuid_of(5), tmp_path)
    assert found.load == GpuLoad(sm_hz=990e6, events=0x40, celsius=87)
    assert found.pids == (8123,)


def test_what_a_gpu_does_not_say_is_not_told(tmp_path: Path) -> None:
    load = answer("computing", fake_nvml.uuid_of(6), tmp_path).load
    assert load == GpuLoad(events=0x4, celsius=61)


@pytest.mark.parametrize(
    ("name", "uuid"), [("computing", "GPU-unknown"), ("computing", "none"), ("driver-gone", "any")]
)
def test_a_gpu_that_nvml_does_not_know_says_nothing(name: str, uuid: str, tmp_path: Path) -> None:
    found = answer(name, uuid, tmp_path)
    assert (found.load, found.pids) == (None, None)
