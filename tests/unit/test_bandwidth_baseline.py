"""Earlier runs: read and written, found again, held against this one."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag.bandwidth import busbw
from ddpdiag.codec import LARGEST_NUMBER, SMALLEST_NUMBER
from ddpdiag.comparison.benchmarks import dumps, find, loads, merge, missing, series_of, shape_of, slower, worse
from ddpdiag.errors import UsageError
from ddpdiag.model.bench import BaselineRow, BaselineSeries, BenchRow, Measured, RankTime, Spread

# The machine may be busy.
relaxed = settings(deadline=None)

SIZES = tuple(8 << power for power in range(24))


def series(
    latency: float = 1e-4, bandwidth: float = 1e9, *, cv: float = 0.01, sizes: tuple[int, ...] = SIZES, **more: Any
) -> BaselineSeries:
    """An all-reduce of 2 ranks along a line."""
    rows = tuple(
        BaselineRow(size_bytes=size, busbw_bytes_per_s=busbw("all_reduce", size, latency + size / bandwidth, 2), cv=cv)
        for size in sizes
    )
    plain = BaselineSeries(
        collective="all_reduce",
        backend="gloo",
        dtype="float",
        op="sum",
        shape=shape_of({"n0": range(2)}),
        fabric={"device": "AMD EPYC"},
        created="2026-01-01T00:00:00Z",
        rows=rows,
    )
    return structs.replace(plain, **more)


names = st.sampled_from(["a", "b"])
words = st.dictionaries(names, names, max_size=2)
floats = st.just(0.0) | st.floats(SMALLEST_NUMBER, LARGEST_NUMBER)
many = st.lists(
    st.builds(
        BaselineSeries,
        collective=names,
        backend=st.just("gloo"),
        dtype=names,
        op=st.sampled_from(["sum", "none"]),
        shape=words,
        fabric=words,
        created=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=5),
        rows=st.lists(
            st.builds(BaselineRow, size_bytes=st.integers(0, 1 << 50), busbw_bytes_per_s=floats, cv=floats), max_size=4
        ).map(tuple),
    ),
    max_size=5,
)


@relaxed
@given(many)
def test_what_is_written_is_read_again(runs: list[BaselineSeries]) -> None:
    assert loads(dumps(runs), "base.json") == tuple(runs)


@relaxed
@given(many, many)
def test_of_two_runs_with_one_key_the_new_one_stays(old: list[BaselineSeries], new: list[BaselineSeries]) -> None:
    merged = merge(old, new)
    assert merge(merged, new) == merged
    assert merge(merged, ()) == merged
    assert all(find(merged, run) == latest for run, latest in zip(new, (_last(new, run) for run in new), strict=True))
    assert all(not isinstance(find(merged, run), str) for run in old)


def _last(runs: list[BaselineSeries], like: BaselineSeries) -> BaselineSeries:
    key = ("collective", "backend", "dtype", "op", "shape", "fabric")
    return [run for run in runs if all(getattr(run, name) == getattr(like, name) for name in key)][-1]


@relaxed
@given(many, many)
def test_who_has_no_comparable_run_gets_a_reason(old: list[BaselineSeries], new: list[BaselineSeries]) -> None:
    for run in new:
        found = find(old, run)
        assert found if isinstance(found, str) else found in old


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        "[" * 100_000,
        '{"schema": "ddpdiag.baseline/1", "series": [{}]}',
        "\ud800",
        '{"schema": "ddpdiag.report/1"}',
    ],
    ids=["empty", "list", "no schema", "deep", "no series", "no text", "other schema"],
)
def test_an_unreadable_file_is_a_sentence(golden, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        loads(text, "base.json")
    # What the decoder says of it follows, and differs between its versions.
    golden(str(caught.value).partition(": ")[0])


def test_a_file_is_json_that_people_can_read() -> None:
    text = dumps([series()])
    assert json.loads(text)["schema"] == "ddpdiag.baseline/1"
    assert "\n" in text.strip()


def test_the_run_of_this_world_is_found_among_others() -> None:
    wanted = series()
    others = [series(backend="nccl"), series(shape=shape_of({"n0": range(8)})), wanted, series(dtype="half")]
    assert find(others, series(2e-4)) == wanted


OTHER_WORLD = series(shape=shape_of({"n0": range(8), "n1": range(8)}))
OTHER = structs.replace(OTHER_WORLD, fabric={"device": "Xeon"})


@pytest.mark.parametrize(
    "old",
    [
        [OTHER_WORLD],
        [series(fabric={"device": "Xeon", "network": "eth0"})],
        [OTHER, series(fabric={"device": "Xeon"}), OTHER],
        [series(collective="broadcast", op="none")],
        [],
    ],
    ids=["another world", "other hardware", "the nearest of three", "another collective", "no run"],
)
def test_what_makes_runs_not_comparable_is_told(golden, old: list[BaselineSeries]) -> None:
    reason = find(old, series())
    assert isinstance(reason, str)
    golden(reason)


def test_the_shape_tells_uneven_hosts_from_even_ones() -> None:
    assert shape_of({"a": [0], "b": [1, 2, 3]}) == {"ranks": "4 ranks", "hosts": "2 hosts (1 to 3 ranks each)"}
    assert shape_of({"a": [0]}) == {"ranks": "1 rank", "hosts": "1 host"}
    assert shape_of({}) == {"ranks": "0 ranks", "hosts": "0 hosts"}


def test_an_equal_run_is_not_worse() -> None:
    assert worse(series(), series()) == ()
    assert slower(series(), series(), 2) is None


def test_a_tenth_less_bandwidth_is_worse_at_large_sizes_only() -> None:
    found = worse(series(), series(bandwidth=0.9e9))
    assert found[-1].size_bytes == SIZES[-1]
    assert found[-1].share == pytest.approx(0.1, abs=0.01)
    assert all(each.size_bytes >= 64 << 10 for each in found)
    assert slower(series(), series(bandwidth=0.9e9), 2) is None


def test_a_twentieth_is_within_what_runs_differ_by() -> None:
    assert worse(series(), series(bandwidth=0.96e9)) == ()


def test_less_than_the_calls_spread_is_not_worse() -> None:
    assert worse(series(), series(bandwidth=0.8e9, cv=0.2)) == ()
    assert worse(series(cv=0.2), series(bandwidth=0.8e9)) == ()
    assert worse(series(cv=0.2), series(bandwidth=0.5e9)) != ()


def test_small_messages_are_compared_by_their_time() -> None:
    found = slower(series(), series(latency=2e-4), 2)
    assert found is not None
    assert found.share == pytest.approx(1.0, abs=0.05)
    assert found.old_seconds == pytest.approx(1e-4, rel=0.05)
    assert found.new_seconds == pytest.approx(2e-4, rel=0.05)
    assert slower(series(), series(latency=1.15e-4), 2) is None
    assert slower(series(), series(latency=1.5e-4, cv=0.3), 2) is None


def test_only_sizes_of_both_runs_are_compared() -> None:
    assert worse(series(), series(bandwidth=0.5e9, sizes=(7, 9))) == ()


@relaxed
@given(
    st.lists(st.tuples(st.integers(-1, 4), st.floats(), st.floats()), max_size=6),
    st.lists(st.tuples(st.integers(-1, 4), st.floats(), st.floats()), max_size=6),
    st.integers(0, 4),
)
def test_any_rows_are_compared(old: list[Any], new: list[Any], ranks: int) -> None:
    was, now = (
        series(rows=tuple(BaselineRow(size_bytes=s, busbw_bytes_per_s=rate, cv=cv) for s, rate, cv in rows))
        for rows in (old, new)
    )
    assert all(each.new_bytes_per_s < each.old_bytes_per_s for each in worse(was, now))
    slower(was, now, ranks)


def spread(mean: float, stdev: float) -> Spread:
    return Spread(min=mean, median=mean, p95=mean, p99=mean, max=mean, mean=mean, stdev=stdev, count=20)


def row(size: int, rate: float, *, cycle: int = 0, collective: str = "all_reduce", in_place: bool = True) -> BenchRow:
    ranks = (
        RankTime(rank=0, seconds=spread(1.0, 0.5)),
        RankTime(rank=1, seconds=spread(2.0, 0.2)),
    )
    measured = Measured(seconds=2.0, algbw_bytes_per_s=rate, busbw_bytes_per_s=rate, wrong=0, calls=20, ranks=ranks)
    return BenchRow(
        backend="gloo",
        collective=collective,
        cycle=cycle,
        size_bytes=size,
        count=size // 4,
        dtype="float",
        op="sum",
        root=-1,
        in_place=measured if in_place else None,
    )


def test_a_run_becomes_one_series_for_each_collective() -> None:
    rows = [row(8, 1.0), row(4, 2.0), row(8, 1.0, collective="reduce"), row(16, 1.0, in_place=False)]
    reduced, other = series_of(rows, shape={"ranks": "2 ranks"}, fabric={}, created="now")
    assert (reduced.collective, other.collective) == ("all_reduce", "reduce")
    assert [each.size_bytes for each in reduced.rows] == [4, 8]
    assert reduced.shape == {"ranks": "2 ranks"}


def test_cycles_are_one_row_with_their_median_and_the_spread_of_the_slowest_rank() -> None:
    ((only,),) = (
        run.rows
        for run in series_of(
            [row(8, rate, cycle=at) for at, rate in enumerate((5.0, 1.0, 3.0))], shape={}, fabric={}, created=""
        )
    )
    assert only == BaselineRow(size_bytes=8, busbw_bytes_per_s=3.0, cv=0.1)


def test_a_row_without_ranks_has_no_spread() -> None:
    bare = structs.replace(row(8, 1.0), in_place=None, out_of_place=structs.replace(row(8, 1.0).in_place, ranks=()))
    assert series_of([bare], shape={}, fabric={}, created="")[0].rows[0].cv == 0.0


def test_a_run_of_small_messages_misses_what_the_baseline_is_about() -> None:
    """Half of the peak of a line comes at latency x bandwidth: 100 kB, so from 128 KiB on."""
    large = tuple(size for size in SIZES if size >= 128 << 10)
    assert missing(series(), series(sizes=SIZES[:10])) == large
    assert worse(series(), series(bandwidth=0.5e9, sizes=SIZES[:10])) == ()


def test_one_large_size_is_enough_to_compare() -> None:
    assert missing(series(), series(sizes=(*SIZES[:3], SIZES[-1]))) == ()
    assert missing(series(), series()) == ()
    assert missing(series(sizes=()), series()) == ()
    assert missing(series(), series(sizes=())) != ()


@relaxed
@given(many, many)
def test_what_is_missing_was_in_the_old_run_and_is_not_in_the_new(
    old: list[BaselineSeries], new: list[BaselineSeries]
) -> None:
    for was, now in zip(old, new, strict=False):
        lost = missing(was, now)
        assert set(lost) <= {row.size_bytes for row in was.rows}
        assert list(lost) == sorted(lost)
        measured = {row.size_bytes for row in now.rows if 0 < row.busbw_bytes_per_s < float("inf")}
        assert not measured & set(lost)
