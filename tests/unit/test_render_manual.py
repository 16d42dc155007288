"""Manual pages and the list of checks."""

import subprocess
import sys

from ddpdiag.render.manual import CheckRow, checks_table, explain

MANUAL = """PCIe link of each GPU.

A GPU whose link trained narrower than both GPU and slot
allow copies at a fraction of its speed.

Compare:

    nvidia-smi -q   -d PCIE

- a list
- of two
"""

ROWS = [
    CheckRow("GPU004", "pcie-link", "gpu", "PCIe link of each GPU"),
    CheckRow("RDZ001", "env", "rendezvous", "[red]"),
]


def page(manual: str = MANUAL, *, width: int = 80, color: bool = False) -> str:
    return explain(ROWS[0], manual, {}, width=width, color=color)


def test_a_page_has_a_head_a_title_and_filled_paragraphs():
    assert page() == (
        "GPU004 pcie-link (stage: gpu)\n\nPCIe link of each GPU.\n\n"
        "A GPU whose link trained narrower than both GPU and slot allow copies at a\nfraction of its speed.\n\n"
        "Compare:\n\n    nvidia-smi -q   -d PCIE\n\n- a list\n- of two\n"
    )


def test_items_of_a_list_are_filled_with_a_hanging_indent():
    manual = (
        "Title.\n\nFindings:\n- missing: the variable names an interface that is not there\n  at all.\n- down: no.\n"
    )
    assert page(manual, width=40).endswith(
        "\n\nFindings:\n- missing: the variable names an\n  interface that is not there at all.\n- down: no.\n"
    )


def test_a_table_within_a_list_stays_as_it_is():
    manual = "Title.\n\n- item:\n      a   table\n"
    assert page(manual, width=40).endswith("\n- item:\n      a   table\n")


def test_settings_are_shown_with_their_usual_values():
    shown = explain(ROWS[0], "Title.", {"slow_ratio": 3.0, "least": 3e7}, width=80, color=False)
    assert shown.endswith("\n\nSettings (--set GPU004.NAME=VALUE): slow_ratio=3, least=3e+07.\n")


def test_a_title_alone_is_a_page():
    assert page("Title.") == "GPU004 pcie-link (stage: gpu)\n\nTitle.\n"
    assert page("") == "GPU004 pcie-link (stage: gpu)\n\n\n"


def test_a_docstring_of_a_function_loses_its_indent():
    assert page("Title.\n\n    Text\n    goes on.\n    ").endswith("Title.\n\nText goes on.\n")


def test_colour_makes_the_head_bold_and_changes_no_word():
    coloured = page(color=True)
    assert coloured.startswith("\x1b[1mGPU004")
    assert coloured.replace("\x1b[1m", "").replace("\x1b[0m", "") == page()


def test_the_list_has_one_line_a_check():
    assert checks_table(ROWS, tty=False, width=20, color=False).splitlines() == [
        "GPU004  pcie-link  gpu         PCIe link of each GPU",
        "RDZ001  env        rendezvous  [red]",
    ]


def test_the_list_in_colour_has_every_word():
    text = checks_table(ROWS, tty=True, width=80, color=True)
    assert "\x1b[1mGPU004" in text
    assert "PCIe link of each GPU" in text
    assert "[red]" in text


def test_an_empty_list_is_empty():
    assert checks_table([], tty=False, width=80, color=False) == ""


def test_a_page_needs_neither_rich_nor_the_model():
    script = (
        "import sys, ddpdiag.render.manual; print([m for m in ('rich', 'msgspec', 'ClusterShell') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
