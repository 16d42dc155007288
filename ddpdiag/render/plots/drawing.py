"""Figures into bytes, and into a page: SVG whose colours and fonts are those of the page around it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from ddpdiag.errors import UsageError
from ddpdiag.render.page import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that nobody would choose: each stands for one of the page, which differs by light and dark.
INK, MUTED, GRID, BAD, WARN, PAPER = (f"#01020{digit}" for digit in "123456")
SERIES = tuple(f"#01021{digit}" for digit in "12345678")
_OF_PAGE = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    BAD: "var(--bad)",
    WARN: "var(--warn)",
    PAPER: "var(--paper)",
} | {color: f"var(--s{number})" for number, color in enumerate(SERIES, 1)}
_COLOR = re.compile("|".join(_OF_PAGE))
# So that parts are told apart without colour, too.
HATCHES = ("", "//", "\\\\", "xx", "--", "||", "++", "/")
# Inches. The box of a figure has 302 CSS pixels (3.1 inches) on a phone of 360: there letters of SMALL points, the
# smallest in use, are still 10 pixels high; elsewhere several figures stand side by side.
WIDTH = 3.4
SMALL = 8.5

# Only within tags: a label says what it says.
_TAG = re.compile(r"<[^>]*>")
# One property, or several, as matplotlib's version has it.
_FONT = re.compile(r"font: (?:(\d+) )?([\d.]+)px [^;\"]*")
_FAMILY = re.compile(r"font-family: [^;\"]*")
_ID = re.compile(r'( id="|url\(#|href="#)')
_NOT_OURS = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"|(<svg[^>]*?) height="[\d.]+pt" width="[\d.]+pt"')


def check_available(option: str = "--plot", extra: str = "plot") -> None:
    """UsageError if there is no matplotlib; it is not imported, which takes a second."""
    if find_spec("matplotlib") is None:
        raise UsageError(_missing(option, extra))


def _missing(option: str, extra: str) -> str:
    return f"{option} needs matplotlib: pip install 'ddpdiag[{extra}]'"


@contextmanager
def drawing(option: str, extra: str = "plot") -> Iterator[None]:
    """What matplotlib throws is one sentence: UsageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(_missing(option, extra)) from error
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{option}: matplotlib cannot draw here: {error}") from error


@contextmanager
def file_style() -> Iterator[None]:
    """Figures that are made and saved within look as they do by default."""
    from matplotlib import rc_context
    from matplotlib.style import context

    with context("default"), rc_context({"svg.hashsalt": "ddpdiag", "grid.color": "#dddddd"}):
        yield


def saved(figure: "Figure", kind: Literal["svg", "png"]) -> bytes:
    """The file of a figure that was made within `file_style`."""
    target = BytesIO()
    # A date, a version or a random id in the file would make each one different.
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(target, format=kind, metadata=metadata, dpi=144)
    return target.getvalue()


@contextmanager
def page_style() -> Iterator[None]:
    """Figures that are made and saved within look like the page."""
    from matplotlib import rc_context
    from matplotlib.style import context

    with (
        context("default"),
        rc_context(
            {
                "svg.hashsalt": "ddpdiag",
                "svg.fonttype": "none",
                "text.parse_math": False,
                "font.size": 10.0,
                "text.color": INK,
                "axes.edgecolor": MUTED,
                "axes.labelcolor": INK,
                "axes.facecolor": "none",
                "axes.titlesize": 10.0,
                "axes.titlelocation": "left",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "figure.facecolor": "none",
                "savefig.facecolor": "none",
                "grid.color": GRID,
                "grid.linewidth": 0.6,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "legend.frameon": False,
                "legend.fontsize": SMALL,
                "hatch.linewidth": 0.8,
            }
        ),
    ):
        yield


def inline(figure: "Figure", name: str) -> str:
    """The SVG element of a figure that was made within `page_style`; `name` keeps its ids apart from other figures'."""
    target = BytesIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = _NOT_OURS.sub("", target.getvalue().decode())
    return _TAG.sub(lambda tag: _of_page(tag[0], name), text).strip()


def _of_page(tag: str, name: str) -> str:
    tag = _COLOR.sub(lambda match: _OF_PAGE[match[0]], tag)
    tag = _FONT.sub(lambda match: f"font: {match[1] or 400} {match[2]}px var(--font)", tag)
    tag = _FAMILY.sub("font-family: var(--font)", tag)
    tag = _SIZE.sub(lambda match: match[1] or match[2], tag)
    return _ID.sub(lambda match: f"{match[1]}{name}-", tag)


def plain(text: str) -> str:
    """`text` as it is: no formula between dollar signs, and no letter that the built-in font lacks."""
    return one_line(text).encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def word(text: str, most: int = 28) -> str:
    """A label within `page_style`, where dollar signs mean themselves; a long one is cut."""
    shown = one_line(text).encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
