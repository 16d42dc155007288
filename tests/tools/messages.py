"""tests/golden/messages.txt: title, message and fix of every finding that a check declares, with typical values.

The text of each is what one unit test makes; that test fails where the text differs. After a change that is meant,

    python -m pytest tests/unit -n 0 --update-golden

writes the entries of the tests that run. Read the whole listing, or `git diff` of it, in one go. An entry moves to
another test when its own makes that finding no longer, or is gone.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from golden import FOLDER, is_defined, text_of

from ddpdiag.checks.registry import all_checks
from ddpdiag.model import Finding

ROOT = Path(__file__).parent.parent.parent
LISTING: Path = FOLDER / "messages.txt"
_HEAD = "== "


class Example(NamedTuple):
    """What one test made of one finding."""

    test: str
    text: str

    @property
    def function(self) -> str:
        """The test without its parameters."""
        return self.test.partition("[")[0]

    @classmethod
    def of(cls, test: str, finding: Finding) -> "Example":
        return cls(test, text_of(finding))


def declared() -> list[str]:
    """Codes of all findings, in the order of the checks and of their declarations."""
    return [f"{check.code}.{word}" for check in all_checks() for word in check.findings]


def read_listing() -> dict[str, Example]:
    """The examples of the listing, by code."""
    if not LISTING.exists():
        return {}
    _, *sections = ("\n" + LISTING.read_text(encoding="utf-8")).split("\n" + _HEAD)
    parts = [section.split("\n", 1) for section in sections]
    return {head.split()[0]: Example(head.split(maxsplit=1)[1], text.rstrip("\n")) for head, text in parts}


def write_listing(made: Mapping[str, Sequence[Example]], ran: Collection[str]) -> None:
    """Write the examples `made` by the tests that `ran` into the listing; codes that are not declared go."""
    old, functions = read_listing(), {test.partition("[")[0] for test in ran}
    kept = {code: e for code, e in old.items() if e.function not in functions and _exists(e.function)}
    new = {code: chosen(old.get(code), kept.get(code), made.get(code, ())) for code in declared()}
    text = "\n".join(f"{_HEAD}{code}  {e.test}\n{e.text}\n" for code, e in new.items() if e is not None)
    LISTING.write_text(text, encoding="utf-8")


def _exists(function: str) -> bool:
    path, _, name = function.partition("::")
    module = ROOT / path
    return module.exists() and is_defined(name, module.read_text(encoding="utf-8"))


def chosen(old: Example | None, kept: Example | None, made: Sequence[Example]) -> Example | None:
    """The example of the same test as before, else what is `kept` since its test did not run; else the first with a
    fix, else the first."""
    same = [example for example in made if old is not None and example.test == old.test]
    with_fix = [example for example in made if "\nfix: " in example.text]
    return next(iter([*same, *([kept] if kept else []), *with_fix, *made]), None)
