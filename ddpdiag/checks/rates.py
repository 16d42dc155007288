"""The rule for rates: below a share of what is expected, measured twice, and the share says how bad it is."""

from collections.abc import Sequence

from ddpdiag.model import Severity


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
