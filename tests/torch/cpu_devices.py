"""GPUs that are none: real tensors of a CPU, a clock that copies alone advance, and what goes wrong between whom.

Rates are some thousandth of real ones, so that few bytes are worth their time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ddpdiag.model.measurements import GpuCopies
from ddpdiag.workloads.copies import Buffer

MB = 1e6
HOST = None


class Hang(Exception):
    """In place of a call that does not return."""


def _raise_hang():
    raise Hang


@dataclass
class CpuDevices:
    """`count` GPUs. Faults are by (source, target), where None is the host; its links have `host_rate`.

    `rates` in bytes per second differ from `rate`; `around` are those through the host. `wrong` is how many words
    arrive wrong, `wrong_around` through the host, from call number `wrong_from` on; `lost` copies do nothing.
    """

    count: int
    rate: float = 100 * MB
    host_rate: float = 100 * MB
    rates: dict = field(default_factory=dict)
    around: float = 40 * MB
    closed: set = field(default_factory=set)
    wrong: dict = field(default_factory=dict)
    wrong_around: dict = field(default_factory=dict)
    wrong_from: int = 0
    lost: set = field(default_factory=set)
    hang: set = field(default_factory=set)
    in_hang: Callable[[], None] | None = _raise_hang
    clock: float = 0.0
    calls: int = 0
    started: list = field(default_factory=list)

    def properties(self, gpu):
        return GpuCopies(index=gpu, uuid=f"GPU-0-{gpu}", pci=f"0000:{gpu}b:00.0", name="stand-in")

    def start(self, gpu):
        self.started.append(gpu)

    def can_access(self, source, target):
        return (source, target) not in self.closed

    def buffer(self, gpu, count):
        return Buffer(gpu, torch.empty(count, dtype=torch.int32))

    def host_buffer(self, gpu, count):
        return self.buffer(HOST, count)

    def copy(self, source, target):
        way = (source.gpu, target.gpu)
        self._move(source, target, self.wrong.get(way, 0))
        self.clock += 4 * len(source.words) / self.rates.get(way, self.host_rate if HOST in way else self.rate)

    def copy_through_host(self, source, target):
        self._move(source, target, self.wrong_around.get((source.gpu, target.gpu), 0))
        self.clock += 4 * len(source.words) / self.around

    def time_work(self, gpu, work):
        begin = self.clock
        work()
        return self.clock - begin

    def _move(self, source, target, wrong):
        way = (source.gpu, target.gpu)
        if way in self.hang:
            self.in_hang()
        self.calls += 1
        if way in self.lost:
            return
        target.words.copy_(source.words)
        if self.calls > self.wrong_from:
            target.words[:wrong] ^= 1
