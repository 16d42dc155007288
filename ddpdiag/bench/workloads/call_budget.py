"""How many calls there is time for. A sweep ends by itself before its time is over, with fewer calls or sizes."""

import time

from ddpdiag.model.bench import Bench

# Fewer calls than this tell nothing; then a size is left out.
LEAST_CALLS = 3
# What lies ahead is not worth more than the size at hand: so much of the time left may go into it, less into checks.
_SHARE = 1 / 3
_CHECK_SHARE = 0.2
# A call of this size is over soon, and tells of bandwidth; smaller ones tell of sizes near to theirs.
PROBE_BYTES = 1 << 20
_NEAR = 64
# The first call of a size may take so much longer than the size before suggests: fresh memory, a slower protocol.
_DOUBT = 2.0


class Pace:
    """What calls take on this rank, and what is left until `end` on the monotonic clock.

    `modes` is how many modes each size is measured in. All ranks must agree on what comes out here.
    """

    def __init__(self, bench: Bench, end: float, modes: int) -> None:
        self._bench = bench
        self._end = end
        self._modes = modes
        self._last: tuple[int, float] | None = None

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return max(0.0, self._end - time.monotonic())

    def knows(self, size_bytes: int) -> bool:
        """Does the last call tell how long one of this size takes? Not from a latency to a bandwidth."""
        return self._last is not None and (self._last[0] >= PROBE_BYTES or size_bytes <= _NEAR * self._last[0])

    def took(self, size_bytes: int, seconds: float) -> None:
        """A call of that size took so long."""
        self._last = (size_bytes, seconds)

    def has_time(self, size_bytes: int) -> bool:
        """Is there time for the fewest calls of a size, going by the one before?"""
        if self._last is None:
            return self.left > 0
        size, seconds = self._last
        expected = seconds * max(1.0, size_bytes / max(1, size))
        return expected * (_DOUBT + LEAST_CALLS) * self._bench.aggregate < self.left

    def checks(self, seconds: float) -> int:
        """How often the values can be checked, once at least, when one call takes so long."""
        return max(1, min(self._bench.checks, int(self.left * _CHECK_SHARE / max(seconds, 1e-9))))

    def calls(self, seconds: float, ahead: float) -> tuple[int, int]:
        """Calls that warm up, and calls that are timed; `ahead` is all that is to come, in sizes such as this one.

        What is to come takes as much longer as it is larger.
        """
        bench = self._bench
        wanted = bench.warmup + bench.iterations
        one = max(seconds * bench.aggregate * self._modes, 1e-9)
        affordable = max(self.left / (one * max(ahead, 1.0)), self.left * _SHARE / one)
        if affordable >= wanted:
            return bench.warmup, bench.iterations
        calls = int(affordable)
        warmup = min(bench.warmup, calls // 5)
        return warmup, min(bench.iterations, calls - warmup)
