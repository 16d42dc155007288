"""Copies between GPUs and the host's memory: their rate, and whether what arrives is what was sent.

Every word of a copy depends on its position and on the link, so that words that are missing, shifted or left over from
another copy are found. Of each link the first and the last copy are checked; both overwrite wrong words in the target.

A step is announced before each link, and the results are reported after each job. So a hang names its GPUs, and the
results of earlier jobs are kept.

A copy through the host cannot be faster than the links of its two GPUs to the host, which are measured first. It is
measured only if the direct copy is slower than these links, gives wrong words, or has no peer access.
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
# The seconds of a copy of this size decide how many words are copied.
PROBE_BYTES = 1 << 20
# Measuring time of one link. 8 GPUs have 16 links to and from the host and 56 pairs: less than 6 s in all.
LINK_SECONDS = 0.04
# Time before the trial's end that is kept for sending the result.
_RESERVE_SECONDS = 1.5
_BATCHES = 3
_MOST_CALLS = 20
_WORD_BYTES = 4
# Factors of `_words`. They are odd, so that different positions, and different links, give different words (mod 2**32).
_PER_POSITION = 0x01000193
_PER_LINK = 0x3C6EF35F
_HOST = 255
# A copy through the host is cut into pieces: long enough for the rate of PCIe, short enough for two to overlap.
_PIECE_WORDS = (4 << 20) // 4


class Buffer(NamedTuple):
    """Memory of a GPU (by torch's index), or pinned memory of the host (None), as 32-bit words."""

    gpu: int | None
    words: torch.Tensor

    def first(self, count: int) -> "Buffer":
        """The first `count` words, as a view of the same memory."""
        return Buffer(self.gpu, self.words[:count])


class CudaDevices:
    """The GPUs that torch shows to this process, or the first `most` of these.

    Only this class calls torch for copies between GPUs; tests replace it. The copies of each GPU run in order.
    torch puts a copy between GPUs on the source's current stream, and lets both GPUs' streams wait for it (aten
    native/cuda/Copy.cu), so an event on the source's stream marks its end. torch enables peer access automatically if
    CUDA offers it, and has no way to disable it again in this process.
    """

    def __init__(self, most: int | None = None) -> None:
        shown = torch.cuda.device_count()
        self.count = shown if most is None else min(shown, most)
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._of_node: dict[int | None, Buffer] = {}
        self._started: list[int] = []

    def about(self, gpu: int) -> GpuCopies:
        """The GPU's index, UUID, PCI address and name, still without rates."""
        found = describe(torch.device("cuda", gpu))
        return GpuCopies(index=gpu, uuid=found.uuid, pci=found.pci, name=found.name)

    def start(self, gpu: int) -> None:
        """Create the GPU's CUDA context: its first use does so."""
        torch.cuda.synchronize(gpu)
        self._started.append(gpu)

    def can_access(self, source: int, target: int) -> bool:
        """Whether `source` has peer access to `target` (cudaDeviceCanAccessPeer)."""
        return bool(torch.cuda.can_device_access_peer(source, target))

    def buffer(self, gpu: int | None, count: int) -> Buffer:
        """Allocate words on the GPU, or for None in pinned memory of the host, which the driver copies fastest."""
        if gpu is None:
            return Buffer(None, torch.empty(count, dtype=torch.int32, pin_memory=True))
        return Buffer(gpu, torch.empty(count, dtype=torch.int32, device=torch.device("cuda", gpu)))

    def host_buffer(self, gpu: int, count: int) -> Buffer:
        """Pinned memory on that GPU's NUMA node. It is kept: torch may reuse freed memory for a GPU of another node."""
        pci, root = self.about(gpu).pci, sys_root(os.environ)
        node = slot_of(pci, root).numa_node if pci else None
        if node not in self._of_node or len(self._of_node[node].words) < count:
            with on_local_cores(pci, root):
                self._of_node[node] = self.buffer(None, count)
        return self._of_node[node].first(count)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Start a copy on the current stream of the source, or of the target if the source is the host."""
        target.words.copy_(source.words, non_blocking=True)

    def through_host(self, source: Buffer, target: Buffer) -> None:
        """Start a copy by way of two pinned pieces in turn; the source's stream waits for its end."""
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
        """Run `work`: its seconds between two events on the GPU's stream, or by the clock if `gpu` is None."""
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


# One measurement: (GPU,) for its two links with the host, (source, target) for a copy between two GPUs.
Job = tuple[int, ...]


def jobs(count: int) -> tuple[Job, ...]:
    """The measurements for `count` GPUs, in the order in which they run."""
    return (*((gpu,) for gpu in range(count)), *permutations(range(count), 2))


def copies(
    devices: CudaDevices,
    ctx: Context,
    *,
    only: Collection[tuple[int, ...]] = (),
    indirect_ratio: float = 1.0,
) -> Copies:
    """Run all jobs, or those in `only`, and report the results after each. Stops shortly before the trial's end.

    Copies through the host are left out if the direct copy reaches `indirect_ratio` of the rate of the host's links.
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
        # Half of a job's time goes into copies, half into filling, comparing and allocating; a job has up to two links.
        bench = _Bench(devices, ctx, min(LINK_SECONDS, left / (len(todo) - number) / 4), indirect_ratio)
        known = structs.replace(bench.with_result(known, job), done=number + 1)
        ctx.report(known, f"{known.done} of {known.jobs} paths")
    return known


class _LinkRate(NamedTuple):
    """The result of one link: its rate, the words in a copy, and the wrong words in the worse of two checked copies."""

    bytes_per_s: float
    words: int
    wrong: int


class _Run(NamedTuple):
    """Copies over one link: from `source` to `target` with `copy`."""

    devices: CudaDevices
    copy: Copy
    source: Buffer
    target: Buffer

    def timed(self, count: int, calls: int) -> float:
        """Mean seconds of copying `count` words, over `calls` copies."""
        here, there = self.source.first(count), self.target.first(count)
        gpu = here.gpu if here.gpu is not None else there.gpu

        def work() -> None:
            for _ in range(calls):
                self.copy(here, there)

        return self.devices.seconds(gpu, work) / calls

    def checked(self, count: int, calls: int) -> tuple[float, int]:
        """Write wrong words into the target, and copy: mean seconds of a copy, and the words still wrong afterwards."""
        words, ends = self.target.words[:count], (self.source.gpu, self.target.gpu)
        words.copy_(_words(words, *ends).bitwise_not_())  # every word differs from the expected one
        seconds = self.timed(count, calls)
        return seconds, int((words != _words(words, *ends)).sum())


class _Bench(NamedTuple):
    """The measurement of one job: the copies over each link take about `link_seconds`."""

    devices: CudaDevices
    ctx: Context
    link_seconds: float
    indirect_ratio: float

    def with_result(self, known: Copies, job: Job) -> Copies:
        """Run one job, and return `known` with its result added."""
        match job:
            case (gpu,):
                done = self._host(known.gpus[gpu])
                return structs.replace(known, gpus=tuple(done if done.index == g.index else g for g in known.gpus))
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
        to_gpu = self._link_rate(host, device, self.devices.copy)
        self.ctx.step(f"copy GPU {gpu} -> host")
        to_host = self._link_rate(device, host, self.devices.copy)
        return structs.replace(
            known,
            to_bytes_per_s=to_gpu.bytes_per_s,
            from_bytes_per_s=to_host.bytes_per_s,
            wrong_to=to_gpu.wrong,
            wrong_from=to_host.wrong,
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
        """Check one copy, time several batches, and check the last copy of the last batch."""
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
        """The number of words whose copy takes a quarter of `link_seconds`, estimated from a small copy."""
        most = len(run.source.words)
        probe = min(PROBE_BYTES // _WORD_BYTES, most)
        run.timed(probe, 1)  # the first copy of a pair lets the GPUs see each other's memory
        return max(probe, min(most, int(probe * self.link_seconds / 4 / max(run.timed(probe, 1), 1e-9))))


def _words(like: torch.Tensor, source: int | None, target: int | None) -> torch.Tensor:
    """The expected words of the copy from `source` to `target`: position x a + link x b, modulo 2**32."""
    link = (_HOST if source is None else source) * 256 + (_HOST if target is None else target) + 1
    ramp = torch.arange(len(like), dtype=torch.int32, device=like.device)
    # The same 32 bits as a signed number.
    return ramp.mul_(_PER_POSITION).add_((link * _PER_LINK + (1 << 31)) % (1 << 32) - (1 << 31))
