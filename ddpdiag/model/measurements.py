"""Measurements of one process: training steps, copies between devices, and arithmetic of its devices."""

from msgspec import Struct


class Proof(Struct, frozen=True, kw_only=True):
    """One step of DistributedDataParallel (DDP), compared with the same step in one process without DDP.

    `first_weights` is the SHA-256 of this rank's parameters before DDP replaces them by rank 0's. `gradient_error` is
    the largest deviation of DDP's gradient from the gradient of one process, as a share of its largest element.
    `gradient_norm` is the Euclidean norm of the gradient of one process. A sketch is a few random sums of all elements
    of a gradient. `input_sketch` is the sketch of this rank's input to the all-reduce. `expected_sketches` has, by
    rank, the sketches of the inputs that this rank computed for other ranks.
    """

    first_weights: str
    dtype: str
    gradient_error: float
    gradient_norm: float
    input_sketch: tuple[float, ...]
    expected_sketches: dict[int, tuple[float, ...]]


class Training(Struct, frozen=True, kw_only=True):
    """The training of TRN001 on one rank.

    `first_loss` is the loss of the first step, `last_loss` the mean loss of the last few steps; both are means over
    ranks. `accuracy` and `test_loss` are over all ranks and test images. `training_seconds` is the time of all steps
    but the first, which warms up; `samples` counts this rank's training images in that time. `first_bad_step` is the
    first step in which this rank's loss or gradient was not finite before any exchange (None: always finite).
    `checksum` is the SHA-256 of the parameters after the training.
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
    """Mean seconds of each part of a step, over a few consecutive steps.

    `data` is the time to make tensors of images, `wait` the time in the all-reduce. `core_share` is the processor time
    of the process divided by that for data, forward and backward. A rank with a lower share than other ranks shared its
    cores with other programs.
    """

    data: float
    forward: float
    backward: float
    wait: float
    optimizer: float
    core_share: float

    @property
    def compute_seconds(self) -> float:
        """The seconds of the forward pass, the backward pass and the optimizer."""
        return self.forward + self.backward + self.optimizer

    @property
    def own_seconds(self) -> float:
        """The seconds of all parts but the wait for other ranks."""
        return self.data + self.compute_seconds


class Steps(Struct, frozen=True, kw_only=True):
    """The timed training steps of one rank.

    `bucket_seconds` is the shortest time of an all-reduce of `bucket_bytes`. `overlap` is the share of the
    communication that ran during the backward pass, as DDP's logging reports it (None: not logged).
    """

    windows: tuple[Window, ...]
    bucket_bytes: int
    bucket_seconds: float
    overlap: float | None


class SoakDifference(Struct, frozen=True, kw_only=True):
    """The first step of a soak in which this rank saw a difference.

    `digests` has, by name, the digest of each result of this rank, and for a collective the number of wrong elements
    that the rank received. `repeated` has the digests of repetitions on this rank, without collectives.
    """

    step: int
    digests: dict[str, str]
    repeated: tuple[dict[str, str], ...]


class Soak(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's part of a soak: the steps, the bytes of their collectives, and the steps with a difference.

    `device` names the facts on which the bits of a result may depend: only ranks with equal ones are compared.
    """

    device: str
    uuid: str | None = None
    steps: int = 0
    bytes: int = 0
    seconds: float = 0.0
    different_steps: int = 0
    first_difference: SoakDifference | None = None


# In GpuCopies and PairCopies a rate is bytes per second in one direction, in the fastest of several batches of calls
# (None: not measured). `wrong` counts 32-bit words that differed on arrival.

# CUDA's text for cudaErrorTooManyPeers. A GPU has 8 peers at most (CUDA C++ programming guide, peer-to-peer memory
# access), unless NVSwitches join them, and torch never releases a peer.
NO_PEERS_LEFT = "peer mapping resources exhausted"


class GpuCopies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU, and its copies from pinned host memory to the GPU (`to`) and back (`from`). `index` is torch's index."""

    index: int
    uuid: str | None = None
    pci: str | None = None
    name: str = ""
    to_bytes_per_s: float | None = None
    from_bytes_per_s: float | None = None
    wrong_to: int = 0
    wrong_from: int = 0


class PairCopies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The copies from one GPU to another. `access` says whether the source writes to the target's memory directly.

    `through_host_bytes_per_s` is the rate of the same copy through pinned host memory, which is measured only if it
    could be faster. `words` is the number of words that were compared after each of the two copies.
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
    """The copies that one process measured. `jobs` is their planned number; the first `done` of them were measured.

    Their order depends only on the GPU count. `refused`: pairs (source, target) for which CUDA had no mappings left.
    """

    gpus: tuple[GpuCopies, ...] = ()
    pairs: tuple[PairCopies, ...] = ()
    done: int = 0
    jobs: int = 0
    refused: tuple[tuple[int, int], ...] = ()


class GpuLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU at one moment, as NVML reports it. `sm_hz` is its clock, `events` the bits of nvmlClocksEventReasons."""

    sm_hz: float | None = None
    events: int | None = None
    celsius: int | None = None


class Compute(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rates of one GPU, or of the CPU (`index` is None): one rate for each batch of calls.

    `index` is torch's index. `flop_per_s` are the rates of matrix products in `dtype`. `copy_bytes_per_s` are the rates
    of copies in the device's memory: bytes read plus bytes written. `processors` is the number of the GPU's
    multiprocessors. `loads` are states of the GPU while it computed. Process `pid` measured. `pids` are the processes
    that NVML shows on the GPU (None: not shown). `why_unmeasured` is the reason if there are no rates.
    """

    device: str
    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    processors: int | None = None
    dtype: str = ""
    flop_per_s: tuple[float, ...] = ()
    copy_bytes_per_s: tuple[float, ...] = ()
    loads: tuple[GpuLoad, ...] = ()
    pid: int = 0
    pids: tuple[int, ...] | None = None
    why_unmeasured: str = ""


class Product(Struct, frozen=True, kw_only=True):
    """A product of two square matrices of `size` rows on one device, such as "GPU 3" or "the CPU".

    `wrong` counts elements that differ from the exact product. `seconds` includes the start of the device. `error` is
    the text of the error if the computation failed.
    """

    device: str
    size: int
    uuid: str | None = None
    wrong: int = 0
    seconds: float = 0.0
    error: str | None = None
