"""nccl-tests' formulas: which bytes a size stands for, and the bandwidth that a time makes of it.

Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md, and GetCollByteCount and GetBw in src/*.cu.
"""

from msgspec import Struct

# What nccl-tests rounds each rank's part down to, so that every part begins where vector loads may.
ALIGNMENT_BYTES = 16
# These split their size between the ranks: it is that of all ranks together.
SPLIT = ("all_gather", "reduce_scatter", "all_to_all")


class Counts(Struct, frozen=True):
    """What a size comes to. Two wanted sizes that come to the same have equal `Counts`.

    `size_bytes` is what is moved, nccl-tests' first column; `count` is its second, in elements (one part of a
    collective that is split). `send` and `receive` are elements of one rank's buffers.
    """

    size_bytes: int
    count: int
    send: int
    receive: int


def factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: 2(n-1)/n, (n-1)/n or 1. With it, busbw is the rate of the slowest link.

    One rank moves nothing between ranks, so where the factor depends on n it is 0. ValueError for an unknown name.
    """
    n = max(1, ranks)
    match collective:
        case "all_reduce":
            return 2 * (n - 1) / n
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (n - 1) / n
        case "broadcast" | "reduce" | "send_recv":
            return 1.0
    raise ValueError(f"no such collective: {collective}")


def algbw(size_bytes: float, seconds: float) -> float:
    """Algorithm bandwidth in bytes per second: size over time. 0 where no time was measured."""
    return size_bytes / seconds if seconds > 0 else 0.0


def busbw(collective: str, size_bytes: float, seconds: float, ranks: int) -> float:
    """Bus bandwidth in bytes per second: `algbw` x `factor`, comparable with what a link can do."""
    return algbw(size_bytes, seconds) * factor(collective, ranks)


def counts(collective: str, wanted_bytes: int, element_bytes: int, ranks: int) -> Counts:
    """What nccl-tests moves when `wanted_bytes` are asked for; at least one element for each rank.

    Of a collective that is split, each rank's part is rounded down to 16 bytes, unless that leaves nothing: nccl-tests
    then moves 0 bytes, and times an empty call.
    """
    n = max(1, ranks)
    elements = wanted_bytes // element_bytes
    if collective not in SPLIT:
        count = max(1, elements)
        return Counts(count * element_bytes, count, count, count)
    part = _aligned(elements // n, element_bytes)
    whole = part * n
    send = part if collective == "all_gather" else whole
    receive = part if collective == "reduce_scatter" else whole
    return Counts(whole * element_bytes, part, send, receive)


def _aligned(part: int, element_bytes: int) -> int:
    grain = max(1, ALIGNMENT_BYTES // element_bytes)
    return (part - part % grain) or max(1, part)
