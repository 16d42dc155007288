"""Matrices of pairs in the terminal and in JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from reports import finding_of, fit

from ddpdiag.codec import indented_json
from ddpdiag.model import Matrix, Severity
from ddpdiag.render.terminal import render

RATES = (None, 24.3e9, 335.7e9, 0.0, 5.01e6)


def matrix(host="n0", *, size=8, what="p2p.topology", cell="NV18", title="ways between GPUs", unit=""):
    names = tuple(f"GPU {index}" for index in range(size))
    cells = tuple(tuple("X" if row == column else cell for column in range(size)) for row in range(size))
    return Matrix(name=f"{what}.{host}", title=title, rows=names, columns=names, cells=cells, unit=unit)


def rates(host="n0", size=8):
    own = matrix(host, size=size, what="p2p.copy", title="copies between GPUs", unit="bytes_per_s")
    cells = tuple(tuple(RATES[(row + column) % 5] for column in range(size)) for row in range(size))
    return structs.replace(own, cells=cells)


def shown(*matrices, findings=(), details=False, width=80):
    return render(fit(matrices=matrices, findings=findings), color=False, width=width, details=details)


def tables(*matrices, **options):
    """What they add to the report."""
    usual = shown(**options).split("\n\n")
    return "\n\n".join(part for part in shown(*matrices, **options).split("\n\n") if part not in usual)


@pytest.mark.parametrize(
    "matrices", [(matrix(), rates()), (matrix(size=16),)], ids=["eight in one piece", "sixteen in two pieces"]
)
def test_gpus_fit_80_columns(golden, matrices):
    text = tables(*matrices)
    assert max(map(len, text.splitlines())) <= 80
    golden(text)


def test_a_table_that_is_too_wide_goes_on_below_itself():
    lines = shown(matrix(size=16, cell="a longer word"), details=True).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("GPU 15") for line in lines) > 1


def test_hosts_that_are_alike_are_shown_once(golden):
    golden(tables(*(matrix(f"n{number}", size=2) for number in range(16))))


def test_a_host_that_differs_is_shown_beside_the_others(golden):
    golden(tables(*(matrix(f"n{number}", size=2, cell="PIX" if number == 3 else "NV18") for number in range(8))))


def test_many_tables_are_shown_only_where_a_host_is_warned_of(golden):
    every = [rates(f"n{number}", size=number + 2) for number in range(5)]
    warned = finding_of(Severity.WARNING, code="P2P002.slow", hosts=("n3",))
    golden(tables(*every), tables(*every, findings=(warned,)))
    assert shown(*every, details=True).count("Copies between GPUs") == 5


def test_other_checks_findings_and_good_to_know_ones_show_none():
    every = [rates(f"n{number}", size=number + 2) for number in range(5)]
    other = finding_of(Severity.ERROR, code="GPU003.sram", hosts=("n3",))
    known = finding_of(Severity.NOTE, code="P2P001.acs", hosts=("n3",))
    assert tables(*every, findings=(other, known)) == tables(*every)


def test_json_has_all_of_them_and_no_number_that_json_lacks():
    own = structs.replace(rates(size=2), cells=((None, float("inf")), (float("nan"), 1e9)))
    report = json.loads(indented_json(fit(matrices=(own,))), parse_constant=lambda word: word)
    (found,) = report["matrices"]
    assert found["name"] == "p2p.copy.n0"
    assert found["cells"] == [[None, "inf"], ["nan", 1e9]]


@settings(deadline=None, max_examples=50)  # drawing a table takes a while on a busy machine
@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.one_of(st.none(), st.floats(), st.integers(), st.booleans(), st.text(max_size=40)),
    st.sampled_from(["", "bytes_per_s"]),
    st.integers(40, 200),
)
def test_any_matrix_can_be_shown(rows, columns, value, unit, width):
    own = Matrix(
        name="p2p.x",
        title="any",
        rows=tuple(f"r{number}" for number in range(rows)),
        columns=tuple(f"c{number}" for number in range(columns)),
        cells=((value,) * columns,) * rows,
        unit=unit,
    )
    assert "any" in shown(own, details=True, width=width)


def test_what_every_run_has_is_shown_where_something_is_wrong_with_it(golden):
    own = structs.replace(rates("", size=4), name="fab.pairs", title="pairs of hosts")
    concerned = finding_of(Severity.WARNING, code="FAB001.host", hosts=("n0",))
    golden(tables(own), tables(own, findings=(concerned,)))
