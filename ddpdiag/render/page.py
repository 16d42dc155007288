"""A page of text: wrapped, indented, coloured or plain, with nothing cut off, and tables that fit its width.

Texts in a report come from other machines. They are shown as they are: rich's markup, a terminal's escape codes and
characters that reverse or hide their neighbours have no effect.
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

# Below this each line has a single word; longer lines are wrapped by the terminal.
LEAST_WIDTH = 40
_LEAST_BODY = 24


def one_line(text: str) -> str:
    """`text` on one line, with invisible characters as escapes."""
    return " ".join(printable(text).split("\n"))


class Page:
    """A text that is being written. Styles are those of rich ("bold red"); without `color` they leave no trace."""

    def __init__(self, *, color: bool, width: int) -> None:
        self.color = color
        self.width = max(width, LEAST_WIDTH)
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
        """Write an empty line."""
        self._file.write("\n")

    def verbatim(self, *parts: str | tuple[str, str], indent: int = 0) -> None:
        """Write a line that is never wrapped, because readers copy it. A part may be a text with its style."""
        line = Text(" " * indent)
        for part in parts:
            text, style = (part, "") if isinstance(part, str) else part
            line.append(printable(text), style)
        self._put(line)

    def write(self, body: str, *, style: str = "", indent: int = 0, lead: str = "", lead_style: str = "") -> None:
        """Write a wrapped paragraph. `lead` comes before it, and the following lines are indented to the end of `lead`.

        A word that is longer than the line stays whole, because readers copy paths and names.
        """
        head = Text(" " * indent).append(printable(lead), lead_style)
        if self.width - head.cell_len < _LEAST_BODY and lead:
            self._put(head)
            head = Text(" " * (indent + 4))
        room = max(self.width - head.cell_len, _LEAST_BODY)
        for line in printable(body).split("\n"):
            for part in wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]:
                self._put(head + Text(part, style))
                head = Text(" " * head.cell_len)

    def table(self, table: Table) -> None:
        """Write a table. Its cells must be `Text`, or rich would interpret them.

        If columns have a least width, the table may be wider than the page: the terminal wraps it; names stay whole.
        """
        wide = any(column.min_width is not None for column in table.columns)
        least = Measurement.get(self._console, self._console.options, table).minimum if wide else 0
        with self._console.capture() as drawn:
            self._console.print(table, width=max(self.width, least), crop=False)
        # rich fills the last column with spaces, which log files keep.
        self._file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))

    def _put(self, line: Text) -> None:
        line.rstrip()
        # With soft wrap rich neither wraps nor crops the line.
        self._console.print(line, soft_wrap=True)

    @property
    def lines(self) -> int:
        """The number of lines that were written."""
        return self._file.getvalue().count("\n")

    def text(self) -> str:
        """The whole text that was written."""
        return self._file.getvalue()


_MOST_DECIMALS, _MOST_SIZE = 3, 1e7


class Format(NamedTuple):
    """The form of the numbers of a column: one unit, and one number of decimals."""

    unit: Unit
    decimals: int

    def cell(self, value: Scalar) -> str:
        """The value without its unit; a value that is not 0 never reads as 0."""
        if not is_number(value) or (isinstance(value, int) and not self.unit.symbol):
            return cell(value, self.unit)
        size = value / self.unit.size
        text = f"{size:,.{self.decimals}f}"
        return figure(size) if abs(size) >= _MOST_SIZE or (size and not text.strip("-0.,")) else text


def column_format(name: str, values: Iterable[Scalar], unit: Unit | None = None) -> Format:
    """The form that shows 3 digits of a column's median and 1 of its least number. `unit`: default fits the median."""
    numbers = sorted(filter(is_number, values))
    unit = unit or column_unit(name, numbers)
    sizes = sorted(size for number in numbers if (size := abs(number / unit.size)))
    if not sizes:
        return Format(unit, 0)
    wanted = 2 - int(f"{sizes[len(sizes) // 2]:.2e}".partition("e")[2])
    return Format(unit, min(max(wanted, -math.floor(math.log10(sizes[0])), 0), _MOST_DECIMALS))


ALL_SHOWN, MOST_SHOWN = 16, 1_000  # without and with `--details`
_LONGEST_TEXT = 28


class Column(NamedTuple):
    """One column, ready to be drawn. Long texts are wrapped, unless they are to stay `whole`."""

    header: str
    cells: tuple[str, ...]
    right: bool
    styles: tuple[str, ...] = ()
    whole: bool = False

    @property
    def width(self) -> int:
        """The width of the column in characters."""
        widest = max(map(cell_len, (*self.header.split("\n"), *self.cells)), default=0)
        return widest if self.right or self.whole else min(widest, _LONGEST_TEXT)


def fitted(names: Sequence[Column], figures: Sequence[Column], height: int, *, width: int) -> Iterator[Table]:
    """Tables that fit `width`: each has all `names` and some `figures`. The gap is 2 spaces, or 1 if all fit then."""
    between = len(names) + len(figures) - 1
    room = width - sum(column.width for column in (*names, *figures))
    gap = 1 if between <= room < 2 * between else 2  # two spaces read better, but one table reads better than two
    start = sum(column.width + gap for column in names)
    piece: list[Column] = []
    used = start
    for column in figures:
        if piece and used + column.width > width:
            yield _drawn((*names, *piece), height, gap)
            piece, used = [], start
        piece.append(column)
        used += column.width + gap
    yield _drawn((*names, *piece), height, gap)


def _drawn(columns: Sequence[Column], height: int, gap: int) -> Table:
    """A table of these columns, with `height` rows and `gap` spaces between columns."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        least = column.width if column.whole else None
        side: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.header), justify=side, overflow="fold", min_width=least)
    for row in range(height):
        table.add_row(*(Text(c.cells[row], c.styles[row] if c.styles else "") for c in columns))
    return table
