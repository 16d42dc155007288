"""What became of each stage, also by what checks of the run find; and how far an interrupted run came."""

from pathlib import Path

from msgspec import structs
from test_judge import recording, report

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.model import Event, EventKind, ProcessState, Recording, Report, Severity, StageSummary, Status, Verdict
from ddpdiag.render.terminal import render

RECORDINGS = Path(__file__).parents[1] / "recordings"
TOLD = Event(kind=EventKind.SIGNAL, seconds=3.3, detail="2")


def stage(judged: Report, name: str) -> StageSummary:
    return next(line for line in judged.stages if line.name == name)


def marked(judged: Report, name: str) -> str:
    """The mark of a stage on the page."""
    lines = render(judged, color=False, width=80).splitlines()
    return next(line.split()[0] for line in lines if line.split()[1:2] == [name])


def cut(run: Recording) -> Recording:
    """The same run, ended by Ctrl-C in the middle of its only trial."""
    told = (structs.replace(own, status=Status.SKIPPED, interrupted=True) for own in run.outcomes)
    return structs.replace(run, outcomes=tuple(told), events=(TOLD,))


def test_a_stage_whose_trial_an_error_is_about_has_failed() -> None:
    judged = report(recording(statuses={1: Status.DIED}))
    assert (stage(judged, "collective").status, stage(judged, "collective").severity) == ("died", Severity.ERROR)
    assert marked(judged, "collective") == "FAIL"


def test_a_rank_that_waited_for_the_one_at_fault_did_not_hang() -> None:
    judged = report(recording(size=3, statuses={0: Status.HUNG, 1: Status.DIED}))
    line = next(check for check in judged.checks if check.code == "COL001")
    assert (line.statuses, line.affected_counts) == ({"hung": 1, "died": 1, "done": 1}, {"hung": 1})
    assert line.outcome_counts == {"died": 1, "done": 1, "affected": 1}
    assert " 1 affected" in render(judged, color=False, width=80)


def test_a_failure_that_another_error_explains_is_a_note_and_its_stage_has_failed() -> None:
    judged = judge(read_recording([RECORDINGS / "p2p-broken-2-ranks.jsonl"]), all_checks())
    severities = {finding.code: finding.severity for finding in judged.findings}
    assert severities["P2P003.fallback"] is Severity.ERROR
    assert severities["RUN003.hung"] is Severity.NOTE
    assert marked(judged, "collective") == "FAIL"
    assert "cannot train" in judged.sentence
    assert "more error" not in judged.sentence


def test_what_is_told_of_the_first_trial_holds_for_later_ones_that_fail_alike() -> None:
    run = recording(statuses={1: Status.DIED})
    later = structs.replace(run.trials[0], number=2, code="TRN001")
    outcomes = (structs.replace(own, trial=2, code="TRN001") for own in run.outcomes if own.rank == 1)
    skips = tuple(skip for skip in run.skips if skip.code != "TRN001")
    run = structs.replace(run, trials=(*run.trials, later), outcomes=(*run.outcomes, *outcomes), skips=skips)
    judged = report(run)
    assert [finding.code for finding in judged.findings if finding.code.startswith("RUN")] == ["RUN003.died"]
    assert stage(judged, "training").severity is Severity.ERROR


def test_a_stage_in_which_a_rank_was_lost_has_failed() -> None:
    event = Event(kind=EventKind.LOST, rank=1, seconds=2.0, detail="it sent nothing", host_answered=True)
    judged = report(recording(statuses={1: Status.UNHEARD}, events=(event,)))
    assert stage(judged, "collective").severity is Severity.ERROR


def test_the_launch_has_failed_of_which_ranks_never_came_and_took_as_long_as_they_were_waited_for(golden) -> None:
    run = recording(events=(Event(kind=EventKind.ABSENT, rank=2, seconds=15.0),), size=3)
    came = {rank: run.arrivals[rank] for rank in (0, 1)}
    launch = stage(report(structs.replace(run, arrivals=came, outcomes=run.outcomes[:2])), "launch")
    assert (launch.status, launch.severity, launch.seconds) == ("error", Severity.ERROR, 15.0)
    golden(launch.detail)


def test_a_stage_that_was_not_finished_in_time_is_no_failure() -> None:
    run = recording(statuses={0: Status.HUNG})
    going = ProcessState(pid=7, state="R", step_seconds=0.01)
    outcomes = tuple(
        structs.replace(own, process=going, step_count=5) if own.status is Status.HUNG else own for own in run.outcomes
    )
    judged = report(structs.replace(run, outcomes=outcomes))
    assert judged.findings[0].code == "RUN004.unfinished"
    assert stage(judged, "collective").severity is None
    assert marked(judged, "collective") == "??"


def test_a_stage_that_was_running_at_ctrl_c_was_not_skipped(golden) -> None:
    judged = report(cut(recording()))
    assert (stage(judged, "collective").status, marked(judged, "collective")) == ("interrupted", "??")
    golden(stage(judged, "collective").detail)


def test_an_interrupted_run_says_when_and_where_and_asks_nobody_to_find_out_who_ended_it(golden) -> None:
    judged = report(cut(recording()))
    assert (judged.verdict, judged.exit_code, judged.recording_problems) == (Verdict.UNKNOWN, 130, ())
    assert [finding.severity for finding in judged.findings] == [Severity.NOTE]
    parts = render(judged, color=False, width=80).split("\n\n")
    golden(parts[2], parts[-1])


def test_what_was_fine_before_ctrl_c_is_said(golden) -> None:
    golden(report(structs.replace(recording(), events=(TOLD,))).sentence)


def test_who_had_come_before_ctrl_c_is_said_where_ranks_were_waited_for(golden) -> None:
    run = recording(size=3)
    run = structs.replace(run, arrivals={0: run.arrivals[0]}, trials=(), outcomes=(), events=(TOLD,))
    golden(report(run).sentence)


def test_an_error_before_ctrl_c_stays_the_verdict() -> None:
    judged = report(structs.replace(recording(wrong=3), events=(TOLD,)))
    assert (judged.verdict, judged.exit_code) == (Verdict.UNFIT, 130)
