"""Markdown stays below what a comment takes, whatever the report holds, and says what is missing."""

import re

from benches import bench as benched
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from reports import finding_of, fit

from ddpdiag.cli.outputs import features_of
from ddpdiag.model import CheckSummary, Report, Severity, StageSummary, WorldSummary
from ddpdiag.model.train import Strategy, StrategyRow, StrategyStatus, TrainReport, TrainRequest
from ddpdiag.render import markdown
from ddpdiag.render.markup import Piece, byte_size, escape_and_cut, fit_pieces

# GitHub: "body is too long (maximum is 65536 characters)".
GITHUB_TAKES = 65_536
nasty = st.text(alphabet="a @#`|!&\n\x1b\u20ac\U0001f600/:<", min_size=1, max_size=4)


def crowded(text: str, number: int) -> Report:
    """A report in which everything is there `number` times, and says `text`."""
    found = tuple(
        finding_of(
            severity,
            code=f"COL001.{place}",
            title=text,
            message=text,
            ranks=tuple(range(0, 2 * number, 2)),
            hosts=(text, f"{place}{text}"),
            gpus=(text,),
            links=(text,) * number,
            evidence={f"{text}{each}": [text] * 20 for each in range(number)},
            fix=text,
            env={f"{text}{each}": text for each in range(number)},
        )
        for severity in Severity
        for place in range(number)
    )
    row = StrategyRow(strategy=Strategy.DDP, status=StrategyStatus.FAILS, reason=text)
    train = TrainReport(
        request=TrainRequest(), batch_size=1, device="cpu", rows=(row,) * number, tolerance=0.1, sentence=text
    )
    return fit(
        sentence=text,
        run_id=text,
        world=WorldSummary(size=number, hosts=(text,) * number, launcher=text, backend=text),
        ranks=({"rank": 0, **{f"{text}{each}": text for each in range(number)}},) * number,
        stages=(StageSummary(name=text, status=text, seconds=1.0),) * number,
        checks=(CheckSummary(code=text, name=text, stage=text, statuses={text: 1}, skipped_because=text),) * number,
        findings=found,
        measurements={f"{text}{each}": text for each in range(number)},
        recording_problems=(text,) * number,
        bench=benched_with(text, number),
        train=train,
        workarounds={f"{text}{each}": text for each in range(number)},
    )


def benched_with(text: str, number: int):
    bench = benched("gloo")
    rows = tuple(structs.replace(row, dtype=text, backend=f"{at}{text}") for at in range(20) for row in bench.rows)
    ranks = tuple(structs.replace(bench.ranks[0], host=text, slow_reason=text) for _ in range(number))
    series = tuple(structs.replace(bench.series[0], sentence=text) for _ in range(number))
    return structs.replace(bench, rows=rows, ranks=ranks, series=series, omissions=(text,) * number)


@settings(deadline=None, max_examples=5)
@given(nasty, st.integers(1, 4_000), st.integers(0, 25))
@example("@", 40_000, 20)
@example("`", 4_000, 1)
def test_no_report_is_too_long_for_a_comment(part: str, length: int, number: int) -> None:
    report = crowded(part * (length // max(1, number)), number)
    text = markdown.render(report, features_of(report))
    assert len(text) < GITHUB_TAKES
    assert text.count("<details>") == text.count("</details>")


def left_out(text: str) -> str:
    """What it says of what is only in the JSON report."""
    return "\n".join(line for line in text.splitlines() if "JSON" in line)


def test_of_a_long_finding_the_beginning_is_shown_and_how_much_is_missing(golden) -> None:
    text = markdown.render(fit(findings=(finding_of(message="word " * 20_000, fix="Mend it."),)))
    shown, note, missing = re.search(r"((?:word ?)+) (\.\.\. \(([\d,]+) .*\))", text).groups()
    assert len("word " * 20_000) - int(missing.replace(",", "")) in (len(shown), len(shown) + 1)
    golden(note, *(line for line in text.splitlines() if "Mend it." in line))


def test_the_table_of_a_benchmark_ends_with_how_many_rows_are_missing(golden) -> None:
    bench = benched("gloo")
    report = fit(bench=structs.replace(bench, rows=bench.rows[:1] * 900))
    golden(left_out(markdown.render(report, features_of(report))))


def test_variables_are_all_there_or_none(golden) -> None:
    text = markdown.render(fit(workarounds={f"NCCL_{number}": "1" * 90 for number in range(1_000)}))
    assert "export" not in text
    golden(left_out(text))


def test_what_does_not_fit_is_named(golden) -> None:
    pieces = (
        Piece("ranks", ["a" * 1_500]),
        Piece("a note", ["b" * 900]),
        Piece("a note", ["b" * 900]),
        Piece("x", ["c"]),
    )
    *fits, note, end = fit_pieces(pieces, 2_000)
    assert (fits, end) == (["b" * 900, "c"], "")
    golden(note, fit_pieces(pieces, 1_900)[-2])


@given(st.text(max_size=300), st.integers(1, 200))
def test_a_sentence_is_as_long_as_it_may_be_and_says_what_is_missing(text: str, most: int) -> None:
    assert byte_size((escape_and_cut(text, most).partition(" ... (")[0],)) <= most + 1
