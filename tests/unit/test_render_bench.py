"""A benchmark for people, and for scripts that read the output of nccl-tests."""

import csv
import re
from io import StringIO
from pathlib import Path

import pytest
from benches import RANKS, SIZES, bench, bench_rank, healthy, mode, row, series_of, slow, unmeasured
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag.bench.blocks import expectation_of, render
from ddpdiag.bench.rows import HEADER, line, number, to_csv
from ddpdiag.model import Report
from ddpdiag.model.bench import Bench, Bottleneck

REPORTS = [
    healthy(),
    healthy(bench("nccl", "gloo")),
    healthy(bench("gloo", collectives=("all_reduce", "all_gather"))),
    slow(),
    unmeasured(),
    healthy(structs.replace(bench(), notes=())),
]


def plain(report: Report, *, width: int = 80, details: bool = False) -> str:
    return render(report, color=False, width=width, details=details)


def paragraph(report: Report, beginning: str) -> str:
    """The part of the plain text that begins so."""
    return next(part for part in re.split(r"\n#?\n", plain(report, width=200)) if part.startswith(beginning))


def parsed(text: str) -> list[list[str]]:
    """The fields of each row, as scripts around nccl-tests find them."""
    return [found.split() for found in text.splitlines() if re.match(r"\s+\d", found)]


def test_the_columns_are_those_of_nccl_tests():
    # Printed by nccl-tests' own formats (src/util.cu); spaces at line ends are not kept.
    golden = (Path(__file__).parent / "golden" / "nccl-tests-header.txt").read_text(encoding="utf-8")
    assert [head.rstrip() for head in HEADER] == golden.splitlines()


def test_a_row_is_that_of_nccl_tests():
    text = line(row(1 << 20))
    assert text[:52] == "     1048576        262144     float     sum      -1"
    assert text[52:] == "  1690.00    0.62    0.93       0  1656.87    0.63    0.95       0"


def test_rows_read_back_as_the_numbers_that_they_were():
    report = healthy()
    rows = parsed(plain(report))
    assert [int(fields[0]) for fields in rows] == list(SIZES)
    for fields, row_ in zip(rows, report.bench.rows, strict=True):
        assert len(fields) == 13
        assert fields[1:5] == [str(row_.count), "float", "sum", "-1"]
        for start, name in ((5, "out_of_place"), (9, "in_place")):
            measured = getattr(row_, name)
            assert float(fields[start]) == pytest.approx(measured.seconds * 1e6, rel=1e-2)
            assert float(fields[start + 1]) == pytest.approx(measured.algbw_bytes_per_s / 1e9, abs=0.0051)
            assert float(fields[start + 2]) == pytest.approx(measured.busbw_bytes_per_s / 1e9, abs=0.0051)
            assert fields[start + 3] == "0"


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_in_a_log_only_rows_begin_with_a_number(report, width):
    text = plain(report, width=width)
    assert text.isascii()
    assert "\x1b" not in text
    table = text[: text.index("\n\n")].splitlines()
    rows = [found for found in table if not found.startswith("#")]
    assert len(rows) == len(report.bench.rows)
    assert all(re.match(r"\s+\d+\s+\d+\s", found) for found in rows)


@pytest.mark.parametrize("report", REPORTS)
def test_rows_in_a_log_do_not_depend_on_the_width(report):
    assert parsed(plain(report, width=60)) == parsed(plain(report, width=200))


def test_out_of_place_is_blank_where_it_was_not_measured():
    only = structs.replace(row(64), out_of_place=None)
    text = line(only)
    assert len(text) == len(line(row(64)))
    assert len(text.split()) == 9
    assert text.split()[5:] == line(row(64)).split()[9:]


def test_in_place_is_not_available_where_it_was_not_measured():
    fields = line(structs.replace(row(64), in_place=None)).split()
    assert fields[9:] == ["N/A"] * 4


def test_wrong_values_that_were_not_looked_for_are_not_ok(golden):
    report = healthy(bench(rows=(row(64, wrong=None),)))
    assert [fields[8] for fields in parsed(plain(report))] == ["N/A"]
    golden(*re.findall("^# Out of bounds .*", plain(report), re.MULTILINE))
    assert " OK" not in plain(report)


def test_wrong_values_are_counted():
    text = plain(healthy(bench(rows=(row(64, wrong=3), row(128)))))
    assert parsed(text)[0][8] == str(3 * RANKS)
    assert f"# Out of bounds values : {3 * RANKS * 2} FAILED" in text


def test_the_footer_is_that_of_nccl_tests():
    text = plain(healthy(bench("gloo", collectives=("all_reduce", "all_gather"))))
    found = re.findall(r"^# Out of bounds values : (\d+) OK\n# Avg bus bandwidth    : (\S+)$", text, re.MULTILINE)
    assert [wrong for wrong, _ in found] == ["0", "0"]
    assert 0 < float(found[1][1]) < float(found[0][1])


@pytest.mark.parametrize(("least", "word"), [(0.5, "OK"), (9.0, "FAILED")])
def test_a_bandwidth_that_was_asked_for_is_held_against_the_best(least, word):
    report = healthy(bench(asked=Bench(min_busbw=least)))
    assert re.search(rf"^# Avg bus bandwidth    : \S+ {word}$", plain(report), re.MULTILINE)


@given(st.floats(min_value=0, max_value=1e20), st.sampled_from([6, 7]))
def test_a_number_never_leaves_its_column(value, width):
    text = number(value, width)
    assert len(text) == width
    assert float(text) == pytest.approx(value, rel=0.5, abs=0.0051)


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (1.234, 7, "   1.23"),
        (12345.678, 7, "12345.7"),
        (123456.7, 7, " 123457"),
        (1234567.0, 7, "1234567"),
        (12345678.0, 7, "1.2e+07"),
        (999.999, 6, "1000.0"),
        (1234567.0, 6, " 1e+06"),
        (float("nan"), 6, "   nan"),
    ],
)
def test_numbers_are_shortened_as_nccl_tests_does(value, width, text):
    assert number(value, width) == text


def test_the_header_says_what_was_asked_for(golden):
    asked = Bench(minbytes=1024, maxbytes=4096, stepbytes=1024, warmup_iters=1, check=0)
    head = paragraph(healthy(bench(asked=asked)), "# ddpdiag version ")
    golden(head.partition("\n")[2])


def test_devices_are_listed_as_nccl_tests_does():
    text = plain(healthy(bench("gloo", "nccl")))
    pattern = r"#  Rank +(\d+) Group +0 Pid +(\d+) on +(\S+) device +(\d+) \[(\w+:\w+:\w+)\] (.*)"
    assert re.findall(pattern, text)[3] == ("3", "4714", "n1", "1", "0000:1A:00", "NVIDIA H100 80GB HBM3")


def test_of_many_devices_a_few_are_listed(golden):
    report = healthy(bench(ranks=tuple(map(bench_rank, range(100)))))
    golden(paragraph(report, "# Using devices"))
    assert len(re.findall(r"^#  Rank", plain(report, details=True), re.MULTILINE)) == 100


def test_a_slow_rank_has_a_reason(golden):
    golden(paragraph(slow(), "# Ranks of "), paragraph(slow(), "# Slow ranks"))


@pytest.mark.parametrize(
    "fields", [{}, {"expectation": None, "share": None, "fit": None}], ids=["all is known", "little is known"]
)
def test_a_series_has_its_peak_expectation_and_latency(golden, fields):
    report = healthy(bench("gloo", "nccl", series=(series_of(**fields), series_of("nccl"))))
    text = plain(report, width=200)
    golden(text[text.index("peak busbw") : text.index("# Ranks of")])


def test_the_end_is_findings_and_verdict():
    text = plain(slow(notes=("rank-2.jsonl is cut off",)))
    assert text.index("error COL001.slow") < text.index("note: rank-2.jsonl") < text.index("UNFIT: ")
    assert plain(healthy()).splitlines()[-2].startswith("FIT: ")


def test_nothing_measured_is_said(golden):
    golden("\n".join(plain(unmeasured()).splitlines()[-3:]))


def test_fit_with_a_slow_rank_is_degraded(golden):
    sentence = "rank 3 on n1 slows the others down: it copies at 0.9 GB/s."
    series = series_of("gloo", bottleneck=Bottleneck.SLOW_RANK, sentence=sentence)
    report = structs.replace(healthy(bench(series=(series,))), sentence=f"{sentence} More.", degraded=True)
    golden(plain(report, width=120).splitlines()[-1])


def test_of_many_ranks_the_slow_ones_are_shown():
    ranks = (*(bench_rank(rank, host=f"n{rank // 8}") for rank in range(63)), bench_rank(63, host="n7", slow="copies"))
    text = plain(healthy(bench(ranks=ranks)), width=120)
    assert "  63  n7" in text
    assert "48 more ranks" in text


def test_an_expectation_that_was_far_exceeded_is_no_percentage():
    for peak, known in ((1.2e9, False), (1.19e9, True)):
        series = series_of("gloo", peak_busbw_bytes_per_s=peak)
        level = structs.replace(series.expectation, busbw_bytes_per_s=1e9)
        assert (expectation_of(structs.replace(series, expectation=level)) is not None) is known


def test_what_was_cut_short_is_not_concluded(golden):
    for complete in (True, False):
        golden(*re.findall("^# Collective test .*", plain(healthy(bench(complete=complete))), re.MULTILINE))


def test_no_empty_line_comes_twice():
    for report in REPORTS:
        assert "\n\n\n" not in plain(report)


def test_texts_of_strangers_are_shown_and_not_obeyed():
    evil = "n\x1b[2J\n     8  9"
    ranks = tuple(bench_rank(rank, host=evil, device=evil, pci=evil, slow=evil) for rank in range(2))
    of = bench(rows=(row(8, dtype=evil, op=evil),), ranks=ranks, notes=(evil,), torch_version=evil)
    text = plain(healthy(of))
    assert "\x1b" not in text
    assert len(parsed(text)) == 1


# CSV


def as_csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(to_csv(report))))


def test_csv_has_a_line_for_each_row_and_mode():
    report = healthy(bench(rows=(*map(row, SIZES[:-1]), structs.replace(row(SIZES[-1]), out_of_place=None))))
    lines = as_csv(report)
    assert len(lines) == 2 * len(SIZES) - 1
    first, last = lines[0], lines[-1]
    assert (first["mode"], last["mode"]) == ("out_of_place", "in_place")
    assert (last["backend"], last["size_bytes"], last["dtype"]) == ("gloo", str(SIZES[-1]), "float")
    inside = report.bench.rows[-1].in_place
    assert float(last["busbw_bytes_per_s"]) == inside.busbw_bytes_per_s
    assert (last["slowest_rank"], last["slowest_host"]) == ("3", "n1")


def test_csv_leaves_empty_what_is_not_known():
    bare = structs.replace(mode(1e-3, 64, wrong=None), ranks={})
    (line,) = as_csv(healthy(bench(rows=(structs.replace(row(64), in_place=bare, out_of_place=None),))))
    assert {line[name] for name in ("wrong", "slowest_rank", "slowest_host")} == {""}


def test_csv_keeps_foreign_texts_within_their_cell():
    evil = 'n,"0"\n1'
    ranks = tuple(bench_rank(rank, host=evil) for rank in range(4))
    (line,) = as_csv(healthy(bench(rows=(structs.replace(row(64), in_place=None),), ranks=ranks)))
    assert line["slowest_host"] == 'n,"0" 1'
    assert None not in line


def test_csv_of_nothing_has_a_header():
    assert as_csv(unmeasured()) == []
    assert to_csv(unmeasured()).startswith("backend,collective,")
