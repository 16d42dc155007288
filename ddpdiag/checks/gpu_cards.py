"""GPUs as GPU003 found them, and how the checks GPU003 to GPU009 speak of them.

A GPU is known by its UUID and its PCI address. Where torch showed exactly what it should (GPU002), GPUs of the host
that no rank may use are somebody else's and left out.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from ddpdiag.check import Seen
from ddpdiag.checks import gpu002
from ddpdiag.checks.hosts import Host, answers_by_host
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.probes.gpu_health import Health, Look

D = TypeVar("D")


class Action(Enum):
    """What to do with a sick GPU, in order of what it costs; none where a setting is to be changed."""

    NONE = "none"
    MONITOR = "monitor"
    RESET = "reset"
    REBOOT = "reboot"
    ISOLATE = "isolate"


class Card(NamedTuple):
    """A GPU of the job: its host, the driver's version there, and the ranks that take it (none: not known)."""

    host: Host
    health: Health
    driver: str | None
    takers: tuple[int, ...]

    @property
    def label(self) -> str:
        """Such as "GPU 5 on n0 (GPU-3f1c..., PCI 0000:65:00.0)"."""
        known = [self.health.uuid or "", f"PCI {self.health.pci}" if self.health.pci else ""]
        shown = ", ".join(filter(None, known))
        return f"GPU {self.health.index} on {self.host.name}{f' ({shown})' if shown else ''}"


class Fault(NamedTuple):
    """What is wrong with one GPU: `said` goes behind its name, `hint` behind the action."""

    word: str
    severity: Severity
    title: str
    said: str
    action: Action
    hint: str = ""
    evidence: Mapping[str, Scalar | list[Scalar]] = {}


def cards_of(seen: Seen[Look]) -> tuple[Card, ...]:
    """The GPUs of the job that could be opened, each once, by host and index."""
    rows = {host.ranks: (host, list(answers.values())) for host, answers in answers_by_host(seen)}
    takers = _takers(seen)
    cards: dict[str, Card] = {}
    for host, looks in rows.values():
        found = [(look.driver, health) for look in looks for health in look.gpus if health.error is None]
        shown = _shown(seen, host, [health for _, health in found])
        for driver, health in sorted(found, key=lambda pair: pair[1].index):
            key = health.uuid or f"{host.name} {health.index}"
            if shown is None or health.uuid in shown:
                cards.setdefault(key, Card(host, health, driver, takers.get(key, ())))
    return tuple(cards.values())


def _takers(seen: Seen[Look]) -> dict[str, tuple[int, ...]]:
    takers: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for rank, row in seen.of(gpu002.CHECK).by_rank.items():
        if row.gpu is not None and row.gpu.uuid:
            takers[row.gpu.uuid] += (rank,)
    return takers


def _shown(seen: Seen[Look], host: Host, found: Sequence[Health]) -> frozenset[str] | None:
    """UUIDs of the GPUs that the host's ranks may use; None if that is not certain.

    CUDA may leave out a GPU because it is sick, so torch is believed only where it shows as many as it should.
    """
    rows = seen.of(gpu002.CHECK).by_rank
    arrivals = seen.world.arrivals
    if not all(rank in rows and len(rows[rank].gpus) == arrivals[rank].gpus for rank in host.ranks):
        return None
    shown = frozenset(gpu.uuid or "" for rank in host.ranks for gpu in rows[rank].gpus)
    # A slice of a GPU has a UUID of its own.
    return shown if shown and shown <= {health.uuid for health in found} else None


def by_model(cards: Sequence[Card]) -> Iterator[tuple[str, list[Card]]]:
    """GPUs of one model, in all hosts: what may be compared."""
    models: dict[str, list[Card]] = defaultdict(list)
    for card in cards:
        if card.health.name is not None:
            models[card.health.name].append(card)
    yield from models.items()


def usual(values: Sequence[float]) -> float | None:
    """The value that occurs most often; of several, the highest. None of none."""
    return max(set(values), key=lambda value: (values.count(value), value), default=None)


def finding_of(seen: Seen[D], card: Card, fault: Fault) -> Finding:
    """A finding about this GPU alone."""
    health = card.health
    who: dict[str, Scalar | list[Scalar]] = {"index": health.index, "pci": health.pci, "action": fault.action.value}
    return seen.finding(
        fault.word,
        fault.severity,
        fault.title,
        f"{card.label}: {fault.said}.",
        ranks=card.takers,
        nodes=(card.host.name,),
        gpus=(health.uuid,) if health.uuid else (),
        evidence=who | dict(fault.evidence),
        remedy=" ".join(filter(None, [_todo(card, fault.action), fault.hint])),
    )


def _todo(card: Card, action: Action) -> str:
    host, health = card.host.name, card.health
    match action:
        case Action.NONE:
            return ""
        case Action.MONITOR:
            return f"Monitor it: look at `nvidia-smi -q -i {health.index}` on {host} again after the job."
        case Action.RESET:
            return (
                f"Reset it: `nvidia-smi --gpu-reset -i {health.index}` on {host} when nothing uses it "
                "(with NVSwitches all GPUs of the host), or reboot."
            )
        case Action.REBOOT:
            return f"Reboot {host}."
        case Action.ISOLATE:
            return f"Isolate it: leave {host} out of jobs until the GPU is repaired or replaced."


def not_looked_at(seen: Seen[D], met: Seen[Look]) -> Iterator[Finding]:
    """A finding if the user's choice left out the check that asks the GPUs."""
    code, options = met.check.code, seen.options
    chosen = not options.select or code.startswith(options.select)
    if seen.world.gpus and not met.trials and (not chosen or code.startswith(options.ignore)):
        yield seen.finding(
            "unreadable",
            Severity.WARNING,
            "the GPUs were not asked",
            f"{code} ({met.check.name}), which asks the GPUs for all of these checks, was left out: UNKNOWN.",
            remedy=f"Select {code} as well.",
        )
