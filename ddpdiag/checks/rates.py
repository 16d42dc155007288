"""The severity of a rate that is too low, from its share of the expected rate in one or more measurements."""

from collections.abc import Sequence

from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Severity

# A lower share of the expected rate is an error. AzNHC fails a host below 76 to 87 % of its rates; 80 % is called good
# (stas00, ml-engineering). A wrong network has a tenth (NCCL over TCP is 5 to 20 times slower than over InfiniBand).
FAR_BELOW_SHARE = 0.1


def severity_of_rate(
    shares: Sequence[float], *, min_share: float, error_below: float, doubts: Sequence[str] = ()
) -> Severity | None:
    """Return the severity of a rate that was measured as `shares` of the expected rate, in order of measurement.

    Returns None if the first share reaches `min_share`; NOTE if a later one does; ERROR if two or more shares are all
    below `error_below` and there are no `doubts` (another user of the GPU, an assumed expectation); else WARNING.
    """
    if shares[0] >= min_share:
        return None
    if any(share >= min_share for share in shares[1:]):
        return Severity.NOTE
    is_error = len(shares) > 1 and max(shares) < error_below and not doubts
    return Severity.ERROR if is_error else Severity.WARNING


def doubts_text(doubts: Sequence[str]) -> str:
    """Return a sentence that says why the finding is only a warning, with a space before it; empty without doubts."""
    return f" This is a warning only, because {names_text(doubts)}." if doubts else ""
