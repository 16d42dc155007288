"""Attribution of a hang from what each rank posted to its process groups.

A rank with an open operation waits for each rank of the operation's group that has not posted the operation. The waits
form paths from rank to rank. A path ends at a rank that waits for no other rank, and the end shows one of four faults:

- a rank that did not post the operation, and waits for none: its program does something else, or has ended;
- a rank whose GPU does not finish an operation that all other ranks of the group have finished;
- ranks that posted different operations under the same number;
- an operation that all ranks have posted and none finishes: no rank is at fault, but a connection between them.

Paths without an end are a deadlock: ranks wait for each other. A rank without a dump may hold up the others, because a
rank that raised an exception writes none (pytorch issue 196968).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.evidence.collectives import ByNumber, Mismatch, by_number, collective_text, compared_part, mismatches
from ddpdiag.evidence.witness import Group, Witness
from ddpdiag.model import Collective, Finding, Severity
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import begun, ranks_text

# The descriptions that torch gives to groups without one.
_NO_DESCRIPTIONS = ("", "undefined")
# Some ranks may finish these collectives before other ranks have begun.
_ENDS_EARLY = frozenset({"broadcast", "reduce", "scatter", "gather"})
_MAX_SHOWN = 4
# So many of the newest collectives of each rank are compared to find a rank with another order.
_ORDER_LENGTH = 4
_STACK_FIX = (
    "Look at what {} did instead: its log, its Python stack (`py-spy dump --pid PID`), the kernel log of its host."
)
_GPU_FIX = (
    "Look at the GPU of {0} (`dmesg -T | grep Xid`, `nvidia-smi -q -d ECC`), and run `ddpdiag host` on the host of {0}."
)
# With DETAIL, a DistributedDataParallel on the CPU ends by SIGSEGV in its constructor (seen with torch 2.13 and 2.15).
MISMATCH_FIX = (
    "Look for what differs between the ranks: data, shapes, a branch or an exception on some ranks only. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective, but crashes DistributedDataParallel on the CPU."
)


class Wait(NamedTuple):
    """An open operation of `rank`, and the ranks for which it waits, because they have not posted or finished it."""

    rank: int
    operation: Collective
    missing: tuple[int, ...]


class Job(Struct, frozen=True, dict=True):
    """The dumps of a job, by rank."""

    witnesses: Mapping[int, Witness]

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of all ranks, by name.

        A group without recorded ranks has the ranks whose dumps name it. If it is smaller than others of its
        description, or the only one, it may also have all ranks without a dump, and ranks in no group like it.
        """
        groups = dict(self._groups)
        for name in self._unrecorded:
            group = groups[name]
            if self._lacks(group):
                ranks = {*group.ranks, *self.absent, *self._unplaced(group.description)}
                groups[name] = structs.replace(group, ranks=tuple(sorted(ranks)))
        return groups

    @cached_property
    def absent(self) -> frozenset[int]:
        """Ranks without a dump: members of groups, all numbers below the highest rank, and as many as groups lack."""
        ranks = {rank for group in self._groups.values() for rank in group.ranks}
        known = {*ranks, *range(max(self.witnesses, default=0))} - self.witnesses.keys()
        lacking: Counter[str] = Counter()
        for name in self._unrecorded:
            group = self._groups[name]
            lacking[group.description] += self._usual_sizes[group.description] - len(group.ranks)
        lacks = (number - len(self._unplaced(description)) for description, number in lacking.items())
        beyond = max(lacks, default=0) - len(known)
        first = max(self.witnesses, default=0) + 1
        return frozenset({*known, *range(first, first + beyond)})

    @cached_property
    def _groups(self) -> dict[str, Group]:
        """The groups of all ranks, each with the ranks that are recorded, or whose dumps name it."""
        groups: dict[str, Group] = {}
        members: dict[str, set[int]] = defaultdict(set)
        for rank, witness in self.witnesses.items():
            for name, group in witness.groups.items():
                members[name].update(group.ranks or (rank,))
                groups.setdefault(name, group)
        return {name: structs.replace(group, ranks=tuple(sorted(members[name]))) for name, group in groups.items()}

    @cached_property
    def _unrecorded(self) -> frozenset[str]:
        """The names of described groups whose ranks no dump records, as with gloo."""
        recorded = {name for each in self.witnesses.values() for name, group in each.groups.items() if group.ranks}
        described = {name for name, group in self._groups.items() if group.description not in _NO_DESCRIPTIONS}
        return frozenset(described - recorded)

    @cached_property
    def _usual_sizes(self) -> dict[str, int]:
        """The largest number of ranks of a group, by description."""
        sizes: dict[str, int] = {}
        for group in self._groups.values():
            sizes[group.description] = max(sizes.get(group.description, 0), len(group.ranks))
        return sizes

    def _unplaced(self, description: str) -> set[int]:
        """The ranks with a dump that names no group of this description."""
        return self.witnesses.keys() - {
            rank for group in self._groups.values() if group.description == description for rank in group.ranks
        }

    def _lacks(self, group: Group) -> bool:
        alone = sum(other.description == group.description for other in self._groups.values()) == 1
        return alone or len(group.ranks) < self._usual_sizes[group.description]

    @cached_property
    def collectives(self) -> ByNumber:
        """The operation that each rank posted, by group name and collective number, in the order of the numbers."""
        return by_number({rank: witness.operations for rank, witness in self.witnesses.items()})

    def missing(self, group: str, number: int) -> tuple[int, ...]:
        """The ranks of a group that have not posted its collective `number`, and those without a dump."""
        posted = {rank: self.witnesses[rank].posted for rank in self.groups[group].ranks if rank in self.witnesses}
        return tuple(
            rank for rank in self.groups[group].ranks if rank not in posted or posted[rank].get(group, -1) < number
        )

    @cached_property
    def open_collectives(self) -> dict[tuple[str, int], dict[int, Collective]]:
        """The open ones of `collectives`. If ends are not recorded, only those that some rank has not posted."""
        found = {}
        for (group, number), by_rank in self.collectives.items():
            ranks = {rank: operation for rank, operation in by_rank.items() if not operation.ended}
            if ranks and (all(self.witnesses[rank].knows_ends for rank in ranks) or self.missing(group, number)):
                found[group, number] = ranks
        return found

    @cached_property
    def stuck(self) -> dict[int, Collective]:
        """The first open operation of each rank whose GPU does not finish what half of its group has finished."""
        found: dict[int, Collective] = {}
        for (group, number), by_rank in self.open_collectives.items():
            done = len(self.groups[group].ranks) - len(by_rank)
            if len(by_rank) <= done and not self.missing(group, number):
                found |= {r: o for r, o in by_rank.items() if r not in found and o.operation not in _ENDS_EARLY}
        return found

    @cached_property
    def waits(self) -> list[Wait]:
        """For each rank and group, the first open operation that waits, and all ranks that the rank waits for."""
        found: dict[tuple[int, str], Wait] = {}
        for (group, number), by_rank in self.open_collectives.items():
            missing = self.missing(group, number)
            for rank, operation in by_rank.items():
                others = {*missing, *(by_rank.keys() & self.stuck.keys())} - {rank}
                if others and not (rank in self.stuck and rank not in missing and others <= self.stuck.keys()):
                    first = found.get((rank, group), Wait(rank, operation, ())).operation
                    found[rank, group] = Wait(rank, first, tuple(sorted(others)))
        return [*found.values(), *self._unmatched()]

    def _unmatched(self) -> Iterator[Wait]:
        """Yield a wait for each open send or receive whose peer has no open counterpart."""
        ends = {
            (operation.group, operation.operation, rank, operation.peer): operation
            for rank, witness in self.witnesses.items()
            for operation in reversed(witness.operations)
            if operation.p2p and not operation.ended and witness.knows_ends
        }
        for (group, name, rank, peer), operation in ends.items():
            other = (group, "recv" if name == "send" else "send", peer, rank)
            if peer is not None and other not in ends:
                yield Wait(rank, operation, (peer,))


def find_faults(job: Job) -> list[Finding]:
    """Find the faults that hold up the job, each with its ranks. If there are none, name the ranks without a dump."""
    edges: dict[int, set[int]] = defaultdict(set)
    for wait in job.waits:
        edges[wait.rank].update(wait.missing)
    found = [*_mismatch_findings(job), *_stuck_findings(job)]
    named = {rank for finding in found for rank in finding.ranks} | _ranks_in_mismatch(job)
    ends = {other for others in edges.values() for other in others} - edges.keys() - named
    blocked = {rank: operation for rank in ends if (operation := _collective_of_all(job, rank)) is not None}
    behind = sorted(ends - blocked.keys() - job.absent)
    if behind:
        found += _behind_findings(job, behind)
    if blocked or not (found or edges):
        found += _unfinished_findings(job, tuple(blocked.values()))
    if circle := _circle(edges, ends | named):
        found.append(_deadlock_finding(job, circle))
    absent = tuple(sorted(ends & job.absent)) or (() if found else tuple(sorted(job.absent)))
    if absent and not named and not behind:
        found.append(_absent_finding(job, absent))
    return found


def _circle(edges: Mapping[int, set[int]], ends: Iterable[int]) -> tuple[int, ...]:
    """Ranks that wait for each other: no path leads from them to `ends`, and at least one of them waits for each."""
    reverse: dict[int, set[int]] = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            reverse[other].add(rank)
    todo, explained = list(ends), set(ends)
    while todo:
        new = reverse[todo.pop()] - explained
        explained |= new
        todo += new
    left = edges.keys() - explained
    while True:
        waited_for = {other for rank in left for other in edges[rank]} & left
        if waited_for == left:
            return tuple(sorted(left))
        left = waited_for


def _collective_of_all(job: Job, rank: int) -> Collective | None:
    """The first open collective of `rank` that all ranks of the group have posted; None if there is none."""
    for (group, number), by_rank in job.open_collectives.items():
        if rank in by_rank and not job.missing(group, number):
            return by_rank[rank]
    return None


def _mismatch_findings(job: Job) -> Iterator[Finding]:
    """Yield, for each group whose ranks posted different collectives under one number, the first such number."""
    for mismatch in mismatches(job.collectives):
        first, _ = mismatch.variants[0]
        odd = mismatch.minority or _odd_among_similar_groups(job, mismatch)
        sides = "; ".join(
            f"{ranks_text(ranks)} posted {collective_text(posted)}" for posted, ranks in mismatch.variants[:_MAX_SHOWN]
        )
        yield _finding(
            "mismatch",
            f"{ranks_text(odd)} posted a different collective than the others"
            if odd
            else f"the ranks of {_group_text(job, first.group)} posted different collectives",
            f"Collective {first.seq} of {_group_text(job, first.group)}: {sides}.",
            MISMATCH_FIX,
            odd,
        )


def _ranks_in_mismatch(job: Job) -> set[int]:
    """The ranks whose last collective of a group is one under whose number ranks posted different collectives."""
    return {
        rank
        for mismatch in mismatches(job.collectives)
        for posted, ranks in mismatch.variants
        for rank in ranks
        if job.witnesses[rank].posted[posted.group] == posted.seq
    }


def _odd_among_similar_groups(job: Job, mismatch: Mismatch) -> tuple[int, ...]:
    """The ranks that posted another collective than all groups of the same description under the same number."""
    first, _ = mismatch.variants[0]
    similar = {name for name, group in job.groups.items() if group.description == job.groups[first.group].description}
    usual = {
        compared_part(posted)
        for name in similar - {first.group}
        for posted in job.collectives.get((name, first.seq), {}).values()
    }
    odd = tuple(sorted(r for posted, ranks in mismatch.variants if compared_part(posted) not in usual for r in ranks))
    return odd if len(usual) == 1 and len(odd) < sum(len(ranks) for _, ranks in mismatch.variants) else ()


def _stuck_findings(job: Job) -> Iterator[Finding]:
    if ranks := tuple(sorted(job.stuck)):
        first = job.stuck[ranks[0]]
        yield _finding(
            "stuck",
            f"the GPU of {ranks_text(ranks)} does not finish its work",
            f"{begun(ranks_text(ranks[:1]))} posted {_full_text(job, first)}. "
            "The other ranks have finished it, this GPU has not.",
            _GPU_FIX.format(ranks_text(ranks)),
            ranks,
        )


def _behind_findings(job: Job, ranks: Sequence[int]) -> Iterator[Finding]:
    """Yield one finding for each operation that some of `ranks` did not post and for which other ranks wait."""
    waits_and_ranks: dict[tuple[str, int], tuple[Wait, list[int]]] = {}
    for rank in ranks:
        waits = [wait for wait in job.waits if rank in wait.missing]
        wait = min(waits, key=lambda wait: (wait.operation.p2p, len(wait.missing), wait.operation.seq, wait.rank))
        waits_and_ranks.setdefault((wait.operation.group, wait.operation.seq), (wait, []))[1].append(rank)
    direct = {wait.rank for wait in job.waits if set(wait.missing) & set(ranks)}
    others = tuple(sorted({wait.rank for wait in job.waits} - direct))
    in_turn = f" {begun(ranks_text(others))} wait for those." if others else ""
    for wait, behind in waits_and_ranks.values():
        waiting = {each.rank for each in job.waits if set(each.missing) & set(behind)}
        name = ranks_text(behind)
        end = f"the other end of a {wait.operation.operation} on rank {wait.rank}"
        yield _finding(
            "behind",
            f"{name} did not post {end if wait.operation.p2p else _full_text(job, wait.operation)}",
            f"{_waiting_text(waiting)} for {name}.{in_turn}",
            _STACK_FIX.format(name),
            tuple(behind),
        )


def _waiting_text(ranks: Collection[int]) -> str:
    return f"{begun(ranks_text(tuple(sorted(ranks))))} {'waits' if len(ranks) == 1 else 'wait'}"


def _unfinished_findings(job: Job, operations: Sequence[Collective]) -> Iterator[Finding]:
    todo = operations or [
        next(iter(ops.values())) for key, ops in job.open_collectives.items() if not job.missing(*key)
    ]
    for operation in list(dict.fromkeys(todo))[:1]:
        yield _finding(
            "unfinished",
            f"all ranks have posted {collective_text(operation)}, and none finishes it",
            f"It is a collective of {_group_text(job, operation.group)}. "
            "No rank is missing, so a message does not arrive.",
            "Look at what these ranks share: network, firewall, interface, the paths between GPUs (`ddpdiag check`).",
        )


def _deadlock_finding(job: Job, ranks: tuple[int, ...]) -> Finding:
    waits = {wait.rank: wait for wait in job.waits if wait.rank in ranks}
    each = [f"{ranks_text([rank])} waits in {collective_text(waits[rank].operation)}" for rank in ranks[:_MAX_SHOWN]]
    odd = _odd_in_order(job, ranks)
    return _finding(
        "deadlock",
        f"{ranks_text(odd)} posted to its groups in another order than most"
        if odd
        else f"{ranks_text(ranks)} wait for each other",
        f"{begun('; '.join(each))}. Their programs post to several groups in different orders.",
        "Let all ranks post to their groups in the same order.",
        odd or ranks,
    )


def _odd_in_order(job: Job, ranks: Sequence[int]) -> tuple[int, ...]:
    """Those of `ranks` whose newest collectives have another order of groups than those of most ranks at that point."""
    counts = {rank: sum(witness.posted.values()) for rank, witness in job.witnesses.items()}
    least = min(counts[rank] for rank in ranks)
    orders: dict[int, tuple[str, ...]] = {}
    for rank, witness in job.witnesses.items():
        posted = [job.groups[each.group].description for each in witness.operations if not each.p2p]
        until = len(posted) + least - counts[rank]
        if least <= counts[rank] and until > 0:
            orders[rank] = tuple(posted[max(0, until - _ORDER_LENGTH) : until])
    odd = find_odd_ranks(orders)
    return tuple(rank for rank in odd.ranks if rank in ranks) if odd is not None else ()


def _absent_finding(job: Job, ranks: tuple[int, ...]) -> Finding:
    can_name = len(ranks) < len(job.witnesses)
    return _finding(
        "no-dump",
        f"{ranks_text(ranks)} left no dump",
        f"The other ranks wait for {'it' if len(ranks) == 1 else 'them'}. A rank that raised or was killed leaves none."
        if can_name
        else "So the rank that holds up the job cannot be named.",
        f"Look at the log of {ranks_text(ranks)}." if can_name else "Copy the dumps of all hosts into one folder.",
        ranks if can_name else (),
    )


def rank_lines(job: Job) -> list[str]:
    """One line for all ranks that wait in the same operation, and one for all ranks in no collective."""
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    waits: dict[int, list[Wait]] = defaultdict(list)
    for wait in job.waits:
        waits[wait.rank].append(wait)
    for rank in sorted(job.witnesses):
        if waits[rank]:
            wait = min(waits[rank], key=lambda wait: len(wait.missing))
            text = f"in {_full_text(job, wait.operation)}, without {ranks_text(wait.missing)}"
        elif operation := job.stuck.get(rank) or _collective_of_all(job, rank):
            text = f"in {_full_text(job, operation)}, which all its ranks posted"
        else:
            text = "in no collective"
        ranks_by_text[text].append(rank)
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_text.items()]


def _finding(kind: str, title: str, message: str, fix: str, ranks: tuple[int, ...] = ()) -> Finding:
    severity = Severity.ERROR if ranks else Severity.WARNING
    return Finding(code=f"dump.{kind}", severity=severity, title=title, message=message, fix=fix, ranks=ranks)


def _group_text(job: Job, name: str) -> str:
    group = job.groups[name]
    return f"{group.description or f'group {name}'} ({ranks_text(group.ranks)})"


def _full_text(job: Job, operation: Collective) -> str:
    return f"{collective_text(operation)} of {_group_text(job, operation.group)}"
