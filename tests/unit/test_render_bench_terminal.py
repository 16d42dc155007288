"""A benchmark in a terminal: for eyes, not for scripts."""

import re

from benches import bench, bench_rank, healthy, series_of, slow
from msgspec import structs

from ddpdiag.bench.plot import expectation_of
from ddpdiag.bench.terminal import render
from ddpdiag.model import Report, Verdict
from ddpdiag.model.bench import Bottleneck


def plain(report: Report, width: int) -> str:
    return render(report, tty=False, color=False, width=width)


def drawn(report: Report, width: int, *, details: bool = False) -> list[str]:
    """The lines as a terminal shows them."""
    return re.sub(
        r"\x1b\[[0-9;]*m", "", render(report, tty=True, color=True, width=width, details=details)
    ).splitlines()


def ranks_of(text: str) -> str:
    """The paragraph of the ranks."""
    return re.split(r"\n#?\n", text[text.index("ranks of ") :])[0]


def test_in_a_terminal_the_verdict_and_the_figures_come_first(golden):
    golden("\n".join(drawn(healthy(), 80)))
    whole = drawn(healthy(), 80, details=True)
    assert any("nRanks 4 nHosts 2" in line for line in whole)
    assert "# Using devices" in whole


def test_in_a_terminal_a_slow_rank_is_told_by_its_mark_and_its_finding(golden):
    text = "\n".join(drawn(slow(), 80))
    golden(text[text.index("ranks of ") :])


def test_fit_with_a_slow_rank_is_degraded(golden):
    sentence = "rank 3 on n1 slows the others down: it copies at 0.9 GB/s."
    series = structs.replace(series_of("gloo"), bottleneck=Bottleneck.SLOW_RANK, sentence=sentence)
    report = structs.replace(healthy(bench(series=(series,))), sentence=f"{sentence} More.", degraded=True)
    unfit = structs.replace(report, verdict=Verdict.UNFIT, degraded=False)
    golden(*(drawn(own, 120)[-1] for own in (report, unfit)), plain(report, 120).splitlines()[-1])


def test_of_many_alike_ranks_a_terminal_shows_the_ranges(golden):
    many = healthy(bench(ranks=tuple(bench_rank(rank, host=f"n{rank // 8}") for rank in range(64))))
    golden(ranks_of("\n".join(drawn(many, 120))), ranks_of(plain(many, 120)))


def test_an_expectation_that_was_far_exceeded_is_no_percentage():
    for peak, known in ((1.2e9, False), (1.19e9, True)):
        series = structs.replace(series_of("gloo"), peak_busbw_bytes_per_s=peak)
        level = structs.replace(series.expectation, busbw_bytes_per_s=1e9)
        assert (expectation_of(structs.replace(series, expectation=level)) is not None) is known
    beyond = structs.replace(series_of("gloo"), peak_busbw_bytes_per_s=1.7e9, share=1.7 / 1.3)
    near = structs.replace(series_of("gloo"), peak_busbw_bytes_per_s=1.5e9, share=1.5 / 1.3)
    assert "1.7 GB/s busbw at 128 MiB: more than the 1.3 GB/s expected" in plain(healthy(bench(series=(beyond,))), 160)
    assert "1.5 GB/s busbw at 128 MiB: 115 % of 1.3 GB/s expected" in plain(healthy(bench(series=(near,))), 160)
