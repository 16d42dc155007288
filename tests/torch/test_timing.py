"""Times of calls, without a process group: what is called, and how often."""

import time

import pytest
import torch

from ddpdiag.bench.workloads.calls import time_calls
from ddpdiag.bench.workloads.operations import Operation
from ddpdiag.model.bench import Blocking

CPU = torch.device("cpu")


class Later:
    """A call that is over some time after it was issued."""

    def __init__(self, under_way: list[int], most: list[int]) -> None:
        self.under_way = under_way
        under_way.append(1)
        most.append(len(under_way))

    def wait(self) -> None:
        time.sleep(0.002)
        self.under_way.pop()


def slow(under_way: list[int], most: list[int]) -> Operation:
    return Operation(
        call=lambda: time.sleep(0.002),
        issue=lambda: Later(under_way, most),
        fill=lambda: None,
        wrong=lambda: 0,
        buffers=(),
    )


@pytest.mark.parametrize("how", [Blocking.WAIT, Blocking.PIPELINED])
def test_each_call_has_its_time(how):
    seconds = time_calls([slow([], [])] * 2 if how is Blocking.PIPELINED else [slow([], [])], 5, CPU, how)
    assert len(seconds) == 5
    assert all(each >= 0.0019 for each in seconds)


def test_no_call_takes_no_time():
    for how in (Blocking.WAIT, Blocking.PIPELINED):
        assert time_calls([slow([], [])], 0, CPU, how) == []


def test_calls_at_once_share_their_time():
    seconds = time_calls([slow([], []) for _ in range(4)], 3, CPU, Blocking.WAIT)
    assert len(seconds) == 3


def test_no_more_calls_are_under_way_than_there_are_buffers():
    under_way: list[int] = []
    most: list[int] = []
    time_calls([slow(under_way, most) for _ in range(2)], 7, CPU, Blocking.PIPELINED)
    assert max(most) == 2
    assert len(most) == 7
    assert under_way == []


class Events:
    """torch.cuda.Event on a clock that every call and every record moves on."""

    def __init__(self) -> None:
        self.microseconds = 0.0
        self.records = 0

    def __call__(self, *, enable_timing: bool) -> "Events.Event":
        assert enable_timing
        return Events.Event(self)

    class Event:
        """One of them."""

        def __init__(self, clock: "Events") -> None:
            self._clock = clock
            self.at = 0.0

        def record(self) -> None:
            self._clock.records += 1
            self._clock.microseconds += 2
            self.at = self._clock.microseconds

        def synchronize(self) -> None:
            """Nothing is under way."""

        def elapsed_time(self, later: "Events.Event") -> float:
            return (later.at - self.at) / 1e3


@pytest.mark.parametrize(("how", "records", "seconds"), [(Blocking.PIPELINED, 6, 12e-6), (Blocking.WAIT, 10, 12e-6)])
def test_pipelined_calls_have_one_event_between_them(monkeypatch, how, records, seconds):
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def call() -> None:
        events.microseconds += 10

    operation = Operation(call=call, issue=lambda: None, fill=lambda: None, wrong=lambda: 0, buffers=())
    times = time_calls([operation], 5, torch.device("cuda", 0), how)
    assert times == pytest.approx([seconds] * 5)
    assert events.records == records
