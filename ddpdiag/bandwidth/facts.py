"""What is known of one sweep of a benchmark, before its bottleneck is told: a table of numbers, and how they read."""

from collections.abc import Sequence
from typing import NamedTuple

from ddpdiag.bandwidth.expectations import Bound
from ddpdiag.bandwidth.text import rate_text, share_text, size_text
from ddpdiag.model.bench import Bottleneck, Fit, Limits

# At least this much of the expectation is as it should be (stas00, ml-engineering: 80 %).
GOOD_SHARE = 0.8
# Of what copies and loopback allow: gloo's threads hand each segment to each other. Two ranks on an idle host of two
# cores reached 0.59 to 0.68 of it.
GOOD_COPY_SHARE = 0.5


class Slow(NamedTuple):
    """A rank that is called slow, and why ("copies 2.1x slower than the median of its peers")."""

    rank: int
    host: str
    reason: str


class Facts(NamedTuple):
    """What is known of one sweep.

    `points` are (size in bytes, seconds of the shortest call), in any order; `peak_busbw_bytes_per_s` and `best_bytes`
    are those of the rows. `oversubscribed` is (ranks, cores) of a host with fewer cores than ranks. `limits` are the
    lowest of all ranks. `links_up` are the fewest and the most NVLinks that are up on GPUs of one model, of the model
    where these differ most. `cores_used` is CPU seconds per second of the busiest rank while it called.
    """

    collective: str
    backend: str
    ranks: int
    hosts: int
    peak_busbw_bytes_per_s: float
    best_bytes: int
    fit: Fit | None
    bound: Bound | None
    points: Sequence[tuple[int, float]]
    limits: Limits = Limits()
    links_up: tuple[int, int] | None = None
    oversubscribed: tuple[int, int] | None = None
    cores_used: float | None = None
    slow: tuple[Slow, ...] = ()

    @property
    def share(self) -> float | None:
        """The peak over what was expected."""
        expected = self.bound.busbw_bytes_per_s if self.bound else 0.0
        return self.peak_busbw_bytes_per_s / expected if expected > 0 else None

    @property
    def good_share(self) -> float:
        """From which share of the expectation on all is as it should be."""
        return GOOD_COPY_SHARE if self.bound and self.bound.part is Bottleneck.COPY else GOOD_SHARE

    @property
    def subject(self) -> str:
        """Such as "all_reduce over nccl"."""
        return f"{self.collective} over {self.backend}"

    @property
    def peak(self) -> str:
        """Such as "1.31 GB/s busbw at 64 MiB"."""
        return f"{rate_text(self.peak_busbw_bytes_per_s)} busbw at {size_text(self.best_bytes)}"

    @property
    def compared(self) -> str:
        """Such as "1.31 GB/s busbw at 64 MiB, 91 % of 1.44 GB/s (source)"."""
        if self.bound is None or self.share is None:
            return self.peak
        expected = rate_text(self.bound.busbw_bytes_per_s)
        return f"{self.peak}, {share_text(self.share)} of {expected} ({self.bound.source})"
