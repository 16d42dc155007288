"""Every finding that any unit test makes must be one that its check's manual page explains."""

from functools import cache

import pytest

from ddpdiag.checks.api import Seen
from ddpdiag.checks.registry import all_checks
from ddpdiag.manual import finding_text

_text = cache(finding_text)
_KNOWN = {check.code: check for check in all_checks()}


@pytest.fixture(autouse=True)
def _documented(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Seen.finding

    def finding(seen: Seen, word: str, *arguments, **named):
        check = seen.check
        # Tests make checks of their own, too.
        if _KNOWN.get(check.code) is check:
            assert _text(check.manual, word) is not None, f"the page of {check.code} lacks the finding {word!r}"
        return make(seen, word, *arguments, **named)

    monkeypatch.setattr(Seen, "finding", finding)
