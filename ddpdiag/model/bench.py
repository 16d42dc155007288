"""A benchmark of collectives: the request, and the results.

Sizes are those of nccl-tests' first column: for all_gather, reduce_scatter and all_to_all the data of all ranks
together, else the bytes of one rank. Bandwidths are bytes per second. `None` is a figure that was not measured.
Reductions are sums, and rank 0 is the root.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from msgspec import Struct

from ddpdiag.errors import UsageError, nearest
from ddpdiag.model.declared import option

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
DTYPES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
# Torch has these in place only, the others out of place.
IN_PLACE = ("all_reduce", "broadcast", "reduce")
# Torch's names of dtypes.
_ALIASES = {
    "int": "int32",
    "fp16": "half",
    "float16": "half",
    "fp32": "float",
    "float32": "float",
    "fp64": "double",
    "float64": "double",
    "bf16": "bfloat16",
}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_SIZES = 1000
_SIZES, _CALLS, _WHAT, _VERDICT = "Sizes", "Calls", "What is measured", "Verdict"


def size(text: str) -> int:
    """Bytes in "8", "128M" or "1.5G"; K, M, G and T are powers of 1024, as in nccl-tests."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        value = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1 <= value < 1 << 50):
        raise UsageError("expected a number of bytes, 1 or more, such as 8, 64K, 128M or 1G")
    return int(value)


def _above(least: float, expected: str) -> Callable[[str], float]:
    """A parser of finite numbers above `least`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > least):
            raise UsageError(f"expected {expected}")
        return value

    return parse


def _names(known: Sequence[str], aliases: Mapping[str, str] = {}) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """A parser of comma-separated names, each kept once; without `known` names, of any."""

    def parse(texts: Sequence[str]) -> tuple[str, ...]:
        words = [word.strip().lower() for text in texts for word in text.split(",")]
        names = tuple(dict.fromkeys(aliases.get(word, word) for word in words))
        for name in names:
            if not name or (known and name not in known):
                raise UsageError(f"expected {', '.join(known or ('a name',))}{nearest(name, known)}")
        return names

    return parse


def _backends(texts: Sequence[str]) -> tuple[str, ...]:
    """Names of backends; empty for "auto"."""
    names = _names(())(texts)
    if "auto" in names and len(names) > 1:
        raise UsageError("auto cannot be combined with others: it is the backend that a job would use")
    return () if names == ("auto",) else names


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The measurements of a benchmark: the options of `ddpdiag allreduce-bench`, named as in nccl-tests.

    `backend` is empty for the backend that a job would use. `min_busbw` is GB/s.
    """

    minbytes: int = option(8, "Smallest size.", "-b", metavar="SIZE", panel=_SIZES, parse=size)
    maxbytes: int = option(
        128 << 20,
        "Largest size (default: 128M).",
        "-e",
        metavar="SIZE",
        panel=_SIZES,
        parse=size,
        show_default=False,
    )
    stepfactor: float = option(
        2.0,
        "Factor between sizes.",
        "-f",
        metavar="X",
        panel=_SIZES,
        parse=_above(1, "a factor above 1, by which each size is larger than the one before"),
    )
    iters: int = option(20, "Timed calls of each size.", "-n", metavar="N", panel=_CALLS, min=1)
    warmup_iters: int = option(5, "Untimed calls before them.", "-w", metavar="N", panel=_CALLS, min=0)
    check: int = option(
        1, "Check the values of one call of each size (0: do not).", "-c", metavar="0|1", panel=_CALLS, min=0, max=1
    )
    timeout: float = option(
        120.0,
        "Limit of the run; fewer calls or sizes are measured if they do not fit.",
        "-T",
        "--budget",
        metavar="SECONDS",
        panel=_CALLS,
        min=5.0,
    )
    collective: tuple[str, ...] = option(
        ("all_reduce",),
        f"{', '.join(COLLECTIVES)} (a,b; default: all_reduce).",
        metavar="NAME",
        panel=_WHAT,
        words=lambda: COLLECTIVES,
        parse=_names(COLLECTIVES),
    )
    datatype: tuple[str, ...] = option(
        ("float",),
        f"{', '.join(DTYPES)} (a,b; default: float).",
        "-d",
        metavar="TYPE",
        panel=_WHAT,
        words=lambda: DTYPES,
        parse=_names(DTYPES, _ALIASES),
    )
    backend: tuple[str, ...] = option(
        (),
        "gloo, nccl or any other backend of torch; several are measured in one run (a,b; default: the job's own).",
        metavar="NAME",
        panel=_WHAT,
        words=lambda: ("auto", "nccl", "gloo"),
        parse=_backends,
    )
    min_busbw: float | None = option(
        None,
        "Exit with 1 if the best bus bandwidth is less.",
        metavar="GB/s",
        panel=_VERDICT,
        parse=_above(0, "GB/s (1e9 bytes per second), above 0"),
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in bytes, in rising order; one more than are allowed at most."""
        return tuple(islice(self._sizes(), _MOST_SIZES + 1))

    def _sizes(self) -> Iterator[int]:
        size = float(self.minbytes)
        while size <= self.maxbytes:
            yield int(size)
            size = max(size * self.stepfactor, int(size) + 1)

    @property
    def min_busbw_bytes_per_s(self) -> float | None:
        return None if self.min_busbw is None else self.min_busbw * 1e9

    def validate(self) -> None:
        """UsageError for options that contradict each other."""
        if self.minbytes > self.maxbytes:
            raise UsageError(
                f"-b {self.minbytes} is above -e {self.maxbytes}: expected the smallest size, then the largest"
            )
        if len(self.sizes) > _MOST_SIZES:
            raise UsageError(f"-b {self.minbytes} -e {self.maxbytes}: at most {_MOST_SIZES} sizes expected")


class BenchPoint(Struct, frozen=True, kw_only=True):
    """One size of a benchmark: its bus bandwidth, and the coefficient of variation of its calls."""

    size_bytes: int
    busbw_bytes_per_s: float
    cv: float


class BenchCurve(Struct, frozen=True, kw_only=True):
    """All sizes of one collective over one backend, small enough to be kept for comparisons.

    `fabric` is what must be equal for two runs to be compared, beside the shape of their worlds: words by name.
    """

    collective: str
    backend: str
    dtype: str
    fabric: dict[str, str]
    points: tuple[BenchPoint, ...]


class Peer(Struct, frozen=True, kw_only=True, array_like=True):
    """The path from a GPU to another one of its host, as NVML reports it; None where it does not.

    `nvlinks` counts the links that are up and lead there, directly or by a switch; `level` is where the PCIe paths meet
    (nvmlGpuTopologyLevel_t); `p2p` says whether each may read and write the other's memory.
    """

    nvlinks: int | None = None
    level: int | None = None
    p2p: bool | None = None


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of one rank: bytes per second in one direction, measured by the rank or reported by its devices.

    `copy_bytes_per_s` counts bytes copied (each is read once and written once), `loopback_bytes_per_s` those of a TCP
    stream from this process to itself; both are measured on all ranks at once. `nic_bytes_per_s` is the nominal speed
    of the interface `nic` to other hosts, of all its `nic_ports` together where there are several (rails of
    InfiniBand), and `nic_port_bytes_per_s` that of the slowest port. `nvlinks` counts the links that are up;
    `nvlink_switched`: all of these lead to a switch, so to every other GPU. `nvlink_bytes_per_s` is the rate of all
    that are up, `pcie_bytes_per_s` the rate that card and slot allow. `cores` counts those that this process may use.
    `peers` are the paths of the GPU `uuid` to others that the process sees, by UUID, and `processor` is the vendor of
    the host's processors. GPUs of one `nvlink_domain` are joined by NVLinks, also those of several hosts (MNNVL).
    """

    copy_bytes_per_s: float | None = None
    loopback_bytes_per_s: float | None = None
    nic: str | None = None
    nic_bytes_per_s: float | None = None
    nic_ports: int | None = None
    nic_port_bytes_per_s: float | None = None
    nvlinks: int | None = None
    nvlink_switched: bool | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    cores: int | None = None
    uuid: str | None = None
    peers: dict[str, Peer] = {}
    processor: str | None = None
    nvlink_domain: str | None = None


class RankRow(Struct, frozen=True, kw_only=True, gc=False):
    """One size on one rank, as it is recorded.

    `cv` is the standard deviation of the calls over their mean. In each call the rank that started last spends least
    time in it, since all finish together: `lag_seconds` is the median over the calls of the longest time of any rank
    less this rank's time, `last` counts the calls in which this rank's time was the shortest, and `transfer_seconds` is
    the median of the shortest time, equal on all ranks. They are None where ranks may finish apart (broadcast, reduce).
    `wrong` counts elements, None if not checked.
    """

    size_bytes: int
    count: int
    dtype: str
    calls: int
    min_seconds: float
    median_seconds: float
    mean_seconds: float
    cv: float
    wrong: int | None = None
    lag_seconds: float | None = None
    last: int | None = None
    transfer_seconds: float | None = None


class BenchRow(Struct, frozen=True, kw_only=True):
    """One line of nccl-tests' table. `count` is its second column.

    `seconds`, `min_seconds` and `cv` are those of `slowest_rank`: the mean of its calls, the shortest, and their
    coefficient of variation. `calls` are those of the rank with fewest, `wrong` counts elements on all ranks.
    """

    backend: str
    collective: str
    size_bytes: int
    count: int
    dtype: str
    seconds: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: int | None
    calls: int
    slowest_rank: int
    min_seconds: float
    cv: float


class Expectation(Struct, frozen=True, kw_only=True):
    """The bus bandwidth that this hardware should reach, and its source."""

    busbw_bytes_per_s: float
    source: str


class Bottleneck(Enum):
    """The part that limits a collective."""

    NOT_JUDGED = "not judged"
    LATENCY = "latency"
    COPY = "cpu copies"
    NIC = "network card"
    PCIE = "pcie"
    NVLINK = "nvlink"
    SLOW_RANK = "slow rank"
    UNKNOWN = "unknown"


class Series(Struct, frozen=True, kw_only=True):
    """The result of all sizes of one collective over one backend, of one dtype.

    `best_bytes` is the size with the highest bus bandwidth, `peak_busbw_bytes_per_s`; `share` is the peak over the
    expectation. `latency_seconds` is the shortest call of a small message. `sentence` says where the bottleneck is.
    """

    backend: str
    collective: str
    dtype: str
    peak_busbw_bytes_per_s: float
    best_bytes: int
    latency_seconds: float | None
    expectation: Expectation | None
    share: float | None
    bottleneck: Bottleneck
    sentence: str


class BenchRank(Struct, frozen=True, kw_only=True):
    """One line of the table of ranks, for one collective over one backend, at `size_bytes`.

    `seconds` is the median of its calls, `spread_share` their coefficient of variation. `copy_bytes_per_s` is the rate
    of copies in its own memory. `slow` is the reason why it is called slow, or empty.
    """

    backend: str
    collective: str
    rank: int
    local_rank: int | None
    host: str
    device: str
    gpu_uuid: str | None
    pci: str | None
    pid: int
    device_index: int | None
    size_bytes: int
    seconds: float | None
    busbw_bytes_per_s: float | None
    spread_share: float | None
    lag_seconds: float | None
    copy_bytes_per_s: float | None = None
    slow: str = ""


class BenchReport(Struct, frozen=True, kw_only=True):
    """A benchmark, judged. `notes` are lines for people: sizes that were dropped, fewer calls, series cut short.

    `wrong` is None if nothing was checked.
    """

    asked: Bench
    rows: tuple[BenchRow, ...]
    series: tuple[Series, ...]
    ranks: tuple[BenchRank, ...]
    notes: tuple[str, ...]
    wrong: int | None
    complete: bool
    sentence: str
    torch_version: str | None = None
    nccl_version: str | None = None
