"""The report as Markdown: the verdict first, and nothing that a stranger wrote is obeyed."""

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from msgspec import structs

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.outputs import features_of
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.model import Finding, Report, Severity, Verdict, WorldSummary
from ddpdiag.model.train import Strategy, StrategyRow, StrategyStatus, TrainReport, TrainRequest
from ddpdiag.render import markdown, terminal
from ddpdiag.render.markup import escape, fence, fold_lines

relaxed = settings(deadline=None)
HEALTHY = Path(__file__).parent.parent / "recordings" / "healthy-2-ranks.jsonl"
EVIL = (
    "@all [x](http://evil.example) ![i](http://e/x.png) <img src=x onerror=y> </details> | a | `b` www.evil.example #12"
)
PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
# What GitHub makes of text outside of code, after it was rendered.
LINKS = re.compile(r"@[\w-]|://|www\.|#\d|GH-\d|mailto:|xmpp:", re.IGNORECASE)


@cache
def healthy() -> Report:
    return judge(read_recording([HEALTHY]), all_checks())


def report(**changed) -> Report:
    return structs.replace(healthy(), **changed)


def bare(**changed) -> Report:
    """The report without its tables."""
    return report(sentence="Well.", ranks=(), stages=(), checks=(), measurements={}, **changed)


def finding(**changed) -> Finding:
    named = {"code": "GPU004.narrow", "severity": Severity.ERROR, "title": "t", "message": "m", **changed}
    return Finding(**named)


def tokens(text: str):
    """All tokens, the inline ones as well."""
    for token in PARSER.parse(text):
        yield token
        yield from token.children or ()


def is_harmless(text: str) -> None:
    for token in tokens(text):
        assert token.type not in ("link_open", "image")
        if token.type in ("html_inline", "html_block"):
            assert re.fullmatch(r"(</?details>\n?|<summary>[^<>]*</summary>\n?)+", token.content), token.content
        if token.type == "text":
            assert not LINKS.search(token.content), token.content


@pytest.mark.parametrize(
    "findings",
    [
        pytest.param((), id="none"),
        pytest.param(
            (finding(ranks=(3,), hosts=("n1",), evidence={"width": 4}, fix="Reseat it.", env={"A_B": "1"}),),
            id="one says who, what numbers and what to do",
        ),
        pytest.param(tuple(finding(code=f"GPU004.c{n}", title=f"t{n}") for n in range(8)), id="many are folded away"),
        pytest.param(tuple(finding(title=f"t{n}", ranks=(n,)) for n in range(20)), id="those of one code are counted"),
    ],
)
def test_the_verdict_comes_first_and_then_the_findings(golden, findings) -> None:
    golden(markdown.render(bare(findings=findings, verdict=Verdict.UNFIT if findings else Verdict.FIT)))


@pytest.mark.parametrize("is_about_run", [False, True], ids=["of the ranks", "of the run"])
def test_that_nobody_is_named_is_said_where_somebody_is_looked_for(golden, is_about_run) -> None:
    found = bare(findings=(finding(severity=Severity.WARNING, is_about_run=is_about_run),))
    golden(markdown.render(found), terminal.render(found, color=False, width=80))


@pytest.mark.parametrize("codes", [1, 500])
@pytest.mark.parametrize("severity", list(Severity))
def test_no_number_of_findings_is_too_long_for_a_comment(codes: int, severity: Severity) -> None:
    """GitHub takes 65,536 characters."""
    findings = tuple(
        finding(
            code=f"GPU004.c{n % codes}", severity=severity, message="m" * 300, ranks=(n,), hosts=(f"node{n}",),
            fix="r" * 100, evidence={"width": 4, "possible_width": 16},
        )
        for n in range(20_000)
    )  # fmt: skip
    notes = tuple("n" * 100 for _ in range(5_000))
    figures = {f"figure_{n}": n for n in range(5_000)}
    text = markdown.render(report(findings=findings, recording_problems=notes, measurements=figures))
    assert len(text) < 60_000
    assert "4,936 more" in text
    assert "4,942 more" in text


def test_the_verdict_says_that_the_job_is_degraded() -> None:
    assert markdown.render(report(degraded=True)).startswith("**FIT, degraded:** ")
    assert markdown.render(report()).startswith("**FIT:** ")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("read `a_b | <c> @d` & e_f", r"read `a_b | <c> @d` & e\_f"),
        ("``a`` `b", r"\`\`a\`\` \`b"),
        (r"\`a\` &lt;", r"\\`a\` &amp;lt;"),
    ],
)
def test_words_between_single_backticks_are_code(text, escaped) -> None:
    assert escape(text, has_code=True) == escaped
    is_harmless(escaped)


def test_a_summary_is_html() -> None:
    assert fold_lines("all_reduce over gloo", ["x"])[1] == "<summary>all_reduce over gloo</summary>"
    assert "\\" not in fold_lines("a_b*c|d`e`[f]~!{g}", ["x"])[1]
    is_harmless("\n".join(fold_lines(EVIL, ["x"])))


def test_the_source_is_ascii(golden) -> None:
    assert markdown.render(report()).isascii()
    rows = (StrategyRow(strategy=Strategy.DDP, status=StrategyStatus.FAILS, reason="x"),)
    train = TrainReport(
        request=TrainRequest(), batch_size=1, device="cpu", rows=rows, tolerance=0.1, sentence="s"
    )  # fmt: skip
    trained = bare(train=train)
    text = markdown.render(trained, features_of(trained))
    assert text.isascii()
    golden(text)


def hostile(evil: str) -> Report:
    found = finding(
        code=evil, title=evil, message=evil, hosts=(evil,), gpus=(evil,), links=(evil,), fix=evil,
        evidence={evil: evil, "list": [evil, evil]}, env={evil: evil},
    )  # fmt: skip
    world = WorldSummary(size=2, hosts=(evil, "n1"), launcher=evil, backend=evil)
    ranks = ({"rank": 0, "host": evil, evil: evil},)
    info = structs.replace(found, severity=Severity.NOTE)
    return report(
        sentence=evil, run_id=evil, world=world, ranks=ranks, findings=(found, info), recording_problems=(evil,),
        measurements={evil: evil}, workarounds={evil: evil},
    )  # fmt: skip


@pytest.mark.parametrize(
    "evil", [EVIL, "```\n</details>\n# x", "| x |\n|---|", "&lt;b&gt;", "a`|`b", "1. x", "- x", "$x$", "\\", "---", "`"]
)
def test_a_strangers_words_are_shown_and_not_obeyed(evil: str) -> None:
    text = markdown.render(hostile(evil))
    is_harmless(text)
    ours = "".join(token.content for token in tokens(text) if token.type == "html_block")
    assert ours.count("<details>") == ours.count("</details>") > 0


@relaxed
@given(st.text(alphabet="@#[]()!<>/&`|\\*_~$:wW.hHtTpPsS12-+= \n\tgGaA{}", max_size=60))
def test_no_words_break_out(evil: str) -> None:
    is_harmless(markdown.render(hostile(evil)))


@relaxed
@given(st.text(max_size=40))
def test_words_are_shown_as_they_were(text: str) -> None:
    shown = "".join(t.content for t in tokens(f"x {escape(text)}") if t.type in ("text", "code_inline", "softbreak"))
    assert " ".join(shown.replace("\u200b", "").split()) == " ".join(f"x {_visible(text)}".split())


def _visible(text: str) -> str:
    from ddpdiag.render.page import one_line

    return one_line(text)


@relaxed
@given(st.text(alphabet="`~ab\n", max_size=20))
def test_a_block_ends_where_it_should(text: str) -> None:
    parsed = [token.type for token in PARSER.parse("\n".join([*fence(text), "", "end"]))]
    assert parsed == ["fence", "paragraph_open", "inline", "paragraph_close"]
