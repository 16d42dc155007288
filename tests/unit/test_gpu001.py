"""GPU001: the GPUs that should be there."""

import pytest
from seen import seen_of

from ddpdiag.checks.gpu.present import CHECK, Data
from ddpdiag.model import RunOptions, Severity
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu, Trouble
from ddpdiag.probes.gpu.visibility import PciFunction

ERROR, WARNING = Severity.ERROR, Severity.WARNING
EIGHT, CPUS, GLOO = RunOptions(expect_gpus=8), RunOptions(expect_gpus=0), RunOptions(backend="gloo")


def found(rows, *, options=None, ranks_per_node=1, size=None):
    seen = seen_of(CHECK, dict(enumerate(rows)), options=options, ranks_per_node=ranks_per_node, size=size)
    return list(CHECK.judge(seen))


def gpu(index, host=0, **changes):
    known = {"name": "NVIDIA H100", "uuid": f"GPU-{host}-{index}", "pci": f"0000:{index}b:00.0"}
    return ListedGpu(index=index, **(known | changes))


def functions(count, driver: str | None = "nvidia"):
    return tuple(PciFunction(f"0000:{index}b:00.0", driver) for index in range(count))


def healthy(count, host=0, **changes):
    nvml = Enumeration(gpus=tuple(gpu(index, host) for index in range(count)), driver="580.1")
    return Data(**({"nvml": nvml, "functions": functions(count), "visible": count} | changes))


def hidden(variable=None, host=0, **changes):
    return healthy(8, host, **({"visible": 0, "cuda_visible_devices": variable} | changes))


# NVML's own texts.
ERRORS = {
    Trouble.ABSENT: "NVML Shared Library Not Found",
    Trouble.MISMATCH: "Driver/library version mismatch",
    Trouble.OTHER: "Unknown Error",
}


def without(trouble=Trouble.ABSENT, **changes):
    return Data(nvml=Enumeration(trouble=trouble, error=ERRORS[trouble]), **changes)


def bound(index, **changes):
    """A rank that its cgroup shows one GPU, as its cuda:0."""
    nvml = Enumeration(gpus=(gpu(0, uuid=f"GPU-{index}", pci=f"0000:{index}b:00.0"),))
    return Data(**({"nvml": nvml, "functions": functions(4), "visible": 1} | changes))


LOST = Data(nvml=Enumeration(gpus=(gpu(0), ListedGpu(index=1, error="GPU is lost"))), functions=functions(2), visible=2)
OTHER_SECOND = [healthy(2), without(Trouble.OTHER, functions=functions(2), visible=2)]
WRONG_SECOND = [healthy(2, visible=n, promised=1, cuda_visible_devices=index) for n, index in ((1, "0"), (0, "2"))]
ONE_APART = [*map(bound, range(4)), *[healthy(4, host=1)] * 4]

SILENT = {
    "all GPUs are there": ([healthy(8), healthy(8, host=1)], {}),
    "a CPU host": ([without()], {}),
    "CPUs are expected of an unused GPU": ([without(functions=functions(1, "nouveau"))], {"options": CPUS}),
    "CPUs are expected of hidden GPUs": ([hidden("")], {"options": CPUS}),
    "a promised share": ([healthy(2, functions=functions(8), promised=2), healthy(8, host=1)], {}),
    "ranks that did not answer": (
        [healthy(4, visible=1, promised=4, cuda_visible_devices="0")],
        {"size": 4, "ranks_per_node": 4},
    ),
    "MIG slices": ([healthy(1, nvml=Enumeration(gpus=(gpu(0, mig=True),)), promised=7)], {}),
    "an unreadable bus where all are there": ([healthy(8, functions=None, promised=8)], {}),
    "one rank on each host": ([bound(n, functions=functions(1)) for n in range(2)], {}),
    "another order": ([healthy(2, cuda_visible_devices=value) for value in ("0,1", "1,0")], {"ranks_per_node": 2}),
}


@pytest.mark.parametrize(("rows", "world"), SILENT.values(), ids=SILENT)
def test_what_is_no_fault_is_silent(rows, world):
    assert found(rows, **world) == []


FAULTS = {
    "no driver": ("fewer", ERROR, "n0", [without(functions=functions(1, driver=None))], {}),
    "fewer than a variable names": ("fewer", ERROR, "n0", [without(promised=2)], {}),
    "fewer than the driver lists": ("fewer", ERROR, "n0", [without(visible=2)], {}),
    "fewer than other hosts": ("fewer", ERROR, "n2", [healthy(8), healthy(8, host=1), without()], {}),
    "fewer than an option says": ("fewer", ERROR, "n1", [healthy(8), healthy(7, host=1)], {"options": EIGHT}),
    "fell off the bus": ("fewer", ERROR, "n0", [healthy(7, functions=functions(8))], {}),
    "a wrong index, all": ("hidden", ERROR, "n0", [hidden("8", promised=1)], {}),
    "a wrong index, the rest": ("hidden", ERROR, "n0", [hidden("0,1,9", visible=2, promised=3)], {}),
    "a wrong index of one rank": ("hidden", ERROR, "n0", WRONG_SECOND, {"ranks_per_node": 2}),
    "an empty variable": ("hidden", WARNING, "n0", [hidden("")], {}),
    "no variable": ("hidden", WARNING, "n0", [hidden()], {}),
    "not in procfs": ("hidden", WARNING, "n0", [hidden(functions=())], {}),
    "hidden though expected": ("hidden", ERROR, "n0", [hidden("")], {"options": EIGHT}),
    "hidden though promised": ("hidden", ERROR, "n0", [hidden("", promised=8)], {}),
    "hidden, unlike other hosts": ("hidden", ERROR, "n1", [healthy(8), hidden("", host=1)], {}),
    "hidden under gloo": ("hidden", WARNING, "n0", [hidden("", promised=8)], {"options": GLOO}),
    "an unreadable bus": ("unreadable", WARNING, "n0", [without(functions=None)], {}),
    "NVML fails": ("unreadable", WARNING, "n0", [without(Trouble.OTHER)], {}),
    "NVML fails, CPUs are expected": ("nvml", WARNING, "n0", [without(Trouble.OTHER)], {"options": CPUS}),
    "NVML fails, the number is known": ("nvml", WARNING, "n0", OTHER_SECOND, {"ranks_per_node": 2}),
    "driver and library differ": ("mismatch", ERROR, "n0", [without(Trouble.MISMATCH, functions=functions(8))], {}),
    "lost": ("lost", ERROR, "n0", [LOST], {}),
    "lost for one rank, not hidden": ("lost", ERROR, "n0", [healthy(2), LOST], {"ranks_per_node": 2}),
    "one GPU for each rank": (
        "isolated",
        WARNING,
        "n0",
        [bound(index, cuda_visible_devices="0") for index in range(4)],
        {"ranks_per_node": 4},
    ),
    "one GPU for each rank, promised together": (
        "isolated",
        WARNING,
        "n0",
        [bound(index, promised=4) for index in range(4)],
        {"ranks_per_node": 4},
    ),
    "one GPU for each rank of one host": ("isolated", WARNING, "n0", ONE_APART, {"ranks_per_node": 4}),
}


@pytest.mark.parametrize(("word", "severity", "host", "rows", "world"), FAULTS.values(), ids=FAULTS)
def test_gpus_that_are_missing_or_hidden_are_named(golden, word, severity, host, rows, world):
    (finding,) = found(rows, **world)
    assert (finding.code, finding.severity, finding.hosts) == (f"GPU001.{word}", severity, (host,))
    assert finding.env == {}  # nothing was tried
    golden(finding)
