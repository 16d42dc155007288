"""Measurements of one process: training steps, copies and arithmetic of its GPUs, and a group of one rank."""

from msgspec import Struct


class Proof(Struct, frozen=True, kw_only=True):
    """One step of DistributedDataParallel, held against one process alone.

    `first_weights` is the SHA-256 of the parameters before DDP sends rank 0's to all. `error` is the largest deviation
    of DDP's gradient from that of all images in one process, as a share of the largest element; `norm` its Euclidean
    norm. Gradients are compared by sketches, a few random sums of all elements: `handed` of the input of this rank to
    the all-reduce, and `witnessed`, by rank, of what others should have handed to it.
    """

    first_weights: str
    dtype: str
    error: float
    norm: float
    handed: tuple[float, ...]
    witnessed: dict[int, tuple[float, ...]]


class Training(Struct, frozen=True, kw_only=True):
    """The training of TRN001 on one rank.

    `first_loss` (mean over ranks) is that of the first step, `last_loss` the mean over the last few; `accuracy` and
    `test_loss` are over all ranks and test images. `samples` counts this rank's training images in the
    `training_seconds` of all steps but the first, which warms up. `first_bad_step` is the first step in which this
    rank's own loss or gradient, before any exchange, was not finite. `checksum` is the SHA-256 of the parameters.
    """

    first_loss: float
    last_loss: float
    accuracy: float
    test_loss: float
    steps: int
    samples: int
    first_bad_step: int | None
    checksum: str
    training_seconds: float


class Window(Struct, frozen=True):
    """Mean seconds of a few steps: images to tensors; forward pass; backward pass; the all-reduce; the optimizer.

    `core_share` is the processor time of the process over the wall time of its own work: where others have less than
    the rest, other processes used their cores.
    """

    data: float
    forward: float
    backward: float
    wait: float
    optimizer: float
    core_share: float

    @property
    def compute(self) -> float:
        """The seconds in which this rank computed."""
        return self.forward + self.backward + self.optimizer

    @property
    def own(self) -> float:
        """The seconds in which this rank waited for no other rank."""
        return self.data + self.compute


class Steps(Struct, frozen=True, kw_only=True):
    """Some training steps.

    `bucket_seconds` is the shortest all-reduce of `bucket_bytes`. `overlap` is the share of the communication that DDP
    hid behind the backward pass, as its own logging has it; None if it has none.
    """

    windows: tuple[Window, ...]
    bucket_bytes: int
    bucket_seconds: float
    overlap: float | None


# Rates are bytes per second in one direction, of the fastest of several batches of calls; what was not measured is
# None. `wrong` counts 32-bit words that differed on arrival.


# CUDA's text for cudaErrorTooManyPeers. A GPU has 8 peers at most (CUDA C++ programming guide, peer-to-peer memory
# access), unless NVSwitches join them, and torch never gives one up again.
NO_PEERS_LEFT = "peer mapping resources exhausted"


class GpuCopies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU by torch's index, and its copies from (`to`: towards the GPU) and to the host's pinned memory."""

    index: int
    uuid: str | None = None
    pci: str | None = None
    name: str = ""
    to_bytes_per_s: float | None = None
    from_bytes_per_s: float | None = None
    wrong_to: int = 0
    wrong_from: int = 0


class PairCopies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ordered pair of GPUs. `access` says whether copies reach the target directly.

    `through_host_bytes_per_s` is the same copy by way of pinned memory, measured only where it could be faster. Words
    were compared in `words` each time.
    """

    source: int
    target: int
    access: bool
    bytes_per_s: float | None = None
    through_host_bytes_per_s: float | None = None
    words: int = 0
    wrong: int = 0
    wrong_through_host: int = 0


class Copies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one process tried: `done` of `jobs`, in an order that the number of GPUs gives.

    `refused` are links for which CUDA had no peer mappings left.
    """

    gpus: tuple[GpuCopies, ...] = ()
    pairs: tuple[PairCopies, ...] = ()
    done: int = 0
    jobs: int = 0
    refused: tuple[tuple[int, int], ...] = ()


class GpuLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU at one moment, as NVML reports it: the clock of its processors in hertz, the bits of nvmlClocksEventReasons
    in `events`."""

    sm_hz: float | None = None
    events: int | None = None
    celsius: int | None = None


class Compute(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rates of one GPU (or the CPU: `index` is None), one of each batch, or the reason why there are none.

    `index` is torch's. `flop_per_s` is the rate of matrix products in `dtype`; that of a copy within the device's
    memory counts what is read and what is written. `during` are its loads while it computed. `pid` is this process, and
    `pids` are those that NVML shows on the GPU, None where it does not say.
    """

    device: str
    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    processors: int | None = None
    dtype: str = ""
    flop_per_s: tuple[float, ...] = ()
    copy_bytes_per_s: tuple[float, ...] = ()
    during: tuple[GpuLoad, ...] = ()
    pid: int = 0
    pids: tuple[int, ...] | None = None
    unmeasured: str = ""


class Product(Struct, frozen=True, kw_only=True):
    """A product of two square matrices of `size` rows on one device, such as "GPU 3" or "the CPU".

    `wrong` elements differ from the exact product, and `seconds` is what it took, with the device's start; or `error`.
    """

    device: str
    size: int
    uuid: str | None = None
    wrong: int = 0
    seconds: float = 0.0
    error: str | None = None
