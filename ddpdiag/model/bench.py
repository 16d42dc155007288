"""A benchmark of collectives: the request, and the results.

A size is defined as in the first column of nccl-tests: for all_gather, reduce_scatter and all_to_all the bytes of all
ranks together, else the bytes of one rank. Bandwidths are bytes per second. A figure that was not measured is None.
Reductions are sums, and rank 0 is the root.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from msgspec import Struct

from ddpdiag.errors import UsageError, did_you_mean
from ddpdiag.model.declared import option

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
DTYPES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
# torch writes the result of these collectives to the buffer of the input, and that of the others to another buffer.
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
_MAX_SIZES = 1000
_SIZES, _CALLS, _MEASURED, _VERDICT = "Sizes", "Calls", "What is measured", "Verdict"


def parse_size(text: str) -> int:
    """Parse a size such as "8", "128M" or "1.5G" into bytes. K, M, G and T are powers of 1024, as in nccl-tests."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        value = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1 <= value < 1 << 50):
        raise UsageError("expected a number of bytes, 1 or more, such as 8, 64K, 128M or 1G")
    return int(value)


def _number_parser(lower_limit: float, expected: str) -> Callable[[str], float]:
    """Return a parser of finite numbers above `lower_limit`. `expected` is the text of its UsageError."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > lower_limit):
            raise UsageError(f"expected {expected}")
        return value

    return parse


def _names_parser(known: Sequence[str], aliases: Mapping[str, str] = {}) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Return a parser of comma-separated names. It drops repetitions, and accepts any name if `known` is empty."""

    def parse(texts: Sequence[str]) -> tuple[str, ...]:
        words = [word.strip().lower() for text in texts for word in text.split(",")]
        names = tuple(dict.fromkeys(aliases.get(word, word) for word in words))
        for name in names:
            if not name or (known and name not in known):
                raise UsageError(f"expected {', '.join(known or ('a name',))}{did_you_mean(name, known)}")
        return names

    return parse


def _parse_backends(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse comma-separated names of backends. The result is empty for "auto"."""
    names = _names_parser(())(texts)
    if "auto" in names and len(names) > 1:
        raise UsageError("auto cannot be combined with others: it is the backend that a job would use")
    return () if names == ("auto",) else names


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The request for a benchmark: the options of `ddpdiag allreduce-bench`, named as in nccl-tests.

    An empty `backend` means the job's backend. `min_busbw` is in GB/s (1e9 bytes per second).
    """

    minbytes: int = option(8, "Smallest size.", "-b", metavar="SIZE", panel=_SIZES, parse=parse_size)
    maxbytes: int = option(
        128 << 20,
        "Largest size (default: 128M).",
        "-e",
        metavar="SIZE",
        panel=_SIZES,
        parse=parse_size,
        show_default=False,
    )
    stepfactor: float = option(
        2.0,
        "Factor between sizes.",
        "-f",
        metavar="X",
        panel=_SIZES,
        parse=_number_parser(1, "a factor above 1, by which each size is larger than the one before"),
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
        panel=_MEASURED,
        words=lambda: COLLECTIVES,
        parse=_names_parser(COLLECTIVES),
    )
    datatype: tuple[str, ...] = option(
        ("float",),
        f"{', '.join(DTYPES)} (a,b; default: float).",
        "-d",
        metavar="TYPE",
        panel=_MEASURED,
        words=lambda: DTYPES,
        parse=_names_parser(DTYPES, _ALIASES),
    )
    backend: tuple[str, ...] = option(
        (),
        "gloo, nccl or any other backend of torch; several are measured in one run (a,b; default: the job's own).",
        metavar="NAME",
        panel=_MEASURED,
        words=lambda: ("auto", "nccl", "gloo"),
        parse=_parse_backends,
    )
    min_busbw: float | None = option(
        None,
        "Exit with 1 if the best bus bandwidth is less.",
        metavar="GB/s",
        panel=_VERDICT,
        parse=_number_parser(0, "GB/s (1e9 bytes per second), above 0"),
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in bytes, in rising order, but not more than _MAX_SIZES + 1, so that `validate` can refuse them."""
        return tuple(islice(self._sizes(), _MAX_SIZES + 1))

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
        if len(self.sizes) > _MAX_SIZES:
            raise UsageError(f"-b {self.minbytes} -e {self.maxbytes}: at most {_MAX_SIZES} sizes expected")


class BenchPoint(Struct, frozen=True, kw_only=True):
    """The bus bandwidth at one size of a benchmark, with the coefficient of variation of the calls' times (`cv`)."""

    size_bytes: int
    busbw_bytes_per_s: float
    cv: float


class BenchCurve(Struct, frozen=True, kw_only=True):
    """The bandwidths of one collective over one backend at all sizes, as a snapshot keeps them for comparisons.

    `fabric` has properties of the network by name, in words. Two runs are compared only if these properties and the
    shapes of their snapshots are equal.
    """

    collective: str
    backend: str
    dtype: str
    fabric: dict[str, str]
    points: tuple[BenchPoint, ...]


class PeerPath(Struct, frozen=True, kw_only=True, array_like=True):
    """The path from a GPU to another GPU of its host, as NVML reports it. A field that NVML does not report is None.

    `nvlinks` is the number of NVLinks that are up and lead to the other GPU, directly or through a switch. `pcie_level`
    says where the PCIe paths of both meet (nvmlGpuTopologyLevel_t). `p2p`: each may access the other's memory.
    """

    nvlinks: int | None = None
    pcie_level: int | None = None
    p2p: bool | None = None


class Limits(Struct, frozen=True, kw_only=True):
    """Upper limits of one rank's rates: bytes per second in one direction, measured or reported by its devices.

    `copy_bytes_per_s` is the rate of copies in memory (each byte is read and written, and counts once).
    `loopback_bytes_per_s` is the rate of a TCP stream from this process to itself. Both were measured on all ranks at
    once. `nic_bytes_per_s` is the nominal speed of the interface `nic` to other hosts, over all its `nic_ports` if
    there are several (rails of InfiniBand). `nic_port_bytes_per_s` is the speed of the slowest port. `nvlinks` is the
    number of NVLinks that are up, `nvlink_bytes_per_s` their total rate. `nvlink_switched`: all lead to a switch, and
    so to every other GPU. `pcie_bytes_per_s` is the rate that card and slot allow. `cores` is the number of cores that
    this process may use. `peers` has, by UUID, the paths from the GPU `uuid` to the other GPUs that the process sees.
    `cpu_vendor` is the vendor of the host's processors. NVLinks join all GPUs of one `nvlink_domain`, even on several
    hosts (MNNVL).
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
    peers: dict[str, PeerPath] = {}
    cpu_vendor: str | None = None
    nvlink_domain: str | None = None


class RankRow(Struct, frozen=True, kw_only=True, gc=False):
    """The recorded result of one size on one rank.

    `calls` is the number of timed calls, and `cv` is the standard deviation of their times divided by the mean. All
    ranks finish a call together, so the rank that starts a call last spends least time in it. The lag in a call is the
    longest time of any rank minus the time of this rank. `lag_seconds` is the median lag. `calls_started_last` is the
    number of calls in which this rank's time was the shortest. `transfer_seconds` is the median of the shortest times,
    equal on all ranks. All three are None if ranks may finish apart (broadcast, reduce). `wrong` is the number of
    wrong elements (None: not checked).
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
    calls_started_last: int | None = None
    transfer_seconds: float | None = None


class BenchRow(Struct, frozen=True, kw_only=True):
    """One row of the table of results, as in nccl-tests. `count` is the second column of nccl-tests.

    `seconds`, `min_seconds` and `cv` are the mean, the minimum and the coefficient of variation of the call times of
    `slowest_rank`. `calls` is the lowest number of calls of any rank. `wrong` is the number of wrong elements on all
    ranks (None: not checked).
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
    """The bus bandwidth that this hardware should reach, and the source of this number, in words."""

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

    `peak_busbw_bytes_per_s` is the highest bus bandwidth, reached at the size `best_size_bytes`. `share` is the peak
    divided by the expected bandwidth. `latency_seconds` is the shortest time of a call at a small size. `sentence`
    names the bottleneck.
    """

    backend: str
    collective: str
    dtype: str
    peak_busbw_bytes_per_s: float
    best_size_bytes: int
    latency_seconds: float | None
    expectation: Expectation | None
    share: float | None
    bottleneck: Bottleneck
    sentence: str


class BenchRank(Struct, frozen=True, kw_only=True):
    """One row of the table of ranks: one rank in one collective over one backend, at `size_bytes`.

    `seconds` is the median time of the rank's calls, `spread_share` their coefficient of variation. `lag_seconds` is
    that of RankRow. `copy_bytes_per_s` is the rate of copies in the rank's memory. `slow_reason` says why the rank is
    slow; empty if it is not slow.
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
    slow_reason: str = ""


class BenchReport(Struct, frozen=True, kw_only=True):
    """The judged result of a benchmark. `wrong` is the number of wrong elements (None: not checked).

    `omissions` are sentences about sizes that were left out, fewer calls than requested, and series cut short.
    `complete`: all requested sizes were measured.
    """

    request: BenchRequest
    rows: tuple[BenchRow, ...]
    series: tuple[Series, ...]
    ranks: tuple[BenchRank, ...]
    omissions: tuple[str, ...]
    wrong: int | None
    complete: bool
    sentence: str
    torch_version: str | None = None
    nccl_version: str | None = None
