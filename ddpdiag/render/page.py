"""A page of text: wrapped, indented, coloured or plain, with nothing cut off.

Texts in a report come from other machines. Whatever is in them, they are shown and never obeyed: neither rich's markup
nor a terminal's escape codes, nor characters that reverse or hide their neighbours.
"""

from io import StringIO
from textwrap import wrap

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ddpdiag.foreign import printable

# Below this, words stand one to a line and help nobody; longer lines are wrapped by the terminal.
LEAST_WIDTH = 40
_LEAST_BODY = 24


def one_line(text: str) -> str:
    """`text` for a place that has one line only."""
    return " ".join(printable(text).split("\n"))


class Page:
    """What has been written so far. Styles are rich's ("bold red"); without `color` they leave no trace.

    `tty`: for eyes, where some pages look otherwise than for scripts.
    """

    def __init__(self, *, color: bool, width: int, tty: bool = False) -> None:
        self.color = color
        self.tty = tty
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
        """An empty line."""
        self._file.write("\n")

    def verbatim(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """One line that is never wrapped, because it is made to be copied."""
        self._put(Text(" " * indent).append(printable(text), style))

    def write(self, body: str, *, style: str = "", indent: int = 0, lead: str = "", lead_style: str = "") -> None:
        """A wrapped paragraph. `lead` stands before it, and the lines that follow are indented to its end.

        A word that is longer than the line stays whole: paths and names are there to be copied.
        """
        head = Text(" " * indent).append(printable(lead), lead_style)
        if self.width - head.cell_len < _LEAST_BODY and lead:
            self._put(head)
            head = Text(" " * (indent + 4))
        for line in _wrapped(printable(body), max(self.width - head.cell_len, _LEAST_BODY)):
            self._put(head + Text(line, style))
            head = Text(" " * head.cell_len)

    def table(self, table: Table) -> None:
        """A table; its cells must be `Text`, or rich would interpret them.

        One whose columns have a least width is as wide as they need: the terminal wraps it, and names stay whole.
        """
        wide = any(column.min_width is not None for column in table.columns)
        least = Measurement.get(self._console, self._console.options, table).minimum if wide else 0
        with self._console.capture() as drawn:
            self._console.print(table, width=max(self.width, least), crop=False)
        # rich fills the last column with spaces, which log files keep.
        self._file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))

    def _put(self, line: Text) -> None:
        line.rstrip()
        # Soft wrap means that rich neither wraps nor crops: the line is as long as it is.
        self._console.print(line, soft_wrap=True)

    @property
    def lines(self) -> int:
        """How many there are by now."""
        return self._file.getvalue().count("\n")

    def text(self) -> str:
        """All that was written."""
        return self._file.getvalue()


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width`, unless a word is longer; line ends in `text` stay."""
    return [
        piece
        for line in text.split("\n")
        for piece in wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]
