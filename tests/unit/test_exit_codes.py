"""`--exit-codes`: what ends in which code of Kubernetes' programs, and the line for node-problem-detector."""

import pytest
from reports import IMPORT, SLOW, THREADS, finding_of, fit, unfit, unknown

from ddpdiag.cli.exit_codes import ExitCodes, exit_code_of, requested_codes, translated
from ddpdiag.errors import ExitCode
from ddpdiag.model import Report
from ddpdiag.render.npd import render

LOST = finding_of(code="RUN002.lost")
K8S = ExitCodes.K8S


@pytest.mark.parametrize(
    ("report", "ddpdiag", "k8s", "npd"),
    [
        (fit(), 0, 0, 0),
        (fit(findings=(IMPORT,)), 0, 0, 0),
        (fit(findings=(IMPORT, THREADS)), 0, 10, 0),
        (fit(findings=(THREADS,), exit_code=1), 1, 30, 1),  # --strict
        (unfit(findings=(SLOW,)), 1, 30, 1),
        (unfit(findings=(LOST, THREADS)), 1, 20, 1),
        (unfit(findings=(LOST, SLOW)), 1, 30, 1),
        (unknown(), 3, 20, 2),
        (unknown(exit_code=2), 2, 30, 2),
        (unfit(findings=(LOST,), exit_code=143), 143, 143, 2),
    ],
)
def test_a_report_ends_in(report: Report, ddpdiag: int, k8s: int, npd: int) -> None:
    codes = {each: translated(exit_code_of(report, each), each) for each in ExitCodes}
    assert codes == {ExitCodes.DDPDIAG: ddpdiag, K8S: k8s, ExitCodes.NPD: npd}
    # Rank 0 sends its code to ranks that translate, too.
    assert all(translated(code, each) == code for each, code in codes.items())


def test_a_run_without_a_report_ends_in() -> None:
    for code, k8s, npd in ((ExitCode.BUG, 30, 2), (ExitCode.INTERRUPTED, 130, 2), (137, 137, 2)):
        assert (translated(code, K8S), translated(code, ExitCodes.NPD)) == (k8s, npd)


def test_a_command_line_with_a_mistake_requests() -> None:
    assert requested_codes(["host", "--exit-codes", "npd", "--wrong"]) is ExitCodes.NPD
    assert requested_codes(["check", "--wrong", "--exit_codes=k8s"]) is K8S
    for words in ("check --exit-codes", "check --exit-codes nagios", "check --wrong", ""):
        assert requested_codes(words.split()) is ExitCodes.DDPDIAG


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (unfit(findings=(THREADS, SLOW)), "UNFIT: Rank 3 slows every all-reduce\n"),
        (fit(sentence="host n\u00e9 can train.", degraded=True), "FIT, degraded: host n? can train.\n"),
        (unknown(sentence="a\nb " * 40, findings=()), f"UNKNOWN: {'a b ' * 17}...\n"),
    ],
)
def test_the_line_for_node_problem_detector(report: Report, line: str) -> None:
    assert render(report) == line
    assert len(line) <= 81
