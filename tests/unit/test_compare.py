"""Two runs compared: what counts, which rank is named, what is no regression."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag import comparison as limits
from ddpdiag.bandwidth import busbw
from ddpdiag.checks.api import Seen
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.run import baseline as cmp001
from ddpdiag.codec import indented_json, read_recording
from ddpdiag.compare import command as rendering
from ddpdiag.compare.command import run
from ddpdiag.compare.reports import Comparison, compare
from ddpdiag.comparison import Change, Direction, compare_figures, figure_shift
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge, world_of
from ddpdiag.judgement.reading import read_baseline, read_report
from ddpdiag.model import CheckSummary, Finding, Report, Severity, Verdict
from ddpdiag.model.bench import BenchCurve, BenchPoint
from ddpdiag.model.options import Figure, Sampling, Snapshot

relaxed = settings(deadline=None)
HEALTHY = Path(__file__).parent.parent / "recordings" / "healthy-2-ranks.jsonl"
QUIET = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0)
NOISY = (1.0, 2.6, 0.9, 1.9, 1.0, 3.0, 1.4, 0.8, 2.2, 1.7)
seconds = st.floats(1e-4, 1e2)


def steps(factor: float = 1.0) -> Figure:
    values = tuple(0.005 * factor * each for each in QUIET)
    return Figure(name="step.usual_seconds", title="step", values=values, sampling=Sampling.REPEATS)


def world(values: tuple[float, ...], sampling: Sampling = Sampling.REPEATS, *, is_rate: bool = False) -> Figure:
    return Figure(name="x.seconds", title="x", values=values, sampling=sampling, is_rate=is_rate)


def snapshot(*figures: Figure, busy: float | None = 1.0, **changed) -> Snapshot:
    shape = {"ranks": "2 ranks", "hosts": "1 host", "backend": "gloo"}
    named = {"created": "then", "shape": shape, "facts": {"versions": {"torch": "2.13"}}, "figures": figures, **changed}
    return Snapshot(core_share=busy, **named)


def changes(old: Snapshot, new: Snapshot, direction: Direction = Direction.REGRESSION) -> list[Change]:
    return [change for change in compare_figures(old, new)[1] if change.direction is direction]


@cache
def recorded() -> Report:
    return judge(read_recording([HEALTHY]), all_checks())


@cache
def healthy() -> Report:
    """The recorded one, on cores of its own: nobody looked."""
    return structs.replace(recorded(), snapshot=structs.replace(recorded().snapshot, core_share=1.0))


def report(**changed) -> Report:
    return structs.replace(healthy(), **changed)


def finding(**changed) -> Finding:
    named = {"code": "HST003.small", "severity": Severity.ERROR, "title": "t", "message": "m", **changed}
    return Finding(**named)


def of(old: Report, new: Report) -> Comparison:
    return compare(old, new, old_source="a", new_source="b")


@pytest.mark.parametrize(("then", "now"), [(0.5, 1.0), (None, None)])
def test_times_on_busy_or_unchecked_cores_are_not_judged(golden, then, now) -> None:
    old, new = snapshot(steps(), busy=then), snapshot(steps(1.5), busy=now)
    count, (change,) = compare_figures(old, new)
    assert (count, change.direction) == (0, Direction.UNJUDGED)
    golden(change.text)


def test_where_nobody_looked_times_are_judged_on_gpus_only() -> None:
    old, new = (snapshot(own, busy=None, on_gpus=True) for own in (steps(), steps(1.5)))
    assert [own.name for own in changes(old, new)] == ["step.usual_seconds"]


def test_degraded_is_reported_and_its_finding_is_the_regression() -> None:
    slow = report(degraded=True, sentence="rank 1 on n0 slows the job down.")
    comparison = of(report(), slow)
    (change,) = [change for change in comparison.changes if change.name == "verdict"]
    assert (change.direction, change.text) == (
        Direction.NEUTRAL,
        "verdict: FIT -> FIT, degraded: rank 1 on n0 slows the job down.",
    )
    assert (comparison.old.degraded, comparison.new.degraded, comparison.new.verdict) == (False, True, "fit")
    assert "FIT, degraded: rank 1" in rendering.render(comparison, width=200, color=False)
    assert not [change for change in of(slow, slow).changes if change.name == "verdict"]


def times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * each for each in values)


REPEATS, SUMMARY = Sampling.REPEATS, Sampling.SUMMARY
# Of two healthy runs of one machine: 4 bytes over gloo.
SPREAD = (80e-6, 105e-6, 144e-6)


@pytest.mark.parametrize(
    ("sampling", "old", "new", "is_beyond"),
    [
        (REPEATS, QUIET, times(QUIET, 1.5), True),
        (REPEATS, QUIET, times(QUIET, 0.6), True),
        (REPEATS, QUIET, times(QUIET, 1.3), False),
        (REPEATS, NOISY, times(NOISY, 1.5), False),
        (SUMMARY, (1.0, 1.1, 1.2), (1.7, 1.8, 2.0), True),
        (SUMMARY, (1.0, 1.1, 1.2), (1.1, 1.8, 2.0), False),
        (SUMMARY, SPREAD, (150e-6, 191e-6, 260e-6), False),
        (SUMMARY, SPREAD, (200e-6, 250e-6, 320e-6), True),
    ],
)
def test_figures_must_be_apart_and_far(sampling, old, new, is_beyond) -> None:
    assert figure_shift(world(old, sampling), world(new, sampling)).is_significant is is_beyond


def test_a_single_value_is_reported_and_not_judged(golden) -> None:
    def rate(value: float) -> Snapshot:
        return snapshot(world((value,), Sampling.SINGLE, is_rate=True))

    assert compare_figures(rate(1000.0), rate(800.0))[1] == ()
    (change,) = compare_figures(rate(1000.0), rate(400.0))[1]
    assert (change.direction, change.ratio) == (Direction.NEUTRAL, 2.5)
    golden(change.text)


@pytest.mark.parametrize("values", [(), (0.0,) * 5, (float("nan"),) * 5, (-1.0,) * 5, (1.0,) * 4])
def test_what_is_no_measurement_is_not_compared(values: tuple[float, ...]) -> None:
    assert figure_shift(world(QUIET), world(values)) is None


@relaxed
@given(st.lists(seconds, min_size=5, max_size=12), st.lists(seconds, min_size=5, max_size=12))
def test_the_other_way_round_it_is_the_opposite(one: list[float], other: list[float]) -> None:
    pairs = (one, other), (other, one)
    there, back = (figure_shift(world(tuple(old)), world(tuple(new))) for old, new in pairs)
    assert there.is_significant is back.is_significant
    assert there.ratio == pytest.approx(1 / back.ratio)


SIZES = tuple(8 << power for power in range(24))


def curve(bandwidth: float = 1e9, *, latency: float = 1e-4, cv: float = 0.01, sizes=SIZES, **more) -> BenchCurve:
    """An all-reduce of 2 ranks along a line."""
    points = tuple(
        BenchPoint(size_bytes=size, busbw_bytes_per_s=busbw("all_reduce", size, latency + size / bandwidth, 2), cv=cv)
        for size in sizes
    )
    kind = {"collective": "all_reduce", "backend": "gloo", "dtype": "float", "fabric": {"devices": "AMD EPYC"}}
    return BenchCurve(**{**kind, "points": points, **more})


@pytest.mark.parametrize(
    ("old", "new", "direction"),
    [
        (curve(), curve(), None),
        (curve(), curve(0.96e9), None),
        (curve(), curve(0.8e9, cv=0.2), None),
        (curve(cv=0.2), curve(0.8e9), None),
        (curve(), curve(latency=1.08e-4), None),
        (curve(), curve(latency=1.5e-4, cv=0.3), None),
        (curve(), curve(0.9e9), Direction.REGRESSION),
        (curve(cv=0.2), curve(0.5e9), Direction.REGRESSION),
        (curve(), curve(1.2e9), Direction.IMPROVEMENT),
        (curve(), curve(sizes=(*SIZES[:3], SIZES[-1])), None),
        ((curve(dtype="half")), curve(), Direction.UNJUDGED),
        (curve(fabric={"devices": "Xeon", "network": "10 Gbit/s"}), curve(), Direction.UNJUDGED),
        (curve(sizes=SIZES[10:]), curve(sizes=SIZES[:10]), Direction.UNJUDGED),
    ],
    ids=[
        *("equal", "4 %", "new spread", "old spread", "latency 8 %", "latency", "a tenth less", "half", "better"),
        *("one large size is enough", "another type", "other hardware", "other sizes"),
    ],
)
def test_benchmarks_are_compared_beyond_noise_and_on_equal_hardware(golden, old, new, direction) -> None:
    found = compare_figures(snapshot(series=(old,)), snapshot(series=(new,)))[1]
    assert [change.direction for change in found] == [direction] * (direction is not None)
    golden(*(change.text for change in found))


@relaxed
@given(*[st.lists(st.tuples(st.integers(-1, 4), st.floats(), st.floats()), max_size=6)] * 2)
def test_any_points_are_compared(old: list, new: list) -> None:
    was, now = (
        curve(points=tuple(BenchPoint(size_bytes=s, busbw_bytes_per_s=rate, cv=cv) for s, rate, cv in points))
        for points in (old, new)
    )
    for change in compare_figures(snapshot(series=(was,)), snapshot(series=(now,)))[1]:
        assert change.direction is not Direction.REGRESSION or change.new < change.old


def test_another_world_is_not_compared(golden) -> None:
    other = snapshot(steps(), shape={"ranks": "4 ranks"})
    count, (change,) = compare_figures(snapshot(steps()), other)
    assert (count, change.direction) == (0, Direction.UNJUDGED)
    golden(change.text)


def test_ranks_that_never_came_are_told(golden) -> None:
    recording = read_recording([HEALTHY.parent / "failures" / "host_missing.jsonl"])
    assert recording.header.world_size > len(recording.arrivals)
    golden(judge(recording, all_checks()).snapshot.shape["ranks"], healthy().snapshot.shape["ranks"])


def test_a_run_compared_with_itself_has_no_change() -> None:
    found = of(report(), report())
    assert (found.changes, found.exit_code) == ((), 0)


@pytest.mark.parametrize(
    ("old", "new", "direction", "code"),
    [
        (Verdict.FIT, Verdict.UNFIT, Direction.REGRESSION, 1),
        (Verdict.FIT, Verdict.UNKNOWN, Direction.REGRESSION, 1),
        (Verdict.UNFIT, Verdict.FIT, Direction.IMPROVEMENT, 0),
        (Verdict.UNKNOWN, Verdict.FIT, Direction.IMPROVEMENT, 0),
        (Verdict.UNKNOWN, Verdict.UNFIT, Direction.REGRESSION, 1),
        (Verdict.UNFIT, Verdict.UNKNOWN, Direction.NEUTRAL, 3),
    ],
)
def test_a_verdict_that_changes_counts(old: Verdict, new: Verdict, direction: Direction, code: int) -> None:
    found = of(report(verdict=old), report(verdict=new))
    assert (found.changes[0].direction, found.exit_code) == (direction, code)


def test_what_a_run_that_could_not_look_does_not_see_is_not_gone(golden) -> None:
    old = report(verdict=Verdict.UNFIT, findings=(finding(),), sentence="s")
    found = of(old, report(verdict=Verdict.UNKNOWN, sentence="s"))
    neutral = [(Direction.NEUTRAL, "verdict"), (Direction.NEUTRAL, "HST003.small")]
    assert [(change.direction, change.name) for change in found.changes] == neutral
    assert found.exit_code == 3
    golden(rendering.render(found, width=80, color=False))
    assert of(report(verdict=Verdict.UNKNOWN), report(verdict=Verdict.UNKNOWN)).exit_code == 3


def test_findings_come_go_and_change() -> None:
    stays, worse = finding(title="stays"), finding(code="HST001.a", severity=Severity.WARNING)
    gone = finding(code="HST002.b")
    new = (stays, structs.replace(worse, severity=Severity.ERROR), finding(code="GPU001.c", severity=Severity.NOTE))
    found = of(report(findings=(stays, worse, gone)), report(findings=new))
    assert [(change.direction.value, change.name) for change in found.changes] == [
        ("regression", "HST001.a"), ("improvement", "HST002.b"), ("neutral", "GPU001.c"),
    ]  # fmt: skip


def tried(code: str, **statuses: int) -> tuple[CheckSummary, ...]:
    """The healthy run's checks, of which this one ended otherwise; with no status it was skipped."""
    skip = None if statuses else "the budget was spent"
    return tuple(
        structs.replace(line, statuses=statuses, skipped_because=skip) if line.code == code else line
        for line in healthy().checks
    )


@pytest.mark.parametrize(
    "checks", [tried("HST003"), tried("HST003", done=1, hung=1), ()], ids=["skipped", "hung", "unknown"]
)
def test_what_was_not_looked_at_is_neither_new_nor_gone(golden, checks: tuple[CheckSummary, ...]) -> None:
    blind, seen = report(checks=checks), report(findings=(finding(severity=Severity.WARNING),))
    for old, new in ((blind, seen), (seen, blind)):
        found = of(old, new)
        (change,) = found.changes
        assert (change.direction, change.name, found.exit_code) == (Direction.NEUTRAL, "HST003.small", 0)
        golden(change.text)


@pytest.mark.parametrize(
    ("statuses", "direction"), [({}, Direction.NEUTRAL), ({"done": 2}, Direction.IMPROVEMENT)], ids=["skipped", "done"]
)
def test_a_hang_is_gone_only_where_its_check_was_tried_again(golden, statuses, direction: Direction) -> None:
    old = report(checks=tried("COL001", hung=2), findings=(finding(code="RUN003.hung", ranks=(1,)),))
    (change,) = of(old, report(checks=tried("COL001", **statuses))).changes
    assert (change.direction, change.name) == (direction, "RUN003.hung")
    golden(change.text)


def test_a_check_that_judges_what_others_saw_has_looked_with_its_stage() -> None:
    judge_only = CheckSummary(code="GPU004", name="pcie", stage="gpu", statuses={}, measures=False)
    old = report(checks=(*healthy().checks, judge_only), findings=(finding(code="GPU004.narrow"),))
    assert of(old, structs.replace(old, findings=())).changes[0].direction is Direction.IMPROVEMENT
    blind = structs.replace(old, checks=(*tried("GPU001"), judge_only), findings=())
    assert of(old, blind).changes[0].direction is Direction.NEUTRAL


def variables(**severities: Severity) -> tuple[Finding, ...]:
    return tuple(
        finding(code="LCH002.variable", severity=severity, title=f"{name} differs between 2 ranks")
        for name, severity in severities.items()
    )


def test_several_findings_of_one_code_are_distinguished(golden) -> None:
    warning, error = Severity.WARNING, Severity.ERROR
    one, other = variables(NCCL_DEBUG=warning), variables(NCCL_DEBUG=warning, PYTHONHASHSEED=error)
    (change,) = of(report(findings=one), report(findings=other)).changes
    assert (change.direction, "PYTHONHASHSEED" in change.text) == (Direction.REGRESSION, True)
    (change,) = of(report(findings=other), report(findings=one)).changes
    assert (change.direction, "PYTHONHASHSEED" in change.text) == (Direction.IMPROVEMENT, True)
    assert of(report(findings=other), report(findings=other[::-1])).changes == ()
    swapped = variables(PYTHONHASHSEED=warning, NCCL_DEBUG=warning)
    (change,) = of(report(findings=other), report(findings=swapped)).changes
    assert change.direction is Direction.IMPROVEMENT
    golden(change.text)
    (change,) = of(report(findings=(*one, *one)), report(findings=(*one, *one, *one))).changes
    assert (change.direction, change.name) == (Direction.REGRESSION, "LCH002.variable")


@pytest.mark.parametrize(("busy", "direction"), [(1.0, Direction.REGRESSION), (0.5, Direction.NEUTRAL)])
def test_a_straggler_on_busy_cores_is_not_judged(busy: float, direction: Direction) -> None:
    ran = CheckSummary(code="TRN003", name="steps", stage="training", statuses={"done": 2})
    old = report(snapshot=structs.replace(healthy().snapshot, core_share=busy), checks=(ran,))
    found = of(old, structs.replace(old, findings=(finding(code="TRN003.straggler", severity=Severity.WARNING),)))
    assert next(change.direction for change in found.changes if change.name == "TRN003.straggler") is direction


def test_versions_and_hosts_are_told_last() -> None:
    old = report()
    other = structs.replace(old.snapshot, facts={**old.snapshot.facts, "versions": {"torch": "9.9"}})
    found = of(old, structs.replace(old, snapshot=other))
    assert {change.direction for change in found.changes} == {Direction.NEUTRAL}
    assert any("9.9" in change.text for change in found.changes)
    # A finding about the run of ddpdiag is no regression of the machine.
    assert of(old, report(findings=(finding(code="RUN004.budget", severity=Severity.WARNING),))).exit_code == 0


def test_a_report_without_figures_says_what_to_give(golden) -> None:
    found = of(report(snapshot=None, sentence="s"), report(sentence="s"))
    assert ([change.direction for change in found.changes], found.exit_code) == ([Direction.UNJUDGED], 3)
    golden(rendering.render(found, width=80, color=False))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """The same run, as a recording and as a JSON report."""
    path = tmp_path / "report.json"
    path.write_text(indented_json(recorded()))
    return HEALTHY, path


def test_a_recording_and_a_report_may_be_mixed(golden, runs, capsys) -> None:
    assert run(str(runs[0]), str(runs[1])) == 3
    golden(" ".join(capsys.readouterr().out.rpartition("\n\n")[2].split()))
    assert read_report(str(runs[1])).snapshot == read_report(str(runs[0])).snapshot


def test_json_and_markdown_say_the_same(golden, runs, tmp_path, capsys) -> None:
    worse = tmp_path / "worse.json"
    worse.write_text(indented_json(report(verdict=Verdict.UNFIT, sentence="<b>@all</b>")))
    assert run(str(runs[0]), str(worse), json=str(tmp_path / "c.json"), markdown=str(tmp_path / "c.md")) == 1
    golden(" ".join(capsys.readouterr().out.rpartition("\n\n")[2].split()))
    assert json.loads((tmp_path / "c.json").read_text())["changes"][0]["direction"] == "regression"
    text = (tmp_path / "c.md").read_text()
    assert "<b>" not in text
    assert "@all" not in text
    golden("\n".join(line for line in text.splitlines() if not line.startswith(("**old", "**new"))))


@pytest.mark.parametrize("content", ["", "{}", "[1]", "hello", '{"schema": "other/1"}', "\x00", "[" * 5000])
def test_what_is_no_run_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(UsageError):
        run(str(HEALTHY), str(path))


def test_a_run_is_not_overwritten(golden, runs, tmp_path) -> None:
    with pytest.raises(UsageError) as caught:
        run(str(runs[0]), str(runs[1]), json=str(runs[1]))
    golden(str(caught.value).replace(str(tmp_path), "TMP"))


def judged(old: Snapshot | None) -> list[Finding]:
    recording = read_recording([HEALTHY])
    header = structs.replace(recording.header, options=structs.replace(recording.header.options, baseline=old))
    recording = structs.replace(recording, header=header)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cmp001, "snapshot_of", lambda *_: healthy().snapshot)
        return list(cmp001.CHECK.judge(Seen(world_of(recording), cmp001.CHECK, recording)))


def baseline() -> Snapshot:
    return structs.replace(read_baseline(str(HEALTHY)), core_share=1.0)


def test_without_a_baseline_nothing_is_said() -> None:
    assert judged(None) == []
    assert judged(baseline()) == []


@pytest.mark.parametrize(("speed", "worse"), [(100, {"CMP001.worse": Severity.WARNING}), (0.01, {})])
def test_a_baseline_of_a_quicker_machine_is_a_warning_and_of_a_slower_one_good_to_know(speed, worse) -> None:
    old = baseline()
    own = [
        structs.replace(f, values=tuple(v * speed if f.is_rate else v / speed for v in f.values)) for f in old.figures
    ]
    found = {f.code: f.severity for f in judged(structs.replace(old, figures=tuple(own)))}
    assert found == worse | {"CMP001.changed": Severity.NOTE}


def test_a_baseline_of_another_world_is_not_compared() -> None:
    old = baseline()
    assert [f.code for f in judged(structs.replace(old, shape={"ranks": "16 ranks"}))] == ["CMP001.incomparable"]


def test_the_manual_page_states_the_limits_of_the_code(golden) -> None:
    sentences = re.findall(r"\b[^.]* %[^.]*", " ".join(cmp001.CHECK.manual.partition("Sources")[0].split()))
    ratios = (limits.REPEATS_RATIO, limits.SUMMARY_RATIO, limits.SINGLE_RATIO)
    shares = (*(ratio - 1 for ratio in ratios), limits.MIN_CORE_SHARE)
    stated = [int(number) for sentence in sentences for number in re.findall(r"(\d+) %", sentence)]
    assert stated == [round(100 * share) for share in shares]
    golden(*sentences)


def test_other_versions_are_good_to_know() -> None:
    old = baseline()
    (found,) = judged(structs.replace(old, facts={"versions": {**old.facts["versions"], "torch": "1.0"}}))
    assert (found.code, found.severity) == ("CMP001.changed", Severity.NOTE)


def test_a_baseline_that_cannot_be_read_names_the_option(golden, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--baseline") as caught:
        read_baseline(str(tmp_path / "nothing"))
    golden(str(caught.value).replace(str(tmp_path), "TMP"))
