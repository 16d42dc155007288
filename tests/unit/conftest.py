"""Every finding that a unit test makes is declared by its check."""

import pytest

from ddpdiag.checks.api import Seen
from ddpdiag.checks.findings import COMMON
from ddpdiag.checks.registry import all_checks
from ddpdiag.model import Finding

_KNOWN = {check.code: check for check in all_checks()}


@pytest.fixture(autouse=True)
def _documented(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Seen.finding

    def finding(seen: Seen, word: str, *arguments, **named) -> Finding:
        # Tests make checks of their own, too.
        if _KNOWN.get(seen.check.code) is seen.check:
            declared = {**COMMON, **seen.check.findings}
            assert word in declared, f"{seen.check.code} does not declare the finding {word!r}"
        return make(seen, word, *arguments, **named)

    monkeypatch.setattr(Seen, "finding", finding)
