"""Every finding that any unit test makes must be one that its check declares."""

import pytest

from ddpdiag.checks.api import Seen
from ddpdiag.checks.findings import COMMON
from ddpdiag.checks.registry import all_checks

_KNOWN = {check.code: check for check in all_checks()}


@pytest.fixture(autouse=True)
def _documented(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Seen.finding

    def finding(seen: Seen, word: str, *arguments, **named):
        check = seen.check
        # Tests make checks of their own, too.
        if _KNOWN.get(check.code) is check:
            assert word in {**COMMON, **check.findings}, f"{check.code} does not declare the finding {word!r}"
        return make(seen, word, *arguments, **named)

    monkeypatch.setattr(Seen, "finding", finding)
