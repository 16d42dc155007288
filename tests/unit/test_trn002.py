"""Strategies: which are tried where, how they are held against single, and who is named."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs
from seen import unseen, world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.findings import Effect
from ddpdiag.checks.world import World
from ddpdiag.codec import encode
from ddpdiag.model import Finding, Outcome, RunOptions, Severity, Status
from ddpdiag.model.train import Strategy, StrategyStatus, TrainRequest
from ddpdiag.strategies.check import CHECK, plan
from ddpdiag.strategies.judge import train_report
from ddpdiag.strategies.trainings import Data, batch_size_of, devices_of, hidden_width_of, ranks_of, why_impossible

DONE, RAISED = Status.DONE, Status.RAISED
STEPS = 4
CURVE = (2.3, 2.0, 1.5, 1.0)
S = Strategy


def options(*strategies: Strategy, backend: str = "auto", **more) -> RunOptions:
    asked = TrainRequest(strategy=strategies or tuple(Strategy), steps=STEPS, **more)
    return RunOptions(train=asked, backend=backend, select=("TRN002",), budget_seconds=120.0)


def world(size: int, *strategies: Strategy, gpus: int = 0, ranks_per_node: int = 8, **more) -> World:
    return world_of(size, ranks_per_node=ranks_per_node, gpus=gpus, options=options(*strategies, **more))


def empty(world: World) -> Seen[Data]:
    return replace(unseen(CHECK, world), left_seconds=100.0)


def data(strategy: Strategy, ranks: tuple[int, ...], rank: int, off=()) -> Data:
    """The data of a rank that trains well; `off` is added to its losses."""
    silent = strategy is S.PIPELINE and rank != ranks[-1]
    shared = strategy in (S.DDP, S.FSDP, S.MODEL_PARALLEL)
    images = len(range(ranks.index(rank), 64, len(ranks))) if shared else 64
    return Data(
        device="CPU",
        start_checksum="a",
        losses=() if silent else tuple(map(sum, zip(CURVE, [*off, *[0.0] * STEPS], strict=False))),
        images=0 if silent else images,
        timed_steps=3,
        seconds=0.5,
        peak_bytes=1 << 20,
        state_bytes=1 << 10,
    )


def ran(world: World, off=None, statuses=None, changed=None, **outcome) -> Seen[Data]:
    """A whole run. `off`: by strategy and rank, what is added to losses; `statuses`: how others ended.

    `changed`: by strategy and rank, what else is different.
    """
    seen = empty(world)
    while trials := plan(seen):
        number = len(seen.recording.trials)
        trial = structs.replace(trials[0], number=number)
        strategy = Strategy(trial.params["strategy"])
        outcomes = []
        for rank in trial.ranks:
            own = data(strategy, trial.ranks, rank, (off or {}).get((strategy, rank), ()))
            own = structs.replace(own, **(changed or {}).get((strategy, rank), {}))
            status = (statuses or {}).get((strategy, rank), DONE)
            more = {"data": Raw(encode(own))} if status is DONE else {"last_step": "training step 2 of 4", **outcome}
            outcomes.append(Outcome(trial=number, code="TRN002", rank=rank, status=status, step_count=5 + rank, **more))
        recording = structs.replace(
            seen.recording, trials=(*seen.recording.trials, trial), outcomes=(*seen.recording.outcomes, *outcomes)
        )
        seen = Seen(world, CHECK, recording, left_seconds=100.0)
    return seen


def findings(seen: Seen[Data]) -> list[Finding]:
    return list(CHECK.judge(seen))


def rows(seen: Seen[Data]) -> dict[Strategy, StrategyStatus]:
    return {row.strategy: row.status for row in train_report(seen).rows}


def test_single_comes_first_and_on_rank_0_alone():
    first = plan(empty(world(4, S.DDP)))[0]
    assert (first.params["strategy"], first.groups, first.may_fail, first.fresh) == ("single", ((0,),), True, True)


def test_each_strategy_is_tried_once():
    seen = ran(world(4))
    tried = [trial.params["strategy"] for trial in seen.trials]
    assert tried == ["single", "ddp", "fsdp", "tensor-parallel", "pipeline", "model-parallel"]


@pytest.mark.parametrize(
    ("left_seconds", "settings", "seconds"),
    [(100.0, {}, 100 / 6), (6.0, {}, 8.0), (100.0, {"TRN002.deadline_seconds": "77"}, 77)],
)
def test_a_trial_takes_its_share_of_what_is_left_or_the_deadline_that_was_set(left_seconds, settings, seconds):
    here = world_of(4, options=structs.replace(options(), settings=settings))
    (trial,) = plan(replace(empty(here), left_seconds=left_seconds))
    assert trial.deadline_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("strategy", "here"),
    [
        pytest.param(S.DP, world(2), id="dp without GPUs"),
        pytest.param(S.DP, world(2, gpus=2, backend="gloo"), id="dp over gloo"),
        pytest.param(S.DP, world(2, gpus=1), id="dp with one GPU"),
        pytest.param(S.MODEL_PARALLEL, world(2, gpus=2, group_size=4), id="model-parallel with few GPUs"),
    ],
)
def test_a_strategy_needs_its_gpus(golden, strategy, here):
    golden(why_impossible(strategy, here))


def test_which_ranks_and_devices_a_strategy_takes():
    here = world(4, gpus=4)
    assert (ranks_of(S.DP, here), devices_of(S.DP, here)) == ((0,), 4)
    here = world(16, gpus=8, group_size=3)
    assert (ranks_of(S.MODEL_PARALLEL, here), devices_of(S.MODEL_PARALLEL, here)) == ((0, 1, 8, 9), 12)
    assert ranks_of(S.PIPELINE, world(6)) == (0, 1, 2, 3), "it has no more blocks"


def test_one_rank_alone_has_nobody_to_train_with():
    why = {strategy: why_impossible(strategy, world(1)) for strategy in Strategy}
    assert [strategy for strategy, reason in why.items() if reason is None] == [S.SINGLE, S.MODEL_PARALLEL]


def test_every_rank_has_an_image():
    assert batch_size_of(world(8, batch_size=3)) == 8


@given(st.integers(1, 5000))
def test_the_hidden_layer_can_be_cut(size):
    hidden = hidden_width_of(structs.replace(world(1), size=size))
    assert hidden % size == 0
    assert hidden >= 128


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_what_agrees_works(size):
    seen = ran(world(size))
    assert findings(seen) == []
    assert rows(seen).pop(S.DP) is StrategyStatus.NOT_POSSIBLE
    assert {ended for strategy, ended in rows(seen).items() if strategy is not S.DP} == {StrategyStatus.WORKS}


def test_a_row_has_its_numbers():
    row = train_report(ran(world(4, S.DDP))).rows[1]
    assert row.samples_per_second == pytest.approx(64 * 3 / 0.5)
    assert (row.speedup, row.efficiency) == (1.0, 0.25)
    assert row.deviation == pytest.approx(0.0, abs=1e-12)


HALF = (0, 0.5, 0.5, 0.5)
ENDS = {(S.DDP, rank): {"end_checksum": "b" if rank == 2 else "a"} for rank in range(4)}
TIED = {(S.DDP, rank): {"end_checksum": str(rank % 2)} for rank in range(4)}
WRONG = {
    "a rank that ended with other parameters": (S.DDP, {2: HALF}, ENDS, (2,)),
    "a rank whose own loss alone is off": (S.DDP, {2: HALF}, {}, ()),
    "half of the ranks is no minority": (S.DDP, {1: (0.5,)}, TIED, ()),
    "a rank that began with other parameters": (
        S.FSDP,
        dict.fromkeys(range(4), (0.5,) * 4),
        {(S.FSDP, 1): {"start_checksum": "b"}},
        (1,),
    ),
    "the last stage of a pipeline alone has a loss": (S.PIPELINE, {3: (0, 0, 0.5)}, {}, ()),
    "no number": (S.DDP, {0: (0, math.nan)}, {}, ()),
}


@pytest.mark.parametrize(("strategy", "off", "changed", "ranks"), WRONG.values(), ids=WRONG)
def test_a_loss_that_differs_is_wrong_and_other_parameters_are_blamed(golden, strategy, off, changed, ranks):
    seen = ran(world(4, strategy), off={(strategy, rank): own for rank, own in off.items()}, changed=changed)
    (found,) = findings(seen)
    assert (found.code, found.severity, found.ranks) == ("TRN002.wrong", Severity.ERROR, ranks)
    golden(found)


def test_single_that_is_no_number_is_wrong_and_nothing_is_compared():
    seen = ran(world(2, S.DDP), changed={(S.SINGLE, 0): {"losses": (2.3, math.nan, math.nan, math.nan)}})
    assert [found.code for found in findings(seen)] == ["TRN002.wrong", "TRN002.unmeasured"]
    assert rows(seen) == {S.SINGLE: StrategyStatus.WRONG, S.DDP: StrategyStatus.UNFINISHED}


@given(st.floats(0, 1e-5), st.integers(0, 3))
def test_rounding_and_what_a_set_tolerance_allows_are_silent(off, rank):
    assert findings(ran(world(4, S.DDP), off={(S.DDP, rank): (off,)})) == []
    asked = structs.replace(options(S.DDP), settings={"TRN002.tolerance": "1"})
    assert findings(ran(world_of(4, options=asked), off={(S.DDP, rank): (0.5,)})) == []


def test_a_hang_names_who_others_wait_for_and_the_next_one_runs():
    hung = {(S.DDP, rank): Status.HUNG for rank in range(4)}
    # Steps rise with the rank: the front is one of them each, the highest counts.
    seen = ran(world(4, S.DDP, S.FSDP), statuses=hung)
    (found,) = findings(seen)
    assert found.code == "TRN002.hangs"
    assert rows(seen) == {S.SINGLE: StrategyStatus.WORKS, S.DDP: StrategyStatus.HANGS, S.FSDP: StrategyStatus.WORKS}


@pytest.mark.parametrize(
    ("error", "is_known"),
    [("RuntimeError: no memory", False), ("OSError: [Errno 24] Too many open files", True)],
    ids=["unknown", "known"],
)
def test_a_failure_names_who_failed_by_itself_and_its_cause(golden, error, is_known):
    (found,) = findings(ran(world(4, S.FSDP), statuses={(S.FSDP, 3): RAISED}, error=error))
    assert (found.code, found.ranks, "known_error" in found.evidence) == ("TRN002.fails", (3,), is_known)
    golden(found)


NO_SHARDS, ANOTHER = "torch 2.5 has no fully_shard", "another rank's torch cannot"


@pytest.mark.parametrize(
    ("strategies", "lacks", "reason", "codes"),
    [
        pytest.param((S.DDP, S.FSDP), [NO_SHARDS] * 2, NO_SHARDS, [], id="on all ranks"),
        pytest.param((S.DDP, S.FSDP), [ANOTHER, "no events"], f"{ANOTHER}; no events", [], id="on one rank"),
        pytest.param((S.FSDP,), [NO_SHARDS] * 2, NO_SHARDS, ["TRN002.unmeasured"], id="nothing else was requested"),
    ],
)
def test_what_torch_lacks_is_not_possible(strategies, lacks, reason, codes):
    changed = {(S.FSDP, rank): {"not_possible": own} for rank, own in enumerate(lacks)}
    seen = ran(world(2, *strategies), changed=changed)
    assert [finding.code for finding in findings(seen)] == codes
    assert (train_report(seen).rows[-1].status, train_report(seen).rows[-1].reason) == (
        StrategyStatus.NOT_POSSIBLE,
        reason,
    )


def test_where_nothing_that_was_asked_for_is_possible_nothing_is_tried(golden):
    seen = empty(world(2, S.DP))
    assert plan(seen) == ()
    (found,) = findings(seen)
    assert (found.code, found.severity) == ("TRN002.unmeasured", Severity.WARNING)
    golden(found)
    assert {row.status for row in train_report(empty(world(2, S.DDP))).rows} == {StrategyStatus.UNFINISHED}


def test_a_backend_that_was_named_and_is_absent_is_no_excuse():
    absent = {(S.DDP, rank): RAISED for rank in range(2)}
    seen = ran(world(2, S.SINGLE, S.DDP, backend="mpi"), statuses=absent, error="AbsentBackend: built without mpi")
    (found,) = findings(seen)
    assert found.code == "TRN002.unmeasured"
    assert rows(seen)[S.DDP] is StrategyStatus.NOT_POSSIBLE


@pytest.mark.parametrize("seconds", [0.5, 0.25], ids=["no-faster", "faster"])
def test_the_sentence_says_what_pays(golden, seconds):
    own = train_report(ran(world(2, S.DDP), changed={(S.DDP, rank): {"seconds": seconds} for rank in range(2)}))
    assert own.rows[1].speedup == pytest.approx(0.5 / seconds)
    assert CHECK.spec_of("wrong").effect is Effect.UNFIT
    golden(own.sentence)
