"""The severity of a rate that is too low, by its share of the expected rate in one or more measurements."""

from collections.abc import Sequence

from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Severity

# AzNHC fails a host below 76 to 87 % of its rates, and 80 % is called good (stas00, ml-engineering). A tenth is far
# below both: a wrong network has such rates (NCCL over TCP sockets instead of InfiniBand is 5 to 20 times slower).
FAR_RATIO = 0.1


def severity_of_rate(
    shares: Sequence[float], *, least: float, error_below: float, doubts: Sequence[str] = ()
) -> Severity | None:
    """The severity of a rate, measured as `shares` of the expected rate; None if the first measurement reaches `least`.

    It is NOTE if a later measurement reaches `least`. It is ERROR if two or more measurements are all below
    `error_below`, without doubts (another user of the GPU, an assumed expectation). Otherwise it is WARNING.
    """
    if shares[0] >= least:
        return None
    if any(share >= least for share in shares[1:]):
        return Severity.NOTE
    is_error = len(shares) > 1 and max(shares) < error_below and not doubts
    return Severity.ERROR if is_error else Severity.WARNING


def doubts_text(doubts: Sequence[str]) -> str:
    """The sentence that says why there is only a warning, after a space; empty without doubts."""
    return f" This is a warning only, because {names_text(doubts)}." if doubts else ""
