"""Pages of a benchmark."""

from benches import bench, bench_rank, healthy
from msgspec import structs

from ddpdiag.bench.blocks import blocks
from ddpdiag.model import Report
from ddpdiag.render.blocks import Chart, Items, Table

FOUR = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def drawn(report: Report, kind: type) -> list:
    """The blocks of one kind."""
    (section,) = blocks(report)
    return [block for block in section.blocks if isinstance(block, kind)]


def test_sentences_are_a_list_without_the_one_of_the_report():
    own = bench("gloo", collectives=FOUR, omissions=())
    series = tuple(structs.replace(one, sentence=f"{one.collective} is bound by copies.") for one in own.series)
    report = healthy(structs.replace(own, series=series))
    (items,) = drawn(report, Items)
    assert items.items == tuple(f"{name} is bound by copies." for name in FOUR)
    assert not drawn(structs.replace(report, sentence=" ".join(items.items)), Items)


def test_charts_have_a_line_for_each_series_and_a_dashed_one_for_its_expectation():
    (busbw,) = drawn(healthy(bench("gloo", collectives=FOUR)), Chart)
    names = [f"{name} over gloo" for name in FOUR]
    assert [(line.name, line.is_dashed) for line in busbw.lines] == [
        *((f"{name}, float", False) for name in names),
        *((f"expected of {name}", True) for name in names),
    ]


def test_the_slow_rank_matters_most_then_the_one_with_the_longest_calls():
    ranks = [bench_rank(rank, slow_reason="copies slowly" if rank == 1 else "") for rank in range(4)]
    table = drawn(healthy(structs.replace(bench("gloo"), ranks=tuple(ranks))), Table)[-1]
    assert table.order == (1, 3, 2, 0)
