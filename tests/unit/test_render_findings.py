"""Findings in the report for people: each thing once, the way out before the figures, an index of many."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from reports import finding_of, fit, unfit, unknown

from ddpdiag.model import Finding, Report, Severity
from ddpdiag.render.findings import beyond
from ddpdiag.render.page import printable
from ddpdiag.render.terminal import render


def plain(report: Report, *, width: int = 80, details: bool = False) -> str:
    return render(report, color=False, width=width, details=details)


def test_a_message_of_500_characters_wraps():
    message = " ".join(f"word{number:04d}" for number in range(56))
    lines = plain(fit(findings=(finding_of(message=message),))).splitlines()
    assert max(map(len, lines)) <= 80
    assert message in " ".join(" ".join(lines).split())


def test_nobody_blamed_is_said():
    assert "nobody can be blamed" in plain(unknown())
    assert "nobody can be blamed" not in plain(fit(findings=(finding_of(Severity.INFO),)))


def test_exports_are_for_copying():
    env = {"A": "x y", "B": "it's", "C": "z" * 200, "D": "a\nb"}
    lines = plain(fit(findings=(finding_of(env=env),))).splitlines()
    exports = [line.strip() for line in lines if line.strip().startswith("export")]
    assert exports == ["export A='x y'", "export B='it'\"'\"'s'", f"export C={'z' * 200}", "export D=$'a\\nb'"]


def test_findings_of_one_code_are_counted_beyond_three():
    findings = tuple(finding_of(ranks=(rank,), nodes=(f"n{rank}",)) for rank in range(10))
    text = plain(fit(findings=findings))
    assert text.count("error COL001.slow: a title") == 3
    assert "7 more like these: ranks 3-9; hosts n[3-9]" in " ".join(text.split())
    assert plain(fit(findings=findings), details=True).count("error COL001.slow: a title") == 10


def test_where_several_codes_have_many_one_of_each_is_shown():
    codes = ("COL001.slow", "COL002.slow")
    findings = tuple(finding_of(code=code, ranks=(rank,)) for code in codes for rank in range(4))
    text = plain(fit(findings=findings))
    assert [text.count(f"error {code}: a title") for code in codes] == [1, 1]
    assert text.count("3 more like these: ranks 1-3") == 2
    assert plain(fit(findings=findings), details=True).count("a title") == 8


def test_two_of_a_code_are_both_shown_however_many_others_there_are():
    codes = [f"COL00{number}.slow" for number in range(3)]
    findings = tuple(finding_of(code=code) for code in codes for _ in range(2))
    assert plain(fit(findings=findings)).count("a title") == 6


def test_long_lists_are_counted_and_whole_in_details():
    report = fit(findings=(finding_of(evidence={"values": list(range(100))}),))
    assert "+92 more" in plain(report)
    assert "98, 99" in " ".join(plain(report, details=True).split())


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
        nodes=st.lists(WORDS, max_size=3).map(tuple),
        gpus=st.lists(WORDS, max_size=3).map(tuple),
        links=st.lists(WORDS, max_size=3).map(tuple),
        evidence=st.dictionaries(WORDS, st.none() | st.booleans() | st.floats() | st.integers() | WORDS, max_size=3),
        remedy=WORDS,
        env=st.dictionaries(WORDS, WORDS, max_size=2),
    ),
    width=st.integers(0, 200),
    color=st.booleans(),
)
def test_any_finding_is_shown_with_all_its_words(finding, width, color):
    report = fit(findings=(finding,), sentence=finding.message, notes=(finding.title,))
    shown = "".join(render(report, color=color, width=width).split())
    texts = (
        finding.title,
        beyond(finding.title, finding.message),
        finding.remedy,
        *finding.nodes,
        *finding.gpus,
        *finding.links,
    )
    for text in texts:
        for word in printable(text).split():
            assert word in shown


ROWS = ["rank 2: hung at 'post', sleeping in _forever (user.py); posted nothing", "ranks 0-1, 3: hung at 'wait'"]
FRAMES = ["_forever (user.py:3)", "measure (col001.py:54)"]


def test_a_table_in_the_evidence_has_a_line_for_each_row():
    text = plain(fit(findings=(finding_of(evidence={"trial": 2, "ranks": ROWS, "stack_of_rank_2": FRAMES}),)))
    assert "\n    ranks:\n      rank 2: hung at 'post', sleeping in _forever (user.py); posted nothing\n" in text
    assert "\n      ranks 0-1, 3: hung at 'wait'\n" in text
    assert "\n    stack of rank 2:\n      _forever (user.py:3)\n      measure (col001.py:54)\n" in text


def test_a_long_row_goes_on_below_itself():
    text = plain(fit(findings=(finding_of(evidence={"ranks": [f"rank 2: {'word ' * 30}"]}),)))
    assert "\n      rank 2: word word" in text
    assert "\n              word word" in text


def test_a_table_shows_its_first_rows_and_says_how_many_are_left_out():
    report = fit(findings=(finding_of(evidence={"ranks": [f"rank {r}: hung" for r in range(20)]}),))
    assert "rank 7: hung\n      +12 more\n" in plain(report)
    assert "rank 19: hung" in plain(report, details=True)


# What is said once ----------------------------------------------------------------------------------------------------


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
    assert beyond(title, message) == beyond_it
    text = " ".join(plain(fit(findings=(finding_of(title=title, message=message),)), details=True).split())
    assert message in text


def evidence_of(message: str = "a message", details: bool = False, **evidence: object) -> str:
    """The paragraph of figures below a finding."""
    text = plain(fit(findings=(finding_of(message=message, evidence=evidence, of_the_run=True),)), details=details)
    return text.partition(message)[2].partition("\n\n")[0].strip()


def test_evidence_does_not_repeat_the_message():
    figures = {"rate_bytes_per_s": 2.38e6, "expected_bytes_per_s": 1.35e9, "source": "most hosts", "lost_share": 0.02}
    message = "2.38 MB/s; most hosts reach 1.35 GB/s; 2 % lost."
    assert evidence_of(message, **figures, noise_share=0.5) == "noise = 50 %"
    assert evidence_of(message, **figures, details=True) == (
        "rate = 2.38 MB/s; expected = 1.35 GB/s; source = most hosts; lost = 2 %"
    )
    # A part of another number or word is no repetition, and a bare number may be any.
    assert evidence_of("12.38 MB/s of 6 ranks on n10", rate_bytes_per_s=2.38e6, of=6, host="n1") == (
        "rate = 2.38 MB/s; of = 6; host = n1"
    )


def test_what_is_not_known_is_no_evidence():
    assert evidence_of(rates_bytes_per_s=[None, None], pair_bytes_per_s=None, usual_bytes_per_s=1e9) == "usual = 1 GB/s"
    assert "rates = not known, not known" in evidence_of(rates_bytes_per_s=[None, None], details=True)
    assert evidence_of(rates_bytes_per_s=[None, 1e9]) == "rates = not known, 1 GB/s"


def test_what_the_kernel_says_of_a_process_is_for_the_details():
    jargon = {"trial": 14, "pid": 56, "state": "S", "wchan": "hrtimer_nanosleep"}
    assert evidence_of(**jargon, deadline_seconds=6.0) == "deadline = 6 s"
    assert evidence_of(**jargon, details=True) == "trial = 14; pid = 56; state = S; wchan = hrtimer_nanosleep"


def test_of_an_output_the_last_line_is_shown_and_all_of_it_in_details():
    output = 'File "x.py", line 3\nraise X\nRuntimeError: gone\n'
    assert evidence_of(output=output) == "output = RuntimeError: gone"
    assert evidence_of("It says RuntimeError: gone", output=output) == ""
    assert evidence_of(output=output, details=True) == (
        'output:\n      File "x.py", line 3\n      raise X\n      RuntimeError: gone'
    )


def test_of_a_stack_the_innermost_frames_are_shown_and_of_many_stacks_one():
    stack, other = [f"f{n} (x.py:{n})" for n in range(6)], ["g (x.py:9)"]
    lines = evidence_of(stack_of_rank_3=stack, stack_of_rank_2=other).splitlines()
    assert [line.strip() for line in lines] == ["stack of rank 3:", *stack[:3], "+3 more"]
    whole = evidence_of(stack_of_rank_3=stack, stack_of_rank_2=other, details=True)
    assert [line.strip() for line in whole.splitlines()] == ["stack of rank 3:", *stack, "stack of rank 2:", *other]


def test_a_stack_that_stands_above_is_not_shown_again():
    findings = tuple(finding_of(code=f"RUN00{n}.hung", evidence={"stack_of_rank_3": FRAMES}) for n in range(3))
    assert plain(fit(findings=findings)).count(FRAMES[0]) == 1
    assert plain(fit(findings=findings), details=True).count(FRAMES[0]) == 3


def test_a_remedy_that_stands_above_is_named():
    cause = finding_of(code="RDZ004.refused", remedy="Open the ports.", evidence={"ports": "1-2"})
    result = finding_of(code="RUN003.hung", remedy="Open the ports.", evidence={"ways": "many"})
    text = plain(fit(findings=(cause, result), stages=(), ranks=(), checks=()))
    assert text.count("Open the ports.") == 1
    assert "    Fix: as for RDZ004.refused, above.\n\n" in text
    assert plain(fit(findings=(cause, result)), details=True).count("    Fix: Open the ports.") == 2


# Many findings --------------------------------------------------------------------------------------------------------

MANY = tuple(
    finding_of(code=f"X00{n}.bad", title=f"title {n}", message=f"message {n}", ranks=(n,), remedy=f"Do {n}.")
    for n in range(6)
)


def test_many_different_findings_begin_with_an_index():
    warning = finding_of(Severity.WARNING, code="Y001.odd", title="odd")
    lines = plain(unfit(findings=(*MANY, MANY[1], warning))).splitlines()
    assert lines[lines.index("7 errors and 1 warning, from the 4th kind on in short (--details: in full):") + 1 :][
        :7
    ] == [
        "  error X000.bad: title 0",
        "  error X001.bad: title 1, and 1 more like this",
        *(f"  error X00{n}.bad: title {n}" for n in range(2, 6)),
        "  warning Y001.odd: odd",
    ]


def test_behind_three_findings_who_and_the_way_out_is_said_of_each():
    text = plain(unfit(findings=MANY))
    assert [f"message {n}" in text for n in range(6)] == [True] * 3 + [False] * 3
    assert all(f"blamed: rank {n}\n    Fix: Do {n}." in text for n in range(6))
    assert all(f"message {n}" in plain(unfit(findings=MANY), details=True) for n in range(6))


def test_three_different_findings_need_no_index():
    assert "errors, from" not in plain(unfit(findings=MANY[:3]))
    assert "\n6 errors:\n" in plain(unfit(findings=MANY), details=True)


def test_hosts_of_findings_that_are_alike_are_a_whole_list():
    findings = tuple(finding_of(nodes=(f"n{host}",)) for host in range(0, 60, 3))
    text = plain(fit(findings=findings))
    assert "17 more like these; with --details" in text
    assert f"\n    all 20 hosts:\n    n[{','.join(str(host) for host in range(0, 60, 3))}]\n" in text


def test_nobody_is_missing_where_nobody_is_looked_for():
    findings = tuple(finding_of(Severity.INFO, message=f"message {n}") for n in range(9))
    assert "6 more like these; with --details" in plain(fit(findings=findings))
    assert "6 more like these: nobody can be blamed; with" in " ".join(
        plain(fit(findings=tuple(structs.replace(f, severity=Severity.ERROR) for f in findings))).split()
    )
