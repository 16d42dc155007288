"""A benchmark of one collective on one rank: all sizes, one after the other, over the open group.

Of the requested dtypes, ops and roots those are measured that backend, torch and the world have.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth import Counts, counts
from ddpdiag.bench.data import RankRow, spread, together
from ddpdiag.bench.workloads.calls import LEAST_CALLS, PROBE_BYTES, CallBudget, finish, time_calls
from ddpdiag.bench.workloads.operations import (
    DTYPES,
    OPS,
    OUT_OF_PLACE_ONLY,
    REDUCING,
    ROOTED,
    Case,
    Missing,
    Operation,
    prepare,
)
from ddpdiag.model.bench import Bench, Timing
from ddpdiag.text import size_text

# Messages of torch and its backends for a dtype or an op that they lack. Anything else is a failure: a GPU that dies in
# its first call must not pass for the user's mistake.
_LACKS = re.compile(
    r"not (yet )?(support|implement)|unsupported|only supports|invalid scalar type|cannot use|can(not|'t) be cast|"
    r"no backend type",
    re.IGNORECASE,
)


class Kind(NamedTuple):
    """A dtype, an op ("none" where there is none) and a root (-1)."""

    dtype: str
    op: str
    root: int


class Found(NamedTuple):
    """The kinds to measure; sentences on those that were requested by name and do not exist, or that "all" omits."""

    kinds: tuple[Kind, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


def kinds(bench: Bench, collective: str, device: torch.device) -> Found:
    """Try every dtype with every op."""
    dtypes = tuple(DTYPES) if "all" in bench.datatype else bench.datatype
    ops = (tuple(OPS) if "all" in bench.op else bench.op) if collective in REDUCING else ("none",)
    ranks = dist.get_world_size()
    if bench.root >= ranks:
        return Found((), (f"root {bench.root}: the ranks of this world are 0 to {ranks - 1}",), ())
    roots = (-1,) if collective not in ROOTED else (bench.root,) if bench.root >= 0 else tuple(range(ranks))
    whys = {(dtype, op): _why_not(collective, Kind(dtype, op, roots[0]), device) for dtype in dtypes for op in ops}
    there = [pair for pair, why in whys.items() if why is None]
    lacks = tuple(
        f"{dist.get_backend()} cannot do {collective} of {dtype}{f' with {op}' if op != 'none' else ''}: {why}"
        for (dtype, op), why in whys.items()
        if why is not None
    )
    measured = tuple(Kind(dtype, op, root) for dtype, op in there for root in roots)
    is_all = "all" in (*bench.datatype, *bench.op)
    return Found(measured, missing=() if is_all else lacks, left_out=lacks if is_all else ())


def case_of(collective: str, kind: Kind, wanted_bytes: int, *, in_place: bool) -> Case:
    """The case of one row."""
    return Case(collective, kind.dtype, kind.op, kind.root, counts_of(collective, kind, wanted_bytes), in_place)


def counts_of(collective: str, kind: Kind, wanted_bytes: int) -> Counts:
    """The counts of a size in the open group."""
    return counts(collective, wanted_bytes, DTYPES[kind.dtype].itemsize, dist.get_world_size())


def _why_not(collective: str, kind: Kind, device: torch.device) -> str | None:
    """The reason why backend or torch lacks this, or None, by a call with one element. Real failures are raised."""
    case = case_of(collective, kind, 1, in_place=collective not in OUT_OF_PLACE_ONLY)
    try:
        prepare(case, device).call()
        finish(device)
    except (Missing, NotImplementedError) as error:
        return _first_line(error)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError) or not _LACKS.search(str(error)):
            raise
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# The sweep -----------------------------------------------------------------------------------------------------------

# Modes of rows that one rank keeps, some 400 bytes each: its data must fit into a message of 4 MiB.
MOST_TIMINGS = 4_000
# The share of the free memory that may be used: torch and gloo need some, too.
_MEMORY_SHARE = 0.7
# gloo copies into its segments, and torch gathers into a buffer first: twice the data of a call.
_MEMORY_FACTOR = 2
# Ranks finish these together, so that the time of each shows when it started.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class SweepContext(NamedTuple):
    """The input of a sweep. `memory_bytes` is free for this rank, `end` is the limit on the monotonic clock, and
    `on_row` is called with each row as soon as it is measured."""

    bench: Bench
    collective: str
    device: torch.device
    memory_bytes: int
    end: float
    step: Callable[[str], None]
    on_row: Callable[[RankRow], None]


class SweepResult(NamedTuple):
    """The rows, notes on those left out, and combinations that backend or torch lack. `whole`: neither time, memory
    nor the size of a report cut the sizes short."""

    rows: tuple[RankRow, ...]
    notes: tuple[str, ...]
    unsupported: tuple[str, ...]
    whole: bool = False


def sweep(context: SweepContext) -> SweepResult:
    """All sizes of all kinds, as long as there is time."""
    context.step(f"{context.collective}: try every dtype and op")
    found = kinds(context.bench, context.collective, context.device)
    run = _Run(context)
    run.notes += found.left_out
    is_complete = all(run.kind(kind, len(found.kinds) - number) for number, kind in enumerate(found.kinds))
    return SweepResult(tuple(run.rows), run.all_notes, found.missing, is_complete and run.has_room)


class _Run:
    """A sweep under way, with its rows so far."""

    def __init__(self, context: SweepContext) -> None:
        self.rows: list[RankRow] = []
        self.notes: list[str] = []
        self.has_room = True
        self._fewer: dict[int, int] = {}
        self._context = context
        # Out of place, then in place, as nccl-tests.
        self._modes = (False,) if context.collective in OUT_OF_PLACE_ONLY else (False, True)
        self._call_budget = CallBudget(context.bench, context.end, len(self._modes))

    def kind(self, kind: Kind, kinds_left: int) -> bool:
        """All sizes of one kind; False when the time is over."""
        # The sizes for which all ranks have memory; each real size once.
        context, bench = self._context, self._context.bench
        width = DTYPES[kind.dtype].itemsize * _MEMORY_FACTOR
        distinct = {counts_of(context.collective, kind, wanted): wanted for wanted in reversed(bench.sizes)}
        sizes = sorted(distinct.values())
        counted = [counts_of(context.collective, kind, size) for size in sizes]
        fits = [own for own in counted if (own.send + own.receive) * width <= context.memory_bytes * _MEMORY_SHARE]
        least = self._agree([len(fits)])[0]
        if least < len(sizes):
            self.has_room = False
            note = f"{context.collective} of {kind.dtype}: {_sizes_text(sizes[least:])} left out: too little memory"
            self._note(f"{note} ({context.memory_bytes >> 20} MiB are free for each rank, or less)")
        sizes = sizes[:least]
        for number, wanted in enumerate(sizes):
            ahead = sum(sizes[number:]) + (kinds_left - 1) * sum(sizes)
            row = self._row(kind, wanted, ahead / wanted)
            if row is None:
                return False
            self.rows.append(row)
            self._context.on_row(row)
            if len(self.rows) * len(self._modes) >= MOST_TIMINGS:
                self._note(f"it ended after {len(self.rows):,} rows: no report holds more")
                return False
        return True

    def _row(self, kind: Kind, wanted: int, ahead: float) -> RankRow | None:
        """One size in all modes; None when there is no time for it. `ahead` is the sum of all sizes left, over this."""
        collective = self._context.collective
        timings: dict[bool, Timing] = {}
        for in_place in self._modes:
            timing = self._timing(case_of(collective, kind, wanted, in_place=in_place), ahead)
            if timing is None:
                self._note(f"the time was over before {_sizes_text([wanted])} could be measured")
                break
            timings[in_place] = timing
        if not timings:
            return None
        sizes = counts_of(collective, kind, wanted)
        return RankRow(
            size_bytes=sizes.size_bytes,
            count=sizes.count,
            dtype=kind.dtype,
            op=kind.op,
            root=kind.root,
            in_place=timings.get(True),
            out_of_place=timings.get(False),
        )

    def _timing(self, case: Case, ahead: float) -> Timing | None:
        """One mode of one size: check values, agree on the number of calls (which is the barrier), time the calls."""
        context, bench, size = self._context, self._context.bench, case.counts.size_bytes
        label = f"{case.collective} {size} B {case.dtype}"
        context.step(f"{label}: is there time?")
        if size > PROBE_BYTES and not self._agree([int(self._call_budget.knows(size))])[0]:
            # One call of a size that cannot take long, so that no large one is started that would.
            kind = Kind(case.dtype, case.op, case.root)
            small = case_of(case.collective, kind, PROBE_BYTES, in_place=case.in_place)
            operation = prepare(small, self._context.device)
            operation.call()  # connects
            self._call_budget.took(small.counts.size_bytes, self._seconds(operation))
        if not self._agree([int(self._call_budget.has_time(size))])[0]:
            return None
        operation = prepare(case, context.device)
        wrong, seconds = self._check(operation, label)
        self._call_budget.took(size, seconds)
        context.step(f"{label}: agree on the number of calls")
        warmup, calls = self._agree(list(self._call_budget.calls(seconds, ahead)))
        if calls < min(LEAST_CALLS, bench.iters):
            return None
        if calls < bench.iters:
            self._fewer[size] = min(calls, self._fewer.get(size, calls))
        context.step(f"{label}: {warmup} + {calls} calls")
        time_calls(operation.call, warmup, context.device)
        return self._timed(case, time_calls(operation.call, calls, context.device), wrong)

    def _seconds(self, operation: Operation) -> float:
        begin = time.perf_counter()
        operation.call()
        finish(self._context.device)
        return time.perf_counter() - begin

    def _check(self, operation: Operation, label: str) -> tuple[int | None, float]:
        """Wrong elements after one call (None: not checked), and its seconds."""
        self._context.step(f"{label}: first call")
        if not self._context.bench.check:
            return None, self._seconds(operation)
        operation.fill()
        seconds = self._seconds(operation)
        wrong = operation.wrong()
        for buffer in operation.buffers:
            buffer.zero_()
        return wrong, seconds

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, with one for all sizes that were called less often."""
        if not self._fewer:
            return tuple(self.notes)
        sizes = _sizes_text(sorted(self._fewer))
        few = f"{self._context.collective} of {sizes}: {min(self._fewer.values())} calls at least instead of"
        return (*self.notes, f"{few} {self._context.bench.iters}: the time was too short")

    def _agree(self, own: list[int]) -> list[int]:
        """The smallest of the ranks' numbers: all must make the same calls. It is also the barrier before a size."""
        numbers = torch.tensor(own, dtype=torch.int64, device=self._context.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
        return [int(number) for number in numbers.tolist()]

    def _timed(self, case: Case, seconds: list[float], wrong: int | None) -> Timing:
        """The times of this rank's calls, beside those of the other ranks where all finish together."""
        summary = spread(seconds)
        if case.collective not in _TOGETHER:
            return Timing(seconds=summary, wrong=wrong)
        # In whole nanoseconds: a rank that spoils floating-point numbers must not spoil times.
        own = [round(each * 1e9) for each in seconds]
        shortest, longest = self._agree(own), [-each for each in self._agree([-each for each in own])]
        lag, last, transfer = together(own, shortest, longest)
        return Timing(
            seconds=summary,
            wrong=wrong,
            lag_seconds=lag / 1e9,
            last=last,
            transfer_seconds=transfer / 1e9,
        )


def _sizes_text(sizes: Sequence[int]) -> str:
    """ "64 MiB", "64 MiB to 1 GiB"."""
    return " to ".join(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))
