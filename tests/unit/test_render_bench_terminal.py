"""A benchmark in a terminal: for eyes, not for scripts."""

import re

from benches import bench, bench_rank, healthy, series_of, slow
from msgspec import structs

from ddpdiag.bench.blocks import expectation_of, render
from ddpdiag.model import Report, Verdict
from ddpdiag.model.bench import Bottleneck


def plain(report: Report, width: int) -> str:
    return render(report, tty=False, color=False, width=width)


def drawn(report: Report, width: int, *, details: bool = False) -> list[str]:
    """The lines as a terminal shows them."""
    return re.sub(
        r"\x1b\[[0-9;]*m", "", render(report, tty=True, color=True, width=width, details=details)
    ).splitlines()


def test_in_a_terminal_the_verdict_and_the_figures_come_first(golden):
    golden("\n".join(drawn(healthy(), 80)))
    whole = drawn(healthy(), 80, details=True)
    assert any("nRanks 4 nHosts 2" in line for line in whole)
    assert "# Using devices" in whole


def test_in_a_terminal_a_slow_rank_has_a_reason_and_its_finding(golden):
    text = "\n".join(drawn(slow(), 80))
    golden(text[text.index("Ranks of ") :])


def test_fit_with_a_slow_rank_is_degraded(golden):
    sentence = "rank 3 on n1 slows the others down: it copies at 0.9 GB/s."
    series = structs.replace(series_of("gloo"), bottleneck=Bottleneck.SLOW_RANK, sentence=sentence)
    report = structs.replace(healthy(bench(series=(series,))), sentence=f"{sentence} More.", degraded=True)
    unfit = structs.replace(report, verdict=Verdict.UNFIT, degraded=False)
    golden(*(drawn(own, 120)[-1] for own in (report, unfit)), plain(report, 120).splitlines()[-1])


def test_of_many_ranks_the_slow_ones_are_shown():
    ranks = (*(bench_rank(rank, host=f"n{rank // 8}") for rank in range(63)), bench_rank(63, host="n7", slow="copies"))
    text = "\n".join(drawn(healthy(bench(ranks=ranks)), 120))
    assert "  63  n7" in text
    assert "48 more ranks" in text


def test_an_expectation_that_was_far_exceeded_is_no_percentage():
    for peak, known in ((1.2e9, False), (1.19e9, True)):
        series = structs.replace(series_of("gloo"), peak_busbw_bytes_per_s=peak)
        level = structs.replace(series.expectation, busbw_bytes_per_s=1e9)
        assert (expectation_of(structs.replace(series, expectation=level)) is not None) is known
