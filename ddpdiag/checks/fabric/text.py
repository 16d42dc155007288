"""What tests of pairs came to, in words; for FAB001 and FAB002."""

from collections.abc import Sequence
from itertools import groupby

from ddpdiag.checks.fabric.search.pair_confirm_cover import Reached
from ddpdiag.model import Severity
from ddpdiag.text import rate_text, share_text

WHYS = {
    "hung": "did not end in time",
    "died": "crashed",
    "raised": "failed",
    "wrong": "gave wrong values",
    "unheard": "was not heard of again",
    "lost": "was lost",
    "skipped": "was ended",
}
_SHOWN = 8


def severity(tests: Sequence[Reached], usual: float, error_share: float) -> Severity:
    """An error where it does not end, or is far below at its best; else it slows the job down."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    bad = len(known) < len(tests) or max(known, default=0.0) < error_share * usual
    return Severity.ERROR if bad else Severity.WARNING


def how(tests: Sequence[Reached], usual: float) -> str:
    """How bad: "25 % slower" at its best."""
    share = slower_share(tests, usual)
    return "bad" if share is None else f"{share_text(share)} slower"


def slower_share(tests: Sequence[Reached], usual: float) -> float | None:
    """By which share of the usual rate the best of them is slower; None where one did not end, or nothing is usual."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None


def tests_text(tests: Sequence[Reached]) -> str:
    """What each test came to; the same one after the other is counted."""
    words = [
        rate_text(tested.rate) if tested.rate is not None else WHYS.get(tested.why, "failed")
        for tested in tests[:_SHOWN]
    ]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return ", ".join(word if times == 1 else f"{word} ({times} times)" for word, times in runs)


def rates(tests: Sequence[Reached]) -> list[str | int | float | bool | None]:
    """The same for the evidence, in bytes per second; None where it did not end."""
    return [tested.rate for tested in tests[:_SHOWN]]
