"""Copies between GPUs and the host's memory: their rate, and whether what arrives is what was sent.

Every word of a copy depends on its position and on the way, so that what is missing, shifted or left over from another
copy shows. The target is spoilt before each copy that is looked at: once alone, once after the timed ones.

What touches a device is behind `Devices`; the loops are the same for a stand-in. A step is announced before each way,
and what is known so far handed over after it, so that a hang names its GPUs and costs nothing else.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import NamedTuple, Protocol

import torch
from msgspec import structs

from ddpdiag.model.measurements import BothDirections, Copies, GpuCopies, PairCopies
from ddpdiag.model.trial import CONTEXT_STEP

# Long enough for the rate of 16 lanes of PCIe 5 (1.2 ms) and of NVLink (0.15 ms); nvbandwidth takes 512 MiB.
PAIR_BYTES = 64 << 20
# The host fills and compares these words with one thread.
HOST_BYTES = 32 << 20
# What tells how much more there is time for.
PROBE_BYTES = 1 << 20
# For one way; 8 GPUs have 16 ways to and from the host and 56 pairs, each with two ways: less than 10 s.
WAY_SECONDS = 0.04
# Kept for the answer itself.
_RESERVE_SECONDS = 1.5
_BATCHES = 3
_MOST_CALLS = 20
_WORD_BYTES = 4
# Odd numbers, so that both are one to one modulo 2**32; each way has a part of its own.
_PER_POSITION = 0x01000193
_PER_WAY = 0x3C6EF35F
_HOST = 255


class Buffer(NamedTuple):
    """Memory of a GPU (by torch's index), or pinned memory of the host (None), as 32-bit words."""

    gpu: int | None
    words: torch.Tensor

    def first(self, count: int) -> "Buffer":
        """The beginning of it."""
        return Buffer(self.gpu, self.words[:count])


Way = tuple[Buffer, Buffer]
Copy = Callable[[Buffer, Buffer], None]


class Devices(Protocol):
    """The GPUs of this process and what is asked of them. Copies are asynchronous, and in order on each GPU."""

    count: int

    def about(self, gpu: int) -> GpuCopies:
        """Who it is."""

    def start(self, gpu: int) -> None:
        """Make it ready, which may take seconds."""

    def can_access(self, source: int, target: int) -> bool:
        """May the source reach the target's memory directly?"""

    def buffer(self, gpu: int | None, count: int) -> Buffer:
        """So many words, not initialised."""

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Source to target; directly where CUDA can."""

    def through_host(self, source: Buffer, target: Buffer) -> None:
        """From GPU to GPU in pieces through pinned memory, one piece out while the one before goes in."""

    def together(self, ways: Sequence[Way]) -> None:
        """Several copies at the same time."""

    def seconds(self, gpu: int | None, work: Callable[[], None]) -> float:
        """How long the work takes that is put on this GPU (None: on several), all other work being over."""


class Told(NamedTuple):
    """Whom to tell: the next step, what is known so far, and how long something took."""

    step: Callable[[str], None]
    report: Callable[[Copies], None]
    timed: Callable[[str, float], None]


class Job(NamedTuple):
    """One thing to try. Of one GPU: its ways to and from the host; of two: a copy, or both ways; of none: all."""

    gpus: tuple[int, ...]
    both: bool = False


def jobs(count: int, *, deep: bool) -> tuple[Job, ...]:
    """All that is tried with so many GPUs, in order. `deep` adds pairs in both directions, and all at once."""
    alone = [Job((gpu,)) for gpu in range(count)]
    pairs = [Job(pair) for pair in permutations(range(count), 2)]
    both = [Job(pair, both=True) for pair in combinations(range(count), 2)] if deep else []
    return (*alone, *pairs, *both, *([Job(())] if deep and count > 2 else []))


def copies(
    devices: Devices, told: Told, *, deep: bool = False, begin: int = 0, end: Callable[[], float] = lambda: math.inf
) -> Copies:
    """Try all jobs from number `begin` on, until `end` on the clock of `time.monotonic`, which may still move on."""
    known = Copies(gpus=tuple(_about(devices, told, gpu) for gpu in range(devices.count)), done=begin)
    todo = jobs(devices.count, deep=deep)
    known = structs.replace(known, jobs=len(todo))
    told.report(known)
    before = time.monotonic()
    for gpu in range(devices.count):
        told.step(f"{CONTEXT_STEP} of GPU {gpu}")
        devices.start(gpu)
    told.timed("context", time.monotonic() - before)
    bench = _Bench(devices, told)
    for number, job in enumerate(todo[begin:], begin):
        left = end() - time.monotonic() - _RESERVE_SECONDS
        if left <= 0:
            break
        # Half is measured, half is spent on filling, comparing and memory.
        bench.way_seconds = min(WAY_SECONDS, left / (len(todo) - number) / 4)
        known = structs.replace(bench.tried(known, job), done=number + 1)
        told.report(known)
    return known


def _about(devices: Devices, told: Told, gpu: int) -> GpuCopies:
    told.step(f"properties of GPU {gpu}")
    return devices.about(gpu)


class _Way(NamedTuple):
    """What came of one way: words compared, and how many were wrong."""

    bytes_per_s: float
    words: int
    wrong: int


class _Run(NamedTuple):
    """Copies of one way."""

    devices: Devices
    copy: Copy
    source: Buffer
    target: Buffer

    def timed(self, count: int, calls: int) -> float:
        """Seconds of one call of so many words."""
        here, there = self.source.first(count), self.target.first(count)
        gpu = here.gpu if here.gpu is not None else there.gpu

        def work() -> None:
            for _ in range(calls):
                self.copy(here, there)

        return self.devices.seconds(gpu, work) / calls

    def checked(self, count: int, calls: int) -> tuple[float, int]:
        """Seconds of one call into a target that was spoilt before, and words that are wrong afterwards."""
        there = self.target.first(count)
        _spoil(there, self.source.gpu, self.target.gpu)
        seconds = self.timed(count, calls)
        return seconds, _wrong(there, self.source.gpu, self.target.gpu)


class _Bench:
    """Measures one way after the other, each in about `way_seconds`."""

    def __init__(self, devices: Devices, told: Told) -> None:
        self._devices = devices
        self._told = told
        self.way_seconds = WAY_SECONDS

    def tried(self, known: Copies, job: Job) -> Copies:
        """What is known after this job."""
        match job.gpus:
            case (gpu,):
                own = self._host(known.gpus[gpu])
                return structs.replace(known, gpus=tuple(own if own.index == g.index else g for g in known.gpus))
            case (one, other) if job.both:
                return structs.replace(known, both=(*known.both, self._both(one, other)))
            case (source, target):
                return structs.replace(known, pairs=(*known.pairs, self._pair(source, target)))
        return structs.replace(known, ring_bytes_per_s=self._ring())

    def _host(self, known: GpuCopies) -> GpuCopies:
        gpu = known.index
        host, device = (self._devices.buffer(place, HOST_BYTES // _WORD_BYTES) for place in (None, gpu))
        self._told.step(f"copy host -> GPU {gpu}")
        there = self._way(host, device, self._devices.copy)
        self._told.step(f"copy GPU {gpu} -> host")
        back = self._way(device, host, self._devices.copy)
        return structs.replace(
            known,
            to_bytes_per_s=there.bytes_per_s,
            from_bytes_per_s=back.bytes_per_s,
            wrong_to=there.wrong,
            wrong_from=back.wrong,
        )

    def _pair(self, source: int, target: int) -> PairCopies:
        here, there = (self._devices.buffer(gpu, PAIR_BYTES // _WORD_BYTES) for gpu in (source, target))
        self._told.step(f"copy GPU {source} -> GPU {target}")
        access = self._devices.can_access(source, target)
        direct = self._way(here, there, self._devices.copy)
        self._told.step(f"copy GPU {source} -> host -> GPU {target}")
        indirect = self._way(here, there, self._devices.through_host)
        return PairCopies(
            source=source,
            target=target,
            access=access,
            bytes_per_s=direct.bytes_per_s,
            through_host_bytes_per_s=indirect.bytes_per_s,
            words=direct.words,
            wrong=direct.wrong,
            wrong_through_host=indirect.wrong,
        )

    def _way(self, source: Buffer, target: Buffer, copy: Copy) -> _Way:
        """Check one copy, time some, and check the last of these."""
        run = _Run(self._devices, copy, source, target)
        probe = min(PROBE_BYTES // _WORD_BYTES, len(source.words))
        run.timed(probe, 1)  # the first copy of a pair lets the GPUs see each other's memory
        count = _affordable(probe, len(source.words), run.timed(probe, 1), self.way_seconds)
        _fill(source.first(count), source.gpu, target.gpu)
        one, wrong = run.checked(count, 1)
        calls = max(1, min(_MOST_CALLS, int(self.way_seconds / _BATCHES / max(one, 1e-9))))
        batches = _BATCHES if one * _BATCHES < 2 * self.way_seconds else 1
        seconds = [run.timed(count, calls) for _ in range(batches - 1)]
        last, wrong_in_the_end = run.checked(count, calls)
        best = min(one, last, *seconds)
        return _Way(count * _WORD_BYTES / max(best, 1e-9), count, max(wrong, wrong_in_the_end))

    def _both(self, one: int, other: int) -> BothDirections:
        self._told.step(f"copy GPU {one} <-> GPU {other}")
        return BothDirections(one=one, other=other, bytes_per_s=2 * self._at_once([(one, other), (other, one)]))

    def _ring(self) -> float:
        self._told.step("copy between all GPUs at once")
        count = self._devices.count
        return self._at_once([(gpu, (gpu + 1) % count) for gpu in range(count)])

    def _at_once(self, pairs: Sequence[tuple[int, int]]) -> float:
        """Bytes per second of each way when all of them copy at the same time."""
        words = PAIR_BYTES // _WORD_BYTES
        ways = [(self._devices.buffer(a, words), self._devices.buffer(b, words)) for a, b in pairs]
        for source, _ in ways:
            source.words.zero_()
        first = self._devices.seconds(None, lambda: self._devices.together(ways))
        again = 2 if first < self.way_seconds else 0
        seconds = [self._devices.seconds(None, lambda: self._devices.together(ways)) for _ in range(again)]
        return PAIR_BYTES / max(min([first, *seconds]), 1e-9)


def _affordable(probe: int, most: int, seconds: float, limit: float) -> int:
    """Words of a copy that takes a quarter of the time there is, going by the probe; never fewer than that."""
    return max(probe, min(most, int(probe * limit / 4 / max(seconds, 1e-9))))


def _words(like: torch.Tensor, source: int | None, target: int | None) -> torch.Tensor:
    """What goes this way: position x a + way x b, modulo 2**32."""
    way = (_HOST if source is None else source) * 256 + (_HOST if target is None else target) + 1
    ramp = torch.arange(len(like), dtype=torch.int32, device=like.device)
    return ramp.mul_(_PER_POSITION).add_(_signed(way * _PER_WAY))


def _signed(value: int) -> int:
    """The same 32 bits as a signed number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _fill(buffer: Buffer, source: int | None, target: int | None) -> None:
    buffer.words.copy_(_words(buffer.words, source, target))


def _spoil(buffer: Buffer, source: int | None, target: int | None) -> None:
    """No word is what it should become."""
    buffer.words.copy_(_words(buffer.words, source, target).bitwise_not_())


def _wrong(buffer: Buffer, source: int | None, target: int | None) -> int:
    return int((buffer.words != _words(buffer.words, source, target)).sum())
