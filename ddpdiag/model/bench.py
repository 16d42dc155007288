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
# torch has these collectives in place only, and the others out of place.
IN_PLACE = ("all_reduce", "broadcast", "reduce")
# Other names of dtypes, as in torch.
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
    """The number of bytes in "8", "128M" or "1.5G"; K, M, G and T are powers of 1024, as in nccl-tests."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        value = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1 <= value < 1 << 50):
        raise UsageError("expected a number of bytes, 1 or more, such as 8, 64K, 128M or 1G")
    return int(value)


def _above(least: float, expected: str) -> Callable[[str], float]:
    """Return a parser of finite numbers above `least`; `expected` is the text of its UsageError."""

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
    """Return a parser of comma-separated names, which keeps each once. It accepts any name if `known` is empty."""

    def parse(texts: Sequence[str]) -> tuple[str, ...]:
        words = [word.strip().lower() for text in texts for word in text.split(",")]
        names = tuple(dict.fromkeys(aliases.get(word, word) for word in words))
        for name in names:
            if not name or (known and name not in known):
                raise UsageError(f"expected {', '.join(known or ('a name',))}{nearest(name, known)}")
        return names

    return parse


def _backends(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse comma-separated names of backends; the result is empty for "auto"."""
    names = _names(())(texts)
    if "auto" in names and len(names) > 1:
        raise UsageError("auto cannot be combined with others: it is the backend that a job would use")
    return () if names == ("auto",) else names


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The request for a benchmark: the options of `ddpdiag allreduce-bench`, named as in nccl-tests.

    `backend` is empty for the job's backend. `min_busbw` is in GB/s (1e9 bytes per second).
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
        """The sizes in bytes, in rising order. If there are too many, only one more than is allowed is returned."""
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
        """Raise UsageError if the smallest size is above the largest, or if there are too many sizes."""
        if self.minbytes > self.maxbytes:
            raise UsageError(
                f"-b {self.minbytes} is above -e {self.maxbytes}: expected the smallest size, then the largest"
            )
        if len(self.sizes) > _MOST_SIZES:
            raise UsageError(f"-b {self.minbytes} -e {self.maxbytes}: at most {_MOST_SIZES} sizes expected")


class BenchPoint(Struct, frozen=True, kw_only=True):
    """One size of a benchmark: its bus bandwidth, and the coefficient of variation of its calls (`cv`)."""

    size_bytes: int
    busbw_bytes_per_s: float
    cv: float


class BenchCurve(Struct, frozen=True, kw_only=True):
    """All sizes of one collective over one backend, small enough to be kept for comparisons.

    `fabric` has properties of the network by name, in words. Only runs with equal properties and shapes are compared.
    """

    collective: str
    backend: str
    dtype: str
    fabric: dict[str, str]
    points: tuple[BenchPoint, ...]


class Peer(Struct, frozen=True, kw_only=True, array_like=True):
    """The path from a GPU to another GPU of its host, as NVML reports it (None: not reported).

    `nvlinks` counts the NVLinks that are up and lead to the other GPU, directly or by a switch. `level` says where the
    PCIe paths meet (nvmlGpuTopologyLevel_t). `p2p` says whether each GPU may read and write the other's memory.
    """

    nvlinks: int | None = None
    level: int | None = None
    p2p: bool | None = None


class Limits(Struct, frozen=True, kw_only=True):
    """Upper limits of one rank's rates: bytes per second in one direction, measured or reported by its devices.

    `copy_bytes_per_s` counts bytes copied (each is read once and written once), `loopback_bytes_per_s` bytes of a TCP
    stream from this process to itself. Both are measured on all ranks at once. `nic_bytes_per_s` is the nominal speed
    of the interface `nic` to other hosts: of all its `nic_ports` together if there are several (rails of InfiniBand).
    `nic_port_bytes_per_s` is the speed of the slowest port. `nvlinks` counts the NVLinks that are up, which have the
    rate `nvlink_bytes_per_s` together. With `nvlink_switched` all of them lead to a switch, so to every other GPU.
    `pcie_bytes_per_s` is the rate that card and slot allow. `cores` counts the cores that this process may use. `peers`
    are the paths from the GPU `uuid` to other GPUs that the process sees, by UUID. `processor` is the vendor of the
    host's processors. GPUs of one `nvlink_domain` are joined by NVLinks, even on several hosts (MNNVL).
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
    """The recorded result of one size on one rank.

    `cv` is the standard deviation of the calls divided by their mean. All ranks finish a call together, so the rank
    that started the call last spends least time in it. The lag in a call is the longest time of any rank minus the time
    of this rank: `lag_seconds` is its median. `last` counts the calls in which this rank's time was the shortest, and
    `transfer_seconds` is the median of the shortest time, equal on all ranks. These three are None if ranks may finish
    apart (broadcast, reduce). `wrong` counts wrong elements (None: not checked).
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
    """One line of the table of results, as in nccl-tests. `count` is the second column of nccl-tests.

    `seconds`, `min_seconds` and `cv` belong to `slowest_rank`: the mean of its calls, the shortest, and their
    coefficient of variation. `calls` is the lowest number of calls of a rank. `wrong` counts elements on all ranks.
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
    """The result of all sizes of one collective over one backend, with one dtype.

    `best_bytes` is the size with the highest bus bandwidth, `peak_busbw_bytes_per_s`. `share` is this peak divided by
    the expected one. `latency_seconds` is the shortest call of a small message. `sentence` names the bottleneck.
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

    `seconds` is the median of the rank's calls, `spread_share` their coefficient of variation. `copy_bytes_per_s` is
    the rate of copies in the rank's memory. `slow` is the reason why the rank is called slow, or empty.
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
    """The judged result of a benchmark. `notes` are sentences about dropped sizes, fewer calls and series cut short.

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
