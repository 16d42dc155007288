"""The options by which a process learns its rank, or the ranks that it starts."""

from dataclasses import dataclass

from ddpdiag.errors import UsageError
from ddpdiag.model.declared import option

_PANEL = "Launch"


def _parse_ranks(text: str) -> int | str:
    """Parse a number of ranks, or one of the words that torchrun accepts instead of a number."""
    if text in ("auto", "gpu", "cpu"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError("expected a number of ranks, auto, gpu or cpu")


def _parse_ports(text: str) -> str:
    low, dash, high = text.partition("-")
    if not (dash and low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high) <= 65535):
        raise UsageError("expected LOW-HIGH within 1-65535, such as 29500-29599")
    return text


@dataclass(frozen=True, kw_only=True)
class LaunchArgs:
    """The options that say which rank this process is or which ranks it starts, and how ranks find each other."""

    nproc_per_node: int | str | None = option(
        None,
        "Ranks to start on this host (default: one per GPU, or 2).",
        metavar="N|auto|gpu|cpu",
        panel=_PANEL,
        parse=_parse_ranks,
    )
    nnodes: int | None = option(None, "Number of hosts, when started by hand on each.", metavar="N", panel=_PANEL)
    node_rank: int | None = option(None, "This host's number, from 0.", metavar="I", panel=_PANEL, variable=False)
    rank: int | None = option(
        None, "This process's rank, when started by hand.", metavar="R", panel=_PANEL, variable=False
    )
    world_size: int | None = option(None, "Total number of ranks.", metavar="N", panel=_PANEL)
    local_rank: int | None = option(
        None, "This process's rank on its host.", metavar="R", panel=_PANEL, advanced=True, variable=False
    )
    master_addr: str | None = option(None, "Host name or address of rank 0.", metavar="HOST", panel=_PANEL)
    master_port: int | None = option(None, "Port that the job would use.", metavar="PORT", panel=_PANEL)
    run_id: str | None = option(
        None, "Name of this run, the same on all ranks.", metavar="NAME", panel=_PANEL, advanced=True
    )
    join_timeout: float = option(
        15.0, "How long ranks wait for each other to join.", metavar="SECONDS", panel=_PANEL, min=0.1, advanced=True
    )
    control_port: int | None = option(
        None, "Port of the control channel.", metavar="PORT", panel=_PANEL, min=1, max=65535, advanced=True
    )
    require_auth: bool = option(
        False,
        "Do not run unless the ranks share a secret (see docs/security.md).",
        " /--no-require-auth",
        panel=_PANEL,
        advanced=True,
    )
    port_range: str | None = option(
        None, "Ports that the firewall allows.", metavar="LOW-HIGH", panel=_PANEL, advanced=True, parse=_parse_ports
    )
