"""Copies between GPUs and the host's memory: their rate, and whether what arrives is what was sent.

Every word of a copy depends on its position and on the link, so that what is missing, shifted or left over from another
copy shows. The target is spoilt before each copy that is looked at: once alone, once after the timed ones.

A step is announced before each link, and what is known so far handed over after it, so that a hang names its GPUs and
costs nothing else.

A copy through the host cannot be faster than the links of its two GPUs to the host, which are measured first. It is
measured only where it could matter: the direct copy is slower than these links, is wrong, or has no peer access.
"""

import os
import time
from collections.abc import Callable, Collection
from itertools import permutations
from typing import NamedTuple

import torch
from msgspec import structs

from ddpdiag.model.measurements import NO_PEERS_LEFT, Copies, GpuCopies, PairCopies
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.probes.gpu.iommu import on_local_cores, slot_of
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.workloads.devices import describe

# Long enough for the rate of 16 lanes of PCIe 5 (1.2 ms) and of NVLink (0.15 ms); nvbandwidth takes 512 MiB.
PAIR_BYTES = 64 << 20
# The host fills and compares these words with one thread.
HOST_BYTES = 32 << 20
# Decides how much more there is time for.
PROBE_BYTES = 1 << 20
# For one link; 8 GPUs have 16 to and from the host and 56 pairs: less than 6 s.
LINK_SECONDS = 0.04
# Kept for the answer itself.
_RESERVE_SECONDS = 1.5
_BATCHES = 3
_MOST_CALLS = 20
_WORD_BYTES = 4
# Odd numbers, so that both are one to one modulo 2**32; each link has a part of its own.
_PER_POSITION = 0x01000193
_PER_LINK = 0x3C6EF35F
_HOST = 255
# Pieces on the way through the host: long enough for the rate of PCIe, short enough for two to overlap.
_PIECE_WORDS = (4 << 20) // 4


class Buffer(NamedTuple):
    """Memory of a GPU (by torch's index), or pinned memory of the host (None), as 32-bit words."""

    gpu: int | None
    words: torch.Tensor

    def first(self, count: int) -> "Buffer":
        """The beginning of it."""
        return Buffer(self.gpu, self.words[:count])


class CudaDevices:
    """The GPUs that torch shows to this process; of these the first `most`, if that is known.

    All that touches a GPU for copies is here: tests put a stand-in in its place. Copies are in order on each GPU.
    torch puts a copy between GPUs on the source's current stream, and lets both GPUs' streams wait for it (aten
    native/cuda/Copy.cu); so an event on the source's stream sees its end. torch enables peer access by itself where
    CUDA offers it, and offers no way to disable it again in this process.
    """

    def __init__(self, most: int | None = None) -> None:
        shown = torch.cuda.device_count()
        self.count = shown if most is None else min(shown, most)
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._of_node: dict[int | None, Buffer] = {}
        self._started: list[int] = []

    def about(self, gpu: int) -> GpuCopies:
        """As the driver names it."""
        found = describe(torch.device("cuda", gpu))
        return GpuCopies(index=gpu, uuid=found.uuid, pci=found.pci, name=found.name)

    def start(self, gpu: int) -> None:
        """Make its context, which its first use does."""
        torch.cuda.synchronize(gpu)
        self._started.append(gpu)

    def can_access(self, source: int, target: int) -> bool:
        """cudaDeviceCanAccessPeer."""
        return bool(torch.cuda.can_device_access_peer(source, target))

    def buffer(self, gpu: int | None, count: int) -> Buffer:
        """On the GPU, or pinned: the driver copies what is not pinned by another, slower way."""
        if gpu is None:
            return Buffer(None, torch.empty(count, dtype=torch.int32, pin_memory=True))
        return Buffer(gpu, torch.empty(count, dtype=torch.int32, device=torch.device("cuda", gpu)))

    def host_buffer(self, gpu: int, count: int) -> Buffer:
        """Pinned, and of the NUMA node of that GPU. Kept: torch hands out again what was freed, of whatever node."""
        pci, root = self.about(gpu).pci, sys_root(os.environ)
        node = slot_of(pci, root).numa_node if pci else None
        if node not in self._of_node or len(self._of_node[node].words) < count:
            with on_local_cores(pci, root):
                self._of_node[node] = self.buffer(None, count)
        return self._of_node[node].first(count)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """On the current stream of the source, or of the target where the source is the host."""
        target.words.copy_(source.words, non_blocking=True)

    def through_host(self, source: Buffer, target: Buffer) -> None:
        """Two pieces of pinned memory in turn; in the end the source's stream waits for the target's."""
        if not self._pieces:
            self._pieces = tuple(self.buffer(None, _PIECE_WORDS).words for _ in range(2))
        out, into = torch.cuda.current_stream(source.gpu), torch.cuda.current_stream(target.gpu)
        arrived: list[torch.cuda.Event] = []
        for number, start in enumerate(range(0, len(source.words), _PIECE_WORDS)):
            here, there = (words[start : start + _PIECE_WORDS] for words in (source.words, target.words))
            piece = self._pieces[number % 2][: len(here)]
            if number >= 2:
                out.wait_event(arrived[number - 2])
            piece.copy_(here, non_blocking=True)
            into.wait_event(out.record_event())
            there.copy_(piece, non_blocking=True)
            arrived.append(into.record_event())
        out.wait_event(arrived[-1])

    def seconds(self, gpu: int | None, work: Callable[[], None]) -> float:
        """Between two events on the GPU's stream; by the clock for work of the host."""
        self._finish()
        if gpu is None:
            start = time.perf_counter()
            work()
            self._finish()
            return time.perf_counter() - start
        with torch.cuda.device(gpu):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _finish(self) -> None:
        for gpu in self._started:
            torch.cuda.synchronize(gpu)


Copy = Callable[[Buffer, Buffer], None]


# One thing to try. Of one GPU: its links with the host; of two: a copy.
Job = tuple[int, ...]


def jobs(count: int) -> tuple[Job, ...]:
    """All that is tried with so many GPUs, in order."""
    return (*((gpu,) for gpu in range(count)), *permutations(range(count), 2))


def copies(
    devices: CudaDevices,
    ctx: Context,
    *,
    only: Collection[tuple[int, ...]] = (),
    indirect_ratio: float = 1.0,
) -> Copies:
    """Try all jobs, or `only` some of them, until the trial's end.

    Copies through the host are left out where the direct copy reaches `indirect_ratio` of the links to the host.
    """
    gpus: list[GpuCopies] = []
    for gpu in range(devices.count):
        ctx.step(f"properties of GPU {gpu}")
        gpus.append(devices.about(gpu))
    todo = jobs(devices.count)
    if only:
        todo = tuple(job for job in todo if job in only)
    known = Copies(gpus=tuple(gpus), jobs=len(todo))
    ctx.report(known, f"{known.done} of {known.jobs} paths")
    before = time.monotonic()
    for gpu in range(devices.count):
        ctx.step(f"{CONTEXT_STEP} of GPU {gpu}")
        devices.start(gpu)
    ctx.timed("context", time.monotonic() - before)
    for number, job in enumerate(todo):
        left = ctx.end - time.monotonic() - _RESERVE_SECONDS
        if left <= 0:
            break
        # Half is measured, half is spent on filling, comparing and memory.
        bench = _Bench(devices, ctx, min(LINK_SECONDS, left / (len(todo) - number) / 4), indirect_ratio)
        known = structs.replace(bench.tried(known, job), done=number + 1)
        ctx.report(known, f"{known.done} of {known.jobs} paths")
    return known


class _LinkRate(NamedTuple):
    """The result of one link: its rate, the words compared, and how many were wrong."""

    bytes_per_s: float
    words: int
    wrong: int


class _Run(NamedTuple):
    """Copies over one link."""

    devices: CudaDevices
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
        words, ends = self.target.words[:count], (self.source.gpu, self.target.gpu)
        words.copy_(_words(words, *ends).bitwise_not_())  # no word is what it should become
        seconds = self.timed(count, calls)
        return seconds, int((words != _words(words, *ends)).sum())


class _Bench(NamedTuple):
    """Measures one link after the other, each in about `link_seconds`."""

    devices: CudaDevices
    ctx: Context
    link_seconds: float
    indirect_ratio: float

    def tried(self, known: Copies, job: Job) -> Copies:
        """The results after this job."""
        match job:
            case (gpu,):
                own = self._host(known.gpus[gpu])
                return structs.replace(known, gpus=tuple(own if own.index == g.index else g for g in known.gpus))
            case (source, target):
                try:
                    return structs.replace(known, pairs=(*known.pairs, self._pair(known, source, target)))
                except RuntimeError as error:
                    if NO_PEERS_LEFT not in str(error):
                        raise
                    return structs.replace(known, refused=(*known.refused, (source, target)))
        return known

    def _host(self, known: GpuCopies) -> GpuCopies:
        gpu = known.index
        words = HOST_BYTES // _WORD_BYTES
        host, device = self.devices.host_buffer(gpu, words), self.devices.buffer(gpu, words)
        self.ctx.step(f"copy host -> GPU {gpu}")
        there = self._link_rate(host, device, self.devices.copy)
        self.ctx.step(f"copy GPU {gpu} -> host")
        back = self._link_rate(device, host, self.devices.copy)
        return structs.replace(
            known,
            to_bytes_per_s=there.bytes_per_s,
            from_bytes_per_s=back.bytes_per_s,
            wrong_to=there.wrong,
            wrong_from=back.wrong,
        )

    def _pair(self, known: Copies, source: int, target: int) -> PairCopies:
        here, there = (self.devices.buffer(gpu, PAIR_BYTES // _WORD_BYTES) for gpu in (source, target))
        self.ctx.step(f"copy GPU {source} -> GPU {target}")
        access = self.devices.can_access(source, target)
        direct = self._link_rate(here, there, self.devices.copy)
        pair = PairCopies(
            source=source,
            target=target,
            access=access,
            bytes_per_s=direct.bytes_per_s,
            words=direct.words,
            wrong=direct.wrong,
        )
        bound = min(known.gpus[source].from_bytes_per_s or 0.0, known.gpus[target].to_bytes_per_s or 0.0)
        if access and not direct.wrong and 0 < self.indirect_ratio * bound <= direct.bytes_per_s:
            return pair
        self.ctx.step(f"copy GPU {source} -> host -> GPU {target}")
        indirect = self._link_rate(here, there, self.devices.through_host)
        return structs.replace(pair, through_host_bytes_per_s=indirect.bytes_per_s, wrong_through_host=indirect.wrong)

    def _link_rate(self, source: Buffer, target: Buffer, copy: Copy) -> _LinkRate:
        """Check one copy, time some, and check the last of these."""
        run = _Run(self.devices, copy, source, target)
        count = self._words_in_time(run)
        source.words[:count].copy_(_words(source.words[:count], source.gpu, target.gpu))
        one, wrong = run.checked(count, 1)
        calls = max(1, min(_MOST_CALLS, int(self.link_seconds / _BATCHES / max(one, 1e-9))))
        batches = _BATCHES if one * _BATCHES < 2 * self.link_seconds else 1
        seconds = [run.timed(count, calls) for _ in range(batches - 1)]
        last, wrong_in_the_end = run.checked(count, calls)
        best = min(one, last, *seconds)
        return _LinkRate(count * _WORD_BYTES / max(best, 1e-9), count, max(wrong, wrong_in_the_end))

    def _words_in_time(self, run: _Run) -> int:
        """Return how many words to copy: what takes a quarter of the time there is, going by a probe."""
        most = len(run.source.words)
        probe = min(PROBE_BYTES // _WORD_BYTES, most)
        run.timed(probe, 1)  # the first copy of a pair lets the GPUs see each other's memory
        return max(probe, min(most, int(probe * self.link_seconds / 4 / max(run.timed(probe, 1), 1e-9))))


def _words(like: torch.Tensor, source: int | None, target: int | None) -> torch.Tensor:
    """The words that are sent over this link: position x a + link x b, modulo 2**32."""
    link = (_HOST if source is None else source) * 256 + (_HOST if target is None else target) + 1
    ramp = torch.arange(len(like), dtype=torch.int32, device=like.device)
    # The same 32 bits as a signed number.
    return ramp.mul_(_PER_POSITION).add_((link * _PER_LINK + (1 << 31)) % (1 << 32) - (1 << 31))
