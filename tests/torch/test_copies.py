"""Copies, run by the same loops as on GPUs: what they measure, and what P2P002 makes of their faults."""

import math
import os
import time

import pytest
import torch
from cpu_devices import HOST, MB, CpuDevices, Hang
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs
from seen import seen_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices as gpu002
from ddpdiag.checks.p2p.copies.check import CHECK
from ddpdiag.codec import encode
from ddpdiag.model import Outcome, ProcessState, Severity, Status
from ddpdiag.model.measurements import GpuCopies
from ddpdiag.workloads.copies import PROBE_BYTES, Buffer, CudaDevices, _expected_words, measure_copies


class Slots(CudaDevices):
    """GPUs in slots of a made-up /sys, whose host memory is not pinned; where this thread was when it was allocated."""

    def __init__(self):
        super().__init__()
        self.allocated = []

    def properties(self, gpu):
        return GpuCopies(index=gpu, pci=f"0000:0{gpu}:00.0")

    def buffer(self, gpu, count):
        self.allocated.append(os.sched_getaffinity(0))
        return Buffer(gpu, torch.empty(count, dtype=torch.int32))


def test_the_hosts_memory_is_allocated_on_the_node_of_each_gpu(monkeypatch, tmp_path):
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)
    for gpu, (node, near) in enumerate([(0, cores[0]), (0, cores[0]), (1, cores[-1]), (-1, cores[0])]):
        device = tmp_path / f"bus/pci/devices/0000:0{gpu}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(f"{near}\n")
    monkeypatch.setenv("DDPDIAG_SYSFS", str(tmp_path))
    devices = Slots()
    buffers = [devices.host_buffer(gpu, 16) for gpu in range(4)]
    assert devices.allocated == [{cores[0]}, {cores[-1]}, mine]
    assert buffers[0].words.data_ptr() == buffers[1].words.data_ptr()
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize(("most", "count"), [(None, 8), (2, 2), (16, 8)])
def test_gpus_behind_those_of_the_ranks_are_left_alone(monkeypatch, most, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert CudaDevices(most).count == count


class Listener:
    """A trial, and what it reports."""

    def __init__(self, end=lambda: math.inf):
        self.steps, self.reports = [], []
        self._end = end

    @property
    def end(self):
        return self._end()

    def step(self, label):
        self.steps.append(label)

    def report(self, known, text):
        self.reports.append(known)

    def add_timing(self, name, seconds): ...


def run(devices, *, only=(), **trial):
    return measure_copies(devices, Listener(**trial), selected_jobs=only, indirect_ratio=0.9)


def pair(found, source, target):
    return next(own for own in found.pairs if (own.source, own.target) == (source, target))


# What is measured -----------------------------------------------------------------------------------------------------


def test_every_way_has_its_rate():
    rates = {(0, 1): 200 * MB, (1, 0): 80 * MB, (1, HOST): 20 * MB, (HOST, 2): 30 * MB}
    found = run(CpuDevices(3, rates=rates))
    assert [(own.source, own.target) for own in found.pairs] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert pair(found, 0, 1).bytes_per_s == pytest.approx(200 * MB)
    assert pair(found, 1, 0).bytes_per_s == pytest.approx(80 * MB)
    assert found.gpus[1].from_bytes_per_s == pytest.approx(20 * MB)
    assert found.gpus[2].to_bytes_per_s == pytest.approx(30 * MB)
    assert found.done == found.jobs == 9
    assert not any(own.wrong or own.wrong_through_host for own in found.pairs)


def test_only_some_links_are_measured_once_more():
    found = run(CpuDevices(3), only=[(2, 0), (1,)])
    assert [(own.source, own.target) for own in found.pairs] == [(2, 0)]
    assert [own.index for own in found.gpus if own.to_bytes_per_s is not None] == [1]
    assert found.done == found.jobs == 2


@pytest.mark.parametrize(
    ("links", "measured"),
    [
        ({}, False),
        ({(0, 1): 80 * MB}, True),
        ({(0, 1): 80 * MB, (0, HOST): 85 * MB}, False),
        ({(0, 1): 80 * MB, (HOST, 1): 85 * MB}, False),
        ({(0, 1): 80 * MB, (1, HOST): 85 * MB}, True),
    ],
)
def test_a_copy_through_the_host_is_measured_where_it_could_be_faster(links, measured):
    found = run(CpuDevices(2, rates=links))
    assert pair(found, 0, 1).through_host_bytes_per_s == (pytest.approx(40 * MB) if measured else None)


@pytest.mark.parametrize("faults", [{"closed": {(0, 1)}}, {"wrong": {(0, 1): 1}}])
def test_a_copy_without_peer_access_or_with_wrong_words_is_tried_through_the_host(faults):
    found = run(CpuDevices(2, **faults))
    assert [own.through_host_bytes_per_s is not None for own in found.pairs] == [True, False]


def test_a_slow_way_takes_no_more_than_it_must():
    devices = CpuDevices(2, rates={(0, 1): 1 * MB})
    found = run(devices)
    assert pair(found, 0, 1).words == PROBE_BYTES // 4
    assert devices.clock < 8 * PROBE_BYTES / MB


def test_nothing_is_tried_when_the_time_is_over():
    found = run(CpuDevices(2), end=time.monotonic)
    assert (found.done, found.jobs, found.pairs) == (0, 4, ())


# Contents -------------------------------------------------------------------------------------------------------------


def test_wrong_words_are_counted_on_their_way_only():
    found = run(CpuDevices(3, wrong={(2, 0): 7, (HOST, 1): 2, (0, HOST): 5}))
    assert {(own.source, own.target): own.wrong for own in found.pairs if own.wrong} == {(2, 0): 7}
    assert not any(own.wrong_through_host for own in found.pairs)
    assert [(own.wrong_to, own.wrong_from) for own in found.gpus] == [(0, 5), (2, 0), (0, 0)]
    own = pair(run(CpuDevices(2, rates={(0, 1): 50 * MB}, wrong_around={(0, 1): 3})), 0, 1)
    assert (own.wrong, own.wrong_through_host) == (0, 3)
    lost = pair(run(CpuDevices(2, lost={(0, 1)})), 0, 1)
    assert lost.wrong == lost.wrong_through_host == lost.words


def test_words_that_go_wrong_only_in_the_end_are_found():
    # Two probes and the copy that is checked alone are right.
    assert pair(run(CpuDevices(2, wrong={(0, 1): 1}, wrong_from=3), only=[(0, 1)]), 0, 1).wrong == 1


places = st.none() | st.integers(0, 254)


@given(places, places, places, places)
def test_no_word_of_a_way_is_right_on_another_way(a, b, c, d):
    like = torch.empty(64, dtype=torch.int32)
    same = bool((_expected_words(like, a, b) == _expected_words(like, c, d)).any())
    assert same is ((a, b) == (c, d))


# The check, from the loops to its findings ----------------------------------------------------------------------------


def outcome(devices, trial, rank):
    """What a supervisor would tell of this trial on this rank."""
    listener = Listener()
    end = {"trial": trial.number, "code": CHECK.code, "rank": rank, "step_count": 9}
    try:
        found = measure_copies(devices, listener)
    except Hang:
        process = ProcessState(pid=4711, state="S", step_seconds=20.0, stack=("synchronize (cuda.py:9)",))
        so_far = Raw(encode(listener.reports[-1]))
        return Outcome(
            status=Status.HUNG, last_step=listener.steps[-1], partial_data=so_far, process=process, seconds=25.0, **end
        )
    return Outcome(status=Status.DONE, data=Raw(encode(found)), last_step=listener.steps[-1], **end)


def tried(devices):
    """A host with one rank for each of these GPUs, after all trials that the check planned."""
    gpus = tuple(gpu002.TorchGpu("stand-in", f"GPU-0-{index}") for index in range(devices.count))
    rows = {r: gpu002.Data(torch="2.13", cuda="12.8", gpus=gpus, chosen=r) for r in range(devices.count)}
    seen = seen_of(gpu002.CHECK, rows, ranks_per_node=devices.count, gpus=devices.count).of(CHECK)
    while trials := CHECK.plan(seen):
        for trial in trials:
            known = structs.replace(trial, number=len(seen.recording.trials))
            new = [outcome(devices, known, rank) for rank in known.ranks]
            recording = seen.recording
            recording = structs.replace(
                recording, trials=(*recording.trials, known), outcomes=(*recording.outcomes, *new)
            )
            seen = Seen(seen.world, CHECK, recording)
    return seen


def judged(devices):
    return list(CHECK.judge(tried(devices)))


def test_healthy_gpus_are_silent():
    seen = tried(CpuDevices(4))
    assert list(CHECK.judge(seen)) == []
    assert [trial.groups for trial in seen.trials] == [((0,),)]
    assert seen.trials[0].may_fail


def test_a_pair_that_hangs_is_named_and_the_others_are_known(golden):
    seen = tried(CpuDevices(4, hang={(2, 1)}))
    (finding,) = CHECK.judge(seen)
    assert (finding.code, finding.severity, finding.hosts) == ("P2P002.hung", Severity.ERROR, ("n0",))
    assert finding.gpus == ("GPU-0-2", "GPU-0-1")
    golden(finding)
    copy, *_ = CHECK.report(seen).matrices
    assert [copy.cells[row][column] is None for row, column in ((2, 0), (2, 1), (3, 0))] == [False, True, True]


FAULTS = {
    "wrong data": (CpuDevices(4, wrong={(1, 3): 12}), "wrong", ("GPU-0-1", "GPU-0-3")),
    "a hang on the way to the host": (CpuDevices(3, hang={(HOST, 1)}), "hung", ("GPU-0-1",)),
    "a slow pair": (
        CpuDevices(4, rates={(0, 2): 10 * MB, (2, 0): 10 * MB}, around=5 * MB), "slow", ("GPU-0-0", "GPU-0-2")
    ),
    "a pair that is slow one way": (CpuDevices(2, rates={(0, 1): 60 * MB}), "slow", ("GPU-0-0", "GPU-0-1")),
    "peer access that is slower than the host": (CpuDevices(3, rate=20 * MB, host_rate=100 * MB), "slow", ()),
}  # fmt: skip


@pytest.mark.parametrize(("devices", "word", "gpus"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_by_its_gpus(golden, devices, word, gpus):
    (finding,) = judged(devices)
    assert (finding.code, finding.gpus, finding.env) == (f"P2P002.{word}", gpus, {})
    golden(finding)


class FewPeers(CpuDevices):
    """GPUs of which each has one peer in a process."""

    def copy(self, source, target):
        if source.gpu is not None and target.gpu is not None and (source.gpu, target.gpu) in {(0, 2), (2, 0)}:
            raise RuntimeError("CUDA error: peer mapping resources exhausted")
        super().copy(source, target)


def test_pairs_that_cuda_has_no_mappings_for_are_left_out_and_the_others_tried():
    found = run(FewPeers(3))
    assert found.refused == ((0, 2), (2, 0))
    assert {(pair.source, pair.target) for pair in found.pairs} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert found.done == found.jobs
