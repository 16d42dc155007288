"""NVLinks and PCIe slots through a fake pynvml."""

import sys
from types import SimpleNamespace

import pytest

from ddpdiag.probes.gpu.links import Connections, connections, nvlink_rate, pcie_rate

GPU, SWITCH = 0, 2


class NVMLError(Exception):
    """As pynvml's: not supported."""

    value = 3


class Missing(dict):
    """What is not there, NVML does not support."""

    def __missing__(self, key):
        raise NVMLError(key)


def linked(monkeypatch, *, states, kinds, init=lambda: None):
    """A Hopper in a slot of generation 5, which sleeps; `states` and `kinds` are by the number of a link."""
    calls = {
        "NVMLError": NVMLError,
        "NVML_NVLINK_MAX_LINKS": 18,
        "NVML_NVLINK_DEVICE_TYPE_SWITCH": SWITCH,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetNvLinkState": lambda _, link: Missing(states)[link],
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda _, link: Missing(kinds)[link],
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 1,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 16,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**calls))
    return connections("GPU-1", (9, 0))


@pytest.mark.parametrize(
    ("states", "kinds", "nvlinks", "switched"),
    [
        pytest.param(dict.fromkeys(range(18), 1), dict.fromkeys(range(18), SWITCH), 18, True, id="a switch"),
        pytest.param({0: 0, 3: 1, 5: 1}, {3: SWITCH, 5: SWITCH}, 2, True, id="only links that are up count"),
        pytest.param({0: 1, 1: 1}, {0: GPU, 1: GPU}, 2, False, id="a bridge"),
        pytest.param({0: 1, 1: 1}, {0: SWITCH, 1: GPU}, 2, False, id="a switch and a bridge"),
        pytest.param({0: 1, 1: 1}, {0: SWITCH}, 2, None, id="one link is not known"),
        pytest.param({0: 0}, {0: SWITCH}, 0, None, id="no link is up"),
        pytest.param({}, {}, None, None, id="nothing is known"),
    ],
)
def test_links_and_whether_they_lead_to_a_switch(monkeypatch, states, kinds, nvlinks, switched):
    found = linked(monkeypatch, states=states, kinds=kinds)
    assert (found.nvlinks, found.nvlink_switched) == (nvlinks, switched)
    assert found.nvlink_bytes_per_s == (pytest.approx(20.6e9 * nvlinks) if nvlinks else None)
    assert found.pcie_bytes_per_s == 48e9


def test_no_pynvml_and_no_driver_say_nothing(monkeypatch):
    def fails():
        raise NVMLError("no driver")

    assert linked(monkeypatch, states={}, kinds={}, init=fails) == Connections()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    assert connections("GPU-1", (9, 0)) == Connections()


def test_rates_are_those_of_nccl():
    assert pcie_rate(4, 16) == 24e9
    assert pcie_rate(9, 16) is None
    assert nvlink_rate((8, 0)) == 20e9
    assert nvlink_rate((12, 0)) == 40.1e9
