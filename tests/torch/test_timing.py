"""Times of calls, without a process group: what is called, and how often."""

import time

import pytest
import torch

from ddpdiag.bench.workloads.sweep import time_calls

CPU = torch.device("cpu")


def test_each_call_has_its_time():
    seconds = time_calls(lambda: time.sleep(0.002), 5, CPU)
    assert len(seconds) == 5
    assert all(each >= 0.0019 for each in seconds)
    assert time_calls(lambda: None, 0, CPU) == []


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


def test_calls_on_a_gpu_have_one_event_between_them(monkeypatch):
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def call() -> None:
        events.microseconds += 10

    assert time_calls(call, 5, torch.device("cuda", 0)) == pytest.approx([12e-6] * 5)
    assert events.records == 6
