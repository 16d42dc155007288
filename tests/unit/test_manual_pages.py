"""Every finding that the sources name is declared, and every page has its sections."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from seen import made_check

import ddpdiag
import ddpdiag.checks
from ddpdiag.checks.api import Check, Stage
from ddpdiag.checks.findings import COMMON, FindingSpec
from ddpdiag.checks.gpu.cards import smi_id
from ddpdiag.checks.registry import all_checks, check_by_code, module_of
from ddpdiag.cli.manual import manual_page, manual_with_findings
from ddpdiag.errors import UsageError
from ddpdiag.explain.card import all_cards
from ddpdiag.lint.rules import all_rules

CHECKS = {module_of(check.code): check for check in all_checks()}
HOMES = ("ddpdiag.checks.", "ddpdiag.bench.", "ddpdiag.strategies.")
ALL = {m.name for m in pkgutil.walk_packages(ddpdiag.__path__, "ddpdiag.") if m.name.startswith(HOMES)}
SECTIONS = ("Findings", "Fix:", "Confirm by hand:", "Sources:")
# What makes a finding, or what one is made of: the word is among the first arguments.
MAKERS = ("finding", "_finding", "Fault", "Trait", "_Way", "Mishap")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(import_module(module)))


def helpers(module: str) -> set[str]:
    """The module and what it imports of checks that is no check itself."""
    found, todo = set(), [module]
    while todo:
        found.add(here := todo.pop())
        for node in ast.walk(tree(here)):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(HOMES):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                todo += [n for n in names if n in ALL and n not in CHECKS and n not in found]
    return found


def words(module: str) -> Iterator[str]:
    for node in ast.walk(tree(module)):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if name in MAKERS and node.args:
            word = node.args[name == "_finding"]  # which takes what was seen first
            either = (word.body, word.orelse) if isinstance(word, ast.IfExp) else (word,)
            yield from (w.value for w in either if isinstance(w, ast.Constant) and isinstance(w.value, str))


def known(check: Check) -> set[str]:
    return {*check.findings, *COMMON}


def paragraphs(page: str) -> list[str]:
    """The paragraphs after the title."""
    return [part.strip("\n") for part in page.strip().split("\n\n")[1:] if part.strip()]


def missing_sections(page: str) -> list[str]:
    """Sections that a page should have and has not; "Fix:" may end a paragraph of causes."""
    parts = paragraphs(page)
    fixes = any(" Fix: " in " ".join(part.split()) for part in parts)
    return [s for s in SECTIONS if not any(part.startswith(s) for part in parts) and not (s == "Fix:" and fixes)]


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_a_page_has_its_sections(check: Check) -> None:
    assert missing_sections(manual_with_findings(check)) == []
    prose = [part for part in paragraphs(check.manual) if not part.startswith(SECTIONS)]
    assert prose, "what it asks, why, and how it measures"


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_findings_are_declared_and_listed(check: Check) -> None:
    assert check.findings
    assert all(
        " ".join(manual_with_findings(check).split()).count(explained.text) for explained in check.findings.values()
    )
    assert sum(part.startswith("Findings") for part in paragraphs(check.manual)) == 1


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_what_a_check_can_find_is_declared(check: Check) -> None:
    assert set(words(module_of(check.code))) <= known(check)


def test_what_helpers_can_find_is_declared_by_a_check_that_uses_them() -> None:
    pytest.importorskip("torch.distributed")
    users: dict[str, list[Check]] = {}
    for module, check in CHECKS.items():
        for helper in helpers(module) - {module}:
            users.setdefault(helper, []).append(check)
    lacking = {
        f"{helper}: {word}"
        for helper, checks in users.items()
        for word in words(helper)
        if not any(word in known(check) for check in checks)
    }
    assert lacking == set()


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_card_leads_to_a_page_that_exists(card) -> None:
    code, _, word = card.code.partition(".")
    if code.startswith("LNT"):
        assert code in {rule.code for rule in all_rules()}
    else:
        assert not word or word in known(check_by_code(code))


# What `nvidia-smi -i` may be given: UUIDs and PCI addresses, or a word for them.
GPU_NAMES = re.compile(r"(?:(?:GPU-[\w-]+|[\da-f]{4}:[\da-f]{2}:00\.0|UUID)(?:,|$))+|<UUID", re.IGNORECASE)
WITH_A_GPU = re.compile(r"nvidia-smi\b[^`|;]*?\s(?:-i|--id)[\s=]+([^\s`),;]+(?:,\w[^\s`),;]*)*)")


def gpus_in_commands(text: str) -> list[str]:
    return [name.rstrip(":.") for name in WITH_A_GPU.findall(text)]


@pytest.mark.parametrize(("uuid", "pci"), [("GPU-1f", "0000:65:00.0"), (None, "0000:65:00.0"), (None, None)])
def test_what_names_a_gpu_is_its_uuid_else_its_address(uuid, pci) -> None:
    name = smi_id(uuid, pci)
    assert GPU_NAMES.match(name)
    assert (uuid or pci or "nvidia-smi -L") in name


def test_no_command_names_a_gpu_by_its_index() -> None:
    """A container or control group counts GPUs anew: its index 0 may be another job's GPU on the host."""
    root = Path(ddpdiag.__file__).parents[1]
    files = [*root.glob("tests/golden/*.txt"), *root.glob("docs/*.md"), root / "README.md"]
    texts = {path.name: path.read_text() for path in files}
    texts |= {check.code: manual_with_findings(check) for check in all_checks()}
    texts |= {card.name: "\n".join((card.meaning, card.confirm, card.fix)) for card in all_cards()}
    named = {f"{where}: {name}" for where, text in texts.items() for name in gpus_in_commands(text)}
    assert len(named) > 10
    assert sorted(one for one in named if not GPU_NAMES.match(one.partition(": ")[2])) == []


PAGE = """Title.

Prose.

Findings:

Causes: a. Fix: b.

Confirm by hand: c.

Sources: d.
"""


def page(text: str) -> Check[object]:
    said, more = FindingSpec.warning("said of both; and more."), FindingSpec.note("of the third.", same_item=True)
    findings = {"one": said, "two-words": said, "third": more, "fourth": FindingSpec.error("with: a colon.")}
    return made_check("X", stage=Stage.HOST, __doc__=text, FINDINGS=findings)


def test_findings_are_listed_under_their_heading() -> None:
    items = "- one, two-words: said of both; and more. third: of the third.\n- fourth: with: a colon."
    assert manual_with_findings(page(PAGE)) == PAGE.replace("Findings:", f"Findings:\n{items}")


def test_the_page_of_a_finding_says_first_what_it_is(golden) -> None:
    golden("\n\n".join(manual_page("GPU004.narrow", width=80, color=False).split("\n\n")[:3]))


def test_a_finding_that_does_not_exist_is_refused_with_those_that_do(golden) -> None:
    with pytest.raises(UsageError) as caught:
        manual_page("GPU004.wide", width=80, color=False)
    golden(str(caught.value))
