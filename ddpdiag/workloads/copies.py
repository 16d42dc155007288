"""Copies between GPUs and the host's memory: their rates, and whether the copied words are correct.

Every 32-bit word of a copy depends on its position and on the link, so that missing, shifted and stale words are found.
The first and the last copy over each link are checked. Before them, wrong words are written to the target.

A job measures the copy from one GPU to another, or both links between a GPU and the host. A step is announced before
each link, and results are reported after each job, so that a hang names its GPUs and loses no earlier results.

A copy through the host cannot be faster than the links of its two GPUs to the host, which are measured first. So a
copy through the host is measured only if the direct copy is slower than these links, wrong, or without peer access.
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
# Less than PAIR_BYTES, because the host fills and compares these words with one thread.
HOST_BYTES = 32 << 20
# A copy of this size is timed first, to choose the number of words for the other copies.
PROBE_BYTES = 1 << 20
# Measuring time of one link. 8 GPUs have 16 links to and from the host and 56 pairs: less than 6 s in all.
LINK_SECONDS = 0.04
# Time before the trial's end that is reserved for sending the result.
_RESERVE_SECONDS = 1.5
_BATCHES = 3
_MAX_CALLS = 20
_WORD_BYTES = 4
# Factors of `_expected_words`. They are odd, so that different positions and different links give different words.
_PER_POSITION = 0x01000193
_PER_LINK = 0x3C6EF35F
_HOST = 255  # in place of the index of a GPU
# A copy through the host is cut into pieces, long enough for the rate of PCIe and short enough for two to overlap.
_PIECE_WORDS = (4 << 20) // 4


class Buffer(NamedTuple):
    """Memory of 32-bit words on the GPU with torch's index `gpu`, or pinned memory of the host if `gpu` is None."""

    gpu: int | None
    words: torch.Tensor

    def first(self, count: int) -> "Buffer":
        """The first `count` words, as a view of the same memory."""
        return Buffer(self.gpu, self.words[:count])


class CudaDevices:
    """The GPUs that torch shows to this process, or the first `max_count` of them.

    Only this class calls torch for copies between GPUs; tests replace it. The copies of each GPU run in order.
    torch puts a copy between GPUs on the source's current stream, and lets both GPUs' streams wait for it (aten
    native/cuda/Copy.cu), so an event on the source's stream marks the end of the copy. torch enables peer access
    automatically if CUDA offers it, and cannot disable it again in the same process.
    """

    def __init__(self, max_count: int | None = None) -> None:
        gpu_count = torch.cuda.device_count()
        self.count = gpu_count if max_count is None else min(gpu_count, max_count)
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._host_buffers: dict[int | None, Buffer] = {}
        self._started: list[int] = []

    def properties(self, gpu: int) -> GpuCopies:
        """Return the GPU's index, UUID, PCI address and name. The rates are not yet set."""
        description = describe(torch.device("cuda", gpu))
        return GpuCopies(index=gpu, uuid=description.uuid, pci=description.pci, name=description.name)

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
        """Pinned memory on the GPU's NUMA node. It stays allocated: else torch could reuse it for another node."""
        pci, root = self.properties(gpu).pci, sys_root(os.environ)
        node = slot_of(pci, root).numa_node if pci else None
        if node not in self._host_buffers or len(self._host_buffers[node].words) < count:
            with on_local_cores(pci, root):
                self._host_buffers[node] = self.buffer(None, count)
        return self._host_buffers[node].first(count)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Start a copy on the current stream of the source, or of the target if the source is the host."""
        target.words.copy_(source.words, non_blocking=True)

    def copy_through_host(self, source: Buffer, target: Buffer) -> None:
        """Start a copy through two alternating pieces of pinned memory, for whose end the source's stream waits."""
        if not self._pieces:
            self._pieces = tuple(self.buffer(None, _PIECE_WORDS).words for _ in range(2))
        source_stream, target_stream = torch.cuda.current_stream(source.gpu), torch.cuda.current_stream(target.gpu)
        arrived: list[torch.cuda.Event] = []
        for number, start in enumerate(range(0, len(source.words), _PIECE_WORDS)):
            source_part, target_part = (words[start : start + _PIECE_WORDS] for words in (source.words, target.words))
            piece = self._pieces[number % 2][: len(source_part)]
            if number >= 2:
                source_stream.wait_event(arrived[number - 2])
            piece.copy_(source_part, non_blocking=True)
            target_stream.wait_event(source_stream.record_event())
            target_part.copy_(piece, non_blocking=True)
            arrived.append(target_stream.record_event())
        source_stream.wait_event(arrived[-1])

    def time_work(self, gpu: int | None, work: Callable[[], None]) -> float:
        """Run `work`, and return its seconds: between two events on the GPU's stream, or by the clock without a GPU."""
        self._synchronize_all()
        if gpu is None:
            start = time.perf_counter()
            work()
            self._synchronize_all()
            return time.perf_counter() - start
        with torch.cuda.device(gpu):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _synchronize_all(self) -> None:
        for gpu in self._started:
            torch.cuda.synchronize(gpu)


Copy = Callable[[Buffer, Buffer], None]
# One measurement: (GPU,) for its two links with the host, (source, target) for a copy between two GPUs.
Job = tuple[int, ...]


def all_jobs(count: int) -> tuple[Job, ...]:
    """All jobs of `count` GPUs, in the order in which they run."""
    return (*((gpu,) for gpu in range(count)), *permutations(range(count), 2))


def measure_copies(
    devices: CudaDevices, ctx: Context, *, selected_jobs: Collection[Job] = (), indirect_ratio: float = 1.0
) -> Copies:
    """Run all jobs, or only `selected_jobs`, and report the results after each. Stop shortly before the trial's end.

    A copy through the host is omitted if a correct peer copy reaches `indirect_ratio` of the links to the host.
    """
    gpus: list[GpuCopies] = []
    for gpu in range(devices.count):
        ctx.step(f"properties of GPU {gpu}")
        gpus.append(devices.properties(gpu))
    jobs = [job for job in all_jobs(devices.count) if not selected_jobs or job in selected_jobs]
    results = Copies(gpus=tuple(gpus), jobs=len(jobs))
    ctx.report(results, f"{results.done} of {results.jobs} paths")
    before = time.monotonic()
    for gpu in range(devices.count):
        ctx.step(f"{CONTEXT_STEP} of GPU {gpu}")
        devices.start(gpu)
    ctx.add_timing("context", time.monotonic() - before)
    for number, job in enumerate(jobs):
        seconds_left = ctx.end - time.monotonic() - _RESERVE_SECONDS
        if seconds_left <= 0:
            break
        # A quarter of a job's time for each of up to two links: filling, comparing and allocating take the other half.
        link_seconds = min(LINK_SECONDS, seconds_left / (len(jobs) - number) / 4)
        measurement = _JobMeasurement(devices, ctx, link_seconds, indirect_ratio)
        results = structs.replace(measurement.run_job(results, job), done=number + 1)
        ctx.report(results, f"{results.done} of {results.jobs} paths")
    return results


class _Link(NamedTuple):
    """The link from `source` to `target`, over which `copy` copies."""

    devices: CudaDevices
    copy: Copy
    source: Buffer
    target: Buffer

    def time_copies(self, count: int, calls: int) -> float:
        """Copy `count` words `calls` times, and return the mean seconds of a copy."""
        source_part, target_part = self.source.first(count), self.target.first(count)
        gpu = source_part.gpu if source_part.gpu is not None else target_part.gpu

        def work() -> None:
            for _ in range(calls):
                self.copy(source_part, target_part)

        return self.devices.time_work(gpu, work) / calls

    def check_copies(self, count: int, calls: int) -> tuple[float, int]:
        """Write wrong words to the target, then copy. Returns the mean seconds, and the number of wrong words."""
        words, ends = self.target.words[:count], (self.source.gpu, self.target.gpu)
        words.copy_(_expected_words(words, *ends).bitwise_not_())  # every word differs from the expected one
        seconds = self.time_copies(count, calls)
        return seconds, int((words != _expected_words(words, *ends)).sum())


class _JobMeasurement(NamedTuple):
    """The measurement of a job, whose copies take about `link_seconds` for each link."""

    devices: CudaDevices
    ctx: Context
    link_seconds: float
    indirect_ratio: float

    def run_job(self, results: Copies, job: Job) -> Copies:
        """Run one job, and return `results` with its result. A pair is in `refused` if CUDA has no peers left."""
        if len(job) == 1:
            new = self._measure_host_links(results.gpus[job[0]])
            return structs.replace(results, gpus=tuple(new if new.index == g.index else g for g in results.gpus))
        source, target = job
        try:
            return structs.replace(results, pairs=(*results.pairs, self._measure_pair(results, source, target)))
        except RuntimeError as error:
            if NO_PEERS_LEFT not in str(error):
                raise
            return structs.replace(results, refused=(*results.refused, (source, target)))

    def _measure_host_links(self, gpu_copies: GpuCopies) -> GpuCopies:
        gpu = gpu_copies.index
        words = HOST_BYTES // _WORD_BYTES
        host, device = self.devices.host_buffer(gpu, words), self.devices.buffer(gpu, words)
        self.ctx.step(f"copy host -> GPU {gpu}")
        to_rate, _, wrong_to = self._measure_link(host, device, self.devices.copy)
        self.ctx.step(f"copy GPU {gpu} -> host")
        from_rate, _, wrong_from = self._measure_link(device, host, self.devices.copy)
        return structs.replace(
            gpu_copies, to_bytes_per_s=to_rate, from_bytes_per_s=from_rate, wrong_to=wrong_to, wrong_from=wrong_from
        )

    def _measure_pair(self, results: Copies, source: int, target: int) -> PairCopies:
        source_buffer, target_buffer = (self.devices.buffer(gpu, PAIR_BYTES // _WORD_BYTES) for gpu in (source, target))
        self.ctx.step(f"copy GPU {source} -> GPU {target}")
        access = self.devices.can_access(source, target)
        rate, words, wrong = self._measure_link(source_buffer, target_buffer, self.devices.copy)
        pair = PairCopies(source=source, target=target, access=access, bytes_per_s=rate, words=words, wrong=wrong)
        host_rate = min(results.gpus[source].from_bytes_per_s or 0.0, results.gpus[target].to_bytes_per_s or 0.0)
        if access and not wrong and 0 < self.indirect_ratio * host_rate <= rate:
            return pair
        self.ctx.step(f"copy GPU {source} -> host -> GPU {target}")
        rate, _, wrong = self._measure_link(source_buffer, target_buffer, self.devices.copy_through_host)
        return structs.replace(pair, through_host_bytes_per_s=rate, wrong_through_host=wrong)

    def _measure_link(self, source: Buffer, target: Buffer, copy: Copy) -> tuple[float, int, int]:
        """Check one copy, time batches of copies, and check the last copy of the last batch.

        Returns the highest rate in bytes/s, the words in a copy, and the wrong words in the worse checked copy.
        """
        link = _Link(self.devices, copy, source, target)
        count = self._choose_word_count(link)
        source.words[:count].copy_(_expected_words(source.words[:count], source.gpu, target.gpu))
        first_seconds, wrong_at_start = link.check_copies(count, 1)
        calls = max(1, min(_MAX_CALLS, int(self.link_seconds / _BATCHES / max(first_seconds, 1e-9))))
        batches = _BATCHES if first_seconds * _BATCHES < 2 * self.link_seconds else 1
        seconds = [link.time_copies(count, calls) for _ in range(batches - 1)]
        last_seconds, wrong_at_end = link.check_copies(count, calls)
        shortest_seconds = min(first_seconds, last_seconds, *seconds)
        return count * _WORD_BYTES / max(shortest_seconds, 1e-9), count, max(wrong_at_start, wrong_at_end)

    def _choose_word_count(self, link: _Link) -> int:
        """Choose the number of words whose copy takes a quarter of `link_seconds`, by timing a small copy."""
        buffer_words = len(link.source.words)
        probe_words = min(PROBE_BYTES // _WORD_BYTES, buffer_words)
        link.time_copies(probe_words, 1)  # the first copy of a pair lets the GPUs see each other's memory
        words = int(probe_words * self.link_seconds / 4 / max(link.time_copies(probe_words, 1), 1e-9))
        return max(probe_words, min(buffer_words, words))


def _expected_words(like: torch.Tensor, source: int | None, target: int | None) -> torch.Tensor:
    """The words that a copy from `source` to `target` must have: position x a + link x b, modulo 2**32."""
    link = (_HOST if source is None else source) * 256 + (_HOST if target is None else target) + 1
    ramp = torch.arange(len(like), dtype=torch.int32, device=like.device)
    # torch's int32 is signed, so the factor is converted to the signed number with the same bits.
    return ramp.mul_(_PER_POSITION).add_((link * _PER_LINK + (1 << 31)) % (1 << 32) - (1 << 31))
