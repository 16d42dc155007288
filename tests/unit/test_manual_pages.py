"""Every finding that the sources name has its manual page, and every page has its sections."""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import pytest

import ddpdiag
from ddpdiag import manual
from ddpdiag.checks.api import Check
from ddpdiag.checks.registry import all_checks, by_code, module_of
from ddpdiag.cli.manual import manual_page
from ddpdiag.errors import UsageError
from ddpdiag.explain.cards import all_cards
from ddpdiag.lint import all_rules

CHECKS = {module_of(check.code): check for check in all_checks()}
HOMES = ("ddpdiag.checks.", "ddpdiag.bench.", "ddpdiag.strategies.")
ALL = {m.name for m in pkgutil.walk_packages(ddpdiag.__path__, "ddpdiag.") if m.name.startswith(HOMES)}
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
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in MAKERS:
            first = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from first[:1]


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_a_page_has_its_sections(check: Check) -> None:
    assert manual.missing_sections(check.manual) == ()
    assert manual.findings_of(check.manual)
    prose = [part for part in manual.paragraphs(check.manual) if not part.startswith(manual.SECTIONS)]
    assert prose, "what it asks, why, and how it measures"


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_what_a_check_can_find_is_explained(check: Check) -> None:
    own = set(words(module_of(check.code)))
    assert {word for word in own if manual.finding_text(check.manual, word) is None} == set()


def test_what_helpers_can_find_is_explained_by_a_check_that_uses_them() -> None:
    users: dict[str, list[Check]] = {}
    for module, check in CHECKS.items():
        for helper in helpers(module) - {module}:
            users.setdefault(helper, []).append(check)
    lacking = {
        f"{helper}: {word}"
        for helper, checks in users.items()
        for word in words(helper)
        if not any(manual.finding_text(check.manual, word) is not None for check in checks)
    }
    assert lacking == set()


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_card_leads_to_a_page_that_exists(card) -> None:
    code, _, word = card.code.partition(".")
    if code.startswith("LNT"):
        assert code in {rule.code for rule in all_rules()}
    else:
        assert not word or manual.finding_text(by_code(code).manual, word) is not None


PAGE = """Title.

Prose.

Findings:
- one, two-words: said of both; and more. third: said of the third.
- fourth: with a colon: inside.

Causes: a. Fix: b.

Confirm by hand: c.

Sources: d.
"""


def test_findings_are_read_off_the_items() -> None:
    found = manual.findings_of(PAGE)
    assert list(found) == ["one", "two-words", "third", "fourth"]
    assert found["one"] == found["two-words"] == "said of both; and more."
    assert found["fourth"] == "with a colon: inside."


@pytest.mark.parametrize("section", ["Findings", "Confirm by hand:", "Sources:", "Fix:"])
def test_a_missing_section_is_missed(section: str) -> None:
    assert manual.missing_sections(PAGE) == ()
    assert manual.missing_sections(PAGE.replace(section, "Else:")) == (section,)


def test_the_page_of_a_finding_says_first_what_it_is(golden) -> None:
    golden("\n\n".join(manual_page("GPU004.narrow", width=80, color=False).split("\n\n")[:3]))


def test_a_finding_that_does_not_exist_is_refused_with_those_that_do(golden) -> None:
    with pytest.raises(UsageError) as caught:
        manual_page("GPU004.wide", width=80, color=False)
    golden(str(caught.value))
