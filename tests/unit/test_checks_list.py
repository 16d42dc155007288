"""What holds for every check."""

import ast
import inspect
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import ddpdiag
from ddpdiag.checks.api import Check
from ddpdiag.checks.gpu import signs
from ddpdiag.checks.registry import MODULES, all_checks, check_by_code, module_of
from ddpdiag.errors import UsageError

CHECKS = all_checks()
FAMILIES = {
    "launch": "LCH",
    "host": "HST",
    "gpu": "GPU",
    "rendezvous": "RDZ",
    "collective": "COL",
    "p2p": "P2P",
    "fabric": "FAB",
    "training": "TRN",
    "run": ("RUN", "CMP"),
}


TESTS = "\n".join(
    path.read_text(encoding="utf-8")
    for pattern in ("unit/*.py", "golden/*.txt", "faults/gallery/*.py")
    for path in sorted(Path(__file__).parents[1].glob(pattern))
)


def test_every_module_with_a_check_is_in_the_list() -> None:
    room = Path(ddpdiag.__file__).parent.parent
    files = {path for path in room.glob("ddpdiag/**/*.py") if "\nCHECK: " in path.read_text()}
    assert files == {room / f"{module_of(code).replace('.', '/')}.py" for code in MODULES}
    assert list(MODULES) == [check.code for check in CHECKS]


def test_codes_and_names_are_unique() -> None:
    assert len({check.code for check in CHECKS}) == len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_a_check_has_a_manual_page_and_a_code_of_its_stage(check: Check[object]) -> None:
    assert check.code.startswith(FAMILIES[check.stage.value])
    assert "Fix:" in check.manual
    assert len(check.title) < 80
    assert check.deadline > 0


def sources_of(check: Check[object]) -> list[str]:
    """The text of a check's module, or of all modules of its package."""
    file = Path(inspect.getfile(sys.modules[check.module]))
    return [path.read_text() for path in (file.parent.glob("*.py") if file.name == "check.py" else [file])]


def test_findings_that_a_check_reads_are_of_checks_before_it() -> None:
    room, codes = Path(ddpdiag.checks.__file__).parent, list(MODULES)
    for code, module in MODULES.items():
        file = room / f"{module.replace('.', '/')}.py"
        sources = file.parent.glob("*.py") if file.name == "check.py" else [file]
        read = {name for path in sources for name in re.findall(r'findings_of\("(\w+)"\)', path.read_text())}
        assert all(codes.index(name) < codes.index(code) for name in read), code


def test_settings_that_a_check_reads_are_declared() -> None:
    for check in CHECKS:
        trees = list(map(ast.parse, sources_of(check)))
        calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        read = {
            name.value
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "setting"
            for name in ast.walk(call.args[0])
            if isinstance(name, ast.Constant)
        }
        read |= {row.total_limit for row in signs.COUNTERS if row.total_code.startswith(check.code)} - {""}
        read |= {row.rise_limit for row in signs.COUNTERS if row.rise_code.startswith(check.code)} - {""}
        words = Counter(node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
        # A name that stands there twice is declared and handed on to what reads it.
        read |= {name for name in check.settings if words[name] > 1}
        assert read == set(check.settings), check.code


def test_settings_that_texts_name_are_declared() -> None:
    sources = "".join(path.read_text() for path in Path(ddpdiag.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"--set ([A-Z0-9]{3}\d{3})\.(\w+)", sources))
    assert named
    assert all(name in {*check_by_code(code).settings, "deadline_seconds"} for code, name in named), named


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.code)
def test_a_test_makes_each_finding_that_a_check_declares(check: Check[object]) -> None:
    missing = [word for word in check.findings if not re.search(rf"{check.code}\.{word}\b|[\"'{{]{word}[\"'}}]", TESTS)]
    assert missing == []


def test_a_finding_leads_to_its_check() -> None:
    assert check_by_code("trn001.diverged").code == "TRN001"


@pytest.mark.parametrize("code", ["", "XYZ999", "hosts", "../x", "COL"])
def test_an_unknown_code_is_named(code: str) -> None:
    with pytest.raises(UsageError, match="ddpdiag checks"):
        check_by_code(code)
