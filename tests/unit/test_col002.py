"""COL002: the benchmark, judged."""

from dataclasses import replace

import pytest
from benched import FAST, SIZES, benched, data_of, steady
from msgspec import structs
from seen import skip_text, unseen, with_arrivals, world_of

from ddpdiag.bandwidth import rounded_size
from ddpdiag.bench import check as col002
from ddpdiag.bench.data import Data, rank_row
from ddpdiag.bench.judge import bench_report, summary_text
from ddpdiag.bench.series import judge_ranks
from ddpdiag.checks.api import Seen
from ddpdiag.checks.run import baseline as cmp001
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.model import RunOptions, Severity, Status
from ddpdiag.model.bench import BenchRequest, Bottleneck, Limits


def alike(ranks: int, **more) -> dict[int, Data]:
    return {rank: data_of(rank, ranks, steady(), **more) for rank in range(ranks)}


def codes(seen: Seen[Data]) -> list[str]:
    return [finding.code for finding in col002.judge(seen)]


@pytest.mark.parametrize(
    ("ranks", "bench", "expected"),
    [(4, None, []), (2, BenchRequest(min_busbw=5.0), ["COL002.below"]), (2, BenchRequest(min_busbw=0.5), [])],
    ids=["no gate", "below the gate", "above the gate"],
)
def test_equal_ranks_are_blamed_for_nothing_but_the_gate_of_a_script(ranks, bench, expected):
    assert codes(benched(alike(ranks), bench=bench)) == expected


def test_a_row_is_the_time_of_the_slowest_rank():
    times = {0: [1e-3], 1: [4e-3], 2: [2e-3]}
    rows = {rank: data_of(rank, 3, lambda own, _size: times[own], sizes=[1 << 20]) for rank in range(3)}
    (row,) = bench_report(benched(rows)).rows
    assert (row.seconds, row.slowest_rank) == (pytest.approx(4e-3), 1)
    assert row.algbw_bytes_per_s == pytest.approx((1 << 20) / 4e-3)
    assert row.busbw_bytes_per_s == pytest.approx((1 << 20) / 4e-3 * 4 / 3)


def test_a_report_is_worked_out_once():
    seen = benched(alike(2))
    assert bench_report(seen) is bench_report(seen)
    assert bench_report(seen) is not bench_report(benched(alike(2)))
    assert judge_ranks(seen, "gloo") is judge_ranks(seen, "gloo")


def renamed(seen: Seen[Data], *, boot: str | None = None) -> Seen[Data]:
    """All hosts are called n0 now; all have this boot id, if one is given."""
    arrivals = {
        rank: structs.replace(arrival, place=structs.replace(arrival.place, host="n0"), host_id=boot or arrival.host_id)
        for rank, arrival in seen.world.arrivals.items()
    }
    return with_arrivals(seen, arrivals)


def test_two_machines_of_one_name_are_two(golden):
    limits = structs.replace(FAST, nic="eth0", nic_bytes_per_s=0.125e9)
    seen = benched(alike(4, limits=limits), ranks_per_node=2)
    one, same, two = (bench_report(s).series[0].expectation for s in (renamed(seen, boot="b"), renamed(seen), seen))
    assert one is not None
    assert same is not None
    assert two is not None
    golden(one.source, same.source)
    assert same.busbw_bytes_per_s == two.busbw_bytes_per_s == pytest.approx(0.94 * 0.125e9)


def test_the_second_machine_of_a_name_has_a_number(golden):
    slow = structs.replace(FAST, nic="eth0", nic_bytes_per_s=0.0125e9)
    fast = structs.replace(FAST, nic="eth0", nic_bytes_per_s=0.125e9)
    rows = {rank: data_of(rank, 4, steady(), limits=slow if rank > 1 else fast) for rank in range(4)}
    expectation = bench_report(renamed(benched(rows, ranks_per_node=2))).series[0].expectation
    assert expectation is not None
    golden(expectation.source)


def test_every_rank_keeps_its_own_time():
    times = {0: [1e-3, 3e-3], 1: [4e-3, 6e-3]}
    rows = {rank: data_of(rank, 2, lambda own, _size: times[own], sizes=[1 << 20]) for rank in range(2)}
    report = bench_report(benched(rows))
    assert [line.seconds for line in report.ranks] == pytest.approx([2e-3, 5e-3])
    # Who spends least time in it came last: rank 1 waited 3 ms each time, so rank 0 lagged.
    assert [line.lag_seconds for line in report.ranks] == pytest.approx([3e-3, 0])


def test_latency_and_expectation_are_found(golden):
    (series,) = bench_report(benched(alike(2))).series
    assert series.latency_seconds == pytest.approx(100e-6, rel=0.01)
    assert series.expectation is not None
    golden(series.expectation.source)


def test_one_wrong_element_is_an_error(golden):
    rows = alike(2) | {1: data_of(1, 2, steady(), wrong={SIZES[-1]: 1})}
    (finding,) = col002.judge(benched(rows))
    assert (finding.code, finding.severity) == ("COL002.wrong", Severity.ERROR)
    assert finding.ranks == ()
    assert bench_report(benched(rows)).wrong == 1
    golden(finding)


def test_a_rank_that_copies_half_as_fast_is_named_in_table_and_sentence(golden):
    rows = alike(2) | {1: data_of(1, 2, steady(), copies=(5e9,) * 5)}
    seen = benched(rows)
    (finding,) = col002.judge(seen)
    assert (finding.code, finding.ranks, finding.hosts) == ("COL002.slow-rank", (1,), ("n0",))
    report = bench_report(seen)
    assert [bool(line.slow_reason) for line in report.ranks] == [False, True]
    assert report.series[0].bottleneck is Bottleneck.SLOW_RANK
    golden(finding, report.sentence)


def test_more_ranks_than_cores_are_not_judged():
    limits = structs.replace(FAST, cores=2)
    (series,) = bench_report(benched(alike(4, limits=limits))).series
    assert series.bottleneck is Bottleneck.NOT_JUDGED


def test_what_was_measured_before_the_run_was_cut_short_is_kept(golden):
    rows = {0: data_of(0, 2, steady(), sizes=SIZES[:5]), 1: data_of(1, 2, steady(), sizes=SIZES[:3])}
    report = bench_report(benched(rows, statuses={0: Status.HUNG, 1: Status.SKIPPED}))
    assert [row.size_bytes for row in report.rows] == [*SIZES[:3]]
    assert not report.complete
    golden(*report.omissions)


def test_a_sweep_without_one_rank_or_that_was_cut_short_is_not_complete():
    rows = {0: data_of(0, 2, steady()), 1: data_of(1, 2, steady(), sizes=())}
    report = bench_report(benched(rows, statuses={0: Status.HUNG, 1: Status.DIED}))
    assert len(report.rows) == len(SIZES), "a rank that gave nothing hides nothing"
    assert not bench_report(benched({0: data_of(0, 2, steady())}, size=2)).complete
    assert not bench_report(benched(alike(2, is_complete=False))).complete


NOT_MEASURED = {
    "cut short, with a gate": ({"sizes": SIZES[:3], "is_complete": False}, BenchRequest(min_busbw=0.5)),
    "nothing": ({"sizes": (), "notes": ("all left out: too little memory",)}, None),
    "a part": ({"is_complete": False, "notes": ("time was up",)}, None),
}


@pytest.mark.parametrize(("rows", "bench"), NOT_MEASURED.values(), ids=NOT_MEASURED)
def test_what_was_not_measured_is_not_healthy(golden, rows, bench):
    seen = benched(alike(2, **rows), bench=bench)
    (finding,) = col002.judge(seen)
    assert (finding.code, finding.severity) == ("COL002.unmeasured", Severity.WARNING)
    golden(finding)


def empty(size: int, bench: BenchRequest) -> Seen[Data]:
    return unseen(col002.CHECK, world_of(size, options=RunOptions(bench=bench)))


def test_every_collective_is_measured_over_every_backend():
    seen = empty(4, BenchRequest(collective=("all_reduce", "broadcast"), backend=("gloo", "nccl")))
    (trial,) = col002.plan(seen)
    assert trial.params == {"backend": "gloo", "collective": "all_reduce"}
    assert trial.deadline_seconds == pytest.approx(10 + (60 - 6) / 4)
    assert col002.plan(benched(alike(4))) == ()
    named = empty(2, BenchRequest(backend=("nccl", "gloo")))
    (trial,) = col002.plan(named)
    assert (trial.params["backend"], named.uses_other_backend(trial)) == ("nccl", False)


@pytest.mark.parametrize(
    ("now", "code"),
    [
        ({rank: data_of(rank, 2, steady(bytes_per_s=0.9e9)) for rank in range(2)}, "CMP001.worse"),
        (alike(2), None),
        (alike(2, device="Xeon"), "CMP001.incomparable"),
        (alike(4), "CMP001.incomparable"),
    ],
    ids=["a tenth less", "equal", "other hardware", "another world"],
)
def test_a_benchmark_is_compared_with_its_baseline(golden, now, code):
    before = benched(alike(2))
    baseline = snapshot_of(before.world, before.recording, [col002.report(before).section])
    seen = benched(now, baseline=baseline)
    compared = replace(seen.of(cmp001.CHECK), sections=(col002.report(seen).section,))
    found = [*cmp001.judge(compared)]
    assert [finding.code for finding in found] == [code] * (code is not None)
    golden(*found)


def test_what_the_backend_lacks_is_said(golden):
    (finding,) = col002.judge(
        benched(alike(2, sizes=(), unsupported=("all_reduce of half: RuntimeError: gloo does not support half",)))
    )
    assert finding.code == "COL002.unsupported"
    golden(finding)


def test_a_host_far_below_its_links_is_a_warning(golden):
    links = Limits(nvlinks=18, nvlink_switched=True, nvlink_bytes_per_s=371e9, cores=64)
    (finding,) = col002.judge(benched(alike(4, backend="nccl", limits=links, device="H100")))
    assert (finding.code, finding.severity, finding.hosts) == ("COL002.far-below", Severity.WARNING, ("n0",))
    golden(finding)
    assert codes(benched(alike(4, backend="nccl", limits=links), ranks_per_node=2)) == []


def test_a_few_sentences_are_shown_each_once(golden):
    one = bench_report(benched(alike(2))).series[0]
    every = [structs.replace(one, sentence=text) for text in ("A.", "A.", "B.", "C.", "D.", "E.")]
    golden(summary_text(every), summary_text(every[:2]), summary_text([]))


def test_one_rank_alone_has_no_ground():
    assert skip_text(col002.CHECK, world_of(1)) is not None
    assert skip_text(col002.CHECK, world_of(2)) is None


def test_the_figures_of_calls():
    row = rank_row(rounded_size("broadcast", 8, 4, 2), "float", [1.0, 2.0, 3.0, 4.0], None)
    assert (row.min_seconds, row.median_seconds, row.mean_seconds, row.calls) == (1.0, 2.5, 2.5, 4)
    assert (row.cv, row.lag_seconds) == (pytest.approx(1.118034 / 2.5), None)
