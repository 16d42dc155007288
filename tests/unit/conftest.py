"""Every finding that a unit test makes is declared by its check; one of each is in tests/golden/messages.txt."""

from collections.abc import Iterator

import pytest
from messages import LISTING, Example, read_listing, write_listing

from ddpdiag.checks.api import Seen
from ddpdiag.checks.findings import COMMON
from ddpdiag.checks.registry import all_checks
from ddpdiag.model import Finding

_KNOWN = {check.code: check for check in all_checks()}
_LISTED = read_listing()
_MADE = pytest.StashKey[dict[str, list[Example]]]()


@pytest.fixture(autouse=True)
def _documented(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make = Seen.finding
    made: dict[str, Finding] = {}

    def finding(seen: Seen, word: str, *arguments, **named):
        check, new = seen.check, make(seen, word, *arguments, **named)
        # Tests make checks of their own, too.
        if _KNOWN.get(check.code) is check:
            assert word in {**COMMON, **check.findings}, f"{check.code} does not declare the finding {word!r}"
            made.setdefault(new.code, new)
        return new

    monkeypatch.setattr(Seen, "finding", finding)
    yield
    if getattr(request.function, "is_hypothesis_test", False):
        return  # what it makes differs from run to run
    examples = {code: Example.of(request.node.nodeid, finding) for code, finding in made.items()}
    if request.config.getoption("update_golden"):
        stash = request.config.stash.setdefault(_MADE, {})
        for code, example in examples.items():
            stash.setdefault(code, []).append(example)
        return
    for code, example in examples.items():
        if code in _LISTED and _LISTED[code].test == example.test:
            assert example == _LISTED[code], f"not as in {LISTING.name}; see tests/tools/messages.py"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the listing, after --update-golden."""
    if made := session.config.stash.get(_MADE, None):
        write_listing(made, {item.nodeid for item in session.items})
