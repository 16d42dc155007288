"""In which order overrides are tried: what an error names first, then what another check suspects, then the usual."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.gpu.nvswitch import JOINED
from ddpdiag.model import Outcome, Severity, Trial

D = TypeVar("D")

# What NCCL writes of each: names of its source files (src/transport, src/misc, src/mnnvl.cc) and its messages.
_TEXTS = {
    "P2P": ("p2p.cc", "P2P is disabled", "peer access", "peer mapping", "cudaIpc"),
    "SHM": ("/dev/shm", "shmutils", "transport/shm.cc", "posix_fallocate"),
    "NVLS": ("nvls", "NVLS", "multicast", "Multicast"),
    "CUMEM": ("cuMem",),
    "MNNVL": ("MNNVL", "IMEX"),
    "GDR": ("DMA-BUF", "dmabuf", "nv_peer_mem", "GPU Direct RDMA", "ibv_reg_mr"),
    "PXN": ("PXN",),
    "PLUGIN": ("NET/Plugin", "libnccl-net", "NET/OFI"),
    "IB": ("net_ib", "NET/IB", "ibv_", "IBV_WC"),
}
# Checks whose findings make one of them likely.
_SUSPECTED_BY = {"SHM": "HST003", "NVLS": "GPU007"}
# The order of recordings without one.
_OLDER = ("P2P", "SHM", "NVLS", "CUMEM", "GDR", "PLUGIN", "IB")
_SEPARATOR = ", "


class Order(NamedTuple):
    """The overrides by name, in the order in which they are tried; `named` by the error of COL001, each tried alone."""

    names: tuple[str, ...]
    named: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, str]:
        """As each trial of the search records it, so that a later version judges the search that was made."""
        return {"order": _SEPARATOR.join(self.names), "named": _SEPARATOR.join(self.named)}


def order_of(seen: Seen[D], usual: tuple[str, ...], failed: Iterable[Outcome]) -> Order:
    """The order that this run's search has, or will have: `usual`, unless errors of `failed` or a check suggest one."""
    if seen.trials:
        return _recorded(seen.trials[0])
    text = "\n".join(line for outcome in failed for line in _errors(outcome))
    named = tuple(name for name in usual if any(part in text for part in _TEXTS.get(name, ())))
    ranks = dict.fromkeys(_suspected(seen), 1) | dict.fromkeys(named, 0)
    return Order(tuple(sorted(usual, key=lambda name: ranks.get(name, 2))), named)


def _errors(outcome: Outcome) -> Iterator[str]:
    """What the rank raised, and NCCL's warnings in its output: with NCCL_DEBUG=INFO that names all there is."""
    yield outcome.error
    yield from (line for line in outcome.detail.split("\n") if "NCCL WARN" in line)


def _recorded(trial: Trial) -> Order:
    if "order" not in trial.params:
        return Order(_OLDER)
    names, named = (tuple(filter(None, str(trial.params[key]).split(_SEPARATOR))) for key in ("order", "named"))
    return Order(names, named)


def _suspected(seen: Seen[D]) -> Iterator[str]:
    for name, code in _SUSPECTED_BY.items():
        if any(finding.severity is not Severity.NOTE for finding in seen.findings_of(code)):
            yield name
    # On such boards NCCL takes NVLS for most sizes; where the fabric manager is at fault, it hangs or raises there.
    if any(card.health.fabric.state == JOINED for card in cards_of(seen.of(memory_errors.CHECK))):
        yield "NVLS"
