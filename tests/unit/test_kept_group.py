"""Which trials share the process group over all ranks, and which get new workers because of it."""

import pytest

from ddpdiag.model import Kind, Outcome, Status, Trial
from ddpdiag.runtime.coordinator.dispatch import OpenGroup

RANKS = (0, 1, 2)


class Run:
    """Trials of three ranks, handed out one after the other; whether each got new workers."""

    def __init__(self) -> None:
        self.kept = OpenGroup(len(RANKS))
        self.open: set[int] = set()  # ranks whose worker has the group
        self.variables: dict[int, dict[str, str | None]] = {}

    def trial(
        self,
        *groups: tuple[int, ...],
        backend: str = "nccl",
        failed: tuple[int, ...] = (),
        env: dict[str, str | None] | None = None,
        kind: Kind = Kind.TORCH,
        fresh: bool = False,
    ) -> bool:
        params: dict[str, str | int | float | bool] = {"backend": backend} if backend else {}
        planned = Trial(
            code="COL001",
            groups=groups or (RANKS,),
            kind=kind,
            deadline_seconds=15,
            params=params,
            env=env or {},
            fresh=fresh,
        )
        trial = self.kept.prepare(planned)
        for rank in trial.ranks:
            if trial.kind is not Kind.TORCH:
                continue
            if trial.fresh or self.variables.get(rank, trial.env) != trial.env:
                self.open.discard(rank)
            self.variables[rank] = trial.env
        opens = trial.kind is Kind.TORCH and backend not in ("", "gloo")
        if opens:
            holders = self.open.intersection(trial.ranks)
            assert holders in (set(), {*RANKS}), "some ranks would wait for others that share an older group"
            assert not holders or trial.ranks == RANKS, "a group stays open beside another one"
        for rank in trial.ranks:
            done = rank not in failed
            opened = opens and rank not in self.open
            status = Status.DONE if done else Status.RAISED
            timings = {"communicator": 2.5} if opened else {}
            self.kept.record_outcome(trial, Outcome(trial=1, code="COL001", rank=rank, status=status, timings=timings))
            if not done and kind is Kind.TORCH:
                self.open.discard(rank)
            elif opened and len(trial.groups[0]) == len(RANKS):
                self.open.add(rank)
        return trial.fresh


@pytest.fixture
def run() -> Run:
    """A run in which all ranks have opened the group."""
    own = Run()
    assert not own.trial(backend="gloo")
    assert not own.trial()
    assert own.open == {*RANKS}
    return own


def test_trials_of_all_ranks_share_it(run: Run) -> None:
    assert not run.trial()
    assert not run.trial()


def test_what_needs_no_group_leaves_it_alone(run: Run) -> None:
    assert not run.trial((0,), backend="")
    assert not run.trial((0,), (1,), (2,), kind=Kind.PLAIN, failed=RANKS)
    assert not run.trial(backend="gloo", kind=Kind.PLAIN)
    assert run.open == {*RANKS}
    assert not run.trial()


@pytest.mark.parametrize("failed", [(1,), RANKS])
def test_after_a_failure_it_is_opened_anew(run: Run, failed: tuple[int, ...]) -> None:
    run.trial(failed=failed)
    assert run.trial() == (failed != RANKS), "workers that failed are replaced anyway"
    assert run.open == {*RANKS}
    assert not run.trial()


def test_a_failure_of_a_trial_without_a_group_counts_as_well(run: Run) -> None:
    run.trial((0,), backend="", failed=(0,))
    assert run.trial()


def test_groups_of_some_ranks_need_new_workers_once(run: Run) -> None:
    assert run.trial((0, 1))
    assert not run.trial((0, 1))
    assert run.trial((1, 2)), "rank 2 still had the group of all ranks"
    assert not run.trial((0, 2))
    assert not run.trial()
    assert not run.trial()


def test_other_variables_and_another_backend_have_a_group_of_their_own(run: Run) -> None:
    p2p: dict[str, str | None] = {"NCCL_P2P_DISABLE": "1"}
    assert not run.trial(env=p2p), "the supervisors replace the workers"
    assert not run.trial(env=p2p)
    assert run.trial(env=p2p, backend="ucc")
    assert not run.trial((2,), env={}, backend="")
    assert run.trial(env=p2p, backend="ucc"), "rank 2 has a new worker, without the group"


def test_a_trial_marked_fresh_stays_so_and_its_group_is_shared(run: Run) -> None:
    assert run.trial(fresh=True)
    assert not run.trial()
