"""Counters of each GPU that rise while the run loads it.

A counter that is not zero may be old; one that rises during a run is a fault that the next job meets as well. The GPUs
are asked once more after everything else has run, by the ranks that asked them for GPU003, and each GPU, known by its
UUID, is held against itself.

Findings, with the numbers before and after and the seconds between:

Causes: wear, heat, a card or cable that is not seated, a bad link. A run of seconds loads a GPU little: that nothing
rose does not show that nothing will.

Fix: monitor, reset, reboot or isolate as the finding says; run it once more with `--depth deep` to see whether it rises
again.

Confirm by hand: `nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE; nvidia-smi nvlink -e` before and after a job, and diff.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api); NVIDIA GPU memory error management
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt); DCGM's PCIe replay policy.
"""

from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import Action, Card, Fault, cards_of, finding_of, key_of, not_looked_at
from ddpdiag.checks.gpu.counters.deltas import Pair, came_up, corrected, counted, flawed_links, replayed, slowed
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.model import Finding, Status, Trial
from ddpdiag.probes.gpu.health import Health, Look

FINDINGS = {
    "gone": Explained.error(
        "the GPU was there and cannot be opened any more, or is not listed: it fell off the bus (Xid 79)."
    ),
    "broken": Explained.error("the GPU says that it is lost, or must be reset."),
    **dict.fromkeys(
        ("uncorrected", "sram", "remapped"),
        Explained.error("uncorrectable errors that came, or rows that were remapped for them."),
    ),
    **dict.fromkeys(
        ("remap-pending", "remap-failed", "retirement-pending", "recovery"), Explained.error("signs that came up.")
    ),
    "nvlink-down": Explained("a link that was up."),
    "nvlink-errors": Explained.warning("replays and recoveries.", same_item=True),
    "nvlink-crc": Explained(
        "good to know up to `crc_per_second`, since the link sends again what CRC finds.", same_item=True
    ),
    "pcie-replays": Explained("good to know up to `pcie_replays_per_minute`."),
    **dict.fromkeys(
        ("corrected", "remapped-corrected", "retired"),
        Explained.warning("ECC hid the errors; corrected is good to know below GPU003's own limit."),
    ),
    "slowdown": Explained.warning("clocks held down by heat or power at the end, and not at the beginning."),
    "unreadable": Explained.not_seen("the second look failed, although the first one worked."),
}

# For a worker that has to be started anew, since the last one was ended.
_START_SECONDS = 0.5


def plan(seen: Seen[Look]) -> Sequence[Trial]:
    """The ranks that saw GPUs at the beginning."""
    groups = tuple((rank,) for rank in sorted(_first(seen)) if rank in seen.world.living)
    return (new_trial(seen, groups=groups),) if seen.is_last and groups and not seen.trials else ()


def moot(seen: Seen[Look]) -> str | None:
    """Without a first look there is nothing to compare with."""
    return (
        None if _first(seen) else f"{memory_errors.CHECK.code} ({memory_errors.CHECK.name}) saw no GPU to compare with"
    )


def last(seen: Seen[Look]) -> float:
    """As long as the first look."""
    took = (o.seconds for o in seen.of(memory_errors.CHECK).outcomes if o.status is Status.DONE)
    return max(took, default=0.0) + _START_SECONDS


def _first(seen: Seen[Look]) -> Mapping[int, Look]:
    return {rank: look for rank, look in seen.of(memory_errors.CHECK).by_rank.items() if any(_opened(look))}


def _opened(look: Look) -> Iterator[Health]:
    return (health for health in look.gpus if health.error is None)


def judge(seen: Seen[Look]) -> Iterator[Finding]:
    yield from not_looked_at(seen, seen.of(memory_errors.CHECK))
    cards = {key_of(card.host.name, card.health): card for card in cards_of(seen.of(memory_errors.CHECK))}
    judged: set[str] = set()
    for rank, first in _first(seen).items():
        second = seen.by_rank.get(rank)
        if second is None:
            continue  # the trial did not end well, and RUN003 says so
        if second.error is not None:
            yield _unreadable(seen, rank, second.error)
            continue
        node = seen.world.node_of(rank)
        later = {key_of(node, health): health for health in _opened(second)}
        for health in _opened(first):
            key = key_of(node, health)
            # A GPU that several ranks see is judged once, and one that is none of the job's never.
            if key in cards and key not in judged:
                judged.add(key)
                yield from _compared(seen, cards[key], first, second, later.get(key))


def _compared(seen: Seen[Look], card: Card, first: Look, second: Look, after: Health | None) -> Iterator[Finding]:
    seconds = _between(first, second)
    if after is None:
        yield finding_of(seen, card, _gone(card, second, seconds))
        return
    pair = Pair(card.health, after, seconds)
    most = memory_errors.most_corrected(seen.of(memory_errors.CHECK))
    for fault in (
        *counted(pair),
        *came_up(pair),
        *flawed_links(pair, seen.number("crc_per_second")),
        *replayed(pair, seen.number("pcie_replays_per_minute")),
        *corrected(pair, most),
        *slowed(pair),
    ):
        yield finding_of(seen, card, fault)


def _between(first: Look, second: Look) -> float | None:
    if first.boot_seconds is None or second.boot_seconds is None:
        return None
    return max(0.0, second.boot_seconds - first.boot_seconds)


def _gone(card: Card, second: Look, seconds: float | None) -> Fault:
    # NVML may number the rest anew, so an error under the same index is a hint only.
    errors = [health.error for health in second.gpus if health.error is not None]
    why = f"NVML says {errors[0]!r}" if errors else f"NVML lists {len(second.gpus)} GPUs without it"
    when = "" if seconds is None else f" {seconds:.1f} s later"
    return Fault(
        "gone",
        "a GPU was lost during the run",
        f"it was there at the beginning;{when} it is gone ({why})",
        Action.REBOOT,
        f"Look for Xid lines in `dmesg` on {card.host.name}; isolate the host if it happens again.",
        {"error": errors[0] if errors else None, "seconds": seconds},
    )


def _unreadable(seen: Seen[Look], rank: int, error: str) -> Finding:
    node = seen.world.node_of(rank)
    return seen.finding(
        "unreadable",
        "the GPUs cannot be read any more",
        f"{node}: {ranks_text((rank,))} could ask the GPUs at the beginning, and not at the end (NVML: {error}): "
        "UNKNOWN what rose during the run.",
        ranks=(rank,),
        evidence={"error": error},
        fix=f"Run `nvidia-smi` on {node} and follow what it says; look for Xid lines in `dmesg`.",
    )


CHECK = Check(
    "GPU010",
    "counters",
    Stage.GPU,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=memory_errors.measure,
    judge=judge,
    data=Look,
    plan=plan,
    moot=moot,
    ground=memory_errors.ground,
    last=last,
    deadline=memory_errors.CHECK.deadline,
    settings={
        # NVIDIA's limit for PCIe replays, as DCGM's watch has it (8 a minute).
        "pcie_replays_per_minute": 8,
        # NVIDIA minds CRC errors from 100 a second on (DCGM, dcgm_gpu_hardware_limits.h).
        "crc_per_second": 100,
    },
)
