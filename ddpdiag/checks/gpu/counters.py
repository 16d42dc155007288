"""Counters of each GPU that rise while the run loads it.

A counter that is not zero may be old; one that rises during a run is a fault that the next job meets as well. The GPUs
are read once more after everything else has run, by the ranks that read them for GPU003, and each GPU, identified by
its UUID, is compared with itself.

Findings, with the numbers before and after and the seconds between:

Causes: wear, heat, a card or cable that is not seated, a bad link. A run of a few seconds loads a GPU little: a counter
that did not rise may still rise in a longer job.

Fix: monitor, reset, reboot or isolate as the finding says; run once more with `--depth deep` to see whether the counter
rises again.

Confirm by hand: `nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE; nvidia-smi nvlink -e` before and after a job, and diff.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api); NVIDIA GPU memory error management
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt); DCGM's PCIe replay policy.
"""

from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, new_trial, unneeded
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, cards_of, finding_of, key_of
from ddpdiag.checks.gpu.clocks import clock_faults
from ddpdiag.checks.gpu.nvswitch import REPLACE_LOST, recovery_faults
from ddpdiag.checks.gpu.signs import nvlink_text, rise_faults, state_faults
from ddpdiag.checks.hosts import leave_out, ranks_text, xid_fix
from ddpdiag.model import Finding, Severity, Status, Trial
from ddpdiag.probes.gpu.health import GpuReading, Health
from ddpdiag.probes.gpu.links import FABRIC_JOINED
from ddpdiag.text import count

FINDINGS = {
    "gone": FindingSpec.error(
        "the GPU was present and cannot be opened any more, or is not listed: it fell off the bus (Xid 79)."
    ),
    **dict.fromkeys(
        ("lost", "reset-required"), FindingSpec.error("NVML reports that the GPU is lost, or must be reset.")
    ),
    **dict.fromkeys(
        ("uncorrected", "sram", "remapped"),
        FindingSpec.error("new uncorrectable errors, or rows that were remapped because of them."),
    ),
    **dict.fromkeys(
        ("remap-pending", "remap-failed", "retirement-pending", "recovery"),
        FindingSpec.error("states of the GPU that are present at the end, but not at the beginning."),
    ),
    "nvlink-down": FindingSpec("a link that was up is down at the end."),
    "nvlink-errors": FindingSpec.warning("replays and recoveries."),
    "pcie-replays": FindingSpec.warning("PCIe sent more than `pcie_replays_per_minute` packets again."),
    "slowdown": FindingSpec.warning("clocks held down by heat or power at the end, but not at the beginning."),
    "unreadable": FindingSpec.unchecked("the second reading failed, although the first one worked."),
}

_START_SECONDS = 0.5  # the time to start a new worker, in case the previous one was ended


def plan(seen: Seen[GpuReading]) -> Sequence[Trial]:
    """Plan a last reading of the GPUs by the ranks that read GPUs for GPU003."""
    groups = tuple((rank,) for rank in sorted(_first_readings(seen)) if rank in seen.world.living_ranks)
    return (new_trial(seen, groups=groups),) if seen.is_last and groups and not seen.trials else ()


def _first_readings(seen: Seen[GpuReading]) -> Mapping[int, GpuReading]:
    return {rank: row for rank, row in seen.of(memory_errors.CHECK).by_rank.items() if any(_opened_gpus(row))}


def _opened_gpus(reading: GpuReading) -> Iterator[Health]:
    return (health for health in reading.gpus if health.error is None)


def judge(seen: Seen[GpuReading]) -> Iterator[Finding]:
    cards = {key_of(card.host.name, card.health): card for card in cards_of(seen)}
    for rank, first in _first_readings(seen).items():
        second = seen.by_rank.get(rank)
        if second is None:
            continue  # the trial failed, which RUN003 reports
        host = seen.world.host_name(rank)
        if second.error is not None:
            yield seen.finding(
                "unreadable",
                "the GPUs could not be read at the end of the run",
                f"{host}: {ranks_text((rank,))} read the GPUs at the beginning, but not at the end (NVML: "
                f"{second.error}), so it is not known whether error counters rose during the run.",
                ranks=(rank,),
                evidence={"error": second.error},
                fix=f"Run `nvidia-smi` on {host}. If it works, run again. If it fails in a container only, start the "
                f"container again. Otherwise see `dmesg -T | grep -i -E 'nvrm|xid'` (as root), and reboot {host} (as "
                f"root), or {leave_out([host])}.",
            )
            continue
        begin, end = first.boot_seconds, second.boot_seconds
        seconds = None if begin is None or end is None else round(max(0.0, end - begin), 3)
        later = {key_of(host, health): health for health in _opened_gpus(second)}
        for key in [key_of(host, health) for health in _opened_gpus(first)]:
            # A GPU that several ranks see is judged once, and a GPU of another job is not judged.
            if (card := cards.pop(key, None)) is not None:
                after = later.get(key)
                found = _new_faults(seen, card, after, seconds) if after else (_gone_fault(card, second, seconds),)
                for fault in found:
                    yield finding_of(seen, card, fault)


def _gone_fault(card: Card, second: GpuReading, seconds: float | None) -> Fault:
    # NVML may renumber the remaining GPUs, so an error at the same index may belong to another GPU.
    errors = [health.error for health in second.gpus if health.error is not None]
    why = f"NVML reports {errors[0]!r}" if errors else f"NVML lists {count(len(second.gpus), 'GPU')} without it"
    when = "at the end" if seconds is None else f"{seconds:.1f} s later"
    return Fault(
        "gone",
        "a GPU was lost during the run",
        f"it was present at the beginning, and is missing {when} ({why})",
        Action.REBOOT,
        REPLACE_LOST,
        {"error": errors[0] if errors else None, "seconds": seconds},
        prefix=xid_fix(card.host.name),
    )


def _new_faults(seen: Seen[GpuReading], card: Card, after: Health, seconds: float | None) -> Iterator[Fault]:
    """Yield a fault for each state that began, each link that went down and each counter that rose during the run."""
    known = {fault.word for fault in _state_faults(card)}
    for fault in _state_faults(card._replace(health=after)):
        if fault.word not in known:
            yield fault._replace(
                title=f"{fault.title}, since this run",
                text=f"{fault.text}. It was not so at the beginning of the run",
                evidence={**fault.evidence, "seconds": seconds},
            )
    was_up = {link.number for link in card.health.nvlinks if link.up}
    if down := [link.number for link in after.nvlinks if not link.up and link.number in was_up]:
        yield Fault(
            "nvlink-down",
            "an NVLink of a GPU went down during the run",
            f"{nvlink_text(down)} {'is' if len(down) == 1 else 'are'} down, up at the beginning of the run",
            Action.RESET,
            evidence={"links": [*down], "seconds": seconds},
            severity=Severity.ERROR if card.health.fabric.state == FABRIC_JOINED else Severity.WARNING,
        )
    yield from rise_faults(seen, card.health, after, seconds)


def _state_faults(card: Card) -> Iterator[Fault]:
    """Yield the faulty states of a GPU, which may begin during a run."""
    yield from state_faults(card.health)
    yield from recovery_faults(card)
    yield from clock_faults(card)


def skip(seen: Seen[GpuReading]) -> SkipReason | None:
    """Skip this check as GPU003 is skipped, or if GPU003 saw no GPU to compare with."""
    first = memory_errors.CHECK
    has_none = seen.is_last and not _first_readings(seen)
    return devices.skip(seen) or unneeded(
        f"{first.code} ({first.name}) saw no GPU to compare with" if has_none else None
    )


def last_seconds(seen: Seen[GpuReading]) -> float:
    """Return the expected seconds of the last reading: those of GPU003's reading, and of the start of a worker."""
    seconds = (o.seconds for o in seen.of(memory_errors.CHECK).outcomes if o.status is Status.DONE)
    return max(seconds, default=0.0) + _START_SECONDS


measure = memory_errors.measure
Data = GpuReading
# NVIDIA's limit for PCIe replays, as DCGM's watch has it (8 a minute).
SETTINGS = {"pcie_replays_per_minute": 8}
CHECK: Check[Data] = Check(__name__, "GPU010", "counters", Stage.GPU, Scope.HOST, deadline=memory_errors.CHECK.deadline)
