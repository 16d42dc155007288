"""JUnit XML that readers take: what they expect of its elements, and what ours say."""

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import benches
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import HUNG, NO_GPU, THREADS, check, finding_of, fit, unfit, unknown

from ddpdiag.model import Report
from ddpdiag.render.junit import render

# Of the schema that Jenkins' xunit plug-in and pytest share: attributes (required first) and children of each element.
_COUNTS = {"tests", "failures", "errors"}
SCHEMA = {
    "testsuites": (set(), {"name", "time", *_COUNTS}, {"testsuite"}),
    "testsuite": (
        {"name", *_COUNTS},
        {"time", "skipped", "timestamp", "hostname"},
        {"properties", "testcase"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": ({"name"}, {"classname", "time"}, {"skipped", "error", "failure", "system-out"}),
    "skipped": (set(), {"message", "type"}, set()),
    "error": (set(), {"message", "type"}, set()),
    "failure": (set(), {"message", "type"}, set()),
    "system-out": (set(), set(), set()),
}
TIME = re.compile(r"[0-9]+\.[0-9]{3}")
# XML 1.0: what a document may hold. https://www.w3.org/TR/xml/#charsets
CHARACTERS = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*")


def read(report: Report) -> Element:
    """The root element, after its elements and counts were held against the schema."""
    text = render(report).decode()
    assert CHARACTERS.fullmatch(text)
    root = ElementTree.fromstring(text)
    for element in root.iter():
        required, more, children = SCHEMA[element.tag]
        assert required <= set(element.keys()) <= required | more, element.tag
        assert {child.tag for child in element} <= children, element.tag
        assert TIME.fullmatch(element.get("time", "0.000"))
    for suite in (root, *root.iter("testsuite")):
        cases = list(suite.iter("testcase"))
        assert suite.get("tests") == str(len(cases))
        assert suite.get("failures") == str(sum(case.find("failure") is not None for case in cases))
        assert suite.get("errors") == str(sum(case.find("error") is not None for case in cases))
    return root


def case_of(root: Element, name: str) -> Element:
    (case,) = (case for case in root.iter("testcase") if case.get("name", "").startswith(name))
    return case


def test_every_check_is_one_case_of_its_stage() -> None:
    root = read(fit())
    assert [suite.get("name") for suite in root] == [
        "ddpdiag.launch",
        "ddpdiag.host",
        "ddpdiag.gpu",
        "ddpdiag.rendezvous",
        "ddpdiag.collective",
        "ddpdiag.training",
        "ddpdiag.verdict",
    ]
    assert [case.get("name") for case in root[1]] == ["HST001 memory", "HST002 threads"]
    assert root[1].get("time") == "0.310"
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("10", "0", "0")


def test_a_skipped_check_has_its_reason() -> None:
    skipped = case_of(read(fit()), "GPU001").find("skipped")
    assert skipped.get("message") == NO_GPU


def test_an_error_is_a_failure_with_all_that_is_known_of_it(golden) -> None:
    root = read(unfit())
    failure = case_of(root, "COL001").find("failure")
    assert failure.get("type") == "COL001.slow"
    golden(failure.get("message"), failure.text)
    assert case_of(root, "verdict").find("failure").get("type") == "UNFIT"


def test_a_warning_is_output_and_no_failure(golden) -> None:
    case = case_of(read(fit(findings=(THREADS,))), "HST002")
    assert [child.tag for child in case] == ["system-out"]
    golden(case[0].text)


def test_a_warning_that_counts_fails_the_verdict() -> None:
    root = read(fit(findings=(THREADS,), exit_code=1))
    assert case_of(root, "HST002").find("failure") is None
    assert case_of(root, "verdict").find("failure") is not None


def test_unknown_is_an_error(golden) -> None:
    root = read(unknown())
    assert (root.get("failures"), root.get("errors")) == ("0", "1")
    error = case_of(root, "verdict").find("error")
    assert error.get("type") == "UNKNOWN"
    golden(error.get("message"), error.text)


def test_an_error_finding_of_an_unknown_run_is_an_error(golden) -> None:
    lost = finding_of(code="RDZ001.lost", env={"A": None})
    case = case_of(read(unknown(findings=(HUNG, lost))), "RDZ001")
    assert case.find("failure") is None
    golden(case.find("error").text)


def test_several_errors_are_one_failure(golden) -> None:
    twice = (finding_of(), finding_of(title="another"))
    (failure,) = case_of(read(unfit(findings=twice)), "COL001").findall("failure")
    golden(failure.get("message"), failure.text)


def test_what_is_no_character_of_xml_is_spelled_out(golden) -> None:
    hostile = "a<b>&\"'\n]]>\x00\x1b\x85\ufffe\udcff\u2028"
    finding = finding_of(
        title=hostile, message=hostile, nodes=(hostile,), evidence={hostile: hostile}, links=(hostile,)
    )
    root = read(unfit(findings=(finding,), sentence=hostile, created=hostile, notes=(hostile,)))
    failure = case_of(root, "COL001").find("failure")
    golden(failure.get("message"), failure.text)


def test_a_benchmark_is_read_as_well() -> None:
    assert case_of(read(benches.healthy()), "verdict").find("failure") is None


def test_the_time_of_a_run_is_that_of_its_suites() -> None:
    root = read(fit(created="2026-03-01T12:00:00+00:00"))
    assert {suite.get("timestamp") for suite in root} == {"2026-03-01T12:00:00"}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=())))
def test_any_text_makes_a_document(text: str) -> None:
    finding = finding_of(code=text, title=text, message=text, nodes=(text,), fix=text, env={text: text})
    skipped = check(text, text, text, text)
    read(unfit(findings=(finding,), sentence=text, notes=(text,), run_id=text, checks=(skipped,)))
