"""Checks of the process groups of a job, made by the job's own processes: `ddpdiag.preflight(groups=...)`.

The ranks exchange what they measured through the job's store, so that a group that hangs does not hang the check. Rank
0 decides, and the other ranks read its answer. A rank that gets no answer decides by itself. The keys of a check have a
prefix of their own: `here/RANK` is a GroupArrival and `here` rank 0's answer, `done1/RANK` a GroupRecord and `done1`
the answer, `done2` the same for a second measurement, `read` a count. They are deleted at the end.
"""

import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from msgspec import Struct, structs
from torch.distributed.distributed_c10d import _get_default_store

from ddpdiag.codec import decode, encode, readable
from ddpdiag.errors import UnfitError, UsageError
from ddpdiag.judgement.groups import find_mistake, group_report, judge_groups, lost_store, needs_repetition, reporters
from ddpdiag.model import Report
from ddpdiag.model.groups import GroupArrival, GroupCheck, GroupRecord, group_key
from ddpdiag.render.findings import findings_text
from ddpdiag.workloads.devices import first_line
from ddpdiag.workloads.groups import Groups, measure_groups, name_groups
from ddpdiag.workloads.steps import BUCKET_BYTES

T = TypeVar("T")
V = TypeVar("V", bound=Struct)

# A rank may be late because it writes a checkpoint. After 10 minutes, NCCL would end the job (its default timeout).
JOIN_SECONDS = 600.0
# The first operation of a group creates its communicator, which may take 25 s.
BUDGET_SECONDS = 60.0
# The most of the job's time that periodic checks may take. If one takes more, the messages of the next are smaller.
COST_SHARE = 0.005
_MIN_BYTES = 64 << 10
# Between two questions to the store.
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2e-4, 0.05
# For rank 0 to read what the other ranks sent and to answer, on a busy host.
_ANSWER_SECONDS = 5.0
# Several checks may follow each other in one store.
_NUMBERS = itertools.count()
_LOGGER = logging.getLogger("ddpdiag")


class _Answer(Struct, frozen=True):
    """Rank 0's answer: the report, why the groups cannot be checked (`mistake`), or neither: measure (again).

    `hosts` are those of all ranks; the first check sends them. `scale` multiplies the sizes of messages.
    """

    report: Report | None = None
    mistake: str = ""
    hosts: dict[int, str] = {}
    scale: float = 1.0


class GroupMonitor:
    """The checks of a job's process groups. `report` is that of the last check. `preflight(groups=...)` makes one."""

    report: Report

    def __init__(
        self,
        groups: Groups,
        *,
        every: int | None = None,
        sizes: int | Mapping[str, int] | None = None,
        budget: float | None = None,
        join_timeout: float | None = None,
        strict: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("preflight(groups=...): there are no groups before init_process_group")
        if every is not None and not (isinstance(every, int) and every > 0):
            raise UsageError(f"preflight(every={every!r}): expected a number of steps, at least 1")
        try:
            self._groups = name_groups(groups)
        except TypeError as error:
            expected = "expected a DeviceMesh, or process groups in a list or a dict"
            raise UsageError(f"preflight(groups=...): {error}; {expected}") from None
        names = [group.name for group in self._groups]
        if not names:
            raise UsageError("preflight(groups=...): there is no group in it")
        given = sizes if isinstance(sizes, Mapping) else dict.fromkeys(names, BUCKET_BYTES if sizes is None else sizes)
        self._sizes = dict.fromkeys(names, BUCKET_BYTES) | dict(given)
        if self._sizes.keys() != set(names) or not all(isinstance(n, int) and n > 0 for n in self._sizes.values()):
            expected = f"expected a number of bytes, or a dict of them for {', '.join(names)}"
            raise UsageError(f"preflight(sizes={sizes!r}): {expected}")
        self._keys = {group.name: group_key(group.ranks) for group in self._groups}
        self._every, self._strict = every, strict
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._steps, self._scale = 0, 1.0
        # The end and the seconds of the last check: not known in the first check.
        self._last_end = self._cost = math.nan
        self._logged: frozenset[object] = frozenset()
        self._known = GroupCheck(
            world_size=self._world_size,
            join_seconds=JOIN_SECONDS if join_timeout is None else join_timeout,
            budget_seconds=BUDGET_SECONDS if budget is None else budget,
            arrivals={},
            hosts={},
        )
        self.report = self._check()

    def step(self) -> Report | None:
        """Count a training step. After each `every` steps, check the groups and return the report; else return None.

        Every rank calls it at the end of each step. Raises UnfitError on all ranks, as `preflight` does.
        """
        self._steps += 1
        if self._every is None or self._steps % self._every:
            return None
        self.report = self._check()
        return self.report

    def _check(self) -> Report:
        """Check the groups once. All ranks return, or all raise UnfitError."""
        begin = time.monotonic()
        allowed = COST_SHARE * (begin - self._last_end)
        if self._cost > allowed:  # False in the first check
            self._scale *= 2.0 ** math.floor(math.log2(allowed / self._cost))
        store = dist.PrefixStore(f"ddpdiag-groups-{next(_NUMBERS)}", _get_default_store())
        own = GroupArrival(readable(socket.gethostname()), self._keys, self._sizes)
        answer = self._ask(store, "here", own, self._plan, self._known.join_seconds)
        if answer.mistake:
            self._leave_last(store)
            raise UsageError(answer.mistake)
        if answer.hosts:
            self._known = structs.replace(self._known, hosts=answer.hosts)
        sizes = {name: max(min(size, _MIN_BYTES), int(size * answer.scale)) for name, size in self._sizes.items()}
        keys, measure_begin = ["here"], time.monotonic()
        while answer.report is None:
            deadline = time.monotonic() + self._known.budget_seconds
            record = measure_groups(self._groups, sizes, deadline)
            keys.append(f"done{len(keys)}")
            answer = self._ask(store, keys[-1], record, self._judge, deadline - time.monotonic() + _ANSWER_SECONDS)
        report = structs.replace(answer.report, seconds=time.monotonic() - begin)
        if report.exit_code:
            self._leave_last(store)
            raise _unfit_error(report)
        with suppress(RuntimeError, TimeoutError):  # a store that is lost now ends the job by itself
            _within(_ANSWER_SECONDS, lambda: self._delete(store, keys))
        self._last_end = time.monotonic()
        self._cost = (self._last_end - measure_begin) / (len(keys) - 1)
        blamed = frozenset((finding.code, finding.ranks, finding.links) for finding in report.findings)
        if self._rank == 0 and blamed - self._logged:
            _LOGGER.warning("%s\n%s", report, findings_text(report.findings))
        self._logged = blamed
        return report

    def _ask(
        self, store: dist.Store, key: str, own: V, decide: Callable[[dict[int, V]], _Answer], seconds: float
    ) -> _Answer:
        """Send a value to rank 0, and return what it decides from the values of all ranks that sent one in time."""
        keys = {rank: f"{key}/{rank}" for rank in range(self._world_size)}

        def talk() -> _Answer:
            store.set(keys[self._rank], encode(own).decode())
            if self._rank != 0 and _is_set(store, [key], seconds + _ANSWER_SECONDS):
                return decode(store.get(key), _Answer)
            has_all = self._rank == 0 and _is_set(store, [*keys.values()], seconds)
            sent = [rank for rank, name in keys.items() if has_all or store.check([name])]
            in_time = sent if self._rank == 0 else reporters(sent, self._world_size)
            answer = decide({rank: decode(store.get(keys[rank]), type(own)) for rank in in_time})
            if self._rank == 0:
                store.set(key, encode(answer).decode())
            return answer

        try:
            return _within(seconds + 2 * _ANSWER_SECONDS, talk)
        except TimeoutError:
            text = ""
        except RuntimeError as error:
            text = first_line(error)
        raise _unfit_error(group_report(self._known, (lost_store(self._known, text),), strict=False))

    def _plan(self, arrivals: dict[int, GroupArrival]) -> _Answer:
        hosts = self._known.hosts | {rank: arrival.host for rank, arrival in arrivals.items()}
        self._known = structs.replace(self._known, arrivals=arrivals, hosts=hosts, rounds=())
        if findings := judge_groups(self._known):
            return _Answer(group_report(self._known, findings, strict=self._strict))
        return _Answer(mistake=find_mistake(arrivals), hosts={} if self._known.first else hosts, scale=self._scale)

    def _judge(self, records: dict[int, GroupRecord]) -> _Answer:
        self._known = structs.replace(self._known, rounds=(*self._known.rounds, records))
        findings = judge_groups(self._known)
        if len(self._known.rounds) == 1 and needs_repetition(findings):
            return _Answer()
        first = {rank: _baseline(self._known.first.get(rank, record), record) for rank, record in records.items()}
        report = group_report(self._known, findings, strict=self._strict)
        self._known = structs.replace(self._known, first=first)
        return _Answer(report)

    def _leave_last(self, store: dist.Store) -> None:
        """On rank 0, wait until the other ranks have read its answer: its process may serve the store, and then end."""

        def talk() -> None:
            end = time.monotonic() + _ANSWER_SECONDS
            store.add("read", 1)
            while self._rank == 0 and store.add("read", 0) < len(self._known.arrivals) and time.monotonic() < end:
                time.sleep(_MAX_PAUSE_SECONDS)

        with suppress(RuntimeError, TimeoutError):
            _within(2 * _ANSWER_SECONDS, talk)

    def _delete(self, store: dist.Store, keys: list[str]) -> None:
        """Delete this rank's keys, and after all ranks have read rank 0's answers, also these."""
        own = [f"{key}/{self._rank}" for key in keys]
        is_last = store.add("read", 1) == self._world_size
        for key in own + (["read", *keys] if is_last else []):
            store.delete_key(key)


def _baseline(first: GroupRecord, record: GroupRecord) -> GroupRecord:
    """The measurements to compare later ones with: the first ones, but of messages only those of the present size."""
    sizes = [[times.size_bytes for times in each.groups] for each in (first, record)]
    return first if sizes[0] == sizes[1] else structs.replace(first, groups=record.groups)


def _unfit_error(report: Report) -> UnfitError:
    error = UnfitError(report)
    error.add_note(findings_text(report.findings))
    return error


def _is_set(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Wait until all keys are set. False if they are not after `seconds`."""
    # store.wait() would block torch's other threads that use the store, and print warnings when its time is over.
    end, pause = time.monotonic() + seconds, _MIN_PAUSE_SECONDS
    while not (is_set := store.check(keys)) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(1.2 * pause, _MAX_PAUSE_SECONDS)
    return is_set


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Run `call` in a thread, because a store whose process is stopped never answers. TimeoutError after `seconds`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    result = future.result(seconds)
    thread.join()
    return result
