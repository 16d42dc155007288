"""How a run is held against what was expected of it."""

from fault import NOBODY, Blame, Fault
from launch import Bed
from runs import Result


def _finding(code="RUN003.hung", severity="error", ranks=(), hosts=(), links=()):
    return {"code": code, "severity": severity, "ranks": list(ranks), "hosts": list(hosts), "links": list(links)}


def _result(blame, *findings, seconds=5.0, **fields):
    fault = Fault(about="", expect=("RUN003.hung",), blame=blame, bed=Bed(ranks=(2, 2, 2)), budget=20, **fields)
    report = {"findings": list(findings), "seconds": seconds, "exit_code": 1}
    return Result("name", fault, seconds, report=report, ended=True, reached=True)


def test_the_guilty_alone_is_right():
    result = _result(Blame(ranks={2}), _finding(ranks=[2], hosts=["h1"]))
    assert result.is_detected
    assert result.blames_right
    assert result.innocents == ()


def test_somebody_else_is_wrong_and_innocent():
    result = _result(Blame(ranks={2}), _finding(ranks=[2, 4], hosts=["h1", "h2"]))
    assert not result.blames_right
    assert result.innocents == ("rank 4", "h2")


def test_nobody_is_wrong_and_no_innocent():
    result = _result(Blame(ranks={2}), _finding())
    assert not result.blames_right
    assert result.innocents == ()


def test_whoever_cannot_be_known_must_not_be_named():
    assert _result(NOBODY, _finding()).blames_right
    assert _result(NOBODY, _finding(hosts=["h0"])).innocents == ("h0",)


def test_a_rank_of_a_guilty_host_is_guilty():
    result = _result(Blame(hosts={"h1"}), _finding(hosts=["h1"]), _finding("RUN002.lost", ranks=[3], hosts=["h1"]))
    assert result.blames_right
    assert result.innocents == ()


def test_an_end_of_a_bad_link_is_not_to_blame():
    blame = Blame(links={"h0 -> h1"})
    assert _result(blame, _finding(links=["h0 -> h1"])).blames_right
    assert not _result(blame, _finding(links=["h0 -> h1"], hosts=["h1"])).blames_right
    assert _result(blame, _finding(links=["h2 -> h1"])).innocents == ("h2 -> h1",)


def test_every_link_of_a_bad_host_may_be_named():
    result = _result(Blame(hosts={"h1"}), _finding(hosts=["h1"], links=["h0 -> h1", "h2 -> h1"]))
    assert result.blames_right
    assert result.innocents == ()


def test_who_is_tolerated_may_be_named_or_not():
    blame = Blame(links={"h2 -> h0"}, tolerated={"h2"})
    assert _result(blame, _finding(links=["h2 -> h0"], hosts=["h2"])).blames_right
    assert _result(blame, _finding(links=["h2 -> h0"])).blames_right


def test_a_finding_must_be_serious_enough():
    warning = _finding(severity="warning", ranks=[2])
    assert not _result(Blame(ranks={2}), warning).is_detected
    assert _result(Blame(ranks={2}), warning, severity="warning").is_detected


def test_a_warning_counts_beside_errors_of_others():
    other = _finding("RUN002.lost", ranks=[4])
    result = _result(Blame(ranks={2}), _finding(severity="warning", ranks=[2]), other, severity="warning")
    assert result.blames_right
    assert result.innocents == ("rank 4",)


def test_a_sentence_that_was_expected_must_be_said():
    assert not _result(Blame(ranks={2}), _finding(ranks=[2]), says={"rank2": "refused"}).is_detected


def test_late_is_late():
    assert _result(NOBODY, seconds=19).is_in_time
    assert not _result(NOBODY, seconds=21).is_in_time


def test_what_is_wrong_with_a_run_is_said_in_words():
    assert _result(Blame(ranks={2}), _finding(ranks=[2], hosts=["h1"])).flaws == []
    flaws = _result(Blame(ranks={2}), _finding(ranks=[4], hosts=["h2"]), seconds=60.0, exit_code=3).flaws
    assert [flaw.split(" ")[0] for flaw in flaws] == ["Blame(ranks={2},", "blamed", "60.0", "exit"]
