"""A benchmark for people, and for scripts that read the output of nccl-tests."""

import csv
import re
from io import StringIO
from pathlib import Path

import pytest
from benches import RANKS, SIZES, bench, bench_rank, healthy, row, series_of, slow, unmeasured
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag.bench.blocks import plausible_expectation, render
from ddpdiag.bench.rows import HEADER_LINES, format_number, row_line, to_csv
from ddpdiag.model import Report
from ddpdiag.model.bench import BenchRequest

REPORTS = [
    healthy(),
    healthy(bench("nccl", "gloo")),
    healthy(bench("gloo", collectives=("all_reduce", "all_gather"))),
    slow(),
    unmeasured(),
    healthy(structs.replace(bench(), omissions=())),
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
    assert [head.rstrip() for head in HEADER_LINES] == golden.splitlines()


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        ("all_reduce", "float     sum      -1      N/A     N/A     N/A     N/A  1656.87    0.63    0.95       0"),
        ("broadcast", "float    none       0      N/A     N/A     N/A     N/A  1656.87    0.63    0.63       0"),
        ("all_gather", "float    none      -1  1656.87    0.63    0.47       0      N/A     N/A     N/A     N/A"),
    ],
)
def test_a_row_is_that_of_nccl_tests_with_the_mode_that_torch_has(collective, text):
    assert row_line(row(1 << 20, collective=collective)) == f"     1048576        262144     {text}"


def test_rows_read_back_as_the_numbers_that_they_were():
    report = healthy()
    rows = parsed(plain(report))
    assert [int(fields[0]) for fields in rows] == list(SIZES)
    for fields, row_ in zip(rows, report.bench.rows, strict=True):
        assert fields[1:9] == [str(row_.count), "float", "sum", "-1", *["N/A"] * 4]
        assert float(fields[9]) == pytest.approx(row_.seconds * 1e6, rel=1e-2)
        assert float(fields[10]) == pytest.approx(row_.algbw_bytes_per_s / 1e9, abs=0.0051)
        assert float(fields[11]) == pytest.approx(row_.busbw_bytes_per_s / 1e9, abs=0.0051)
        assert fields[12:] == ["0"]


@pytest.mark.parametrize("report", REPORTS)
def test_in_a_log_only_rows_begin_with_a_number_in_any_width(report):
    for width in (40, 80, 200):
        text = plain(report, width=width)
        assert text.isascii()
        assert "\x1b" not in text
        assert "\n\n\n" not in text
        table = text[: text.index("\n\n")].splitlines()
        rows = [found for found in table if not found.startswith("#")]
        assert len(rows) == len(report.bench.rows)
        assert all(re.match(r"\s+\d+\s+\d+\s", found) for found in rows)
        assert parsed(text) == parsed(plain(report, width=120))


FOOTERS = {
    "not checked": (bench(rows=(row(64, wrong=None),)), "N/A not checked", ""),
    "wrong": (bench(rows=(row(64, wrong=3 * RANKS), row(128))), f"{3 * RANKS} FAILED", ""),
    "right, and a gate is reached": (bench(request=BenchRequest(min_busbw=0.5)), "0 OK", "OK"),
    "a gate is not reached": (bench(request=BenchRequest(min_busbw=9.0)), "0 OK", "FAILED"),
}


@pytest.mark.parametrize(("report", "wrong", "gate"), FOOTERS.values(), ids=FOOTERS)
def test_the_footer_is_that_of_nccl_tests(report, wrong, gate):
    found = re.search(
        r"^# Out of bounds values : (.*)\n# Avg bus bandwidth    : \S+ ?(.*)$", plain(healthy(report)), re.M
    )
    assert found.groups() == (wrong, gate)


@given(st.floats(min_value=0, max_value=1e20), st.sampled_from([6, 7]))
def test_a_number_never_leaves_its_column(value, width):
    text = format_number(value, width)
    assert len(text) == width
    assert float(text) == pytest.approx(value, rel=0.5, abs=0.0051)


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (1.234, 7, "   1.23"),
        (12345.678, 7, "12345.7"),
        (1234567.0, 7, "1234567"),
        (12345678.0, 7, "1.2e+07"),
        (999.999, 6, "1000.0"),
        (1234567.0, 6, " 1e+06"),
        (float("nan"), 6, "   nan"),
    ],
)
def test_numbers_are_shortened_as_nccl_tests_does(value, width, text):
    assert format_number(value, width) == text


def test_the_header_says_what_was_asked_for(golden):
    asked = BenchRequest(minbytes=1024, maxbytes=4096, stepfactor=1.5, warmup_iters=1, check=0)
    head = paragraph(healthy(bench(request=asked)), "# ddpdiag version ")
    golden(head.partition("\n")[2])


def test_devices_are_listed_as_nccl_tests_does_and_of_many_a_few(golden):
    text = plain(healthy(bench("gloo", "nccl")))
    pattern = r"#  Rank +(\d+) Group +0 Pid +(\d+) on +(\S+) device +(\d+) \[(\w+:\w+:\w+)\] (.*)"
    assert re.findall(pattern, text)[3] == ("3", "4714", "n1", "1", "0000:1A:00", "NVIDIA H100 80GB HBM3")
    report = healthy(bench(ranks=tuple(map(bench_rank, range(100)))))
    golden(paragraph(report, "# Using devices"))
    assert len(re.findall(r"^#  Rank", plain(report, details=True), re.MULTILINE)) == 100


def test_a_slow_rank_has_a_reason(golden):
    golden(paragraph(slow(), "# Ranks of "), paragraph(slow(), "# Slow ranks"))


@pytest.mark.parametrize(
    "fields",
    [{}, {"expectation": None, "share": None, "latency_seconds": None}],
    ids=["all is known", "little is known"],
)
def test_a_series_has_its_peak_expectation_and_latency(golden, fields):
    report = healthy(bench("gloo", "nccl", series=(series_of(**fields), series_of("nccl"))))
    text = plain(report, width=200)
    golden(text[text.index("peak busbw") : text.index("# Ranks of")])


def test_the_end_is_findings_and_verdict(golden):
    text = plain(slow(recording_problems=("rank-2.jsonl is cut off",)))
    assert text.index("error COL001.slow") < text.index("note: rank-2.jsonl") < text.index("UNFIT: ")
    degraded = structs.replace(healthy(), sentence="rank 3 on n1 slows the others down.", degraded=True)
    golden(*(plain(report, width=200).rstrip().rpartition("\n")[2] for report in (degraded, unmeasured())))


def test_of_many_ranks_the_slow_ones_are_shown():
    ranks = (
        *(bench_rank(rank, host=f"n{rank // 8}") for rank in range(63)),
        bench_rank(63, host="n7", slow_reason="copies"),
    )
    text = plain(healthy(bench(ranks=ranks)), width=120)
    assert "  63  n7" in text
    assert "48 more ranks" in text


def test_an_expectation_that_was_far_exceeded_is_no_percentage():
    for peak, known in ((1.2e9, False), (1.19e9, True)):
        series = series_of("gloo", peak_busbw_bytes_per_s=peak)
        level = structs.replace(series.expectation, busbw_bytes_per_s=1e9)
        assert (plausible_expectation(structs.replace(series, expectation=level)) is not None) is known


def test_what_was_cut_short_is_not_concluded(golden):
    for complete in (True, False):
        golden(*re.findall("^# Collective test .*", plain(healthy(bench(complete=complete))), re.MULTILINE))


def test_texts_of_strangers_are_shown_and_not_obeyed():
    evil = "n\x1b[2J\n     8  9"
    ranks = tuple(bench_rank(rank, host=evil, device=evil, pci=evil, slow_reason=evil) for rank in range(2))
    of = bench(rows=(row(8, dtype=evil),), ranks=ranks, omissions=(evil,), torch_version=evil)
    text = plain(healthy(of))
    assert "\x1b" not in text
    assert len(parsed(text)) == 1


def as_csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(to_csv(report))))


def test_csv_has_a_line_for_each_row():
    report = healthy(bench(rows=(*map(row, SIZES[:-1]), row(SIZES[-1], wrong=None))))
    lines = as_csv(report)
    assert len(lines) == len(SIZES)
    last = lines[-1]
    assert (last["backend"], last["size_bytes"], last["dtype"], last["wrong"]) == ("gloo", str(SIZES[-1]), "float", "")
    assert float(last["busbw_bytes_per_s"]) == report.bench.rows[-1].busbw_bytes_per_s
    assert (last["slowest_rank"], last["slowest_host"]) == ("3", "n1")


def test_csv_keeps_foreign_texts_within_their_cell():
    evil = 'n,"0"\n1'
    ranks = tuple(bench_rank(rank, host=evil) for rank in range(4))
    (line,) = as_csv(healthy(bench(rows=(row(64),), ranks=ranks)))
    assert line["slowest_host"] == 'n,"0" 1'
    assert None not in line


def test_csv_of_nothing_has_a_header():
    assert as_csv(unmeasured()) == []
    assert to_csv(unmeasured()).startswith("backend,collective,")
