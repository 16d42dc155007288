"""The facts before P2P003's search: COL001's failure, the variables that are set, and the overrides that may help."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddpdiag.bandwidth import busbw
from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import is_echo, stopped_by_themselves, without_backend
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import answers_by_host, ranks_text
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.p2p.fallback.members import ACROSS, INSIDE, VARIABLES, interface_overrides
from ddpdiag.checks.p2p.fallback.search import Ground, Member, Members
from ddpdiag.checks.rendezvous import interfaces
from ddpdiag.model import Outcome, Severity, Status, Trial
from ddpdiag.probes.gpu.links import JOINED
from ddpdiag.probes.net.tcp_connect import is_loopback

# Failures before any data are sent: error texts without a known-error card, and checks whose cards explain the error.
_OTHER_REASONS = ("Unknown backend type", "torch sees none")
_OF_GPUS = frozenset({"GPU001", "GPU002", "GPU008"})
_SEPARATOR = ", "


class Order(NamedTuple):
    """The overrides in the order in which they are tried. `named` are those in COL001's error, each tried alone."""

    names: tuple[str, ...]
    named: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, str]:
        """The order as parameters: each trial of the search records it, so that later findings do not change it."""
        return {"order": _SEPARATOR.join(self.names), "named": _SEPARATOR.join(self.named)}


class Before(NamedTuple):
    """The result of COL001's all-reduce over one backend."""

    trial: Trial
    works: bool
    busbw: float | None


def before(seen: Seen[Any], backend: str) -> Before | None:
    """The result of COL001 over this backend with all ranks together, or None if it was not tried."""
    known = seen.of(all_reduce.CHECK)
    for trial in known.trials:
        if trial.params.get("backend") == backend:
            rows = [row.data for row in known.rows if row.trial is trial]
            works = known.succeeded(trial) and not any(data.wrong for data in rows)
            slowest = max((data.large_seconds.median for data in rows), default=0.0)
            rate = busbw("all_reduce", rows[0].large_bytes, slowest, rows[0].ranks) if works and slowest > 0 else None
            return Before(trial, works, rate)
    return None


def moot(seen: Seen[Any]) -> str | None:
    """The reason why no search is needed, or None."""
    job, gloo, backend = before(seen, seen.world.backend), before(seen, "gloo"), seen.world.backend
    tried = (o for o in seen.recording.outcomes if o.code in (all_reduce.CHECK.code, seen.check.code))
    if without := without_backend(tried):
        return f"torch has no {backend} on {ranks_text(tuple(without))}"
    if job is None:
        return None
    if job.works:
        return f"{backend} works as it is"
    if any(found.code == "LCH002.process-group" for found in seen.findings_of("LCH002")):
        return f"ranks open different process groups for {backend}, which {lch002.NCCL_CLASS} chooses"
    failed = [o for o in seen.recording.outcomes if o.trial == job.trial.number and o.status is not Status.DONE]
    if failed and (reason := _other_reason(seen, failed)):
        return f"{backend} fails for a reason that no variable avoids: {reason}"
    if ranks := stopped_by_themselves(failed, backend):
        return f"{ranks_text(ranks)} stopped the all-reduce, however GPUs are joined (RUN003 says how)"
    if gloo is not None and not gloo.works:
        return f"gloo fails as well as {backend}: the cause is the network or a host, not paths between GPUs"
    return None


def _other_reason(seen: Seen[Any], failed: Sequence[Outcome]) -> str:
    """The first error, if every failed rank has one that is not about paths between GPUs; else empty."""
    shared = next((found for found in seen.findings_of("GPU002") if found.code == "GPU002.shared"), None)
    if shared is not None:
        return f"{ranks_text(shared.ranks)} share a GPU ({shared.code})"
    # NCCL's message follows torch's first line.
    errors = [o.error for o in failed if not o.told and not is_echo(o)]
    lines = [next((line for line in error.split("\n") if _is_other_reason(line)), None) for error in errors]
    return lines[0] or "" if lines and None not in lines else ""


def _is_other_reason(line: str) -> bool:
    known = known_error(line)
    return any(text in line for text in _OTHER_REASONS) or (known is not None and known.check in _OF_GPUS)


def ground_of(seen: Seen[Any]) -> Ground:
    """The facts from which the search begins."""
    own, skipped, order = before(seen, seen.world.backend), skipped_here(seen), search_order(seen)

    def members(names: Sequence[str], group: Sequence[Member] = (*INSIDE, *ACROSS)) -> Members:
        known = {member.name: member for member in group if member.name not in skipped}
        return tuple(known[name] for name in names if name in known)

    return Ground(
        broken=own is not None and not own.works,
        hosts=tuple(seen.world.hosts.values()),
        own=set_by_user(seen),
        inside=members(order.names, INSIDE),
        across=members(order.names, ACROSS),
        alternatives=interface_overrides(_common_interfaces(seen)) if "IFNAME" not in skipped else (),
        named=members(order.named),
    )


def search_order(seen: Seen[Any]) -> Order:
    """The recorded order, or for a new search: overrides that errors name, then those that findings suggest."""
    if seen.trials:
        params = seen.trials[0].params
        names, named = (tuple(filter(None, str(params[key]).split(_SEPARATOR))) for key in ("order", "named"))
        return Order(names, named)
    usual = tuple(override.name for override in (*INSIDE, *ACROSS))
    job = before(seen, seen.world.backend)
    if job is None or job.works:
        return Order(usual)  # no search follows, and large worlds have many findings
    failed = [o for o in seen.recording.outcomes if o.trial == job.trial.number]
    # Errors of ranks, and NCCL's warnings: the rest of the output with NCCL_DEBUG=INFO names every feature.
    warnings = (line for o in failed for line in o.detail.split("\n") if "NCCL WARN" in line)
    text = "\n".join((*(o.error for o in failed), *warnings))
    named = tuple(name for name in usual if any(part in text for part in VARIABLES[name].texts))
    suspected = [
        name
        for name in usual[1:]  # the first of all is tried first if none is suspected
        for code in VARIABLES[name].seen_by
        if any(finding.severity is not Severity.NOTE for finding in seen.findings_of(code))
    ]
    # With NVSwitches NCCL uses NVLS for most sizes. If the fabric manager is at fault, NVLS hangs or fails.
    if any(card.health.fabric.state == JOINED for card in cards_of(seen.of(memory_errors.CHECK))):
        suspected.append("NVLS")
    ranks = dict.fromkeys(suspected, 1) | dict.fromkeys(named, 0)
    return Order(tuple(sorted(usual, key=lambda name: ranks.get(name, 2))), named)


def set_by_user(seen: Seen[Any]) -> Members:
    """One member for each of NCCL's variables that LCH002 found on any rank. The member unsets the variable."""
    variables: dict[str, str] = {}
    for data in seen.of(lch002.CHECK).by_rank.values():
        variables = data.variables | variables
    names = [name for name in sorted(variables) if name.startswith("NCCL_") and not name.startswith(lch002.WATCHING)]
    return tuple(Member(f"no {name}", {name: None}, f"{name}={variables[name]}") for name in names)


def skipped_here(seen: Seen[Any]) -> dict[str, str]:
    """The overrides that cannot help in this run, by name, with the reason."""
    hosts = tuple(seen.world.hosts.values())
    fabrics = [card.health.fabric for card in cards_of(seen.of(memory_errors.CHECK))]
    # NCCL starts its network inside a host, too, and uses it if it is faster or nothing else is left (ncclTopoCheckNet
    # in graph/paths.cc). A host whose bus could not be read may have a device.
    devices = [row.rdma for row in seen.of(hst004.CHECK).by_rank.values()]
    rules: tuple[tuple[bool, Sequence[str], str], ...] = (
        (max(map(len, hosts), default=0) < 2, (*(member.name for member in INSIDE), "PXN"), "each host has one rank"),
        (
            bool(fabrics) and all(fabric.state is None for fabric in fabrics),
            ("NVLS",),
            "no GPU belongs to an NVSwitch fabric",
        ),
        (
            bool(devices) and all(rdma is not None and not rdma for rdma in devices),
            ("GDR", "PXN", "IB"),
            "no host has an InfiniBand or RoCE device",
        ),
        (
            bool(fabrics) and not any(fabric.may_span_hosts for fabric in fabrics),
            ("MNNVL",),
            "no GPU belongs to a domain of NVLinks between hosts",
        ),
        (len(_common_interfaces(seen)) < 2, ("IFNAME",), "the hosts have no two interfaces in common"),
        (len(hosts) < 2, ("MNNVL", "PXN", "IFNAME"), "there is one host"),
    )
    return {name: reason for applies, names, reason in rules if applies for name in names}


def _common_interfaces(seen: Seen[Any]) -> tuple[str, ...]:
    """Names of the interfaces that are up on every host and have an address other than loopback."""
    answers = [next(iter(rows.values())) for _, rows in answers_by_host(seen.of(interfaces.CHECK))]
    usable = [
        [each.name for each in data.interfaces or () if each.running and not all(map(is_loopback, each.addresses))]
        for data in answers
    ]
    if len(usable) < len(seen.world.hosts):
        return ()
    return tuple(name for name in usable[0] if all(name in names for names in usable))
