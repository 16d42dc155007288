"""What bounds the ranks of a benchmark, all together."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ddpdiag.checks.bench.data import Data
from ddpdiag.model.bench import Limits


def lowest(limits: Iterable[Limits]) -> Limits:
    """The lowest of what ranks have; `nvlink_switched` only where all are."""
    known = tuple(limits)
    return Limits(
        copy_bytes_per_s=_least([own.copy_bytes_per_s for own in known]),
        loopback_bytes_per_s=_least([own.loopback_bytes_per_s for own in known]),
        nic_bytes_per_s=_least([own.nic_bytes_per_s for own in known]),
        nic_ports=_fewest([own.nic_ports for own in known]),
        nic_port_bytes_per_s=_least([own.nic_port_bytes_per_s for own in known]),
        nvlinks=_fewest([own.nvlinks for own in known]),
        nvlinks_max=_fewest([own.nvlinks_max for own in known]),
        nvlink_switched=_all([own.nvlink_switched for own in known]),
        nvlink_bytes_per_s=_least([own.nvlink_bytes_per_s for own in known]),
        pcie_bytes_per_s=_least([own.pcie_bytes_per_s for own in known]),
        pcie_now_bytes_per_s=_least([own.pcie_now_bytes_per_s for own in known]),
        cores=_fewest([own.cores for own in known]),
    )


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _fewest(values: Sequence[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _all(values: Sequence[bool | None]) -> bool | None:
    """True or False where every rank says so or one denies it; None where one does not say."""
    if False in values:
        return False
    return True if values and None not in values else None


def links_up(ranks: Iterable[Data]) -> tuple[int, int] | None:
    """The fewest and the most NVLinks that are up on GPUs of one model, of the model where these differ most.

    None if there are no links. A GPU without any counts only beside one that leads to a switch: some boards bridge
    some of their GPUs.
    """
    models: dict[str, list[Limits]] = defaultdict(list)
    for data in ranks:
        if data.limits.nvlinks is not None:
            models[data.device].append(data.limits)
    ranges = [found for own in models.values() if (found := _range(own))]
    return max(ranges, default=None, key=lambda found: found[1] - found[0])


def _range(own: Sequence[Limits]) -> tuple[int, int] | None:
    switched = any(limits.nvlink_switched for limits in own)
    links = [limits.nvlinks or 0 for limits in own if limits.nvlinks or switched]
    return (min(links), max(links)) if links else None
