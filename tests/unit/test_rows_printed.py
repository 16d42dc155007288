"""The rows of a benchmark that runs: printed once, as soon as they are known, and read by acceptance suites."""

import io
import os
import re

import pytest
from benched import benched, data_of, steady
from benches import bench, healthy
from msgspec import structs

from ddpdiag.bench.blocks import render, table_lines
from ddpdiag.bench.live import RowPrinter
from ddpdiag.bench.options import BenchOutputs
from ddpdiag.model import Report, Status
from ddpdiag.model.bench import BenchRequest
from ddpdiag.model.news import CheckProgress, PartialResults
from ddpdiag.render.progress import Progress, SilentListener

REPORTS = {
    "one table": healthy(),
    "gate": healthy(bench(request=BenchRequest(min_busbw=0.5))),
    "backends with devices of their own": healthy(bench("gloo", "nccl")),
    "collectives": healthy(bench("gloo", collectives=("all_reduce", "all_gather", "broadcast"))),
    "cut short": healthy(bench("gloo", collectives=("all_reduce", "all_gather"), complete=False)),
}


def lines(report: Report, *, is_running: bool = False) -> list[str]:
    return list(table_lines(report, details=False, is_running=is_running))


def with_rows(report: Report, count: int) -> Report:
    """The report when its first rows were measured."""
    whole = report.bench
    rows = whole.rows[:count]
    begun = {(row.backend, row.collective) for row in rows}
    series, ranks = (
        tuple(one for one in items if (one.backend, one.collective) in begun) for items in (whole.series, whole.ranks)
    )
    running = structs.replace(whole, rows=rows, series=series, ranks=ranks, complete=False)
    return structs.replace(report, bench=running)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_what_is_printed_meanwhile_is_how_the_final_text_begins(report):
    whole, before = lines(report), []
    for count in range(1, len(report.bench.rows) + 1):
        now = lines(with_rows(report, count), is_running=True)
        assert now == whole[: len(now)]
        assert now[: len(before)] == before
        assert sum(not line.startswith("#") for line in now) == count
        before = now
    assert render(report, color=True, width=80).startswith("".join(f"{line.rstrip()}\n" for line in before))


# What a rank has reported of its sizes -------------------------------------------------------------------------------

SIZES = (8, 1024, 1 << 20, 16 << 20)


def running(*sizes: int) -> PartialResults:
    """News of two ranks that measured these sizes."""
    rows = {rank: data_of(rank, 2, steady(), sizes=sizes) for rank in range(2)}
    statuses = dict.fromkeys(rows, Status.SKIPPED)
    request = BenchRequest(maxbytes=SIZES[-1])
    return PartialResults(recording=benched(rows, bench=request, statuses=statuses).recording)


def rows(text: str) -> list[int]:
    return [int(line.split()[0]) for line in text.splitlines() if line.startswith(" ")]


def test_each_row_is_printed_once_and_other_news_is_passed_on():
    stream, told = io.StringIO(), []
    display = SilentListener()
    display.tell = told.append
    printer = RowPrinter(display, stream, [], details=False)
    for count in (1, 1, 3, 4):
        printer.tell(running(*SIZES[:count]))
        assert rows(stream.getvalue()) == [*SIZES[:count]]
    printer.tell(progress := CheckProgress(text="16 MiB"))
    assert told == [progress]


def test_lines_that_a_full_pipe_does_not_take_are_left_to_the_final_text():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    printed: list[str] = []
    with open(reader, "rb") as pipe, open(writer, "w") as stream:
        printer = RowPrinter(SilentListener(), stream, printed, details=False)
        printer.tell(running(SIZES[0]))
        os.write(writer, b"x" * (1 << 16))
        printer.tell(running(*SIZES))
        assert rows("\n".join(printed)) == [SIZES[0]]
        pipe.read1(1 << 17)
        printer.tell(running(*SIZES))
        assert rows("\n".join(printed)) == [*SIZES]
    printer.tell(running(*SIZES, 64 << 20))  # the reader is gone


def test_a_row_does_not_end_up_in_the_line_of_the_progress():
    terminal = io.StringIO()
    progress = Progress(terminal, live=True)
    RowPrinter(progress, terminal, [], details=False).tell(running(SIZES[0]))
    progress.close()
    assert terminal.getvalue().startswith("\r\x1b[K# ddpdiag version")


def test_the_final_text_has_what_was_not_printed_and_all_if_a_rank_lost_rows():
    report, outputs = healthy(), BenchOutputs()
    whole = outputs.page(report, color=False, width=80)
    outputs._printed_lines.extend(line.rstrip() for line in lines(with_rows(report, 3), is_running=True))
    rest = outputs.page(report, color=False, width=80)
    assert whole.endswith(rest)
    assert rows(rest.partition("\n\n")[0]) == [row.size_bytes for row in report.bench.rows[3:]]
    outputs._printed_lines[-1] += "0"
    assert outputs.page(report, color=False, width=80).endswith(whole)
    assert BenchOutputs(quiet=True).listener(display := SilentListener()) is display


# As in isvtest/workloads/nccl_common.py and reframe_nccl_tests.py of NVIDIA/ai-cloud-validation.
AVERAGE = re.compile(r"#?\s*Avg bus bandwidth\s*:\s*([\d.]+)")
AVERAGE_OF_REFRAME = re.compile(r"# Avg bus bandwidth\s*:\s*([\d.]+)")
OUT_OF_BOUNDS = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)")


@pytest.mark.parametrize("scale", [1.0, 1e-5, 300.0])
@pytest.mark.parametrize("wrong", [0, 3])
def test_acceptance_suites_read_the_average_and_the_wrong_values(scale, wrong):
    whole = bench()
    sized = tuple(structs.replace(r, busbw_bytes_per_s=r.busbw_bytes_per_s * scale, wrong=wrong) for r in whole.rows)
    text = render(healthy(structs.replace(whole, rows=sized)), color=False, width=80)
    mean = sum(row.busbw_bytes_per_s for row in sized) / len(sized) / 1e9
    for pattern in (AVERAGE, AVERAGE_OF_REFRAME):
        assert float(pattern.search(text)[1]) == pytest.approx(mean, rel=1e-3)
    assert int(OUT_OF_BOUNDS.search(text)[1]) == wrong * len(sized)
