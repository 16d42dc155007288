"""The rule for rates: below a share of what is expected, measured twice, and the share says how bad it is."""

from collections.abc import Sequence

from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Severity

# AzNHC fails a host below 76 to 87 % of its rates, and 80 % is called good (stas00, ml-engineering). A tenth is far
# from both; it is what a wrong network costs (NCCL over TCP sockets instead of InfiniBand is 5 to 20 times slower).
FAR_RATIO = 0.1


def severity_of_rate(
    shares: Sequence[float], *, least: float, error_below: float, doubts: Sequence[str] = ()
) -> Severity | None:
    """The severity of a rate whose measurements are shares of what is expected; None if the first reaches `least`.

    A later measurement that reaches it leaves a note. An error takes two measurements below `error_below`, and no
    doubts (another user of the GPU, an expectation that is only assumed).
    """
    if shares[0] >= least:
        return None
    if any(share >= least for share in shares[1:]):
        return Severity.NOTE
    is_error = len(shares) > 1 and max(shares) < error_below and not doubts
    return Severity.ERROR if is_error else Severity.WARNING


def doubts_text(doubts: Sequence[str]) -> str:
    """A sentence, with a space before it; nothing without doubts."""
    return f" This is a warning only, because {names_text(doubts)}." if doubts else ""
