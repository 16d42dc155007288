"""A benchmark of collectives: what was asked for, and what came of it.

Sizes are what nccl-tests prints in its first column: for all_gather, reduce_scatter and all_to_all the data of all
ranks together, else the bytes of one rank. Bandwidths are bytes per second. What was not measured is `None`.
"""

from enum import Enum

from msgspec import Struct, field


class Average(Enum):
    """Which rank's time a row shows; nccl-tests' numbers of -a."""

    RANK_0 = 0
    MEAN = 1
    FASTEST = 2
    SLOWEST = 3


class Blocking(Enum):
    """How calls follow each other; nccl-tests' numbers of -z.

    PIPELINED: each is issued before the last one is over. BARRIER: each is waited for, with a barrier behind it that
    counts. WAIT: each is waited for. APART: as BARRIER, but the barrier does not count.
    """

    PIPELINED = 0
    BARRIER = 1
    WAIT = 2
    APART = 3


class BaselineRow(Struct, frozen=True, kw_only=True):
    """One row of an earlier run: its bus bandwidth, and the coefficient of variation of its calls."""

    size_bytes: int
    busbw_bytes_per_s: float
    cv: float


class BaselineSeries(Struct, frozen=True, kw_only=True):
    """An earlier run of one collective on one shape of world.

    `shape` and `fabric` are what must be alike for two runs to be compared, as words for people, by name.
    """

    collective: str
    backend: str
    dtype: str
    op: str
    shape: dict[str, str]
    fabric: dict[str, str]
    created: str
    rows: tuple[BaselineRow, ...]


class Bench(Struct, frozen=True, kw_only=True):
    """What a benchmark measures. `backends` empty: the one that a job would take.

    Sizes go from `min_bytes` to `max_bytes`, by `step_bytes` where that is given, else by `factor`. Each is called
    `warmup` times, then `iterations` times, `aggregate` calls at once; the whole is done `cycles` times (0: until the
    time is over). "all" in `dtypes` and `ops` means those that the backend has, and a root of -1 all ranks in turn.
    `checks` is how often the values are checked. `blocking` None: PIPELINED on GPUs, WAIT on a CPU. `baseline` is what
    `--baseline` read, `args` the command line as it was typed.
    """

    collectives: tuple[str, ...] = ("all_reduce",)
    backends: tuple[str, ...] = ()
    min_bytes: int = 8
    max_bytes: int = 128 << 20
    step_bytes: int | None = None
    factor: float = 2.0
    iterations: int = 20
    warmup: int = 5
    aggregate: int = 1
    cycles: int = 1
    dtypes: tuple[str, ...] = ("float",)
    ops: tuple[str, ...] = ("sum",)
    roots: tuple[int, ...] = (0,)
    average: Average = Average.SLOWEST
    checks: int = 1
    blocking: Blocking | None = None
    per_iteration: bool = False
    min_busbw_bytes_per_s: float | None = None
    baseline: tuple[BaselineSeries, ...] | None = None
    args: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in bytes, in rising order."""
        sizes, size = [], float(self.min_bytes)
        while size <= self.max_bytes:
            sizes.append(int(size))
            size = size + self.step_bytes if self.step_bytes else max(size * self.factor, size + 1)
        return tuple(dict.fromkeys(sizes))


class Peer(Struct, frozen=True, kw_only=True, array_like=True):
    """The path from a GPU to another one of its host, as NVML tells it; None is what it does not say.

    `nvlinks` are those that are up and lead there, directly or by a switch; `level` is where the PCIe paths meet
    (nvmlGpuTopologyLevel_t); `p2p` says whether each may read and write the other's memory.
    """

    nvlinks: int | None = None
    level: int | None = None
    p2p: bool | None = None


class Limits(Struct, frozen=True, kw_only=True):
    """What bounds one rank: bytes per second in one direction, measured by itself, or as its devices say.

    `copy_bytes_per_s` counts bytes copied (each is read once and written once), `loopback_bytes_per_s` those of a TCP
    stream from this process to itself; both are measured on all ranks at once. `nic_bytes_per_s` is the nominal speed
    of the interface `nic` on the way to other hosts, of all its `nic_ports` together where there are several (rails of
    InfiniBand), and `nic_port_bytes_per_s` that of the slowest port. `nvlinks` are those that are up, `nvlinks_max`
    those that the GPU has, `nvlink_switched` whether all that are up lead to a switch, so to every other GPU;
    `nvlink_bytes_per_s` is what those that are up carry together. `pcie_bytes_per_s` is what card and slot can do
    together, `pcie_now_bytes_per_s` what they do now. `cores` are those that this process may use. `uuid` is that of
    the GPU, `peers` are its paths to others that the process sees, by their UUIDs, and `processor` is the maker of the
    host's processors. GPUs of one `nvlink_domain` are joined by NVLinks, also those of several hosts (MNNVL).
    """

    copy_bytes_per_s: float | None = None
    loopback_bytes_per_s: float | None = None
    nic: str | None = None
    nic_bytes_per_s: float | None = None
    nic_ports: int | None = None
    nic_port_bytes_per_s: float | None = None
    nvlinks: int | None = None
    nvlinks_max: int | None = None
    nvlink_switched: bool | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    pcie_now_bytes_per_s: float | None = None
    cores: int | None = None
    uuid: str | None = None
    peers: dict[str, Peer] = {}
    processor: str | None = None
    nvlink_domain: str | None = None


class Spread(Struct, frozen=True, kw_only=True, gc=False):
    """Seconds of one rank's calls; `cv` is the standard deviation over the mean."""

    min: float
    median: float
    p95: float
    p99: float
    max: float
    mean: float
    stdev: float
    count: int

    @property
    def cv(self) -> float:
        """Coefficient of variation."""
        return self.stdev / self.mean if self.mean > 0 else 0.0


class RankTime(Struct, frozen=True, kw_only=True):
    """One rank in one mode of a row.

    `lag_seconds` is by how much it came later than the first one, in the median of the calls; all leave a collective
    together, so who spends least time in it came last. None where ranks may leave apart (broadcast, reduce), or where
    only the whole was timed. `wrong` counts elements. `times` holds all calls, where that was asked for.
    """

    rank: int
    seconds: Spread
    lag_seconds: float | None = None
    wrong: int | None = None
    times: tuple[float, ...] = ()


class Measured(Struct, frozen=True, kw_only=True):
    """One mode (in place or out of place) of a row, over all ranks.

    `seconds` is the mean of a rank's calls, for the rank that `Average` says. `transfer_seconds` is the median over the
    calls of the shortest time that any rank spent in it: what is left without waiting for each other.
    `skew_seconds` is the median of the longest less the shortest: how far apart the ranks arrived. `wrong` counts
    elements on all ranks.
    """

    seconds: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: int | None
    calls: int
    transfer_seconds: float | None = None
    skew_seconds: float | None = None
    ranks: tuple[RankTime, ...] = ()


class BenchRow(Struct, frozen=True, kw_only=True):
    """One line of nccl-tests' table. `count` is what it prints there, `op` "none" and `root` -1 where there is none."""

    backend: str
    collective: str
    cycle: int
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    out_of_place: Measured | None = None
    in_place: Measured | None = None

    def natural(self) -> Measured | None:
        """The mode that torch itself has: in place for all_reduce, broadcast and reduce, else out of place."""
        if self.collective in ("all_reduce", "broadcast", "reduce"):
            return self.in_place or self.out_of_place
        return self.out_of_place or self.in_place

    def modes(self) -> dict[str, Measured]:
        """What was measured of "out_of_place" and "in_place", in nccl-tests' order."""
        both = {"out_of_place": self.out_of_place, "in_place": self.in_place}
        return {name: mode for name, mode in both.items() if mode is not None}


class Expectation(Struct, frozen=True, kw_only=True):
    """The bus bandwidth that this hardware should reach, and what says so."""

    busbw_bytes_per_s: float
    source: str


class Fit(Struct, frozen=True, kw_only=True):
    """seconds = latency + size / bandwidth: `busbw_bytes_per_s` is that of an endless message.

    `half_bytes` is the size at which half of it is reached. `residual_share` is the largest share by which a size
    between the two ends of the fit took longer than it says (negative: never longer), at `residual_bytes`.
    """

    latency_seconds: float
    busbw_bytes_per_s: float
    half_bytes: float
    residual_share: float | None = None
    residual_bytes: int | None = None


class Bottleneck(Enum):
    """What holds a collective back."""

    NOT_JUDGED = "not judged"
    LATENCY = "latency"
    COPY = "cpu copies"
    NIC = "network card"
    PCIE = "pcie"
    NVLINK = "nvlink"
    MISSING_PART = "missing part"
    CONGESTION = "congestion"
    SLOW_RANK = "slow rank"
    UNKNOWN = "unknown"


class Series(Struct, frozen=True, kw_only=True):
    """All sizes of one collective over one backend, of one dtype, op and root, and what they mean.

    `best_bytes` is the size with the highest bus bandwidth, `peak_busbw_bytes_per_s`; `share` is the peak over the
    expectation. `sentence` says where the bottleneck is.
    """

    backend: str
    collective: str
    dtype: str
    op: str
    root: int
    peak_busbw_bytes_per_s: float
    best_bytes: int
    fit: Fit | None
    expectation: Expectation | None
    share: float | None
    bottleneck: Bottleneck
    sentence: str


class BenchRank(Struct, frozen=True, kw_only=True):
    """One line of the table of ranks, for one collective over one backend, at `size_bytes`.

    `seconds` is the median of its calls. `spread_share` is their coefficient of variation. `copy_bytes_per_s` is what
    it copies in its own memory, `pair_busbw_bytes_per_s` the best that it reached alone with one other rank.
    `slow` says why it is called slow, or nothing.
    """

    backend: str
    collective: str
    rank: int
    local_rank: int | None
    node: str
    device: str
    gpu_uuid: str | None
    pci: str | None
    pid: int
    device_index: int | None
    size_bytes: int
    seconds: float | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    spread_share: float | None
    lag_seconds: float | None
    copy_bytes_per_s: float | None = None
    pair_busbw_bytes_per_s: float | None = None
    slow: str = ""


class BenchReport(Struct, frozen=True, kw_only=True):
    """A benchmark, judged. `notes` are lines for people: sizes that were dropped, fewer calls, what was cut short.

    `average_busbw_bytes_per_s` is nccl-tests' footer: the mean over all rows and modes. `wrong` is None if nothing was
    checked. `saved` is what `--save-baseline` writes.
    """

    asked: Bench
    created: str
    rows: tuple[BenchRow, ...]
    series: tuple[Series, ...]
    ranks: tuple[BenchRank, ...]
    notes: tuple[str, ...] = field(name="remarks")
    average_busbw_bytes_per_s: float | None
    wrong: int | None
    complete: bool
    sentence: str
    saved: tuple[BaselineSeries, ...] = ()
    torch_version: str | None = None
    nccl_version: str | None = None
    env: dict[str, str] = field(default_factory=dict)
