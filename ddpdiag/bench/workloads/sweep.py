"""A benchmark of one collective on one rank: all sizes, one after the other, over the group that is open.

Of the dtypes, ops and roots that were asked for those are measured that backend and torch have.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from itertools import count as counting
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth import Counts, counts
from ddpdiag.bench.data import Cell, Line, spread, together
from ddpdiag.bench.workloads.calls import IN_FLIGHT, LEAST_CALLS, PROBE_BYTES, CallBudget, finish, time_calls
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
from ddpdiag.model.bench import Bench, Blocking
from ddpdiag.text import size_text

# What torch and its backends say of a dtype or an op that they lack. Anything else is a failure: a GPU that dies in its
# first call must not pass for the user's mistake.
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
    """What is measured; sentences on what was asked for by name and is not there, and on what "all" left out."""

    kinds: tuple[Kind, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


def kinds(bench: Bench, collective: str, device: torch.device) -> Found:
    """Tries every dtype with every op."""
    dtypes = tuple(DTYPES) if "all" in bench.dtypes else bench.dtypes
    ops = (tuple(OPS) if "all" in bench.ops else bench.ops) if collective in REDUCING else ("none",)
    ranks = tuple(range(dist.get_world_size())) if -1 in bench.roots else bench.roots
    roots = ranks if collective in ROOTED else (-1,)
    whys = {(dtype, op): _why_not(collective, Kind(dtype, op, roots[0]), device) for dtype in dtypes for op in ops}
    there = [pair for pair, why in whys.items() if why is None]
    missing: list[str] = []
    left_out: list[str] = []
    for (dtype, op), why in whys.items():
        if why is not None:
            what = f"{collective} of {dtype}" + (f" with {op}" if op != "none" else "")
            # A name is there if it is there with anything that "all" stands for.
            excused = any(dtype == other for other, _ in there) if "all" in bench.ops else False
            excused |= any(op == other for _, other in there) if "all" in bench.dtypes else False
            (left_out if excused else missing).append(f"{dist.get_backend()} cannot do {what}: {why}")
    measured = tuple(Kind(dtype, op, root) for dtype, op in there for root in roots)
    return Found(measured, tuple(missing), tuple(left_out))


def case_of(collective: str, kind: Kind, wanted_bytes: int, *, in_place: bool) -> Case:
    """One row's case."""
    return Case(collective, kind.dtype, kind.op, kind.root, counts_of(collective, kind, wanted_bytes), in_place)


def counts_of(collective: str, kind: Kind, wanted_bytes: int) -> Counts:
    """What a size comes to in the open group."""
    return counts(collective, wanted_bytes, DTYPES[kind.dtype].itemsize, dist.get_world_size())


def _why_not(collective: str, kind: Kind, device: torch.device) -> str | None:
    """Why backend or torch does not have this, or None: tried with as little as there is. Real failures are raised."""
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

# Numbers that one rank keeps, some 30 bytes each: what it hands over must fit into a message of 4 MiB.
MOST_NUMBERS = 60_000
_NUMBERS_PER_CELL = 14
# Of what is free, so much may be taken: torch and gloo need some, too.
_MEMORY_SHARE = 0.7
# gloo copies into segments of its own, and torch gathers into a buffer of its own first: twice the data of a call.
_MEMORY_FACTOR = 2
# Ranks leave these together, so that the time which each spends inside tells when it came.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class SweepContext(NamedTuple):
    """What a sweep needs beside the group. `memory_bytes` is what this rank may take, `end` the monotonic clock's time
    at which it must be over, `on_line` gets each line as soon as it is there."""

    bench: Bench
    collective: str
    device: torch.device
    memory_bytes: int
    end: float
    step: Callable[[str], None]
    on_line: Callable[[Line], None]
    modes: tuple[bool, ...] = (False, True)  # out of place, then in place, as nccl-tests


class SweepResult(NamedTuple):
    """The lines, what was left out and why, and combinations that backend or torch do not have. `whole`: the sizes were
    not cut short by the time, by memory, or by what a report holds."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    unsupported: tuple[str, ...]
    whole: bool = False


def sweep(context: SweepContext) -> SweepResult:
    """All sizes of all kinds, `cycles` times, as long as there is time."""
    context.step(f"{context.collective}: try every dtype and op")
    found = kinds(context.bench, context.collective, context.device)
    run = _Run(context)
    run.notes += found.left_out
    went_on = True
    for cycle in range(context.bench.cycles) if context.bench.cycles else counting():
        before = len(run.lines)
        went_on = all(run.kind(cycle, kind, len(found.kinds) - number) for number, kind in enumerate(found.kinds))
        if not went_on or len(run.lines) == before:
            break
    # Cycles without end are whole once the first of them is.
    whole = went_on or (not context.bench.cycles and any(line.cycle > 0 for line in run.lines))
    return SweepResult(tuple(run.lines), run.all_notes, found.missing, whole and run.has_room)


class _Run:
    """The lines so far."""

    def __init__(self, context: SweepContext) -> None:
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.has_room = True
        self._fewer: dict[int, int] = {}
        self._numbers = 0
        self._context = context
        self._modes = [mode for mode in context.modes if not (mode and context.collective in OUT_OF_PLACE_ONLY)]
        usual = Blocking.PIPELINED if context.device.type == "cuda" else Blocking.WAIT
        self._how = usual if context.bench.blocking is None else context.bench.blocking
        self._call_budget = CallBudget(context.bench, context.end, len(self._modes))
        self._used = [0.0, 0.0]  # processor seconds and seconds in timed calls of the line at hand

    def kind(self, cycle: int, kind: Kind, kinds_left: int) -> bool:
        """All sizes of one kind; False when the time is over."""
        # The sizes for which all ranks have memory; each real size once.
        context, bench = self._context, self._context.bench
        width = DTYPES[kind.dtype].itemsize * _MEMORY_FACTOR * self._at_once
        distinct = {counts_of(context.collective, kind, wanted): wanted for wanted in reversed(bench.sizes)}
        sizes = sorted(distinct.values())
        counted = [counts_of(context.collective, kind, size) for size in sizes]
        fits = [own for own in counted if (own.send + own.receive) * width <= context.memory_bytes * _MEMORY_SHARE]
        least = self._agree([len(fits)])[0]
        if least < len(sizes):
            self.has_room = False
            note = f"{context.collective} of {kind.dtype}: {_sizes_text(sizes[least:])} left out, for want of memory"
            self._note(f"{note} ({context.memory_bytes >> 20} MiB are free for each rank, or less)")
        sizes = sizes[:least]
        for number, wanted in enumerate(sizes):
            ahead = sum(sizes[number:]) + (kinds_left - 1) * sum(sizes)
            line = self._line(cycle, kind, wanted, ahead / wanted)
            if line is None:
                return False
            self.lines.append(line)
            self._context.on_line(line)
            self._numbers += sum(_NUMBERS_PER_CELL + len(c.times) for c in (line.in_place, line.out_of_place) if c)
            if self._numbers > MOST_NUMBERS:
                self._note(f"it ended after {len(self.lines):,} rows: no report holds more")
                return False
        return True

    @property
    def _at_once(self) -> int:
        """Operations with buffers of their own."""
        pipeline = IN_FLIGHT if self._how is Blocking.PIPELINED and self._context.device.type != "cuda" else 1
        return max(self._context.bench.aggregate, pipeline)

    def _line(self, cycle: int, kind: Kind, wanted: int, ahead: float) -> Line | None:
        """One size in all modes; None when there is no time for it. `ahead` is all that is to come, in such sizes."""
        collective = self._context.collective
        self._used = [0.0, 0.0]
        cells: dict[bool, Cell] = {}
        for in_place in self._modes:
            cell = self._cell(case_of(collective, kind, wanted, in_place=in_place), ahead)
            if cell is None:
                self._note(f"the time was over before {_sizes_text([wanted])} could be measured")
                break
            cells[in_place] = cell
        if not cells:
            return None
        sizes = counts_of(collective, kind, wanted)
        return Line(
            cycle=cycle,
            size_bytes=sizes.size_bytes,
            count=sizes.count,
            dtype=kind.dtype,
            op=kind.op,
            root=kind.root,
            in_place=cells.get(True),
            out_of_place=cells.get(False),
            cores=self._used[0] / max(self._used[1], 1e-9),
        )

    def _cell(self, case: Case, ahead: float) -> Cell | None:
        """One mode of one size: check values, agree on the number of calls (which is the barrier), time the calls."""
        context, bench, size = self._context, self._context.bench, case.counts.size_bytes
        label = f"{case.collective} {size} B {case.dtype}"
        context.step(f"{label}: is there time?")
        if size > PROBE_BYTES and not self._agree([int(self._call_budget.knows(size))])[0]:
            # One call of a size that cannot take long, so that a large one is not begun that would.
            kind = Kind(case.dtype, case.op, case.root)
            small = case_of(case.collective, kind, PROBE_BYTES, in_place=case.in_place)
            operation = prepare(small, self._context.device)
            operation.call()  # connects
            self._call_budget.took(small.counts.size_bytes, self._seconds(operation))
        if not self._agree([int(self._call_budget.has_time(size))])[0]:
            return None
        operations = [prepare(case, context.device) for _ in range(self._at_once)]
        wrong, seconds = self._check(operations[0], label)
        self._call_budget.took(size, seconds)
        context.step(f"{label}: agree on the number of calls")
        warmup, calls = self._agree(list(self._call_budget.calls(seconds, ahead)))
        if calls < min(LEAST_CALLS, bench.iterations):
            return None
        if calls < bench.iterations:
            self._fewer[size] = min(calls, self._fewer.get(size, calls))
        context.step(f"{label}: {warmup} + {calls} calls")
        time_calls(operations, warmup, context.device, self._how)
        before, begin = os.times(), time.monotonic()
        timed = time_calls(operations, calls, context.device, self._how)
        after = os.times()
        self._used[0] += after.user + after.system - before.user - before.system
        self._used[1] += time.monotonic() - begin
        return self._timed(case, timed, wrong)

    def _seconds(self, operation: Operation) -> float:
        begin = time.perf_counter()
        operation.call()
        finish(self._context.device)
        return time.perf_counter() - begin

    def _check(self, operation: Operation, label: str) -> tuple[int | None, float]:
        """Wrong elements in `checks` calls (None: not checked), and the seconds of one call."""
        self._context.step(f"{label}: first call")
        checks = self._context.bench.checks
        if not checks:
            return None, self._seconds(operation)
        wrong, seconds, done, most = 0, 0.0, 0, checks
        while done < most:
            operation.fill()
            seconds = self._seconds(operation)
            wrong += operation.wrong()
            done += 1
            if done == 1 and checks > 1:
                most = self._agree([self._call_budget.checks(seconds)])[0]
        if most < checks:
            self._note(f"values were checked {most} times instead of {checks} at large sizes, for want of time")
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
        return (*self.notes, f"{few} {self._context.bench.iterations}, for want of time")

    def _agree(self, own: list[int]) -> list[int]:
        """The smallest of the ranks' numbers: all must make the same calls. It is also the barrier before a size."""
        numbers = torch.tensor(own, dtype=torch.int64, device=self._context.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
        return [int(number) for number in numbers.tolist()]

    def _timed(self, case: Case, seconds: list[float], wrong: int | None) -> Cell:
        times = tuple(round(each, 9) for each in seconds) if self._context.bench.per_iteration else ()
        summary = spread(seconds)
        if case.collective not in _TOGETHER:
            return Cell(seconds=summary, wrong=wrong, times=times)
        # In whole nanoseconds: what comes from a rank that spoils floating-point numbers shall not spoil times.
        own = [round(each * 1e9) for each in seconds]
        shortest, longest = self._agree(own), [-each for each in self._agree([-each for each in own])]
        lag, last, transfer, skew = together(own, shortest, longest)
        return Cell(
            seconds=summary,
            wrong=wrong,
            lag_seconds=lag / 1e9,
            last=last,
            transfer_seconds=transfer / 1e9,
            skew_seconds=skew / 1e9,
            times=times,
        )


def _sizes_text(sizes: Sequence[int]) -> str:
    """ "64 MiB", "64 MiB to 1 GiB"."""
    return " to ".join(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))
