"""Write pages of text for a terminal: wrapped and indented paragraphs, colours, and tables that fit the width.

Texts in a report come from other machines. In them, rich's markup, a terminal's escape codes, and characters that
reverse or hide others have no effect.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from textwrap import wrap
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ddpdiag.model import Scalar
from ddpdiag.sanitize import printable
from ddpdiag.text import Unit, cell, column_unit, figure, is_number

# On a narrower page each line would have a single word. A narrower terminal wraps the lines.
MIN_WIDTH = 40
_MIN_BODY_WIDTH = 24


def one_line(text: str) -> str:
    """Put `text` on one line, with invisible characters as escapes."""
    return " ".join(printable(text).split("\n"))


def clip_text(text: str, max_letters: int) -> str:
    """Put `text` on one line, cut to at most `max_letters` characters."""
    line = one_line(text)
    return line if len(line) <= max_letters else line[: max(0, max_letters - 3)] + "..."


class Page:
    """A page to which text is added. Styles are those of rich, such as "bold red", and are ignored without `color`."""

    def __init__(self, *, color: bool, width: int) -> None:
        self.color = color
        self.width = max(width, MIN_WIDTH)
        self._file = StringIO()
        self._console = Console(
            file=self._file,
            width=self.width,
            height=100,
            force_terminal=color,
            force_jupyter=False,
            force_interactive=False,
            no_color=not color,
            color_system="standard" if color else None,
            legacy_windows=False,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def blank(self) -> None:
        self._file.write("\n")

    def write_verbatim(self, *parts: str | tuple[str, str], indent: int = 0) -> None:
        """Write a line that is never wrapped, because readers copy it. A part is a text, or a (text, style) pair."""
        line = Text(" " * indent)
        for part in parts:
            text, style = (part, "") if isinstance(part, str) else part
            line.append(printable(text), style)
        self._print_line(line)

    def write(self, body: str, *, style: str = "", indent: int = 0, lead: str = "", lead_style: str = "") -> None:
        """Write a wrapped paragraph after a label, `lead`. All lines are indented to the end of the label.

        A word that is longer than the line is not split, because readers copy paths and names.
        """
        head = Text(" " * indent).append(printable(lead), lead_style)
        if self.width - head.cell_len < _MIN_BODY_WIDTH and lead:
            self._print_line(head)
            head = Text(" " * (indent + 4))
        room = max(self.width - head.cell_len, _MIN_BODY_WIDTH)
        for line in printable(body).split("\n"):
            for part in wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]:
                self._print_line(head + Text(part, style))
                head = Text(" " * head.cell_len)

    def table(self, table: Table) -> None:
        """Write a table of rich. The cells must be `Text`, because rich interprets markup in other cells.

        If columns have a minimum width, the table may be wider than the page: names are not split.
        """
        has_minimum_widths = any(column.min_width is not None for column in table.columns)
        min_width = Measurement.get(self._console, self._console.options, table).minimum if has_minimum_widths else 0
        with self._console.capture() as drawn:
            self._console.print(table, width=max(self.width, min_width), crop=False)
        # rich fills the last column with spaces, which log files keep.
        self._file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))

    def _print_line(self, line: Text) -> None:
        line.rstrip()
        # With soft wrap rich neither wraps nor crops the line.
        self._console.print(line, soft_wrap=True)

    @property
    def line_count(self) -> int:
        return self._file.getvalue().count("\n")

    def text(self) -> str:
        return self._file.getvalue()


_MAX_DECIMALS, _MAX_PLAIN_NUMBER = 3, 1e7


class NumberFormat(NamedTuple):
    """The unit and the number of decimals of all numbers in a column."""

    unit: Unit
    decimals: int

    def cell(self, value: Scalar) -> str:
        """The value as text without its unit. A value that would be rounded to 0 gets more decimals."""
        if not is_number(value) or (isinstance(value, int) and not self.unit.symbol):
            return cell(value, self.unit)
        size = value / self.unit.size
        text = f"{size:,.{self.decimals}f}"
        return figure(size) if abs(size) >= _MAX_PLAIN_NUMBER or (size and not text.strip("-0.,")) else text


def column_format(name: str, values: Iterable[Scalar], unit: Unit | None = None) -> NumberFormat:
    """Choose decimals for 3 digits of the median, and 1 of the smallest number. The default unit fits the median."""
    numbers = sorted(filter(is_number, values))
    unit = unit or column_unit(name, numbers)
    sizes = sorted(size for number in numbers if (size := abs(number / unit.size)))
    if not sizes:
        return NumberFormat(unit, 0)
    wanted_decimals = 2 - int(f"{sizes[len(sizes) // 2]:.2e}".partition("e")[2])
    return NumberFormat(unit, min(max(wanted_decimals, -math.floor(math.log10(sizes[0])), 0), _MAX_DECIMALS))


ROWS_SHOWN, DETAIL_ROWS_SHOWN = 16, 1_000  # without and with `--details`
_MAX_TEXT_WIDTH = 28


class Column(NamedTuple):
    """A column as text, with the style of each cell. Long cells are wrapped, unless `no_wrap` is set."""

    header: str
    cells: tuple[str, ...]
    is_right_aligned: bool
    styles: tuple[str, ...] = ()
    no_wrap: bool = False

    @property
    def width(self) -> int:
        """The width of the column in characters, after long texts are wrapped."""
        widest = max(map(cell_len, (*self.header.split("\n"), *self.cells)), default=0)
        return widest if self.is_right_aligned or self.no_wrap else min(widest, _MAX_TEXT_WIDTH)


def fit_tables(
    key_columns: Sequence[Column], other_columns: Sequence[Column], row_count: int, *, width: int
) -> Iterator[Table]:
    """Yield tables that fit `width`. Each has all `key_columns`, and together they have all `other_columns`."""
    gap_count = len(key_columns) + len(other_columns) - 1
    room = width - sum(column.width for column in (*key_columns, *other_columns))
    gap = 1 if gap_count <= room < 2 * gap_count else 2  # one table with narrow gaps reads better than two tables
    key_width = sum(column.width + gap for column in key_columns)
    piece: list[Column] = []
    used_width = key_width
    for column in other_columns:
        if piece and used_width + column.width > width:
            yield _rich_table((*key_columns, *piece), row_count, gap)
            piece, used_width = [], key_width
        piece.append(column)
        used_width += column.width + gap
    yield _rich_table((*key_columns, *piece), row_count, gap)


def _rich_table(columns: Sequence[Column], row_count: int, gap: int) -> Table:
    """A table of rich with these columns, `row_count` rows, and `gap` spaces between columns."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        min_width = column.width if column.no_wrap else None
        justify: Literal["left", "right"] = "right" if column.is_right_aligned else "left"
        table.add_column(Text(column.header), justify=justify, overflow="fold", min_width=min_width)
    for row in range(row_count):
        table.add_row(*(Text(c.cells[row], c.styles[row] if c.styles else "") for c in columns))
    return table
