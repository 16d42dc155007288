"""What is known before the climb: what failed, what the user has set, and which rungs may matter here."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import is_echo, without_backend
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import answers_by_host, ranks_text
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.p2p.fallback.overrides import (
    ACROSS,
    INSIDE,
    NVLS,
    P2P,
    Files,
    holding_back,
    holds_back,
    interface_rungs,
    own_overrides,
)
from ddpdiag.checks.p2p.fallback.search import Ground, Member, Members
from ddpdiag.checks.p2p.paths import check as paths
from ddpdiag.checks.p2p.paths.data import path_views
from ddpdiag.checks.rendezvous import interfaces
from ddpdiag.model import Status, Trial
from ddpdiag.probes.net.tcp_connect import is_loopback

D = TypeVar("D")

# Texts of torch, CUDA and NCCL (init.cc) for what is wrong before anything is sent.
_OTHER_REASONS = (
    "Unknown backend type",
    "Distributed package doesn't have",
    "torch sees none",
    "Duplicate GPU detected",
    "no kernel image is available",
    "CUDA out of memory",
)


class Thresholds(NamedTuple):
    """Ratios of rates: what a gain is, what a rescue from slowness, and how far below gloo is slow."""

    gain: float
    rescue: float
    slower_than_gloo: float


class Before(NamedTuple):
    """What the all-reduce of COL001 gave over one backend: None if it was not tried."""

    trial: Trial
    works: bool
    busbw: float | None


def before(seen: Seen[D], backend: str) -> Before | None:
    """How COL001 went over this backend, with all ranks together."""
    known = seen.of(all_reduce.CHECK)
    for trial in known.trials:
        if trial.params.get("backend") == backend and "round" not in trial.params:
            rows = [row.data for row in known.rows if row.trial is trial]
            works = known.went_well(trial) and not any(data.wrong for data in rows)
            slowest = max((data.large_seconds.median for data in rows), default=0.0)
            rate = all_reduce.busbw(rows[0].large_bytes, slowest, rows[0].ranks) if works and slowest > 0 else None
            return Before(trial, works, rate)
    return None


def why_not(seen: Seen[D], limits: Thresholds) -> str | None:
    """Why there is nothing to climb for, or None."""
    own, gloo = before(seen, seen.world.backend), before(seen, "gloo")
    if said := without_backend(
        o for o in seen.recording.outcomes if o.code in (all_reduce.CHECK.code, seen.check.code)
    ):
        return f"torch has no {seen.world.backend} on {ranks_text(tuple(said))}"
    if own is None:
        return None
    if reason := _other_reason(seen, own):
        return f"{seen.world.backend} fails for a reason that no variable gets around: {reason}"
    if not own.works and gloo is not None and not gloo.works:
        return f"gloo fails as well as {seen.world.backend}: that is the network or a host, not how GPUs are joined"
    known = ground_of(seen, limits)
    if known.broken or known.slow_below is not None or known.holding:
        return None
    if not seen.of(lch002.CHECK).by_rank:
        return f"{seen.world.backend} works as it is; what is set was not looked at ({lch002.CHECK.code})"
    return f"{seen.world.backend} works as it is, and nothing that is set holds it back"


def _other_reason(seen: Seen[D], own: Before) -> str:
    """What the ranks said that failed by themselves, if all of that has nothing to do with how GPUs are joined."""
    outcomes = [o for o in seen.recording.outcomes if o.trial == own.trial.number and o.status is not Status.DONE]
    errors = [o.error.partition("\n")[0] for o in outcomes if not o.told and not is_echo(o)]
    other = errors and all(any(text in error for text in _OTHER_REASONS) for error in errors)
    return errors[0] if other else ""


def ground_of(seen: Seen[D], limits: Thresholds) -> Ground:
    """Where the climb begins."""
    own, gloo = before(seen, seen.world.backend), before(seen, "gloo")
    settings, files = _settings(seen)
    mine = own_overrides(settings, files)
    rungs, _ = rungs_here(seen)
    return Ground(
        broken=own is not None and not own.works,
        slow_below=_slow_below(own, gloo, limits),
        hosts=tuple(seen.world.hosts.values()),
        own=mine,
        holding=holding_back(settings, files, mine),
        inside=tuple(rung for rung in INSIDE if rung in rungs),
        across=tuple(rung for rung in ACROSS if rung in rungs),
        alternatives=tuple(rung for rung in rungs if rung not in INSIDE and rung not in ACROSS),
        gain=limits.gain,
        rescue=limits.rescue,
    )


def _slow_below(own: Before | None, gloo: Before | None, limits: Thresholds) -> float | None:
    """gloo goes through every host's processors: what is far slower than that is not as it should be."""
    if own is None or gloo is None or own.busbw is None or gloo.busbw is None:
        return None
    least = gloo.busbw / limits.slower_than_gloo
    return least if own.busbw < least else None


def _settings(seen: Seen[D]) -> tuple[Mapping[str, str], Files]:
    """NCCL's variables on any rank, and its configuration files; of different values, one that costs speed."""
    variables: dict[str, str] = {}
    files: dict[str, dict[str, str]] = {}
    for data in seen.of(lch002.CHECK).by_rank.values():
        for name, value in data.variables.items():
            if name.startswith("NCCL_") and not holds_back(name, variables.get(name)):
                variables[name] = value
        for path, rows in data.files.items():
            files.setdefault(path, {}).update(rows)
    return variables, files


def rungs_here(seen: Seen[D]) -> tuple[Members, dict[str, str]]:
    """The rungs that may matter here, and for each of the others why it cannot."""
    hosts = tuple(seen.world.hosts.values())
    skipped: dict[str, str] = {}
    if max(map(len, hosts), default=0) < 2:
        skipped |= dict.fromkeys((rung.name for rung in INSIDE), "each host has one rank")
    else:
        skipped |= {rung.name: why for rung, why in ((NVLS, _no_nvls(seen)), (P2P, _no_p2p(seen))) if why}
    # Inside a host, too, NCCL starts its network, and takes it where that is faster or nothing else is left
    # (ncclTopoCheckNet in graph/paths.cc). A plugin may bring a network of its own.
    if reason := _no_rdma(seen):
        skipped |= dict.fromkeys(("GDR", "IB"), reason)
    if len(hosts) < 2:
        skipped["IFNAME"] = "there is one host"
    names = _candidates(seen) if len(hosts) > 1 else ()
    if len(hosts) > 1 and len(names) < 2:
        skipped["IFNAME"] = "the hosts have one interface in common" if names else "no interface is known on all hosts"
    rungs: Sequence[Member] = (*INSIDE, *ACROSS, *(interface_rungs(names) if "IFNAME" not in skipped else ()))
    return tuple(rung for rung in rungs if rung.name not in skipped), skipped


def _no_p2p(seen: Seen[D]) -> str:
    """NCCL asks NVML as well, and takes no way that it does not allow; but it gives up where there are NVLinks.

    (ncclTopoCheckP2p in graph/paths.cc: "P2P is disabled between NVLINK connected GPUs", an error.)
    """
    views = path_views(seen.of(paths.CHECK))
    pairs = [pair for view in views for pair in view.pairs]
    told = len(views) == len(seen.world.hosts) and pairs and all(p.works is False and p.is_unlinked for p in pairs)
    return "NVML allows no P2P between any two GPUs" if told else ""


def _no_nvls(seen: Seen[D]) -> str:
    """Without a switch there is no NVLS. GPUs that nobody looked at may have one."""
    cards = cards_of(seen.of(memory_errors.CHECK))
    told = cards and not any(card.health.fabric.state is not None for card in cards)
    return "no GPU belongs to an NVSwitch fabric" if told else ""


def _no_rdma(seen: Seen[D]) -> str:
    """A bus that could not be read may have a device."""
    rows = seen.of(hst004.CHECK).by_rank.values()
    told = rows and all(row.rdma is not None and not row.rdma for row in rows)
    return "no host has an InfiniBand or RoCE device" if told else ""


def _candidates(seen: Seen[D]) -> tuple[str, ...]:
    """Interfaces that are up on every host with an address that others may reach, by name."""
    common: list[set[str]] = []
    order: dict[str, None] = {}
    for _, rows in answers_by_host(seen.of(interfaces.CHECK)):
        data = next(iter(rows.values()))
        usable = [
            interface.name
            for interface in data.interfaces or ()
            if interface.running and any(not is_loopback(address) for address in interface.addresses)
        ]
        common.append(set(usable))
        order |= dict.fromkeys(usable)
    if len(common) < len(seen.world.hosts):
        return ()
    return tuple(name for name in order if all(name in own for own in common))
