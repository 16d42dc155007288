"""One line for a monitoring system, and its exit code."""

import re

import pytest
from reports import THREADS, fit, unfit, unknown

from ddpdiag.model import Report
from ddpdiag.render.nagios import State, line, render, state_of

# 'label'=value[UOM];[warn];[crit];[min];[max]
ITEM = re.compile(r"('(?:[^'=]|'')+'|[^ '=]+)=(-?[0-9.]+)(s|B|%|c)?(;[-0-9.]*){0,4}")


def halves(report: Report) -> tuple[str, str]:
    text = render(report)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.isascii()
    assert len(text) <= 1024
    said, data = text.rstrip("\n").split(" | ")
    return said, data


@pytest.mark.parametrize(
    ("report", "state"),
    [
        (fit(), State.OK),
        (fit(findings=(THREADS,)), State.WARNING),
        (fit(findings=(THREADS,), exit_code=1), State.CRITICAL),  # --strict
        (unfit(), State.CRITICAL),
        (unknown(), State.UNKNOWN),
        (unknown(exit_code=143), State.UNKNOWN),
        (unknown(exit_code=2), State.UNKNOWN),
    ],
)
def test_a_verdict_is_a_state(report: Report, state: State) -> None:
    assert state_of(report) is state
    assert halves(report)[0].startswith(f"DDPDIAG {state.name} - ")


def test_the_codes_are_those_of_the_guidelines() -> None:
    assert [(state.name, int(state)) for state in State] == [("OK", 0), ("WARNING", 1), ("CRITICAL", 2), ("UNKNOWN", 3)]


def test_performance_data_has_labels_numbers_and_units() -> None:
    said, data = halves(unfit(measurements={"import_seconds": 0.0000021, "all_reduce.gloo.busbw_bytes_per_s": 1e15}))
    assert said.endswith(unfit().sentence)
    assert data.startswith("seconds=7.912s;;120 errors=1;;0 warnings=1;0 ranks=4;;;0;4 failing_hosts=0;;;0")
    assert "import_seconds=0.0000021s" in data
    assert "all_reduce.gloo.busbw_bytes_per_s=1000000000000000" in data
    assert all(ITEM.fullmatch(item) for item in data.split(" "))


def test_what_is_no_number_is_left_out() -> None:
    _, data = halves(
        fit(measurements={"a": None, "b": "fast", "c": True, "d": float("nan"), "e": float("inf"), "f": 1})
    )
    assert data.endswith("failing_hosts=0;;;0 f=1")


def test_strange_names_are_quoted() -> None:
    _, data = halves(fit(measurements={"it's a=b|c\n\x1b": 2}))
    assert data.endswith(r" 'it''s a_b/c \x1b'=2")


def test_a_sentence_stays_on_its_line_and_out_of_the_data() -> None:
    said, _ = halves(fit(sentence="a|b\nc\x00\x1b[31m \udcff \u202e" + "long " * 500))
    assert said.startswith(r"DDPDIAG OK - a/b c\x00\x1b[31m \udcff \u202elong")
    assert said.endswith(" ...")


def test_many_figures_are_cut_between_two_of_them() -> None:
    _, data = halves(fit(measurements={f"figure.{number}": number for number in range(1000)}))
    assert all(ITEM.fullmatch(item) for item in data.split(" "))


def test_what_has_no_report_has_a_line() -> None:
    assert line(State.UNKNOWN, "--budget 1: expected 5 or more") == "DDPDIAG UNKNOWN - --budget 1: expected 5 or more\n"
