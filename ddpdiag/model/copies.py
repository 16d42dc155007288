"""Copies between the GPUs of one host, and to and from its memory: what one process saw.

Rates are bytes per second in one direction, of the fastest of several batches of calls; what was not measured is None.
`wrong` counts 32-bit words that differed on arrival.
"""

from msgspec import Struct


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
    """One ordered pair of GPUs. `access`: may the source's copies reach the target directly, as CUDA says?

    `through_host_bytes_per_s` is the same copy by way of pinned memory. Words were compared in `words` each time.
    """

    source: int
    target: int
    access: bool
    bytes_per_s: float | None = None
    through_host_bytes_per_s: float | None = None
    words: int = 0
    wrong: int = 0
    wrong_through_host: int = 0


class BothWays(Struct, frozen=True, kw_only=True):
    """Two GPUs that copy to each other at the same time: bytes per second of both directions together."""

    one: int
    other: int
    bytes_per_s: float


class Copies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one process tried: `done` of `jobs`, in an order that the number of GPUs gives.

    `ring_bytes_per_s` is what each GPU sends when all copy to their next one at the same time.
    """

    gpus: tuple[GpuCopies, ...] = ()
    pairs: tuple[PairCopies, ...] = ()
    both: tuple[BothWays, ...] = ()
    ring_bytes_per_s: float | None = None
    done: int = 0
    jobs: int = 0
