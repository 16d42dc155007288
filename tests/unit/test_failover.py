"""Who reports when rank 0 is lost; every rank is a thread here, and the shared folder a temporary one."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import structs
from seen import arrival_of

from ddpdiag.codec import assemble, encode_line, read_lines
from ddpdiag.model import Event, EventKind, Header, Kind, Options, Outcome, Status, Trial
from ddpdiag.model.recording import Line
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.deadlines import ElectionTimes
from ddpdiag.runtime.record import RecordCopy
from ddpdiag.runtime.record.failover import Election, without_rank_0
from ddpdiag.runtime.record.shared_folder import SharedFolder, SharedRunLog, append, shared_folder

QUICK = ElectionTimes(look=0.005, grace=0.05, ready=0.1, turn=0.2, count=3, readers=0.1, alive=1.0)
VERDICT = Shutdown(1, "rank 0 was lost")
HEADER = Header(run_id="r", world_size=4, launcher="hand", options=Options(), created="", version="0")
TRIAL = Trial(code="COL001", groups=((0, 1, 2, 3),), kind=Kind.TORCH, deadline_seconds=5, number=1)


class Candidates:
    """Some living ranks that take part, and what became of them."""

    def __init__(self, folder: Path) -> None:
        self.shared = SharedFolder(folder)
        self.made: list[tuple[int, tuple[int, ...]]] = []

    def run(self, ranks: Sequence[int], *, dead: Sequence[int] = ()) -> list[Shutdown | None]:
        """What each of `ranks` is told; the `dead` left a sign and died."""
        for rank in (*ranks, *dead):
            self.shared.mark("candidate", rank)
            self.shared.mark("ready", rank)
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(self._run, ranks))

    def _run(self, rank: int) -> Shutdown | None:
        def take_over(candidates: tuple[int, ...]) -> Shutdown:
            self.made.append((rank, candidates))
            return VERDICT

        return Election(self.shared, rank, take_over, QUICK).run()


def test_the_lowest_living_rank_reports_and_all_hear_it(tmp_path: Path) -> None:
    candidates = Candidates(tmp_path)
    assert candidates.run([3, 1, 2]) == [VERDICT] * 3
    assert candidates.made == [(1, (1, 2, 3))]


def test_the_next_one_reports_when_the_successor_dies_too(tmp_path: Path) -> None:
    candidates = Candidates(tmp_path)
    assert candidates.run([2, 3], dead=[1]) == [VERDICT] * 2
    assert candidates.made == [(2, (1, 2, 3))]


def test_while_rank_0_lives_nobody_takes_its_place(tmp_path: Path) -> None:
    candidates = Candidates(tmp_path)
    run_log = SharedRunLog(tmp_path / "run", lambda: [HEADER])
    candidates.shared = SharedFolder(tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(candidates.run, [1, 2])
        run_log.close(VERDICT, (1, 2), 5.0)
    assert waiting.result() == [VERDICT] * 2
    assert candidates.made == []
    assert not (tmp_path / "run").exists()


def test_without_a_folder_there_is_no_verdict(tmp_path: Path) -> None:
    assert Election(SharedFolder(tmp_path / "gone"), 1, lambda _heirs: VERDICT, QUICK).run() is None


def test_a_rank_0_that_stood_still_learns_that_it_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_log = SharedRunLog(folder, lambda: [HEADER])
    while not run_log._written:
        pass
    assert not run_log.was_replaced(1.0)
    assert SharedFolder(folder).claim(0, 1)
    assert not SharedFolder(folder).claim(0, 2)
    assert run_log.was_replaced(1.0)
    run_log.close(VERDICT, (), 0.0)


def test_a_rank_0_that_was_replaced_leaves_the_folder_to_its_successor(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_log = SharedRunLog(folder, lambda: [HEADER])
    while not run_log._written:
        pass
    SharedFolder(folder).claim(0, 1)
    run_log.close(VERDICT, (), 0.0)
    assert read_lines([folder / "run.jsonl"]) == [HEADER]


class RemovedFolder(SharedFolder):
    """A folder that is removed while a rank looks at it."""

    listings = 0

    def mark(self, mark: str, rank: int) -> None:
        if mark == "read":
            raise FileNotFoundError
        super().mark(mark, rank)

    def ranks(self, mark: str, me: int) -> tuple[int, ...]:
        self.listings += 1
        return () if mark == "leader" else super().ranks(mark, me)


def test_the_verdict_counts_even_if_nobody_can_be_told_that_it_was_read(tmp_path: Path) -> None:
    shared = RemovedFolder(tmp_path)
    shared.write_verdict(VERDICT)
    assert Election(shared, 2, lambda _heirs: VERDICT, QUICK).run() == VERDICT


def test_a_successor_that_stood_still_until_all_was_removed_makes_no_report(tmp_path: Path) -> None:
    made: list[tuple[int, ...]] = []
    shared = RemovedFolder(tmp_path)
    shared.mark("candidate", 1)
    shared.mark("ready", 1)

    def take_over(candidates: tuple[int, ...]) -> Shutdown:
        made.append(candidates)
        return VERDICT

    assert Election(shared, 1, take_over, QUICK).run() is None
    assert made == []


def test_who_waits_for_the_verdict_does_not_list_the_folder_at_every_look(tmp_path: Path) -> None:
    shared = RemovedFolder(tmp_path)
    assert Election(shared, 1, lambda _heirs: VERDICT, QUICK).run() is None
    assert shared.listings <= 2 * (QUICK.count + 1)


def obtain(lines: Sequence[Line], *candidates: int) -> list[Line]:
    own = structs.replace(HEADER, writer=min(candidates))
    return list(without_rank_0([HEADER, *lines], own, candidates, 20.0))


def test_who_left_no_sign_is_lost_and_unheard_in_the_trial_that_ran() -> None:
    arrivals = [arrival_of(rank, 4) for rank in range(4)]
    done = [Outcome(trial=1, code="COL001", rank=rank, status=Status.HUNG, told=True) for rank in (2, 3)]
    noticed = [Event(kind=EventKind.LOST, rank=0, seconds=8.0 + rank) for rank in (2, 3)]
    run = assemble(obtain([*arrivals, TRIAL, *done, *noticed], 2, 3))
    assert (run.header.writer, run.header.run_id) == (2, "r")
    assert [event.rank for event in run.events] == [0, 0, 1]
    assert {o.rank: o.status for o in run.outcomes} == {
        0: Status.UNHEARD,
        1: Status.UNHEARD,
        2: Status.HUNG,
        3: Status.HUNG,
    }
    assert run.end is not None


def test_who_was_lost_before_is_not_lost_again() -> None:
    before = Event(kind=EventKind.LOST, rank=1, seconds=3.0)
    run = assemble(obtain([*(arrival_of(rank, 4) for rank in range(4)), before], 2, 3))
    assert [event.seconds for event in run.events if event.rank == 1] == [3.0]


def test_who_was_lost_before_is_unheard_in_the_trial_that_ran() -> None:
    before = Event(kind=EventKind.LOST, rank=1, seconds=3.0)
    run = assemble(obtain([*(arrival_of(rank, 4) for rank in range(4)), TRIAL, before], 2, 3))
    assert {o.rank: o.status for o in run.outcomes} == {0: Status.UNHEARD, 1: Status.UNHEARD}


def test_who_said_that_it_was_leaving_is_a_bystander_and_not_lost() -> None:
    said = Event(kind=EventKind.LEAVING, rank=1, seconds=3.0, detail="15")
    run = assemble(obtain([*(arrival_of(rank, 4) for rank in range(4)), TRIAL, said], 2, 3))
    assert [event.rank for event in run.events if event.kind is EventKind.LOST] == [0]
    (own,) = (outcome for outcome in run.outcomes if outcome.rank == 1)
    assert (own.status, own.told) == (Status.SKIPPED, True)


def test_a_copy_that_came_after_the_end_leaves_no_folder(tmp_path: Path) -> None:
    copy = RecordCopy(str(tmp_path), "ddpdiag-r", 2)
    copy.open("abcd")
    copy.write(encode_line(HEADER))
    copy.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_written_once_rank_0_has_named_the_folder_and_removed_at_the_end(tmp_path: Path) -> None:
    copy = RecordCopy(str(tmp_path), "ddpdiag-r", 2)
    copy.write(encode_line(HEADER))
    copy.open("abcd")
    copy.write(encode_line(arrival_of(2, 4)))
    mark = copy.mark("candidate")
    assert mark is not None
    mark.result(5)
    folder = shared_folder(str(tmp_path), "ddpdiag-r", "abcd")
    assert read_lines([folder / "rank-2.jsonl", folder / "candidate-2"]) == [HEADER, arrival_of(2, 4)]
    assert folder.stat().st_mode & 0o777 == 0o700
    copy.remove()
    assert [path.name for path in folder.iterdir()] == ["candidate-2"]


def test_a_rank_that_was_never_welcomed_writes_nothing(tmp_path: Path) -> None:
    copy = RecordCopy(str(tmp_path), "ddpdiag-r", 2)
    copy.write(encode_line(HEADER))
    assert copy.mark("candidate") is None
    copy.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_last_line_of_a_killed_rank_may_be_cut_off(tmp_path: Path) -> None:
    append(tmp_path / "run.jsonl", encode_line(HEADER) + encode_line(arrival_of(0, 4))[:20])
    assert read_lines([tmp_path / "run.jsonl", tmp_path / "missing.jsonl"]) == [HEADER]
