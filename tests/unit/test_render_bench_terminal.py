"""A benchmark in a terminal: for eyes, not for scripts."""

import re

from benches import bench, bench_rank, healthy, series_of, slow
from msgspec import structs

from ddpdiag.model import Report, Verdict
from ddpdiag.model.bench import Bottleneck
from ddpdiag.render.bench import render


def plain(report: Report, width: int) -> str:
    return render(report, tty=False, color=False, width=width)


def drawn(report: Report, width: int, *, details: bool = False) -> list[str]:
    """The lines as a terminal shows them."""
    return re.sub(
        r"\x1b\[[0-9;]*m", "", render(report, tty=True, color=True, width=width, details=details)
    ).splitlines()


def test_in_a_terminal_the_verdict_and_the_figures_come_first():
    lines = drawn(healthy(), 80)
    assert lines[0] == "ddpdiag: FIT: 4 ranks on 2 hosts (n[0-1]), torchrun, gloo"
    assert lines[2] == "torch 2.13.0; 20 calls a size after 5 to warm up; times of the slowest rank"
    assert lines[3:5] == ["", "all_reduce over gloo"]
    assert next(number for number, line in enumerate(lines) if re.match(r"\s+8 ", line)) < 10
    assert not any("nRanks" in line or "Collective test" in line for line in lines)
    whole = drawn(healthy(), 80, details=True)
    assert any("nRanks 4 nHosts 2" in line for line in whole)
    assert "# Using devices" in whole


def test_in_a_terminal_a_slow_rank_is_told_by_its_mark_and_its_finding():
    lines = drawn(slow(), 80)
    assert any(line.startswith("warn     3  n1") for line in lines)
    assert not any(line.startswith("rank 3 on n1:") for line in lines)


def test_fit_with_a_slow_rank_is_no_contradiction_in_a_terminal():
    sentence = "rank 3 on n1 holds the others back: it copies at 0.9 GB/s."
    series = structs.replace(series_of("gloo"), bottleneck=Bottleneck.SLOW_RANK, sentence=sentence)
    report = structs.replace(healthy(bench(series=(series,))), sentence=f"{sentence} More.")
    assert drawn(report, 120)[-1] == f"FIT, but {sentence} More."
    assert plain(report, 120).splitlines()[-1] == f"FIT: {sentence} More."
    assert drawn(structs.replace(report, sentence=f"All well. {sentence}"), 120)[-1].startswith("FIT: All")
    assert drawn(structs.replace(report, verdict=Verdict.UNFIT), 120)[-1].startswith("UNFIT: rank 3")


def test_of_many_alike_ranks_a_terminal_shows_the_ranges():
    many = bench(ranks=tuple(bench_rank(rank, node=f"n{rank // 8}") for rank in range(64)))
    assert not any("  host" in line for line in drawn(healthy(many), 120))
    assert any(line.startswith("64 ranks: time ") for line in drawn(healthy(many), 120))
    assert "56 ranks more; blamed, silent and slowest" in plain(healthy(many), 120)
