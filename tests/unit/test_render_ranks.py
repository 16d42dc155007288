"""The table of ranks: the order of rows, marks, the columns that fit, names that can be copied."""

import math
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from reports import finding_of, fit, plain, rank_row, unfit

from ddpdiag.model import Finding, Matrix, Report, Scalar, Severity, Verdict
from ddpdiag.render.blocks import value_of
from ddpdiag.render.page import column_format
from ddpdiag.render.ranks import ranks_table, severity_of_blamed_ranks

FQDN = "ip-10-0-12-{}.eu-central-1.compute.internal"


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


def world_of(ranks: tuple[dict[str, Scalar], ...], **fields: object) -> Report:
    """Hardly more than these ranks."""
    world = structs.replace(fit().world, size=len(ranks))
    return fit(**{"stages": (), "checks": (), "sentence": "Well.", "ranks": ranks, "world": world} | fields)


def first_rows(report: Report) -> list[tuple[Scalar, ...]]:
    """The rows of the table in the order of their importance."""
    table = ranks_table(report)
    return [tuple(map(value_of, table.rows[place])) for place in table.order]


def warned(*hosts: int) -> tuple[Finding, ...]:
    return tuple(finding_of(Severity.WARNING, hosts=(f"n{host}",), code=f"FAB001.x{host}") for host in hosts)


def test_blamed_ranks_come_first_in_a_large_world(golden):
    report = world_of(hosts_of(64, slow=(3, 5)), findings=(finding_of(ranks=(9,)), *warned(3, 5)))
    rows = first_rows(report)
    assert rows[0][:3] == (9, "FAIL", "n1")
    assert {row[2] for row in rows[1:17]} == {"n3", "n5"}
    golden(plain(report))


def test_silent_ranks_come_before_slow_ones():
    assert {row[2] for row in first_rows(world_of(hosts_of(64, silent=(7,), slow=(3,))))[:8]} == {"n7"}


def test_a_host_that_is_blamed_as_a_whole_is_marked():
    rows = tuple(rank_row(rank) for rank in range(4))
    findings = (finding_of(hosts=("n1",)), finding_of(Severity.WARNING, hosts=("n0", "n1")))
    assert severity_of_blamed_ranks(findings, rows) == dict.fromkeys((0, 1), Severity.WARNING) | dict.fromkeys(
        (2, 3), Severity.ERROR
    )
    # Where ranks are named, the host only says where they are.
    assert severity_of_blamed_ranks((finding_of(ranks=(2,), hosts=("n1",)),), rows) == {2: Severity.ERROR}
    assert severity_of_blamed_ranks((finding_of(Severity.NOTE, hosts=("n1",)),), rows) == {}


@pytest.mark.parametrize("hosts", [2, 64])
def test_ranks_that_are_alike_have_no_table_but_with_details(hosts):
    for findings in ((), warned(*range(hosts))):
        report = world_of(hosts_of(hosts), findings=findings)
        assert "host busbw" not in plain(report).partition("Well.")[0]
        assert "n1 " in plain(report, details=True)


def test_a_silent_rank_differs():
    assert "host busbw" in plain(world_of(hosts_of(2, silent=(1,))))


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
    return world_of(tuple(rank_row(rank, **steps) for rank in range(2)), findings=(finding_of(ranks=(1,)),))


def test_the_legend_says_which_columns_add_up_to_a_step(golden):
    assert "Data + forward + backward + optimizer + wait: one training step" in " ".join(plain(trained()).split())
    golden(plain(trained()), plain(trained(), width=120))


def test_one_table_with_the_most_important_columns_fits_the_width():
    for width in range(60, 121, 5):
        lines = plain(trained(), width=width).splitlines()
        assert sum("host" in line.split() and "rank" in line.split() for line in lines) == 1
        assert max(map(len, lines)) <= width
    narrow, wide = (" ".join(plain(trained(), width=width).split()) for width in (60, 160))
    assert "optimizer" in narrow.partition("for lack of room")[2]
    assert "for lack of room" not in wide


def matrix(*names: str) -> Matrix:
    cells = tuple(
        tuple(1e9 * (row + 1) if row != column else None for column in range(len(names))) for row in range(len(names))
    )
    return Matrix(name="net.x", title="pairs", rows=names, columns=names, cells=cells, unit="bytes_per_s")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("n0", "n1"), id="whole names"),
        pytest.param([FQDN.format(30 + host) for host in range(8)], id="long names"),
        pytest.param([letter * 20 for letter in "abcdef"], id="numbers for columns"),
    ],
)
def test_names_in_a_matrix_are_as_short_as_they_must_be(golden, names):
    golden(plain(world_of((), matrices=(matrix(*names),), verdict=Verdict.UNKNOWN)))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_names_are_never_folded(width):
    uuid = "GPU-0a2b3c4d-aaaa-bbbb-cccc-0123456789ab"
    report = unfit(ranks=(rank_row(0, gpu_uuid=uuid, host="h" * 50), rank_row(1, gpu_uuid=uuid[:-1] + "c", host="n")))
    assert uuid in plain(report, width=width, details=True)
    assert all(f"  {'h' * 50}" in plain(report, width=width, details=details) for details in (False, True))
