"""Blocks in the formats that draw them: terminal, Markdown, HTML."""

import re
from xml.etree import ElementTree

import pytest
from pages import Reader
from reports import fit

from ddpdiag.render import html, markdown
from ddpdiag.render.blocks import Cell, Chart, Code, Column, Fold, HeatMap, Items, Line, Mark, Section, Table, Text
from ddpdiag.render.html.charts import alt_text, svg_of
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint

ROWS = (("ddp", 1436.0, 2**30, 0.93), ("<script>|`*", Cell(None), None, Cell(0.42, Mark.ERROR)))
COLUMNS = (Column("strategy"), Column("samples/s", bar=True), Column(name="peak_bytes"), Column("eff.", "eff_share"))
SIZES = tuple(2.0**power for power in range(10, 21))
CHART = Chart(
    title="Bandwidth",
    x_name="size_bytes",
    y_name="busbw_bytes_per_s",
    lines=(
        Line("gloo </svg>", tuple((size, 1e3 * size) for size in SIZES)),
        Line("expected", ((SIZES[0], 2e9), (SIZES[-1], 2e9)), is_dashed=True),
    ),
)
DAYS = HeatMap(
    noun="host",
    column_noun="day",
    columns=("05-30", "05-31", "06-01"),
    rows=(("n1", ((0, 0), (0, 4), (3, 4))), ("n2", ((1, 1), (0, 0), (0, 2)))),
)
BLOCKS = (
    Text("Of 4 ranks.", lead="Speed"),
    Table(columns=COLUMNS, rows=ROWS, title="Rates", noun="strategy", note="eff.: efficiency."),
    Items(("first", "second"), "Why"),
    Code("export A=1\nunset B", "Variables"),
    CHART,
    DAYS,
    Fold("More", (Text("Folded."),)),
)


class Example:
    @staticmethod
    def blocks(_report):
        yield Section("Strategies", BLOCKS, name="strategies")

    @staticmethod
    def samples(_report):
        yield from ()


def in_terminal(*blocks, width=80, **kwargs):
    page = Page(color=False, width=width)
    paint(page, blocks, **kwargs)
    return page.text()


def in_html():
    return re.search(r'<section id="strategies".*?</section>', html.render(fit(), (Example,)), re.DOTALL)[0]


def test_blocks_in_each_format(golden):
    golden(in_terminal(Section("Strategies", BLOCKS)))
    text = markdown.render(fit(), (Example,))
    golden(text[text.index("### Strategies") : text.index("<summary>Ranks")])
    golden("\n".join(text.strip() for text in Reader(in_html()).texts if text.strip()))


def test_a_fold_is_shown_with_details():
    assert "Folded." not in in_terminal(*BLOCKS)
    assert "Folded." in in_terminal(*BLOCKS, details=True)


def test_a_long_table_shows_its_important_rows_and_how_many_are_left():
    rows = tuple((number, number * 1.5) for number in range(100))
    table = Table(
        columns=(Column("rank"), Column(name="time_seconds")), rows=rows, noun="rank", order=(99, 98, *range(98))
    )
    text = in_terminal(table)
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["99", "98", "0"]
    assert "84 more ranks, with --details" in text
    assert "\n  50 " in in_terminal(table, details=True)


def test_many_columns_of_a_heat_map_share_letters():
    cells = tuple((day == 70, day > 30) for day in range(90))
    text = in_terminal(HeatMap(noun="host", column_noun="day", columns=("day",) * 90, rows=(("n1", cells),)))
    assert text.splitlines()[1] == f"n1    {'-' * 15}{'.' * 20}x{'.' * 9}"


def test_a_bar_is_as_long_as_its_share_of_the_longest():
    rows = ((1.0,), (4.0,), (None,))
    report = Section("Bars", (Table(columns=(Column("rate", bar=True),), rows=rows),), name="bars")
    page = html.render(fit(), (type("Feature", (Example,), {"blocks": staticmethod(lambda _: iter([report]))}),))
    assert re.findall(r"--bar: (\d+)%", page.partition('id="bars-1"')[2])[:2] == ["25", "100"]


def test_a_chart_is_whole_and_says_in_words_what_it_shows(golden):
    texts = [*ElementTree.fromstring(svg_of(CHART)).itertext()]
    assert "gloo </svg>" in texts
    golden("\n".join(texts), alt_text(CHART))


@pytest.mark.parametrize("y", [float("nan"), -1.0, 1e300])
def test_values_that_no_axis_can_show_are_left_out(y):
    assert svg_of(Chart(title="", x_name="size_bytes", y_name="time_seconds", lines=(Line("odd", ((1.0, y),)),))) == ""


def test_a_chart_of_a_single_point_is_drawn():
    lines = (Line("one", ((8.0, 0.5),)),)
    assert "<circle" in svg_of(Chart(title="", x_name="size_bytes", y_name="time_seconds", lines=lines))
