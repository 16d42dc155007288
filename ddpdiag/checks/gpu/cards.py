"""The GPUs of the job as GPU003 read them, the ranks that use each GPU, and findings about single GPUs.

A GPU is identified by its UUID and its PCI address. torch (GPU002) lists the UUIDs that a rank may use. Without this
list, CUDA_VISIBLE_DEVICES (recorded by GPU001) is interpreted as CUDA does: it may have indices, UUIDs, abbreviated
UUIDs and slices of a GPU. An index is the position in NVML's order (that of the PCI bus) only if all GPUs of the rank
are of one model, because CUDA counts the fastest first. GPUs that no rank may use do not belong to the job and are left
out. If it is not certain which GPUs ranks may use, a finding about a GPU without a known rank is a warning at most.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from shlex import quote
from typing import Any, NamedTuple

from ddpdiag.checks.api import Seen, SkipReason, inapplicable
from ddpdiag.checks.gpu import devices, present
from ddpdiag.checks.hosts import Host, data_by_host, leave_out
from ddpdiag.checks.registry import check_by_code
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.probes.gpu.health import Health
from ddpdiag.probes.gpu.visibility import ProcGpu, device_index, parse_visible_devices


class Action(Enum):
    """The actions for a faulty GPU, in order of their cost. NONE: only a setting must change."""

    NONE = "none"
    MONITOR = "monitor"
    RESET = "reset"
    REBOOT = "reboot"
    ISOLATE = "isolate"


_FIXES = {
    Action.NONE: "",
    Action.MONITOR: "The job can run, but this GPU may slow it down. After the job run `{command}` on {host}. If "
    "{sign}, report the GPU to the administrator.",
    Action.RESET: "Stop all processes on this GPU (on a host with NVSwitches: on all its GPUs). Then run `nvidia-smi "
    "--gpu-reset -i {gpu}` as root on {host}, or reboot {host}. If you cannot, {leave_out}.",
    Action.REBOOT: "Reboot {host} (as root), or {leave_out}.",
    Action.ISOLATE: "Ask the administrator to have this GPU repaired or replaced. Until then {leave_out}.",
}
_RESET_ALL_FIX = (
    "Stop all processes on the GPUs of {host}. Then run `nvidia-smi --gpu-reset` as root there, or reboot {host}. If "
    "you cannot, {leave_out}."
)


class Recheck(NamedTuple):
    """A command to run after the job ("{gpu}": the GPU's UUID), and a clause about output that shows a fault."""

    command: str
    sign: str


RECHECK_LOG = Recheck("dmesg -T | grep -i xid", "it shows the same number again")


class Card(NamedTuple):
    """A GPU of the job, with its host, GPU003's reading (`health`), and the ranks that use it (empty: not known).

    `is_assignment_known` is False if it is not known which GPUs the job may use. The GPU may then be another job's.
    """

    host: Host
    health: Health
    ranks: tuple[int, ...]
    is_assignment_known: bool = True

    @property
    def is_foreign(self) -> bool:
        """Whether the GPU may belong to another job."""
        return not self.is_assignment_known and not self.ranks

    @property
    def smi_id(self) -> str:
        """The name of the GPU for `nvidia-smi -i`."""
        return smi_id(self.health.uuid, self.health.pci)

    @property
    def label(self) -> str:
        """The name of the GPU in findings, such as "GPU 5 on n0 (GPU-3f1c..., PCI 0000:65:00.0)"."""
        known = [self.health.uuid or "", f"PCI {self.health.pci}" if self.health.pci else ""]
        shown = ", ".join(filter(None, known))
        return f"GPU {self.health.index} on {self.host.name}{f' ({shown})' if shown else ''}"


class Fault(NamedTuple):
    """A fault of one GPU. In the finding's message `text` follows the GPU's name.

    The finding's fix consists of `prefix`, the sentences on `action` (for MONITOR with `recheck`), and `advice`.
    """

    word: str
    title: str
    text: str
    action: Action
    advice: str = ""
    evidence: Mapping[str, Scalar | list[Scalar]] = {}
    severity: Severity | None = None
    recheck: Recheck = RECHECK_LOG
    prefix: str = ""


def smi_id(uuid: str | None, pci: str | None = None) -> str:
    """Return the name of a GPU for `nvidia-smi -i`: its UUID, else its PCI address, and never its index.

    In a container or control group, NVML counts only the visible GPUs, so the same index may be another job's GPU on
    the host. UUID and PCI address are valid everywhere (docs.nvidia.com/deploy/nvidia-smi, --id).
    """
    return quote(name) if (name := uuid or pci) else "<UUID, listed by nvidia-smi -L>"


def ranks_by_uuid(seen: Seen[Any]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that use each GPU, by the GPU's UUID."""
    rows, uuid_by_rank = seen.of(present.CHECK).by_rank, dict[int, str]()
    for rank, row in rows.items():
        uuids = visible_uuids(row) or ()
        index = device_index(seen.world.places[rank].local_rank, len(uuids))
        is_certain = row.cuda_visible_devices is not None or len({gpu.name for gpu in row.nvml.gpus}) <= 1
        if index is not None and is_certain and uuids[index]:
            uuid_by_rank[rank] = uuids[index]
    listed = {gpu.uuid for row in rows.values() for gpu in row.nvml.gpus}
    for rank, view in seen.of(devices.CHECK).by_rank.items():
        if view.gpu is not None and view.gpu.uuid and (view.gpu.uuid in listed or rank not in uuid_by_rank):
            uuid_by_rank[rank] = view.gpu.uuid
    ranks: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for rank in sorted(uuid_by_rank):
        ranks[uuid_by_rank[rank]] += (rank,)
    return ranks


def _usable_uuids(seen: Seen[Any], host: Host, gpus: Sequence[Health]) -> frozenset[str] | None:
    """Return the UUIDs of those `gpus` of the host that its ranks may use; None if this is not certain.

    CUDA may leave out a faulty GPU, so torch's list counts only if it has as many GPUs as expected.
    """
    torch, enumerated = seen.of(devices.CHECK).by_rank, seen.of(present.CHECK).by_rank
    known = frozenset(health.uuid for health in gpus if health.uuid)
    counts = {rank: seen.world.arrivals[rank].gpus for rank in host.ranks}
    if all(rank in torch and len(torch[rank].gpus) == count for rank, count in counts.items()):
        uuids = frozenset(gpu.uuid or "" for rank in host.ranks for gpu in torch[rank].gpus)
        # The UUID of a slice differs from its GPU's.
        if uuids and uuids <= known:
            return uuids
    if max(counts.values(), default=0) >= len(gpus):
        return known
    named = [visible_uuids(enumerated[rank]) for rank in host.ranks if rank in enumerated]
    known_sets = [frozenset(uuids) for uuids in named if uuids is not None]
    return frozenset[str]().union(*known_sets) if len(known_sets) == len(host.ranks) else None


def visible_uuids(row: present.Data) -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES names, in order (unset: all); None if not known."""
    gpus, value = row.nvml.gpus, row.cuda_visible_devices
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    # CUDA leaves out a GPU that cannot be opened, so the indices of later GPUs change.
    if not uuids or len(uuids) < len(gpus):
        return None
    if value is None:
        return tuple(uuids)
    if value.startswith("MIG-"):
        # A slice does not name its GPU. The GPU is known if only one is cut into slices.
        sliced = [gpu.uuid or "" for gpu in gpus if gpu.mig]
        return (sliced[0],) if len(sliced) == 1 else None
    named = parse_visible_devices(value, [ProcGpu(gpu.pci or "", gpu.uuid) for gpu in gpus])
    if any(name.isdecimal() for name in named) and len({gpu.name for gpu in gpus}) > 1:
        return None
    return tuple(uuids[int(name)] if name.isdecimal() else name for name in named)


def cards_of(seen: Seen[Any]) -> tuple[Card, ...]:
    """Return the GPUs of the job that GPU003 could open, each once, in the order of hosts and GPU indices."""
    ranks = ranks_by_uuid(seen)
    cards: dict[str, Card] = {}
    for host, readings in data_by_host(seen.of(check_by_code("GPU003"))):
        gpus = [health for reading in readings.values() for health in reading.gpus if health.error is None]
        usable = _usable_uuids(seen, host, gpus)
        for health in sorted(gpus, key=lambda health: health.index):
            key = key_of(host.name, health)
            if usable is None or health.uuid is None or health.uuid in usable:
                cards.setdefault(key, Card(host, health, ranks.get(key, ()), usable is not None))
    return tuple(cards.values())


def key_of(host: str, health: Health) -> str:
    """Return a key that identifies a GPU: its UUID, else its host with the PCI address or index."""
    return health.uuid or f"{host} {health.pci or health.index}"


def by_model(cards: Sequence[Card]) -> Iterator[tuple[str, list[Card]]]:
    """Yield each GPU model with its GPUs on all hosts, so that they can be compared with each other."""
    for model in dict.fromkeys(card.health.name for card in cards):
        if model is not None:
            yield model, [card for card in cards if card.health.name == model]


def mode(values: Sequence[float]) -> float | None:
    """Return the most frequent value; of equally frequent ones the highest. None if there is no value."""
    return max(set(values), key=lambda value: (values.count(value), value), default=None)


def card_findings(seen: Seen[Any], faults_of: Callable[[Card], Iterable[Fault]]) -> Iterator[Finding]:
    """Yield findings on the faults that `faults_of` finds on each GPU of the job, at most one for each word."""
    for card in cards_of(seen):
        first: dict[str, Fault] = {}
        for fault in faults_of(card):
            first.setdefault(fault.word, fault)
        for fault in first.values():
            yield finding_of(seen, card, fault)


def skip(seen: Seen[Any]) -> SkipReason | None:
    """Skip a check if no host has a visible GPU, or if GPU003, which reads the GPUs, did not run."""
    reader = check_by_code("GPU003")
    reason = f"{reader.code} ({reader.name}), which reads the GPUs for it, did not run"
    return devices.skip(seen) or inapplicable(None if seen.of(reader).trials else reason)


def finding_of(seen: Seen[Any], card: Card, fault: Fault) -> Finding:
    health = card.health
    severity = fault.severity or seen.check.severity_of(fault.word)
    who: dict[str, Scalar | list[Scalar]] = {"index": health.index, "pci": health.pci, "action": fault.action.value}
    return seen.finding(
        fault.word,
        fault.title,
        f"{card.label}: {fault.text}.{' It is not known whether this job may use it.' if card.is_foreign else ''}",
        severity=Severity.WARNING if card.is_foreign and severity is Severity.ERROR else severity,
        ranks=card.ranks,
        hosts=(card.host.name,),
        gpus=(health.uuid,) if health.uuid else (),
        evidence=who | dict(fault.evidence),
        fix=fix_of(card.host.name, card.smi_id, fault),
    )


def fix_of(host: str, gpu: str | None, fault: Fault) -> str:
    """Return the fix of a fault. `gpu` is the GPU's `smi_id`; None: the fix is for all GPUs of the host."""
    return " ".join(filter(None, [fault.prefix, action_text(host, gpu, fault.action, fault.recheck), fault.advice]))


def action_text(host: str, gpu: str | None, action: Action, recheck: Recheck = RECHECK_LOG) -> str:
    """Return the sentences that describe an action. `gpu` is the GPU's `smi_id`; None: all GPUs of the host."""
    text = _RESET_ALL_FIX if gpu is None and action is Action.RESET else _FIXES[action]
    named = recheck._replace(command=recheck.command.format(gpu=gpu))
    return text.format(host=host, gpu=gpu, leave_out=leave_out([host]), **named._asdict())
