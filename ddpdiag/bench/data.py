"""What one rank gives of the benchmark (COL002), and its times in few numbers.

There may be millions of lines, and they hold no cycles, so the collector of garbage need not look at them.
"""

import math
from collections.abc import Sequence

from msgspec import Struct, field

from ddpdiag.model.bench import Limits, Spread
from ddpdiag.stats import quantile


class Cell(Struct, frozen=True, kw_only=True, gc=False):
    """One mode of a line on this rank.

    In each call the rank that came last spends least time in it, since all leave together. `lag_seconds` is the median
    over the calls of the longest time that any rank spent less this rank's own; `last` counts the calls in which this
    rank's was the shortest. `transfer_seconds` and `skew_seconds` are medians of the shortest, and of the longest less
    the shortest; they are the same on all ranks. None where ranks may leave apart. `wrong` is None if not checked.
    """

    seconds: Spread
    wrong: int | None = None
    lag_seconds: float | None = None
    last: int | None = None
    transfer_seconds: float | None = None
    skew_seconds: float | None = None
    times: tuple[float, ...] = ()


class Line(Struct, frozen=True, kw_only=True, gc=False):
    """One line of nccl-tests' table on this rank; see `model.bench.BenchRow`.

    `cores` are the processor seconds that this process used per second of its calls.
    """

    cycle: int
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: Cell | None = None
    out_of_place: Cell | None = None
    cores: float | None = None

    @property
    def key(self) -> tuple[int, str, str, int, int]:
        """What is the same on all ranks."""
        return self.cycle, self.dtype, self.op, self.root, self.size_bytes


def spread(seconds: Sequence[float]) -> Spread:
    """Summary of at least one call; ValueError if there is none."""
    if not seconds:
        raise ValueError("no calls to summarise")
    ordered, mean = sorted(seconds), sum(seconds) / len(seconds)
    return Spread(
        min=ordered[0],
        median=quantile(ordered, 0.5),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
        mean=mean,
        stdev=math.sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds)),
        count=len(seconds),
    )


def together(
    own: Sequence[float], shortest: Sequence[float], longest: Sequence[float]
) -> tuple[float, int, float, float]:
    """Lag, calls in which this rank came last, transfer and skew, from each call's own, shortest and longest time."""
    lag = sorted(most - mine for mine, most in zip(own, longest, strict=True))
    last = sum(mine <= least for mine, least in zip(own, shortest, strict=True))
    skew = sorted(most - least for least, most in zip(shortest, longest, strict=True))
    return quantile(lag, 0.5), last, quantile(sorted(shortest), 0.5), quantile(skew, 0.5)


# One rank's answer ---------------------------------------------------------------------------------------------------


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial. `device` is the name of what it ran on; index, UUID and PCI address are a GPU's.

    `copies` are the rates of its own copies, in bytes copied per second, at moments that all ranks share. `notes` say
    what was left out and why, and are the same on all ranks; `unsupported` names what was asked for and is not there.
    `whole`: neither time nor room was short.
    """

    backend: str
    collective: str
    ranks: int
    pid: int
    device: str
    device_index: int | None = None
    gpu_uuid: str | None = None
    pci: str | None = None
    limits: Limits = Limits()
    lines: tuple[Line, ...] = ()
    copies: tuple[float, ...] = ()
    notes: tuple[str, ...] = field(default=(), name="remarks")
    unsupported: tuple[str, ...] = ()
    whole: bool = True
