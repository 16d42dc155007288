"""GPUs as GPU003 found them, and how the checks GPU003 to GPU011 speak of them.

A GPU is known by its UUID and its PCI address. GPUs of the host that no rank may use (gpu_shown) are somebody else's
and left out; where that is not certain, one that no rank is known to take is worth a warning at most.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.visibility import shown_of
from ddpdiag.checks.hosts import Host, answers_by_host
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.probes.gpu.health import Health, Look

D = TypeVar("D")


class Action(Enum):
    """What to do with a sick GPU, in order of what it costs; none where a setting is to be changed."""

    NONE = "none"
    MONITOR = "monitor"
    RESET = "reset"
    REBOOT = "reboot"
    ISOLATE = "isolate"


class Card(NamedTuple):
    """A GPU of the job: its host, the driver's version there, and the ranks that take it (none: not known).

    `certain` is False where nothing tells which GPUs of the host the job may use: it may be somebody else's.
    """

    host: Host
    health: Health
    driver: str | None
    takers: tuple[int, ...]
    certain: bool = True

    @property
    def is_foreign(self) -> bool:
        """May it be somebody else's?"""
        return not self.certain and not self.takers

    @property
    def label(self) -> str:
        """Such as "GPU 5 on n0 (GPU-3f1c..., PCI 0000:65:00.0)"."""
        known = [self.health.uuid or "", f"PCI {self.health.pci}" if self.health.pci else ""]
        shown = ", ".join(filter(None, known))
        return f"GPU {self.health.index} on {self.host.name}{f' ({shown})' if shown else ''}"


class Fault(NamedTuple):
    """What is wrong with one GPU: `said` goes behind its name, `hint` behind the action."""

    word: str
    title: str
    said: str
    action: Action
    hint: str = ""
    evidence: Mapping[str, Scalar | list[Scalar]] = {}
    severity: Severity | None = None


def cards_of(seen: Seen[Look]) -> tuple[Card, ...]:
    """The GPUs of the job that could be opened, each once, by host and index."""
    knowledge = shown_of(seen)
    takers = knowledge.takers()
    cards: dict[str, Card] = {}
    for host, answers in answers_by_host(seen):
        found = [(look.driver, health) for look in answers.values() for health in look.gpus if health.error is None]
        shown = knowledge.to(host, [health for _, health in found])
        for driver, health in sorted(found, key=lambda pair: pair[1].index):
            key = key_of(host.name, health)
            if shown is None or health.uuid is None or health.uuid in shown:
                cards.setdefault(key, Card(host, health, driver, takers.get(key, ()), shown is not None))
    return tuple(cards.values())


def key_of(host: str, health: Health) -> str:
    """What a GPU is known by: its UUID, or its place on the host where it tells none."""
    return health.uuid or f"{host} {health.pci or health.index}"


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
    severity = fault.severity or seen.check.severity_of(fault.word)
    who: dict[str, Scalar | list[Scalar]] = {"index": health.index, "pci": health.pci, "action": fault.action.value}
    return seen.finding(
        fault.word,
        fault.title,
        f"{card.label}: {fault.said}.{' UNKNOWN whether this job may use it.' if card.is_foreign else ''}",
        severity=Severity.WARNING if card.is_foreign and severity is Severity.ERROR else severity,
        ranks=card.takers,
        nodes=(card.host.name,),
        gpus=(health.uuid,) if health.uuid else (),
        evidence=who | dict(fault.evidence),
        fix=" ".join(filter(None, [todo(card.host.name, health.index, fault.action), fault.hint])),
    )


def todo(host: str, index: int | None, action: Action) -> str:
    """What to do with the GPU of that index (None: not known) on `host`, in a sentence."""
    which = "INDEX" if index is None else str(index)
    match action:
        case Action.NONE:
            return ""
        case Action.MONITOR:
            return f"Monitor it: look at `nvidia-smi -q -i {which}` on {host} again after the job."
        case Action.RESET:
            return (
                f"Reset it: `nvidia-smi --gpu-reset -i {which}` on {host} when nothing uses it "
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
            "the GPUs were not asked",
            f"{code} ({met.check.name}), which asks the GPUs for all of these checks, was left out: UNKNOWN.",
            fix=f"Select {code} as well.",
        )
