"""Measurements of one process: training steps, copies and arithmetic of its GPUs, and a group of one rank."""

from msgspec import Struct


class Proof(Struct, frozen=True, kw_only=True):
    """One step of DistributedDataParallel (DDP), compared with the same step in one process alone.

    `first_weights` is the SHA-256 of the parameters before DDP sends rank 0's to all. `error` is the largest deviation
    of DDP's gradient from that of one process, as a share of its largest element. `norm` is the Euclidean norm of the
    gradient of one process. Other gradients are compared by sketches, a few random sums of all elements: `handed` is
    that of this rank's input to the all-reduce, `witnessed` those of the inputs that other ranks should have, by rank.
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
    """Mean seconds of each part of a few steps: `data` makes tensors of images, `wait` is the time in the all-reduce.

    `core_share` is the processor time of the process divided by the wall time of its own work. A rank with less than
    the other ranks shared its cores with other processes.
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
    """The timed training steps of one rank.

    `bucket_seconds` is the shortest all-reduce of `bucket_bytes`. `overlap` is the share of the communication that DDP
    hid behind the backward pass, by its own logging (None: not logged).
    """

    windows: tuple[Window, ...]
    bucket_bytes: int
    bucket_seconds: float
    overlap: float | None


# In the following structs rates are bytes per second in one direction, from the fastest of several batches of calls. A
# rate that was not measured is None. `wrong` counts 32-bit words that differed on arrival.


# CUDA's text for cudaErrorTooManyPeers. A GPU has 8 peers at most (CUDA C++ programming guide, peer-to-peer memory
# access), unless NVSwitches join them, and torch never gives one up again.
NO_PEERS_LEFT = "peer mapping resources exhausted"


class GpuCopies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU (`index` is torch's), and its copies from pinned memory of the host (`to` the GPU) and back (`from`)."""

    index: int
    uuid: str | None = None
    pci: str | None = None
    name: str = ""
    to_bytes_per_s: float | None = None
    from_bytes_per_s: float | None = None
    wrong_to: int = 0
    wrong_from: int = 0


class PairCopies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The copies from one GPU to another. `access` says whether they reach the target directly.

    `through_host_bytes_per_s` is the rate of the same copy by way of pinned memory, which is measured only if it could
    be faster. Each time `words` words were compared.
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
    """The copies that one process measured: `done` of `jobs`, in an order that depends only on the number of GPUs.

    `refused` are the pairs (source, target) for which CUDA had no peer mappings left.
    """

    gpus: tuple[GpuCopies, ...] = ()
    pairs: tuple[PairCopies, ...] = ()
    done: int = 0
    jobs: int = 0
    refused: tuple[tuple[int, int], ...] = ()


class GpuLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU at one moment, by NVML: the clock of its processors; `events` are the bits of nvmlClocksEventReasons."""

    sm_hz: float | None = None
    events: int | None = None
    celsius: int | None = None


class Compute(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rates of one GPU (or of the CPU: `index` is None), one for each batch, or why there are none (`unmeasured`).

    `index` is torch's. `flop_per_s` are rates of matrix products in `dtype`. `copy_bytes_per_s` are rates of copies in
    the device's memory; they count bytes read and bytes written. `during` are the GPU's loads while it computed. `pid`
    is this process, and `pids` are the processes that NVML shows on the GPU (None: NVML does not say).
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

    `wrong` counts elements unlike the exact product. `seconds` includes the device's start. `error`: it failed.
    """

    device: str
    size: int
    uuid: str | None = None
    wrong: int = 0
    seconds: float = 0.0
    error: str | None = None
