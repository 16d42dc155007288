"""The GPUs of this process, as `workloads.copies` asks them, through torch.

torch puts a copy between GPUs on the source's current stream, and lets both GPUs' streams wait for it (aten
native/cuda/Copy.cu); so an event on the source's stream sees its end. torch enables peer access by itself where CUDA
offers it, and offers no way to disable it again in this process.
"""

import time
from collections.abc import Callable, Sequence

import torch

from ddpdiag.model.measurements import GpuCopies
from ddpdiag.workloads.copies import Buffer, Way
from ddpdiag.workloads.devices import describe

# Pieces on the way through the host: long enough for the rate of PCIe, short enough for two ways to overlap.
_PIECE_WORDS = (4 << 20) // 4


class CudaDevices:
    """The GPUs that torch shows to this process; of these the first `most`, if that is known."""

    def __init__(self, most: int | None = None) -> None:
        shown = torch.cuda.device_count()
        self.count = shown if most is None else min(shown, most)
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._started: list[int] = []

    def about(self, gpu: int) -> GpuCopies:
        """As the driver names it."""
        found = describe(torch.device("cuda", gpu))
        return GpuCopies(index=gpu, uuid=found.uuid, pci=found.pci, name=found.name)

    def start(self, gpu: int) -> None:
        """What needs it first makes its context."""
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

    def together(self, ways: Sequence[Way]) -> None:
        """Each on streams of its own, since a copy makes the current streams of both its ends wait."""
        for number, (source, target) in enumerate(ways):
            out, into = (self._stream(end.gpu, number) for end in (source, target))
            with torch.cuda.stream(out), torch.cuda.stream(into):
                self.copy(source, target)

    def _stream(self, gpu: int | None, number: int) -> torch.cuda.Stream:
        place = (gpu or 0, number)
        if place not in self._streams:
            self._streams[place] = torch.cuda.Stream(place[0])
        return self._streams[place]

    def seconds(self, gpu: int | None, work: Callable[[], None]) -> float:
        """Between two events on the GPU's stream; by the clock where several GPUs work."""
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
