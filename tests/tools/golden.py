"""Texts that tests compare letter by letter: `tests/golden/<test module>.txt`, a section for each test.

    def test_a_slow_host_is_named(golden):
        (finding,) = judged(...)
        assert (finding.code, finding.hosts) == ("RDZ004.slow", ("n1",))
        golden(finding)

After a change that is meant, `python -m pytest --update-golden` rewrites the sections of the tests that run;
then read `git diff tests/golden`. Where parameters were renamed, remove the module's file first.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdiag.model import Finding
from ddpdiag.text import ranks_text

FOLDER = Path(__file__).parent.parent / "golden"
Sections = dict[str, str]
_HEAD = re.compile(r"^== (test_.*)\n", re.MULTILINE)
_BETWEEN = "\n--\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    """--update-golden."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the texts of tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """golden(finding or text, ...): they are what this test's section of its module's golden file holds.

    A test may call it several times; each call checks that its texts follow those of the call before.
    """
    test, module = request.node.name, request.path
    path = FOLDER / f"{module.stem}.txt"
    updates = request.config.getoption("update_golden")
    section = read(path).get(test)
    expected = [] if section is None else section.split(_BETWEEN)
    texts: list[str] = []

    def check(*things: Finding | str) -> None:
        texts.extend(text_of(thing) for thing in things)
        if not updates and texts != expected[: len(texts)]:
            pytest.fail(_difference(path.name, expected[: len(texts)], texts), pytrace=False)

    yield check
    if updates and texts:
        _update(path, module, test, _BETWEEN.join(texts))
    elif not updates and len(texts) < len(expected):
        pytest.fail(f"{path.name} has more texts than {test}")


def _difference(name: str, expected: list[str], texts: list[str]) -> str:
    """The lines that differ, and how to accept them."""
    old, new = (_BETWEEN.join(each).splitlines() for each in (expected, texts))
    lines = difflib.unified_diff(old, new, f"golden/{name}", "this run", lineterm="")
    return "\n".join([*lines, "accept it with: python -m pytest --update-golden"])


def text_of(thing: Finding | str) -> str:
    """What the golden file shows of it; spaces at the ends of lines are left out."""
    if isinstance(thing, Finding):
        blamed = [*([ranks_text(thing.ranks)] if thing.ranks else []), *thing.hosts, *thing.gpus, *thing.links]
        lines = [f"{thing.severity.value} {thing.code}: {thing.title}", thing.message]
        lines += [f"blamed: {', '.join(blamed)}"] if blamed else []
        lines += [f"fix: {thing.fix}"] if thing.fix else []
        lines += [f"unset {name}" if value is None else f"export {name}={value}" for name, value in thing.env.items()]
        thing = "\n".join(lines)
    return "\n".join(line.rstrip() for line in thing.splitlines()).rstrip("\n")


def read(path: Path) -> Sections:
    """The sections of a golden file, by test."""
    if not path.exists():
        return {}
    _, *parts = _HEAD.split(path.read_text(encoding="utf-8"))
    return {
        name: text.removesuffix("\n\n").removesuffix("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _update(path: Path, module: Path, test: str, text: str) -> None:
    """Write one section, in the order of the tests in their module; sections of tests that are gone go."""
    source = module.read_text(encoding="utf-8")
    sections = {name: old for name, old in read(path).items() if is_defined(name, source)} | {test: text}
    order = sorted(sections, key=lambda name: _place(name, source))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(f"== {name}\n{sections[name]}\n" for name in order), encoding="utf-8")


def is_defined(test: str, source: str) -> bool:
    """Does a module with this source define the test?"""
    return _place(test, source) >= 0


def _place(test: str, source: str) -> int:
    """Where in its module a test is defined; -1 if it is not."""
    return source.find(f"def {test.partition('[')[0]}(")
