"""Pages of a benchmark."""

from benches import bench, bench_rank, healthy, series_of
from msgspec import structs
from pages import Reader
from test_page_blame import built, figure, table, words_of

from ddpdiag.cli.outputs import features_of
from ddpdiag.model import Report
from ddpdiag.render import html

FOUR = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def four() -> Report:
    """Four collectives, each with a sentence of its own; the whole says them together."""
    own = bench("gloo", collectives=FOUR)
    series = tuple(structs.replace(one, sentence=f"{one.collective} is bound by copies.") for one in own.series)
    return structs.replace(healthy(structs.replace(own, series=series)), sentence="All are bound.")


def alone() -> Report:
    """One collective, whose sentence is that of the whole."""
    own = bench("gloo")
    return structs.replace(healthy(own), sentence=own.series[0].sentence)


# Benchmark ------------------------------------------------------------------------------------------------------------


def test_what_the_numbers_mean_is_a_list_and_no_column(golden):
    own = built(four())
    (section,) = [section for section in own.sections if section.name == "benchmark"]
    assert section.items.items == tuple(f"{name} is bound by copies." for name in FOUR)
    assert section.items.name in Reader(html.render(four(), features_of(four()))).text
    golden(section.items.name, "\n".join(column.title for column in table(own, "series").columns))


def test_what_the_page_begins_with_is_not_said_again():
    (section,) = [section for section in built(alone()).sections if section.name == "benchmark"]
    assert section.items is None


def test_the_legend_has_what_is_expected_and_the_latency_numbers_in_words(golden):
    own = built(four())
    golden(words_of(figure(own, "benchmark", "Bus bandwidth").svg), figure(own, "benchmark", "Latency").alt)


def test_every_rank_has_a_bar(golden):
    ranks = tuple(bench_rank(rank, lag_seconds=rank * 1e-5) for rank in range(4))
    drawn = figure(built(healthy(structs.replace(bench("gloo"), ranks=ranks))), "benchmark", "all_reduce over gloo, ")
    golden(drawn.title, words_of(drawn.svg))


def test_a_rank_is_slow_only_where_it_was_judged_so(golden):
    # Who waits spends more time in the call: the times alone would point at the wrong one.
    ranks = [
        bench_rank(rank, lag_seconds=None, seconds=(1e-3, 1e-3, 1.01e-3, 9e-3)[rank], slow="") for rank in range(4)
    ]
    for slow in (None, 0):
        own = tuple(structs.replace(rank, slow="copies slowly" if rank.rank == slow else "") for rank in ranks)
        shown = built(healthy(structs.replace(bench("gloo"), ranks=own)))
        golden(words_of(figure(shown, "benchmark", "all_reduce over gloo, ").svg))


def test_types_are_told_as_far_as_there_are_some():
    series = (series_of(collective="broadcast", op="none", root=0), series_of(op="sum"))
    shown = built(healthy(structs.replace(bench("gloo"), series=series)))
    assert [row[2].text for row in table(shown, "series").rows] == ["float, root 0", "float, sum"]
