"""Findings in the report for people: each thing once, the fix before the figures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from reports import finding_of, fit, plain

from ddpdiag.model import Finding, Severity
from ddpdiag.render.findings import message_without_title
from ddpdiag.render.terminal import render
from ddpdiag.sanitize import printable


def told(*findings: Finding, details: bool = False) -> str:
    """What the report says between its head and its verdict, where it has nothing but findings."""
    report = fit(findings=findings, stages=(), ranks=(), checks=(), measurements={})
    return plain(report, details=details).partition("\n\n")[2].rpartition("\n\nFIT:")[0]


@pytest.mark.parametrize("severity", Severity, ids=lambda severity: severity.value)
def test_nobody_blamed_is_said_where_somebody_is_looked_for(golden, severity):
    golden(told(finding_of(severity)))


def test_exports_are_for_copying():
    env = {"A": "x y", "B": "it's", "C": "z" * 200, "D": "a\nb"}
    lines = plain(fit(findings=(finding_of(env=env),))).splitlines()
    workarounds = [line.strip() for line in lines if line.strip().startswith("export")]
    assert workarounds == ["export A='x y'", "export B='it'\"'\"'s'", f"export C={'z' * 200}", "export D='a"]


ALIKE = tuple(finding_of(ranks=(rank,), hosts=(f"n{rank}",)) for rank in range(10))
SEVERAL = tuple(finding_of(code=f"COL00{code}.slow", ranks=(rank,)) for code in (1, 2) for rank in range(4))
HOSTS = tuple(finding_of(hosts=(f"n{host}",)) for host in range(0, 60, 3))
INFOS = tuple(finding_of(Severity.NOTE, message=f"message {n}") for n in range(9))
ERRORS = tuple(structs.replace(own, severity=Severity.ERROR) for own in INFOS)


@pytest.mark.parametrize(
    "findings",
    [ALIKE, SEVERAL, HOSTS, INFOS, ERRORS],
    ids=["one code", "several codes", "a whole list of hosts", "nobody is looked for", "nobody is known"],
)
def test_of_findings_of_one_code_some_are_shown_and_the_others_counted(golden, findings):
    golden(told(*findings))
    assert told(*findings, details=True).count("a title") == len(findings)


WORDS = st.text(max_size=80)


@settings(deadline=None)
@given(
    finding=st.builds(
        Finding,
        code=WORDS,
        severity=st.sampled_from(Severity),
        title=WORDS,
        message=WORDS,
        ranks=st.lists(st.integers(0, 99)).map(tuple),
        hosts=st.lists(WORDS, max_size=3).map(tuple),
        gpus=st.lists(WORDS, max_size=3).map(tuple),
        links=st.lists(WORDS, max_size=3).map(tuple),
        evidence=st.dictionaries(WORDS, st.none() | st.booleans() | st.floats() | st.integers() | WORDS, max_size=3),
        fix=WORDS,
        env=st.dictionaries(WORDS, WORDS, max_size=2),
    ),
    width=st.integers(0, 200),
    color=st.booleans(),
)
def test_any_finding_is_shown_with_all_its_words(finding, width, color):
    report = fit(findings=(finding,), sentence=finding.message, recording_problems=(finding.title,))
    shown = "".join(render(report, color=color, width=width).split())
    texts = (
        finding.title,
        message_without_title(finding.title, finding.message),
        finding.fix,
        *finding.hosts,
        *finding.gpus,
        *finding.links,
    )
    for text in texts:
        for word in printable(text).split():
            assert word in shown


def test_of_a_finding_that_a_card_explains_only_the_card_is_shown_unless_all_is_asked_for():
    evidence = {"known_error": "port-taken", "last_step": "connect", "ranks": ["rank 1: raised at 'connect'"]}
    report = fit(findings=(finding_of(code="RUN003.raised", evidence=evidence),))
    assert "connect" not in plain(report)
    assert "connect" in render(report, color=False, width=80, details=True)


ROWS = ["rank 2: hung at 'post', sleeping in _forever (user.py); posted nothing", "ranks 0-1, 3: hung at 'wait'"]
FRAMES = ["_forever (user.py:3)", "measure (col001.py:54)"]


@pytest.mark.parametrize(
    ("evidence", "last"),
    [
        ({"values": list(range(100))}, "98, 99"),
        ({"trial": 2, "ranks": ROWS, "stack_of_rank_2": FRAMES}, FRAMES[-1]),
        ({"ranks": [f"rank 2: {'word ' * 30}"]}, "word word"),
        ({"ranks": [f"rank {rank}: hung" for rank in range(20)]}, "rank 19: hung"),
    ],
    ids=["a long list", "a table and a stack", "a long row", "many rows"],
)
def test_lists_and_tables_show_their_first_rows_and_how_many_are_left_out(golden, evidence, last):
    golden(told(finding_of(evidence=evidence)))
    assert last in " ".join(told(finding_of(evidence=evidence), details=True).split())


@pytest.mark.parametrize(
    ("title", "message", "beyond_it"),
    [
        ("rank 3 hung", "rank 3 hung: it did not come; pid 5.", "It did not come; pid 5."),
        ("rank 3 hung", "rank 3 hung", ""),
        ("n1 refuses", "n1 refuses (2 of 6 ways). Others reach each other.", "2 of 6 ways. Others reach each other."),
        ("slow", "slow: n1 takes long.", "n1 takes long."),
        # No sentence of its own would be left.
        ("rank 3", "rank 3 is slow.", "rank 3 is slow."),
        ("2 ways of 2", "2 ways of 2.5 GB/s", "2 ways of 2.5 GB/s"),
        ("", ": odd", ": odd"),
    ],
)
def test_a_message_does_not_begin_with_its_title(title, message, beyond_it):
    assert message_without_title(title, message) == beyond_it
    text = " ".join(plain(fit(findings=(finding_of(title=title, message=message),)), details=True).split())
    assert message in text


FIGURES = {"rate_bytes_per_s": 2.38e6, "expected_bytes_per_s": 1.35e9, "source": "most hosts", "lost_share": 0.02}
OUTPUT = {"output": 'File "x.py", line 3\nraise X\nRuntimeError: gone\n'}
EVIDENCE = {
    "figures of the message": ("2.38 MB/s; most hosts reach 1.35 GB/s; 2 % lost.", {**FIGURES, "noise_share": 0.5}),
    "parts of other numbers and words": (
        "12.38 MB/s of 6 ranks on n10",
        {"rate_bytes_per_s": 2.38e6, "of": 6, "host": "n1"},
    ),
    "not known": ("a message", {"rates_bytes_per_s": [None, None], "pair_bytes_per_s": None, "usual_bytes_per_s": 1e9}),
    "known in part": ("a message", {"rates_bytes_per_s": [None, 1e9]}),
    "what the kernel says of a process": (
        "a message",
        {"trial": 14, "pid": 56, "state": "S", "wchan": "hrtimer_nanosleep", "deadline_seconds": 6.0},
    ),
    "an output": ("a message", OUTPUT),
    "an output whose end the message tells": ("It says RuntimeError: gone", OUTPUT),
    "stacks": (
        "a message",
        {"stack_of_rank_3": [f"f{n} (x.py:{n})" for n in range(6)], "stack_of_rank_2": ["g (x.py:9)"]},
    ),
}


@pytest.mark.parametrize(("message", "evidence"), EVIDENCE.values(), ids=EVIDENCE)
def test_evidence_is_what_the_message_does_not_say_and_all_of_it_in_details(golden, message, evidence):
    finding = finding_of(message=message, evidence=evidence, is_about_run=True)
    golden(told(finding), told(finding, details=True))


def test_a_stack_that_stands_above_is_not_shown_again():
    findings = tuple(finding_of(code=f"RUN00{n}.hung", evidence={"stack_of_rank_3": FRAMES}) for n in range(3))
    assert plain(fit(findings=findings)).count(FRAMES[0]) == 1
    assert plain(fit(findings=findings), details=True).count(FRAMES[0]) == 3


def test_a_remedy_that_stands_above_is_named(golden):
    cause = finding_of(code="RDZ004.refused", fix="Open the ports.", evidence={"ports": "1-2"})
    result = finding_of(code="RUN003.hung", fix="Open the ports.", evidence={"ways": "many"})
    golden(told(cause, result), told(cause, result, details=True))


MANY = tuple(
    finding_of(code=f"X00{n}.bad", title=f"title {n}", message=f"message {n}", ranks=(n,), fix=f"Do {n}.")
    for n in range(6)
)


def test_of_many_different_findings_each_has_the_blamed_and_the_fix(golden):
    findings = *MANY, MANY[1], finding_of(Severity.WARNING, code="Y001.odd", title="odd")
    golden(told(*findings))
    assert all(f"message {n}" in told(*findings, details=True) for n in range(6))


def test_in_details_all_findings_are_in_full(golden):
    golden(told(*MANY, details=True))
