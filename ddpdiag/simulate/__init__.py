"""The options of `ddpdiag simulate`, which plans and judges a run of an invented fleet like a real run."""

from dataclasses import dataclass

from ddpdiag.cli.options import option

_FAULTS = ("slow-host", "slow-inside", "dead-host", "hang", "slow-link", "uplink", "leaf")


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """The options of `ddpdiag simulate`."""

    hosts: int = option(16, "Hosts of the fleet.", metavar="N", min=2, max=131_072)
    ranks_per_host: int = option(8, "Ranks of each host.", metavar="G", min=1, max=64)
    fault: tuple[str, ...] = option(
        (), f"Fault: {', '.join(_FAULTS)} or none (repeatable).", metavar="KIND[:COUNT]", words=lambda: _FAULTS
    )
    slower: float = option(
        0.25, "How much slower slow hosts and links are, as a share.", metavar="SHARE", min=0.0, max=0.99
    )
    noise: float = option(0.02, "Standard deviation of a test, as a share.", metavar="SHARE", min=0.0, max=0.5)
    transients: float = option(0.01, "Share of tests that are slow by chance.", metavar="SHARE", min=0.0, max=0.5)
    congestion: float = option(
        0.0, "Share of leaves on which congestion begins in a round.", metavar="SHARE", min=0.0, max=1.0
    )
    hosts_per_leaf: int = option(32, "Hosts on a leaf switch.", metavar="N", min=1)
    seed: int = option(0, "The same seed gives the same run.", metavar="N")
