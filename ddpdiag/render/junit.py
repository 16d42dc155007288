"""The report as JUnit XML: a suite for each stage, a test case for each check, and one for the verdict.

Continuous integration services and test viewers read it. The elements are those that the schema of Jenkins' xunit
plug-in knows (junit-10.xsd), which pytest's files follow as well. A check with an error finding has failed, or, where
the verdict is UNKNOWN, is in error: nothing is known of what it looks at. Warnings and notes are its system-out; a
skipped check has its reason. The last suite says the verdict, so that an UNKNOWN run is never green.
"""

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from ddpdiag import __version__
from ddpdiag.foreign import printable
from ddpdiag.model import CheckLine, Finding, Report, Severity, Verdict
from ddpdiag.render.page import one_line
from ddpdiag.text import fold_hosts, fold_ranks

_KINDS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def render(report: Report) -> bytes:
    """XML in UTF-8."""
    root = Element("testsuites", name="ddpdiag")
    seconds = {stage.name: stage.seconds for stage in report.stages}
    for name in dict.fromkeys(check.stage for check in report.checks):
        suite = _suite(root, report, name, seconds.get(name, 0.0))
        for check in report.checks:
            if check.stage == name:
                _case(suite, report, check)
    _verdict(root, report)
    for suite in root:
        _count(suite, suite.findall("testcase"))
    _count(root, root.findall("testsuite/testcase"))
    root.set("time", _seconds(report.seconds))
    del root.attrib["skipped"]  # the schema has it in a suite only
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.3f}"


def _count(element: Element, cases: Sequence[Element]) -> None:
    element.set("tests", str(len(cases)))
    for kind, name in _KINDS.items():
        element.set(name, str(sum(case.find(kind) is not None for case in cases)))


def _suite(root: Element, report: Report, name: str, seconds: float) -> Element:
    suite = SubElement(root, "testsuite", name=f"ddpdiag.{one_line(name)}", time=_seconds(seconds))
    if report.created:
        suite.set("timestamp", one_line(report.created).partition("+")[0])  # xs:dateTime of most readers has no zone
    if report.world.nodes:
        suite.set("hostname", one_line(report.world.nodes[0]))
    return suite


def _case(suite: Element, report: Report, check: CheckLine) -> None:
    name = one_line(f"{check.code} {check.name}")
    case = SubElement(suite, "testcase", classname=suite.get("name", ""), name=name)
    findings = [finding for finding in report.findings if finding.code.partition(".")[0] == check.code]
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        kind = "error" if report.verdict is Verdict.UNKNOWN else "failure"
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        broken = SubElement(case, kind, type=one_line(errors[0].code), message=one_line(errors[0].title) + more)
        broken.text = _in_words(errors)
    elif check.skipped_because is not None:
        SubElement(case, "skipped", message=one_line(check.skipped_because))
    if others := [finding for finding in findings if finding not in errors]:
        SubElement(case, "system-out").text = _in_words(others)


def _in_words(findings: Sequence[Finding]) -> str:
    return printable("\n\n".join("\n".join(_lines(finding)) for finding in findings))


def _lines(finding: Finding) -> Iterator[str]:
    """A finding as text: what, who, the numbers, the fix."""
    yield f"{finding.severity.value}: {finding.code}: {finding.title}"
    yield finding.message
    subjects = {
        "ranks": fold_ranks(finding.ranks),
        "hosts": fold_hosts(finding.nodes),
        "gpus": ", ".join(finding.gpus),
        "links": ", ".join(finding.links),
    }
    yield from (f"{name}: {words}" for name, words in subjects.items() if words)
    yield from (f"{name}: {value}" for name, value in finding.evidence.items() if value is not None)
    if finding.fix:
        yield f"fix: {finding.fix}"
    for name, value in finding.env.items():
        yield f"fix: unset {name}" if value is None else f"fix: {name}={value}"


def _verdict(root: Element, report: Report) -> None:
    """The last suite; its one case fails where the exit code is that of a failure."""
    suite = _suite(root, report, "verdict", 0.0)
    about = {"version": __version__, "run_id": report.run_id, "launcher": report.world.launcher}
    properties = SubElement(suite, "properties")
    for name, value in {**about, "backend": report.world.backend, "ranks": str(report.world.size)}.items():
        SubElement(properties, "property", name=name, value=one_line(value))
    case = SubElement(suite, "testcase", classname="ddpdiag.verdict", name="verdict")
    if report.exit_code == 0:
        SubElement(case, "system-out").text = printable(report.sentence)
        return
    kind = "error" if report.verdict is Verdict.UNKNOWN else "failure"
    broken = SubElement(case, kind, type=report.verdict.value.upper(), message=one_line(report.sentence))
    broken.text = printable("\n".join((report.sentence, *report.notes)))
