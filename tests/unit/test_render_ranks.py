"""The table of ranks in the terminal: who is looked for, one line for what is one thing, names that can be copied."""

import math
import re
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from reports import finding_of, fit, rank_row, unfit

from ddpdiag.model import Finding, Matrix, Report, Scalar, Severity, Verdict
from ddpdiag.render.page import LONG, column_format, shortened, shorter
from ddpdiag.render.ranks import blamed
from ddpdiag.render.terminal import render

FQDN = "ip-10-0-12-{}.eu-central-1.compute.internal"


def plain(report: Report, *, width: int = 80, details: bool = False) -> str:
    return render(report, color=False, width=width, details=details)


def hosts_of(hosts: int, slow: tuple[int, ...] = (), silent: tuple[int, ...] = ()) -> tuple[dict[str, Scalar], ...]:
    """Eight ranks on each of many hosts, with one figure for each host."""
    return tuple(
        {
            "rank": rank,
            "local_rank": rank % 8,
            "host": f"n{rank // 8}",
            "gpu_uuid": f"GPU-{rank:08d}",
            "host_busbw_bytes_per_s": None
            if rank // 8 in silent
            else 7e10 + rank // 8
            if rank // 8 in slow
            else 1e11 + rank // 8,
        }
        for rank in range(8 * hosts)
    )


def bare(**fields: object) -> Report:
    """Hardly more than what `fields` say."""
    return fit(**{"stages": (), "checks": (), "sentence": "Well.", "ranks": ()} | fields)


def lines_of(report: Report, **more: object) -> list[list[str]]:
    """The words of each line of the table."""
    lines = plain(structs.replace(report, stages=()), **more).splitlines()
    head = next((number for number, line in enumerate(lines) if re.search(r"\branks? +(local +)?host\b", line)), None)
    if head is None:
        return []
    return [line.split() for line in lines[head + 1 : lines.index("", head)]]


def warned(*hosts: int) -> tuple[Finding, ...]:
    return tuple(finding_of(Severity.WARNING, hosts=(f"n{host}",), code=f"FAB001.x{host}") for host in hosts)


def test_ranks_of_a_host_that_have_the_same_figures_are_one_line(golden):
    report = bare(ranks=hosts_of(64, slow=(3, 5)), findings=warned(3, 5))
    assert [line[-2:] for line in lines_of(report)[:3]] == [["n3", "70"], ["n5", "70"], ["n0", "100"]]
    golden(plain(report))


def test_ranks_whose_figures_differ_keep_their_lines_and_hosts_take_turns():
    rows = tuple(row | {"arrival_seconds": 0.1 + rank / 1e3} for rank, row in enumerate(hosts_of(64, slow=(3, 5))))
    found = lines_of(fit(ranks=rows, findings=warned(3, 5)))
    assert [line[2] for line in found] == ["n3", "n5"] * 4
    assert [line[1] for line in found[:3]] == ["24", "40", "25"]


def test_one_blamed_rank_of_a_host_has_its_own_line():
    found = lines_of(fit(ranks=hosts_of(64), findings=(finding_of(ranks=(9,)), *warned(3))))
    assert found[0][:4] == ["FAIL", "9", "n1", "GPU-00000009"]
    assert found[1][:2] == ["warn", "24-31"]


def test_a_host_that_is_blamed_as_a_whole_is_marked():
    rows = tuple(rank_row(rank) for rank in range(4))
    findings = (finding_of(hosts=("n1",)), finding_of(Severity.WARNING, hosts=("n0", "n1")))
    assert blamed(findings, rows) == dict.fromkeys((0, 1), Severity.WARNING) | dict.fromkeys((2, 3), Severity.ERROR)
    # Where ranks are named, the host only says where they are.
    assert blamed((finding_of(ranks=(2,), hosts=("n1",)),), rows) == {2: Severity.ERROR}
    assert blamed((finding_of(Severity.NOTE, hosts=("n1",)),), rows) == {}
    marks = [line[0] for line in lines_of(fit(ranks=rows, findings=findings))]
    assert marks == ["warn", "warn", "FAIL", "FAIL"]


def test_the_unit_is_that_of_all_ranks_also_where_those_shown_have_no_figure():
    silent = tuple(range(8))
    text = plain(unfit(ranks=hosts_of(64, silent=silent), findings=tuple(finding_of(hosts=(f"n{h}",)) for h in silent)))
    assert text.partition("ranks  host")[2].splitlines()[0].split()[-1] == "GB/s"
    assert [line[-1] for line in lines_of(unfit(ranks=hosts_of(64, silent=silent)))] == ["-"] * 8


@pytest.mark.parametrize("hosts", [2, 64])
def test_ranks_that_are_alike_have_no_table_and_no_legend_but_with_details(hosts):
    for findings in ((), tuple(finding_of(Severity.WARNING, hosts=(f"n{host}",)) for host in range(hosts))):
        report = fit(ranks=hosts_of(hosts), findings=findings)
        assert lines_of(report) == []
        assert "arrival:" not in plain(report)
        assert len(lines_of(report, details=True)) >= 8 * hosts


def test_a_silent_rank_differs():
    assert len(lines_of(fit(ranks=hosts_of(2, silent=(1,))))) == 16


# Columns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        pytest.param([1.07e9, 1.06e9, 2.4e6], ["1.070", "1.060", "0.002"], id="the least number keeps a digit"),
        pytest.param([93.8e9, 132e9], ["94", "132"], id="three digits for the median"),
        pytest.param([2e9, 3e9, 1.0], ["2.000", "3.000", "1e-09"], id="what is not 0 never reads as 0"),
        pytest.param([0.0, 0.0], ["0", "0"], id="nothing"),
        pytest.param([1e9, math.nan, math.inf], ["1.00", "nan", "inf"], id="no number"),
        pytest.param([1e9, "x", True], ["1.00", "x", "yes"], id="words"),
    ],
)
def test_the_decimal_points_of_a_column_are_in_line(values, cells):
    own = column_format("busbw_bytes_per_s", values)
    assert [own.cell(value) for value in values] == cells


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=9))
@example([sys.float_info.max])  # three digits of it are more than a float holds
@example([1024, 5e-324])  # in kilobytes this is 0
def test_any_column_can_be_written(values):
    for name in ("x", "x_seconds", "x_bytes"):
        own = column_format(name, values)
        assert all(isinstance(own.cell(value), str) for value in values if value is not None)


def trained() -> Report:
    """Two ranks with the parts of a training step; rank 1 is blamed."""
    steps = {"wait_seconds": 0.007, "arrival_seconds": 0.02}
    return bare(ranks=tuple(rank_row(rank, **steps) for rank in range(2)), findings=(finding_of(ranks=(1,)),))


def test_the_legend_says_which_columns_add_up_to_a_step(golden):
    assert "data + forward + backward + optimizer + wait: one training step" in " ".join(plain(trained()).split())
    golden(plain(trained()), plain(trained(), width=120))


def test_one_table_with_the_most_important_columns_fits_the_width():
    report = trained()
    for width in range(50, 121, 5):
        lines = plain(report, width=width).splitlines()
        assert sum("host" in line.split() and "rank" in line.split() for line in lines) == 1
        assert max(map(len, lines)) <= width
    narrow, wide = (plain(report, width=width) for width in (50, 120))
    assert "samples" in narrow.split("rank  host")[0].splitlines()[-2]
    assert "optimizer" in " ".join(narrow.split()).partition("for lack of room")[2]
    assert "for lack of room" not in " ".join(wide.split())


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "short", "rule"),
    [
        (("n0", "n1"), ("n0", "n1"), ""),
        (("a.example.org", "b.example.org"), ("a.example.org", "b.example.org"), ""),
        ((FQDN.format(30), FQDN.format(31)), ("ip-10-0-12-30", "ip-10-0-12-31"), "*.eu-central-1.compute.internal"),
        ((FQDN.format(30),), ("ip-10-0-12-30",), "*.eu-central-1.compute.internal"),
        (
            ("training-worker-large-0.a.example", "training-worker-large-1.a.example"),
            ("0", "1"),
            "training-worker-large-*.a.example",
        ),
        (("192.168.100.1234567", "192.168.101.1234567"), ("100.1234567", "101.1234567"), "192.168.*"),
        (("h" * 40, "i" * 40), ("h" * 40, "i" * 40), ""),
    ],
)
def test_names_lose_what_all_share_where_they_are_long(names, short, rule):
    found = shortened(names)
    assert tuple(found.names[name] for name in names) == short
    assert found.rule == rule


@given(st.lists(st.text("ab1-._", min_size=1, max_size=40), min_size=1, max_size=6, unique=True))
def test_a_short_name_and_its_rule_are_the_whole_name(names):
    for short in shorter(names):
        assert len(set(short.names.values())) == len(names)
        assert all(short.names.values())
        for name, part in short.names.items():
            assert (short.rule or "*").replace("*", part) == name
    assert shortened(names).longest <= max(LONG, *map(len, names))


def test_long_names_of_hosts_are_short_in_the_table_and_said_once(golden):
    rows = tuple(rank_row(rank, host=FQDN.format(30 + rank)) for rank in range(3))
    report = bare(ranks=rows, verdict=Verdict.UNKNOWN)
    assert [line[1] for line in lines_of(report)] == [f"ip-10-0-12-{30 + rank}" for rank in range(3)]
    assert FQDN.format(30) in plain(report, details=True).partition("host")[2]
    golden(plain(report))


def matrix(*names: str) -> Matrix:
    cells = tuple(
        tuple(1e9 * (row + 1) if row != column else None for column in range(len(names))) for row in range(len(names))
    )
    return Matrix(name="net.x", title="pairs", rows=names, columns=names, cells=cells, unit="bytes_per_s")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("n0", "n1"), id="whole names"),
        pytest.param([FQDN.format(30 + host) for host in range(3)], id="without the domain"),
        pytest.param([FQDN.format(30 + host) for host in range(8)], id="what differs"),
        pytest.param([letter * 20 for letter in "abcdef"], id="numbers for columns"),
    ],
)
def test_names_in_a_matrix_are_as_short_as_they_must_be(golden, names):
    golden(plain(bare(matrices=(matrix(*names),))))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_names_are_never_folded(width):
    uuid = "GPU-0a2b3c4d-aaaa-bbbb-cccc-0123456789ab"
    report = unfit(ranks=(rank_row(0, gpu_uuid=uuid, host="h" * 50), rank_row(1, gpu_uuid=uuid[:-1] + "c", host="n")))
    assert uuid in plain(report, width=width, details=True)
    for details in (False, True):
        assert f"  {'h' * 50}" in plain(report, width=width, details=details)
