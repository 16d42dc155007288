"""NVML through a fake pynvml."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from ddpdiag.probes.gpu.nvml import Device, Trouble, enumerate_gpus, sysfs_address


class NVMLError(Exception):
    """As pynvml's: one subclass per code."""

    value = 999


LibraryNotFound, DriverNotLoaded, Mismatch, NotSupported = (
    type(name, (NVMLError,), {}) for name in ("LibraryNotFound", "DriverNotLoaded", "Mismatch", "NotSupported")
)


def raising(error):
    def call(*_args, **_kwargs):
        raise error

    return call


def fake(**changes):
    """A pynvml that shows one GPU of MIG-less hardware."""
    calls = {
        "NVMLError": NVMLError,
        "NVMLError_LibraryNotFound": LibraryNotFound,
        "NVMLError_DriverNotLoaded": DriverNotLoaded,
        "NVMLError_LibRmVersionMismatch": Mismatch,
        "nvmlMemory_v2": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: "NVIDIA H100",
        "nvmlDeviceGetUUID": lambda _: "GPU-1",
        "nvmlDeviceGetPciInfo": lambda _: SimpleNamespace(busId="00000000:1B:00.0"),
        "nvmlDeviceGetMemoryInfo": lambda _, version=None: SimpleNamespace(total=80 << 30, used=1 << 20),
        "nvmlDeviceGetMigMode": raising(NotSupported()),
    }
    return SimpleNamespace(**(calls | changes))


def enumerated(monkeypatch, **changes):
    monkeypatch.setitem(sys.modules, "pynvml", fake(**changes))
    return enumerate_gpus(lambda _: None)


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (LibraryNotFound(), Trouble.ABSENT),
        (DriverNotLoaded(), Trouble.ABSENT),
        (Mismatch(), Trouble.MISMATCH),
        (NVMLError("Unknown Error"), Trouble.OTHER),
    ],
)
def test_why_nvml_does_not_start_is_told_apart(monkeypatch, error, trouble):
    assert enumerated(monkeypatch, nvmlInit=raising(error)).trouble is trouble


def test_an_old_library_gives_memory_in_its_first_form(monkeypatch):
    def info(_handle, version=None):
        if version:
            raise NotSupported
        return SimpleNamespace(total=8, used=4)

    assert enumerated(monkeypatch, nvmlDeviceGetMemoryInfo=info).gpus[0].memory_bytes == 8


def test_a_missing_pynvml_is_an_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert enumerate_gpus(lambda _: None).trouble is Trouble.ABSENT


def test_bus_ids_are_spelled_as_sysfs_does():
    assert sysfs_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert sysfs_address("00010000:C3:00.0") == "10000:c3:00.0"


@pytest.mark.parametrize("kind", [ctypes.c_char, ctypes.c_ubyte])
@pytest.mark.parametrize(("uuid", "number"), [(b"\0\0\0\0", 0), (b"\x01\0\0\x02", 0x01000002), (b"\0\0\x03\0", 0x300)])
def test_an_array_of_bytes_is_read_behind_its_first_zero(monkeypatch, kind, uuid, number):
    """As in pynvml's structures of the fabric."""
    filled = type("Filled", (ctypes.Structure,), {"_fields_": [("clusterUuid", kind * 4), ("state", ctypes.c_uint8)]})

    def fill(_handle, target):
        ctypes.memmove(target, uuid + b"\x03", 5)
        return 0

    monkeypatch.setitem(sys.modules, "pynvml", fake(Info=filled, nvmlInfo=fill))
    assert Device(0).members("nvmlInfo", "Info", ("clusterUuid", "state")) == {"clusterUuid": number, "state": 3}
