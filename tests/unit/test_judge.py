"""From a recording to verdict, exit code and sentence."""

import pytest
from msgspec import Raw, structs
from seen import world_of

from ddpdiag.checks.api import Stage
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.launch import versions
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.rendezvous import coordinator_name
from ddpdiag.codec import encode
from ddpdiag.judgement import judge
from ddpdiag.model import (
    End,
    Event,
    EventKind,
    Header,
    HostLists,
    Kind,
    Outcome,
    Recording,
    Report,
    RunOptions,
    Severity,
    Skip,
    Status,
    Trial,
    Verdict,
)
from ddpdiag.stats import Samples

STEADY = Samples(min=1e-3, median=1e-3, p95=1e-3, count=8)


def answer(wrong: int = 0) -> Raw:
    return Raw(encode(all_reduce.Data("gloo", 2, 4, STEADY, 4 << 20, STEADY, wrong)))


def recording(
    *,
    statuses: dict[int, Status] | None = None,
    events: tuple[Event, ...] = (),
    skips: tuple[Skip, ...] = (),
    options: RunOptions | None = None,
    size: int = 2,
    wrong: int = 0,
    ended: bool = True,
) -> Recording:
    """One all-reduce of `size` ranks, done on all that `statuses` does not name."""
    chosen = options or RunOptions()
    ranks = tuple(range(size))
    trial = Trial(
        code="COL001", groups=(ranks,), kind=Kind.TORCH, deadline_seconds=5, number=1, params={"backend": "gloo"}
    )
    outcomes = []
    for rank in ranks:
        status = (statuses or {}).get(rank, Status.DONE)
        data = answer(wrong) if status is Status.DONE else Raw()
        outcomes.append(Outcome(trial=1, code="COL001", rank=rank, status=status, data=data, seconds=1.0 + rank))
    told = {"COL001", *(skip.code for skip in skips)}
    others = (check.code for check in all_checks() if check.measure is not None and check.code not in told)
    return Recording(
        header=Header(run_id="r", world_size=size, launcher="hand", options=chosen, created="", version="0"),
        arrivals=world_of(size, ranks_per_node=1).arrivals,
        trials=(trial,),
        outcomes=tuple(outcomes),
        events=events,
        skips=(*skips, *(Skip(code=code, reason="not part of this test", is_inapplicable=True) for code in others)),
        end=End(seconds=3.0) if ended else None,
    )


def report(run: Recording) -> Report:
    return judge(run, all_checks())


def with_slow_import(run: Recording) -> Recording:
    data = versions.Data(python="3.11.7", torch="2.13.0", import_seconds=42.0, import_core_seconds=2.0)
    trial = Trial(code="LCH003", groups=((0,),), kind=Kind.TORCH, deadline_seconds=5, number=2)
    outcome = Outcome(trial=2, code="LCH003", rank=0, status=Status.DONE, data=Raw(encode(data)))
    return structs.replace(run, trials=(*run.trials, trial), outcomes=(*run.outcomes, outcome))


def without_rank_2() -> Recording:
    run = recording(events=(Event(kind=EventKind.ABSENT, rank=2, seconds=15.0),), size=3)
    return structs.replace(run, arrivals={0: run.arrivals[0], 1: run.arrivals[1]}, outcomes=run.outcomes[:2])


def without_a_skip(code: str) -> Recording:
    run = recording()
    return structs.replace(run, skips=tuple(skip for skip in run.skips if skip.code != code))


def untried(**options: tuple[str, ...]) -> Recording:
    return structs.replace(recording(options=RunOptions(**options)), trials=(), outcomes=())


def skipping(code: str, *, excused: bool, reason: str = "nccl needs GPUs, and no rank has a visible GPU", **options):
    skip = Skip(code=code, reason=reason, is_inapplicable=excused)
    return recording(skips=(skip,), options=RunOptions(**options))


def in_two_groups(first: Status, *second: Outcome, backend: str, gpus: int = 0) -> Recording:
    """How all-reduce ended on rank 1 over gloo, and then on both ranks over the job's backend."""
    run = recording(statuses={1: first}, options=RunOptions(backend=backend))
    trial = structs.replace(run.trials[0], number=2, params={"backend": backend})
    again = (structs.replace(own, trial=2, code="COL001", rank=rank) for rank, own in enumerate(second))
    arrivals = world_of(2, ranks_per_node=1, gpus=gpus).arrivals
    return structs.replace(run, arrivals=arrivals, trials=(*run.trials, trial), outcomes=(*run.outcomes, *again))


def ended(status: Status, error: str = "", data: Raw | None = None) -> Outcome:
    return Outcome(trial=2, code="COL001", rank=0, status=status, error=error, data=data or Raw())


DONE, DIED = ended(Status.DONE, data=answer()), ended(Status.DIED)
NO_NCCL = ended(Status.RAISED, "AbsentBackend: torch 9.9 was built without nccl; it has gloo")
NO_NCL = ended(Status.RAISED, "AbsentBackend: torch 9.9 knows no backend ncl, only gloo, nccl")
CLOSED = ended(Status.RAISED, "RuntimeError: Connection closed by peer")
LOST = Event(kind=EventKind.LOST, rank=1, seconds=2.0, detail="it sent nothing", host_answered=True)
BUDGET = Event(kind=EventKind.BUDGET, seconds=57.0, detail="before TRN001 could run")
SIGINT, SIGTERM = (Event(kind=EventKind.SIGNAL, detail=detail) for detail in ("2", "15"))
KNOWN = structs.replace(recording().header, checks=("COL001", "RUN001", "RUN002", "RUN003", "RUN004"))
FIT, UNFIT, UNKNOWN = Verdict.FIT, Verdict.UNFIT, Verdict.UNKNOWN

# The recording, the verdict, the exit code, and the codes of the findings with their ranks.
RUNS = {
    "clean": (recording(), FIT, 0, {}),
    "wrong values": (recording(wrong=3), UNFIT, 1, {"COL001.wrong": ()}),
    "a dead rank": (recording(statuses={1: Status.DIED}), UNFIT, 1, {"RUN003.died": (1,)}),
    "a rank that never came": (without_rank_2(), UNKNOWN, 3, {"RUN001.absent": (2,)}),
    "a lost rank": (recording(statuses={1: Status.UNHEARD}, events=(LOST,)), UNFIT, 1, {"RUN002.lost": (1,)}),
    "a check that could not run": (skipping("TRN001", excused=False, reason="no reason"), UNKNOWN, 3, {}),
    "a check without ground": (skipping("GPU002", excused=True, reason="no GPU"), FIT, 0, {}),
    "a check that never ran": (without_a_skip("TRN001"), UNKNOWN, 3, {}),
    "the launch alone": (untried(select=("LCH001",)), FIT, 0, {}),
    "a stage that was skipped": (untried(stages=("collective",)), UNKNOWN, 3, {}),
    "nccl without GPUs": (
        skipping("TRN001", excused=True, backend="nccl", skip_stages=("p2p", "fabric")), UNKNOWN, 3, {}
    ),
    "gloo without GPUs": (skipping("TRN001", excused=True, backend="gloo"), FIT, 0, {}),
    "a stage without GPUs": (
        skipping("COL001", excused=False, backend="nccl", stages=("collective",)), UNKNOWN, 3, {}
    ),
    "gloo fails, nccl works": (
        in_two_groups(Status.DIED, DONE, DONE, backend="nccl", gpus=1), FIT, 0, {"RUN003.died": (1,)}
    ),
    "both fail": (in_two_groups(Status.DIED, DONE, DIED, backend="nccl", gpus=1), UNFIT, 1, {"RUN003.died": (1,)}),
    "nccl fails": (in_two_groups(Status.DONE, DONE, DIED, backend="nccl", gpus=1), UNFIT, 1, {"RUN003.died": (1,)}),
    "torch without nccl": (
        in_two_groups(Status.DONE, NO_NCCL, NO_NCCL, backend="ncl"), UNFIT, 1, {"RUN003.raised": ()}
    ),
    "one torch without the backend": (
        in_two_groups(Status.DONE, CLOSED, NO_NCL, backend="ncl"), UNFIT, 1, {"RUN003.raised": (1,)}
    ),
    "no end": (recording(ended=False), UNKNOWN, 3, {}),
    "budget": (recording(events=(BUDGET,)), UNKNOWN, 3, {"RUN004.budget": ()}),
    "SIGINT": (recording(events=(SIGINT,)), UNKNOWN, 130, {"RUN004.told": ()}),
    "SIGTERM": (recording(events=(SIGTERM,)), UNKNOWN, 143, {"RUN004.told": ()}),
    "SIGTERM that the end of a rank caused": (
        recording(events=(SIGTERM, LOST)), UNFIT, 1, {"RUN002.lost": (1,), "RUN004.told": ()}
    ),
    "a warning": (with_slow_import(recording()), FIT, 0, {"LCH003.slow-import": (0,)}),
    "a warning, strictly": (
        with_slow_import(recording(options=RunOptions(strict=True))), FIT, 1, {"LCH003.slow-import": (0,)}
    ),
    "a check that was not selected": (recording(wrong=3, options=RunOptions(ignore=("COL",))), FIT, 0, {}),
    "checks made after the recording": (structs.replace(without_a_skip("TRN001"), header=KNOWN), FIT, 0, {}),
}  # fmt: skip


@pytest.mark.parametrize(("run", "verdict", "code", "findings"), RUNS.values(), ids=RUNS)
def test_a_run_is_judged(golden, run: Recording, verdict: Verdict, code: int, findings: dict) -> None:
    judged = report(run)
    assert {finding.code: finding.ranks for finding in judged.findings} == findings
    assert (judged.verdict, judged.exit_code) == (verdict, code)
    golden(judged.sentence, *judged.hosts.caveats, *judged.recording_problems)


def test_a_report_says_more_of_a_run() -> None:
    clean = report(recording())
    assert (clean.ranks[1]["host"], clean.ranks[1]["busbw_bytes_per_s"]) == ("n1", pytest.approx((4 << 20) / 1e-3))
    assert {stage.name: stage.seconds for stage in clean.stages}["collective"] == 2.0, "of its slowest rank"
    assert report(RUNS["a rank that never came"][0]).hosts == HostLists(
        failing=(), healthy=("n0", "n1"), caveats=("the host of rank 2 is not known, so it cannot be excluded",)
    )
    assert report(RUNS["a lost rank"][0]).hosts == HostLists(failing=("n1",), healthy=("n0",))
    assert [f.severity for f in report(RUNS["gloo fails, nccl works"][0]).findings] == [Severity.WARNING]
    for name, code in (("a check that was not selected", "COL001"), ("checks made after the recording", "TRN001")):
        assert not any(line.code == code for line in report(RUNS[name][0]).checks)


def test_a_failure_over_gloo_is_explained(golden) -> None:
    golden(*report(RUNS["gloo fails, nccl works"][0]).findings)


def test_a_check_without_ground_changes_nothing() -> None:
    judged = report(RUNS["a check without ground"][0])
    assert next(line for line in judged.checks if line.code == "GPU002").skipped_because == "no GPU"


def test_a_check_that_runs_nothing_is_left_out_by_its_ground_too(golden) -> None:
    judged = report(recording())
    assert judged.verdict is Verdict.FIT
    golden(next(line for line in judged.checks if line.code == "GPU004").skipped_because)


@pytest.mark.parametrize(
    "data",
    [
        b'{"backend":"gloo","ranks":2,"small_bytes":4,"small_seconds":{"min":0,"median":0,"p95":0,"count":1},'
        b'"large_bytes":4,"large_seconds":{"min":0,"median":0,"p95":0,"count":1},"wrong":0}',
        b"[1, 2]",
        b"{",
        b'{"other": 1}',
    ],
    ids=["another form", "a list", "no JSON", "another version"],
)
def test_data_that_one_rank_sent_in_another_form_is_unreadable_and_no_crash(data: bytes) -> None:
    run = recording()
    judged = report(structs.replace(run, outcomes=(structs.replace(run.outcomes[0], data=Raw(data)), run.outcomes[1])))
    assert judged.verdict is Verdict.UNKNOWN
    assert any(note.startswith("COL001 was not judged") for note in judged.recording_problems)


def test_an_address_that_is_none_is_unreadable_and_no_crash() -> None:
    data = coordinator_name.Data("x", ("x",), 0.1, "n0", ("n0",), None)
    trial = Trial(code="RDZ002", groups=((0,),), kind=Kind.PLAIN, deadline_seconds=5, number=2)
    outcome = Outcome(trial=2, code="RDZ002", rank=0, status=Status.DONE, data=Raw(encode(data)))
    run = recording()
    judged = report(structs.replace(run, trials=(*run.trials, trial), outcomes=(*run.outcomes, outcome)))
    assert judged.verdict is Verdict.UNKNOWN
    assert "RDZ002" in judged.recording_problems[0]


def test_a_threshold_that_is_no_number_is_unreadable_and_no_crash() -> None:
    judged = report(with_slow_import(recording(options=RunOptions(settings={"LCH003.slow_import_seconds": "x"}))))
    assert "LCH003" in judged.recording_problems[0]


def test_an_unknown_signal_is_a_signal(golden) -> None:
    events = (Event(kind=EventKind.SIGNAL, detail=detail) for detail in ("999", "²", "-1", ""))
    all_judged = [report(recording(events=(event,))) for event in events]
    assert {judged.verdict for judged in all_judged} == {Verdict.UNKNOWN}
    golden(*{judged.sentence for judged in all_judged})


def test_every_stage_but_run_has_its_place_in_the_order() -> None:
    stages = [check.stage for check in all_checks()]
    order = list(Stage)
    assert [order.index(stage) for stage in stages] == sorted(order.index(stage) for stage in stages)
