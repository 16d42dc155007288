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


def test_links_to_a_switch(monkeypatch):
    found = linked(monkeypatch, states=dict.fromkeys(range(18), 1), kinds=dict.fromkeys(range(18), SWITCH))
    assert (found.nvlinks, found.nvlink_switched) == (18, True)
    assert found.nvlink_bytes_per_s == pytest.approx(370.8e9)
    assert found.pcie_bytes_per_s == 48e9


def test_only_links_that_are_up_are_asked_where_they_lead(monkeypatch):
    found = linked(monkeypatch, states={0: 0, 3: 1, 5: 1}, kinds={3: SWITCH, 5: SWITCH})
    assert (found.nvlinks, found.nvlink_switched) == (2, True)


def test_a_bridge_is_no_switch(monkeypatch):
    assert linked(monkeypatch, states={0: 1, 1: 1}, kinds={0: GPU, 1: GPU}).nvlink_switched is False
    assert linked(monkeypatch, states={0: 1, 1: 1}, kinds={0: SWITCH, 1: GPU}).nvlink_switched is False


def test_what_is_not_said_is_none(monkeypatch):
    assert linked(monkeypatch, states={0: 1, 1: 1}, kinds={0: SWITCH}).nvlink_switched is None
    assert linked(monkeypatch, states={0: 0}, kinds={0: SWITCH}).nvlink_switched is None
    found = linked(monkeypatch, states={}, kinds={})
    assert (found.nvlinks, found.nvlink_switched) == (None, None)


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
