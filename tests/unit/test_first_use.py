"""The first use of a device and of a communicator: how long it may take, and what is said where it is slow."""

import socket
from types import SimpleNamespace

import pytest
from msgspec import Raw, structs
from seen import seen_of

from ddpdiag.checks.api import FIRST_USE_SECONDS, Check, Nothing, Seen, new_trial
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import memory_errors, present
from ddpdiag.checks.host import limits
from ddpdiag.checks.p2p import paths as p2p_paths
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.run import budget as budget_check
from ddpdiag.checks.run import trials
from ddpdiag.cli.check import _default_budget
from ddpdiag.model import Finding, Kind, Outcome, Place, ProcessState, RunOptions, Severity, Status, Trial
from ddpdiag.runtime.coordinator.dispatch import numbered_trial
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.supervisor.ipc import StepPage, Task
from ddpdiag.runtime.supervisor.trial_runner import RunningTrial
from ddpdiag.runtime.supervisor.worker import WorkerContext

TRIAL = Trial(code="COL001", groups=((0, 1),), kind=Kind.TORCH, deadline_seconds=15, first_use_seconds=60)


@pytest.mark.parametrize(
    ("check", "params", "first_use"),
    [
        (all_reduce.CHECK, {"backend": "nccl"}, FIRST_USE_SECONDS),
        (all_reduce.CHECK, {"backend": "gloo"}, 0),
        (present.CHECK, {}, FIRST_USE_SECONDS),
        (memory_errors.CHECK, {}, FIRST_USE_SECONDS),
        (p2p_paths.CHECK, {}, FIRST_USE_SECONDS),
        (limits.CHECK, {}, 0),
    ],
    ids=lambda value: value.code if isinstance(value, Check) else None,
)
def test_a_trial_that_may_be_the_first_user_of_the_gpus_has_time_for_it(
    check: Check, params: dict[str, str], first_use: float
) -> None:
    assert new_trial(seen_of(check, {}, size=2, gpus=2), params=params).first_use_seconds == first_use


@pytest.mark.parametrize(("left", "first_use"), [(300, 60), (90, 30), (20, 5), (10, 0)])
def test_the_budget_keeps_time_for_what_comes_after_a_first_use(left: float, first_use: float) -> None:
    trial = numbered_trial(TRIAL, 1, TRIAL.deadline_seconds, left)
    assert trial.first_use_seconds == first_use
    assert trial.limit_seconds <= left


def running(trial: Trial) -> RunningTrial:
    worker = SimpleNamespace(page=StepPage.create(), log=SimpleNamespace(size=lambda: 0))
    return RunningTrial(trial, 0, worker, now=100.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "step",
    [
        "NVML",
        "NVML: GPU 3",
        "context",
        "context of GPU 3",
        "communicator",
        "connect all ranks: post",
        "wait at the gate",
    ],
)
def test_the_deadline_moves_on_during_a_first_use(step: str) -> None:
    own = running(TRIAL)
    own.worker.page.write(1, step)
    own.allow_first_use(120.0)
    assert own.deadline == 100 + 15 + 20
    own.worker.page.write(2, "connect all ranks: wait")
    own.allow_first_use(130.0)
    assert own.deadline == 100 + 15 + 20


def test_a_first_use_that_never_ends_has_a_deadline() -> None:
    own = running(TRIAL)
    own.worker.page.write(1, "communicator")
    for now in range(101, 400):
        own.allow_first_use(now)
    assert own.deadline == 100 + TRIAL.limit_seconds


def outcome(rank: int, **timings: float) -> Outcome:
    return Outcome(trial=0, code="COL001", rank=rank, status=Status.DONE, data=Raw(b"{}"), timings=timings)


def judged(*outcomes: Outcome, may_fail: bool = False, options: RunOptions | None = None) -> list[Finding]:
    seen = seen_of(trials.CHECK, dict.fromkeys(range(2), Nothing()), options=options)
    trial = structs.replace(TRIAL, may_fail=may_fail)
    recording = structs.replace(seen.recording, trials=(trial,), outcomes=outcomes)
    return list(trials.CHECK.judge(Seen(seen.world, trials.CHECK, recording)))


def test_a_usual_start_is_silent() -> None:
    assert judged(outcome(0, context=2.0, communicator=3.0), outcome(1, context=9.0, communicator=3.1)) == []


SLOW = {
    "contexts": ("context", [(0, 12.0), (0, 1.0), (1, 21.44)], (0, 1), 21.4),
    "NVML, without persistence mode": ("NVML", [(0, 32.06), (1, 31.9)], (), 32.1),
    "a communicator": ("communicator", [(0, 20.1), (1, 20.2)], (), 20.2),
    "the first collective": ("connect all ranks", [(0, 20.3), (1, 20.4)], (), 20.4),
}


@pytest.mark.parametrize(("step", "starts", "ranks", "slowest"), SLOW.values(), ids=SLOW)
def test_a_slow_start_names_its_step_and_its_slowest_time(golden, step, starts, ranks, slowest) -> None:
    (found,) = judged(*(outcome(rank, **{step: seconds}) for rank, seconds in starts))
    assert (found.code, found.severity, found.ranks) == ("RUN003.slow-start", Severity.WARNING, ranks)
    assert found.evidence == {"step": step, "seconds": slowest, "trial": 0}
    golden(found)


def test_a_worker_notes_how_long_nvml_took_and_has_that_time_back() -> None:
    one, other = socket.socketpair()
    with one, other:
        task = Task(Place(rank=0, world_size=1, host="n0", launcher="none"), TRIAL, RunOptions(), "", {}, 100.0)
        context = WorkerContext(task, one, StepPage.create())
        for step in ("kernel log", "NVML", "NVML: GPU 0", "driver version"):
            context.step(step)
        assert 0 < context.timings["NVML"] < 60
        assert context.end == pytest.approx(100.0 + context.timings["NVML"])


@pytest.mark.parametrize("step", ["context", "communicator", "connect all ranks: post"])
@pytest.mark.parametrize(
    ("first_use", "backend", "code"),
    [
        pytest.param(5.0, "nccl", "RUN004.unfinished", id="the budget ended it"),
        pytest.param(60.0, "nccl", "RUN003.hung", id="it had its time"),
        pytest.param(0.0, "gloo", "RUN003.hung", id="gloo starts nothing"),
    ],
)
def test_a_first_use_that_the_budget_ends_is_no_hang(step: str, first_use: float, backend: str, code: str) -> None:
    trial = structs.replace(TRIAL, first_use_seconds=first_use, params={"backend": backend})
    process = ProcessState(pid=7, state="S", step_seconds=15 + first_use)
    hung = [
        Outcome(trial=0, code="COL001", rank=rank, status=Status.HUNG, step_count=5, last_step=step, process=process)
        for rank in range(2)
    ]
    seen = seen_of(trials.CHECK, dict.fromkeys(range(2), Nothing()), gpus=2)
    recording = structs.replace(seen.recording, trials=(trial,), outcomes=tuple(hung))
    both = (trials.CHECK, budget_check.CHECK)
    found = [finding for check in both for finding in Seen(seen.world, check, recording).findings]
    assert [finding.code for finding in found] == [code]


def test_what_is_slow_can_be_set_and_an_experiment_is_not_judged() -> None:
    slow = (outcome(0, communicator=20.1), outcome(1, communicator=20.2))
    assert judged(*slow, options=RunOptions(settings={"RUN003.slow_start_seconds": "30"})) == []
    assert judged(*slow, may_fail=True) == []


@pytest.mark.parametrize(("took", "first_use"), [(0.5, 5.0), (8.0, 24.0), (40.0, 60.0)])
def test_each_set_of_variables_has_three_times_what_starts_took_before(took: float, first_use: float) -> None:
    seen = seen_of(fallback.CHECK, {}, size=2, gpus=2)
    recording = structs.replace(seen.recording, trials=(), outcomes=(outcome(0, context=took), outcome(1)))
    trial = fallback._trial(Seen(seen.world, fallback.CHECK, recording), fallback.Step(fallback.Grouping.ALL_RANKS))
    assert trial.first_use_seconds == first_use


@pytest.mark.parametrize(
    ("ranks", "local", "gpus", "seconds"),
    [
        (2, 2, 0, 60),
        (8, 8, 8, 60 + 60 + 8 * 5),
        (16, 8, 0, 120),
        (16, 8, 8, 120 + 60 + 8 * 5),
        (1024, 8, 8, 120 + 36 + 60 + 8 * 5),
    ],
)
def test_the_default_budget_grows_with_gpus_and_ranks(monkeypatch, ranks, local, gpus, seconds) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 256)
    place = Place(rank=0, world_size=ranks, host="n0", launcher="slurm", local_world_size=local)
    assert _default_budget(Launch(place=place, master_addr="n0", port=1, run_id="r"), gpus=gpus) == seconds
