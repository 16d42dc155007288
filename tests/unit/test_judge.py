"""From a recording to verdict, exit code and sentence."""

import pytest
from msgspec import Raw, structs
from seen import world_of

from ddpdiag.checks.api import Stage
from ddpdiag.checks.collective import all_reduce
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


def test_a_clean_run_is_fit() -> None:
    judged = report(recording())
    assert (judged.verdict, judged.exit_code, judged.findings) == (Verdict.FIT, 0, ())
    assert judged.ranks[1]["host"] == "n1"
    assert judged.ranks[1]["busbw_bytes_per_s"] == pytest.approx((4 << 20) / 1e-3)


def test_a_stage_takes_as_long_as_its_slowest_rank() -> None:
    assert {stage.name: stage.seconds for stage in report(recording()).stages}["collective"] == 2.0


def test_wrong_values_are_unfit() -> None:
    judged = report(recording(wrong=3))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNFIT, 1)
    assert judged.findings[0].code == "COL001.wrong"


def test_a_dead_rank_is_named_in_the_sentence(golden) -> None:
    judged = report(recording(statuses={1: Status.DIED}))
    assert judged.verdict is Verdict.UNFIT
    assert (judged.findings[0].code, judged.findings[0].ranks) == ("RUN003.died", (1,))
    golden(judged.sentence)


def test_a_rank_that_never_came_is_unknown_and_exit_3(golden) -> None:
    run = recording(events=(Event(kind=EventKind.ABSENT, rank=2, seconds=15.0),), size=3)
    came = {rank: run.arrivals[rank] for rank in (0, 1)}
    judged = report(structs.replace(run, arrivals=came, outcomes=run.outcomes[:2]))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNKNOWN, 3)
    assert judged.findings[0].ranks == (2,)
    assert (judged.hosts.failing, judged.hosts.healthy) == ((), ("n0", "n1"))
    golden(*judged.hosts.caveats)


def test_a_lost_rank_is_unfit_and_told_once() -> None:
    event = Event(kind=EventKind.LOST, rank=1, seconds=2.0, detail="it sent nothing", host_answered=True)
    judged = report(recording(statuses={1: Status.UNHEARD}, events=(event,)))
    assert judged.exit_code == 1
    assert [finding.code for finding in judged.findings] == ["RUN002.lost"]
    assert judged.hosts == HostLists(failing=("n1",), healthy=("n0",))


def test_a_check_that_could_not_run_is_unknown() -> None:
    judged = report(recording(skips=(Skip(code="TRN001", reason="no reason", is_inapplicable=False),)))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNKNOWN, 3)
    assert "TRN001" in judged.sentence


def test_a_check_without_ground_changes_nothing() -> None:
    judged = report(recording(skips=(Skip(code="GPU002", reason="no GPU", is_inapplicable=True),)))
    assert judged.verdict is Verdict.FIT
    assert next(line for line in judged.checks if line.code == "GPU002").skipped_because == "no GPU"


def test_a_check_that_runs_nothing_is_left_out_by_its_ground_too(golden) -> None:
    judged = report(recording())
    assert judged.verdict is Verdict.FIT
    golden(next(line for line in judged.checks if line.code == "GPU004").skipped_because)


def without_skip(code: str, run: Recording) -> Recording:
    return structs.replace(run, skips=tuple(skip for skip in run.skips if skip.code != code))


def test_a_check_that_was_taken_and_never_ran_is_unknown(golden) -> None:
    judged = report(without_skip("TRN001", recording()))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNKNOWN, 3)
    golden(judged.sentence)


def test_only_stages_that_were_done_count_as_tested(golden) -> None:
    only_launch = structs.replace(recording(options=RunOptions(select=("LCH001",))), trials=(), outcomes=())
    golden(report(recording()).sentence, report(only_launch).sentence)
    skipped = structs.replace(recording(options=RunOptions(stages=("collective",))), trials=(), outcomes=())
    assert report(skipped).verdict is Verdict.UNKNOWN


def test_a_named_backend_without_its_gpus_is_unknown(golden) -> None:
    reason = "nccl needs GPUs, and no rank has a visible GPU"
    skips = (Skip(code="TRN001", reason=reason, is_inapplicable=True),)
    judged = report(recording(skips=skips, options=RunOptions(backend="nccl", skip_stages=("p2p", "fabric"))))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNKNOWN, 3)
    golden(judged.sentence)
    assert report(recording(skips=skips, options=RunOptions(backend="gloo"))).verdict is Verdict.FIT


def test_a_stage_without_the_gpus_of_its_backend_has_a_fix() -> None:
    skips = (Skip(code="COL001", reason="nccl needs GPUs, and no rank has a visible GPU", is_inapplicable=False),)
    judged = report(recording(skips=skips, options=RunOptions(backend="nccl", stages=("collective",))))
    assert judged.verdict is Verdict.UNKNOWN
    assert judged.sentence.endswith("or test with --backend gloo.")


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
    judged = report(_with_slow_import(recording(options=RunOptions(settings={"LCH003.slow_import_seconds": "x"}))))
    assert "LCH003" in judged.recording_problems[0]


def test_an_unknown_signal_is_a_signal(golden) -> None:
    events = (Event(kind=EventKind.SIGNAL, detail=detail) for detail in ("999", "²", "-1", ""))
    all_judged = [report(recording(events=(event,))) for event in events]
    assert {judged.verdict for judged in all_judged} == {Verdict.UNKNOWN}
    golden(*{judged.sentence for judged in all_judged})


def over_both(gloo: Status, nccl: Status) -> Report:
    """A job of two GPUs: how all-reduce ended on rank 1 over gloo and over NCCL."""
    run = recording(statuses={1: gloo}, options=RunOptions(backend="nccl"))
    trial = structs.replace(run.trials[0], number=2, params={"backend": "nccl"})
    again = [Outcome(trial=2, code="COL001", rank=0, status=Status.DONE, data=answer())]
    again += [Outcome(trial=2, code="COL001", rank=1, status=nccl, data=answer() if nccl is Status.DONE else Raw())]
    arrivals = world_of(2, ranks_per_node=1, gpus=1).arrivals
    return report(
        structs.replace(run, arrivals=arrivals, trials=(*run.trials, trial), outcomes=(*run.outcomes, *again))
    )


def test_gloos_faults_do_not_condemn_a_job_whose_own_backend_works(golden) -> None:
    judged = over_both(gloo=Status.DIED, nccl=Status.DONE)
    assert (judged.verdict, [f.severity for f in judged.findings]) == (Verdict.FIT, [Severity.WARNING])
    golden(*judged.findings)


def test_gloos_faults_are_errors_where_the_jobs_own_backend_fails_too() -> None:
    judged = over_both(gloo=Status.DIED, nccl=Status.DIED)
    severities = [(finding.code, finding.severity) for finding in judged.findings]
    assert judged.verdict is Verdict.UNFIT
    assert severities == [("RUN003.died", Severity.ERROR)]
    assert over_both(gloo=Status.DONE, nccl=Status.DIED).verdict is Verdict.UNFIT


UNKNOWN_BACKEND = "AbsentBackend: torch 9.9 knows no backend ncl, only gloo, nccl"


def over_a_typo(*errors: str) -> Report:
    """`--backend ncl`: what the ranks raised in its all-reduce, after one over gloo that was done."""
    run = recording(options=RunOptions(backend="ncl"))
    trial = structs.replace(run.trials[0], number=2, params={"backend": "ncl"})
    failed = {"trial": 2, "code": "COL001", "status": Status.RAISED}
    again = [Outcome(**failed, rank=rank, error=error) for rank, error in enumerate(errors)]
    return report(structs.replace(run, trials=(*run.trials, trial), outcomes=(*run.outcomes, *again)))


def test_a_torch_that_was_built_without_the_backend_is_no_wrong_usage() -> None:
    absent = "AbsentBackend: torch 9.9 was built without nccl; it has gloo"
    judged = over_a_typo(absent, absent)
    assert (judged.verdict, judged.exit_code) == (Verdict.UNFIT, 1)
    assert [finding.code for finding in judged.findings] == ["RUN003.raised"]


def test_a_rank_whose_torch_alone_lacks_the_backend_is_blamed() -> None:
    judged = over_a_typo("RuntimeError: Connection closed by peer", UNKNOWN_BACKEND)
    assert judged.verdict is Verdict.UNFIT
    assert [(finding.code, finding.ranks) for finding in judged.findings] == [("RUN003.raised", (1,))]


def test_a_recording_without_an_end_is_never_fit(golden) -> None:
    judged = report(recording(ended=False))
    assert judged.verdict is Verdict.UNKNOWN
    golden(*judged.recording_problems)


BUDGET = Event(kind=EventKind.BUDGET, seconds=57.0, detail="before TRN001 could run")
SIGNALS = [(Event(kind=EventKind.SIGNAL, detail=signum), code) for signum, code in (("2", 130), ("15", 143))]


@pytest.mark.parametrize(("event", "code"), [(BUDGET, 3), *SIGNALS], ids=["budget", "SIGINT", "SIGTERM"])
def test_a_run_that_ended_early_is_unknown(event: Event, code: int) -> None:
    judged = report(recording(events=(event,)))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNKNOWN, code)


def test_a_vanished_rank_outranks_the_sigterm_that_its_end_caused() -> None:
    lost = Event(kind=EventKind.LOST, rank=1, seconds=2.0, detail="silent")
    assert report(recording(events=(Event(kind=EventKind.SIGNAL, detail="15"), lost))).exit_code == 1


def test_strict_makes_warnings_count_in_the_exit_code_only() -> None:
    def strict(*, strict: bool) -> Report:
        return judge(_with_slow_import(recording(options=RunOptions(strict=strict))), all_checks())

    assert (strict(strict=False).verdict, strict(strict=False).exit_code) == (Verdict.FIT, 0)
    assert (strict(strict=True).verdict, strict(strict=True).exit_code) == (Verdict.FIT, 1)


def _with_slow_import(run: Recording) -> Recording:
    from ddpdiag.checks.launch import versions

    data = versions.Data(python="3.11.7", torch="2.13.0", import_seconds=42.0, import_core_seconds=2.0)
    trial = Trial(code="LCH003", groups=((0,),), kind=Kind.TORCH, deadline_seconds=5, number=2)
    outcome = Outcome(trial=2, code="LCH003", rank=0, status=Status.DONE, data=Raw(encode(data)))
    return structs.replace(run, trials=(*run.trials, trial), outcomes=(*run.outcomes, outcome))


def test_checks_that_were_not_selected_are_not_judged() -> None:
    judged = report(_with_slow_import(recording(wrong=3, options=RunOptions(ignore=("COL",)))))
    assert judged.verdict is Verdict.FIT
    assert not any(line.code == "COL001" for line in judged.checks)


def test_every_stage_but_run_has_its_place_in_the_order() -> None:
    stages = [check.stage for check in all_checks()]
    order = list(Stage)
    assert [order.index(stage) for stage in stages] == sorted(order.index(stage) for stage in stages)


def test_a_check_that_came_after_the_recording_is_not_missed_in_it() -> None:
    run = recording()
    known = structs.replace(run.header, checks=("COL001", "RUN001", "RUN002", "RUN003", "RUN004"))
    judged = judge(structs.replace(run, header=known), all_checks())
    assert judged.verdict is Verdict.FIT
    assert not any(line.code == "TRN001" for line in judged.checks)
