"""What one rank saw of a training step: whether its gradient was right, and where the time went."""

from msgspec import Struct


class Proof(Struct, frozen=True, kw_only=True):
    """One step of DistributedDataParallel, held against one process alone.

    `first_weights` is the SHA-256 of the parameters before DDP sends rank 0's to all. `error` is the largest deviation
    of DDP's gradient from that of all images in one process, as a share of the largest element; `norm` its Euclidean
    norm. Gradients are told by sketches, a few random sums of all elements: `handed` of what this rank handed to the
    all-reduce, `averaged` of what came out, and `witnessed`, by rank, of what others should have handed to it. `shards`
    are digests of this rank's images in two epochs of `images`; over all ranks `covered` images are in some shard, and
    `drawn` counts them with repetitions. `reduced` counts right predictions by an all-reduce, `gathered` those among
    all predictions, of `predicted`.
    """

    first_weights: str
    dtype: str
    error: float
    norm: float
    handed: tuple[float, ...]
    averaged: tuple[float, ...]
    witnessed: dict[int, tuple[float, ...]]
    images: int
    shards: tuple[str, str]
    covered: int
    drawn: int
    predicted: int
    reduced: int
    gathered: int


class Window(Struct, frozen=True):
    """Mean seconds of a few steps: images to tensors; forward pass; backward pass; the all-reduce; the optimizer.

    `core_share` is the processor time of the process over the wall time of its own work: where others have less than
    the rest, somebody else had their cores.
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
        """The seconds in which this rank waited for nobody."""
        return self.data + self.compute


class Steps(Struct, frozen=True, kw_only=True):
    """Some training steps.

    `bucket_seconds` is the shortest all-reduce of `bucket_bytes`; `edges` the shortest exchange of `edge_bytes` each
    way with a neighbour, by its rank. `overlap` is the share of the communication that DDP hid behind the backward
    pass, as its own logging has it; None if it has none.
    """

    windows: tuple[Window, ...]
    bucket_bytes: int
    bucket_seconds: float
    edge_bytes: int
    edges: dict[int, float]
    overlap: float | None
