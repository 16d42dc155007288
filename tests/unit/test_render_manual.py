"""Manual pages and the list of checks."""

import subprocess
import sys

import pytest

from ddpdiag.cli.manual import Page, checks_table, page_text

MANUAL = """PCIe link of each GPU.

A GPU whose link trained narrower than both GPU and slot
allow copies at a fraction of its speed.

Compare:

    nvidia-smi -q   -d PCIE

- a list
- of two
"""

PAGE = Page("GPU004", "pcie-link", "gpu", MANUAL, {})


def page(manual: str = MANUAL, *, width: int = 80, color: bool = False) -> str:
    return page_text(PAGE._replace(manual=manual), width=width, color=color)


PAGES = {
    "filled-paragraphs": (MANUAL, 80),
    "items-with-a-hanging-indent": (
        "Title.\n\nFindings:\n- missing: the variable names an interface that is not there\n  at all.\n- down: no.\n",
        40,
    ),
    "table-in-a-list-stays-as-it-is": ("Title.\n\n- item:\n      a   table\n", 40),
    "title-alone": ("Title.", 80),
    "empty": ("", 80),
    "docstring-loses-its-indent": ("Title.\n\n    Text\n    goes on.\n    ", 80),
}


@pytest.mark.parametrize(("manual", "width"), PAGES.values(), ids=PAGES)
def test_a_page_has_a_head_a_title_and_what_the_manual_says(golden, manual, width):
    text = page(manual, width=width)
    assert text.endswith("\n")
    golden(text)


def test_settings_are_shown_with_their_usual_values(golden):
    settings = {"slow_ratio": 3.0, "least": 3e7}
    golden(page_text(PAGE._replace(manual="Title.", settings=settings), width=80, color=False))


def test_colour_makes_the_head_bold_and_changes_no_word():
    coloured = page(color=True)
    assert coloured.startswith("\x1b[1mGPU004")
    assert coloured.replace("\x1b[1m", "").replace("\x1b[0m", "") == page()


def test_the_list_has_one_line_a_check(golden):
    golden(checks_table([PAGE, Page("RDZ001", "env", "rendezvous", "[red]", {})]))
    assert checks_table([]) == ""


def test_a_page_needs_neither_rich_nor_the_model():
    script = (
        "import sys, ddpdiag.cli.manual; print([m for m in ('rich', 'msgspec', 'ClusterShell') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
