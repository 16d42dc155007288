"""The facts before the search: the failure of COL001, the variables that are set, and those that may matter here."""

from collections.abc import Mapping, Sequence
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
from ddpdiag.checks.launch import versions
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.fallback.members import ACROSS, IFNAME, INSIDE, VARIABLES
from ddpdiag.checks.p2p.fallback.search import Ground, Member, Members
from ddpdiag.checks.p2p.host_paths import host_paths
from ddpdiag.checks.rendezvous import interfaces
from ddpdiag.model import Outcome, Severity, Status, Trial
from ddpdiag.nccl_rings import version_of
from ddpdiag.probes.gpu.links import JOINED
from ddpdiag.probes.net.tcp_connect import is_loopback

# What is wrong before anything is sent: texts that no card explains, and the checks of GPUs that explain known ones.
_OTHER_REASONS = ("Unknown backend type", "torch sees none")
_OF_GPUS = frozenset({"GPU001", "GPU002", "GPU008"})

# NCCL's configuration files by path, as their variables.
Files = Mapping[str, Mapping[str, str]]
_CONF_FILE = "NCCL_CONF_FILE"
# From this version on NVLS is used between two GPUs, too.
_NVLS_OF_TWO = (2, 29)

_SEPARATOR = ", "


class Order(NamedTuple):
    """The overrides by name, in the order in which they are tried; `named` by the error of COL001, each tried alone."""

    names: tuple[str, ...]
    named: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, str]:
        """As each trial of the search records it, so that a later version judges the search that was made."""
        return {"order": _SEPARATOR.join(self.names), "named": _SEPARATOR.join(self.named)}


class Before(NamedTuple):
    """The result of COL001's all-reduce over one backend."""

    trial: Trial
    works: bool
    busbw: float | None


def before(seen: Seen[Any], backend: str) -> Before | None:
    """The course of COL001 over this backend, with all ranks together."""
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
    """Why there is nothing to search for, or None."""
    own, gloo = before(seen, seen.world.backend), before(seen, "gloo")
    tried = (o for o in seen.recording.outcomes if o.code in (all_reduce.CHECK.code, seen.check.code))
    if said := without_backend(tried):
        return f"torch has no {seen.world.backend} on {ranks_text(tuple(said))}"
    if own is None:
        return None
    if not own.works and any(found.code == "LCH002.process-group" for found in seen.findings_of("LCH002")):
        return f"ranks open different process groups for {seen.world.backend}, which {lch002.NCCL_CLASS} chooses"
    failed = [o for o in seen.recording.outcomes if o.trial == own.trial.number and o.status is not Status.DONE]
    if reason := _other_reason(seen, failed):
        return f"{seen.world.backend} fails for a reason that no variable avoids: {reason}"
    if ranks := stopped_by_themselves(failed, seen.world.backend):
        return f"{ranks_text(ranks)} stopped the all-reduce, however GPUs are joined (RUN003 says how)"
    if not own.works and gloo is not None and not gloo.works:
        return f"gloo fails as well as {seen.world.backend}: the cause is the network or a host, not paths between GPUs"
    if own.works and _slow_below(seen, own, gloo) is None:
        return f"{seen.world.backend} works as it is"
    return None


def _other_reason(seen: Seen[Any], failed: Sequence[Outcome]) -> str:
    """The errors of ranks that failed by themselves, if none of that concerns the paths between GPUs."""
    if not failed:
        return ""
    shared = next((found for found in seen.findings_of("GPU002") if found.code == "GPU002.shared"), None)
    if shared is not None:
        return f"{ranks_text(shared.ranks)} share a GPU ({shared.code})"
    # NCCL's own words are behind torch's first line.
    errors = [o.error for o in failed if not o.told and not is_echo(o)]
    lines = [next((line for line in error.split("\n") if _is_other_reason(line)), None) for error in errors]
    return lines[0] or "" if lines and None not in lines else ""


def _is_other_reason(line: str) -> bool:
    known = known_error(line)
    return any(text in line for text in _OTHER_REASONS) or (known is not None and known.check in _OF_GPUS)


def ground_of(seen: Seen[Any]) -> Ground:
    """The facts from which the search begins."""
    own, gloo = before(seen, seen.world.backend), before(seen, "gloo")
    known, _ = overrides_here(seen)
    by_name = {override.name: override for override in known}
    order = search_order(seen)
    ordered = [by_name[name] for name in order.names if name in by_name]
    return Ground(
        broken=own is not None and not own.works,
        slow_below=_slow_below(seen, own, gloo),
        hosts=tuple(seen.world.hosts.values()),
        own=set_by_user(seen),
        inside=tuple(override for override in ordered if override in INSIDE),
        across=tuple(override for override in ordered if override in ACROSS),
        alternatives=tuple(override for override in known if override not in (*INSIDE, *ACROSS)),
        named=tuple(by_name[name] for name in order.named if name in by_name),
        rescue=seen.number("rescue"),
    )


def search_order(seen: Seen[Any]) -> Order:
    """The order that this run's search has, or will have: what errors name first, then what a check suspects."""
    if seen.trials:
        params = seen.trials[0].params
        names, named = (tuple(filter(None, str(params[key]).split(_SEPARATOR))) for key in ("order", "named"))
        return Order(names, named)
    usual = tuple(override.name for override in (*INSIDE, *ACROSS))
    own, gloo = before(seen, seen.world.backend), before(seen, "gloo")
    if own is None or (own.works and _slow_below(seen, own, gloo) is None):
        return Order(usual)  # nothing is searched for, and large worlds have many findings
    failed = [o for o in seen.recording.outcomes if o.trial == own.trial.number]
    # What ranks raised, and NCCL's warnings in their output: with NCCL_DEBUG=INFO that names all there is.
    warnings = (line for o in failed for line in o.detail.split("\n") if "NCCL WARN" in line)
    text = "\n".join((*(o.error for o in failed), *warnings))
    named = tuple(name for name in usual if any(part in text for part in VARIABLES[name].texts))
    suspected = [
        name
        for name in usual[1:]  # the first is tried first where nothing is suspected
        for code in VARIABLES[name].seen_by
        if any(finding.severity is not Severity.NOTE for finding in seen.findings_of(code))
    ]
    # On such boards NCCL takes NVLS for most sizes; where the fabric manager is at fault, it hangs or raises there.
    if any(card.health.fabric.state == JOINED for card in cards_of(seen.of(memory_errors.CHECK))):
        suspected.append("NVLS")
    ranks = dict.fromkeys(suspected, 1) | dict.fromkeys(named, 0)
    return Order(tuple(sorted(usual, key=lambda name: ranks.get(name, 2))), named)


def _slow_below(seen: Seen[Any], own: Before | None, gloo: Before | None) -> float | None:
    """gloo goes through every host's processors: what is far slower than that is not as it should be."""
    if own is None or gloo is None or own.busbw is None or gloo.busbw is None:
        return None
    least = gloo.busbw / seen.number("slower_than_gloo")
    return least if own.busbw < least else None


def set_by_user(seen: Seen[Any]) -> Members:
    """NCCL's variables and configuration files that LCH002 saw on any rank, as members that take them away."""
    variables: dict[str, str] = {}
    files: dict[str, dict[str, str]] = {}
    for data in seen.of(lch002.CHECK).by_rank.values():
        variables = data.variables | variables
        for path, rows in data.files.items():
            files.setdefault(path, {}).update(rows)
    return own_overrides(variables, files)


def overrides_here(seen: Seen[Any]) -> tuple[Members, dict[str, str]]:
    """The overrides that may matter here, and for each of the others why it cannot."""
    hosts = tuple(seen.world.hosts.values())
    skipped: dict[str, str] = {}
    if alone := max(map(len, hosts), default=0) < 2:
        skipped |= dict.fromkeys((override.name for override in INSIDE), "each host has one rank")
    else:
        skipped |= {name: why for name, why in (("NVLS", _no_nvls(seen)), ("P2P", _no_p2p(seen))) if why}
    # Inside a host, too, NCCL starts its network, and takes it where that is faster or nothing else is left
    # (ncclTopoCheckNet in graph/paths.cc). A plugin may bring a network of its own.
    rows = seen.of(hst004.CHECK).by_rank.values()
    # A bus that could not be read may have a device.
    if rows and all(row.rdma is not None and not row.rdma for row in rows):
        skipped |= dict.fromkeys(("GDR", "PXN", "IB"), "no host has an InfiniBand or RoCE device")
    if alone:
        skipped["PXN"] = "each host has one rank"
    names = _candidates(seen) if len(hosts) > 1 else ()
    if len(hosts) < 2:
        skipped |= dict.fromkeys(("MNNVL", "PXN", "IFNAME"), "there is one host")
    else:
        cards = cards_of(seen.of(memory_errors.CHECK))
        if cards and not any(card.health.fabric.may_span_hosts for card in cards):
            skipped["MNNVL"] = "no GPU belongs to a domain of NVLinks between hosts"
        if len(names) < 2:
            few = "the hosts have one interface in common" if names else "no interface is known on all hosts"
            skipped["IFNAME"] = few
    overrides: Sequence[Member] = (*INSIDE, *ACROSS, *(interface_overrides(names) if "IFNAME" not in skipped else ()))
    return tuple(override for override in overrides if override.name not in skipped), skipped


def _no_p2p(seen: Seen[Any]) -> str:
    """NCCL asks NVML as well, and takes no path that it does not allow; but it gives up where there are NVLinks.

    (ncclTopoCheckP2p in graph/paths.cc: "P2P is disabled between NVLINK connected GPUs", an error.)
    """
    all_paths = host_paths(seen.of(paths.CHECK))
    pairs = [pair for paths_here in all_paths for pair in paths_here.pairs]
    told = len(all_paths) == len(seen.world.hosts) and pairs and all(p.works is False and p.is_unlinked for p in pairs)
    return "NVML allows no P2P between any two GPUs" if told else ""


def _no_nvls(seen: Seen[Any]) -> str:
    """Without a switch there is no NVLS. GPUs that no check has seen may have one."""
    cards = cards_of(seen.of(memory_errors.CHECK))
    if cards and not any(card.health.fabric.state is not None for card in cards):
        return "no GPU belongs to an NVSwitch fabric"
    hosts = tuple(seen.world.hosts.values())
    version = next(filter(None, (row.nccl for row in seen.of(versions.CHECK).by_rank.values())), None)
    # ncclNvlsInit in transport/nvls.cc; between hosts it counts the GPUs of a domain of NVLinks.
    if len(hosts) == 1 and len(hosts[0]) <= 2 and version is not None and version_of(version) < _NVLS_OF_TWO:
        return f"NCCL {version} uses it between more than two GPUs only"
    return ""


def _candidates(seen: Seen[Any]) -> tuple[str, ...]:
    """Interfaces that are up on every host with an address that others may reach, by name."""
    answers = [next(iter(rows.values())) for _, rows in answers_by_host(seen.of(interfaces.CHECK))]
    usable = [
        [own.name for own in data.interfaces or () if own.running and not all(map(is_loopback, own.addresses))]
        for data in answers
    ]
    if len(usable) < len(seen.world.hosts):
        return ()
    return tuple(name for name in usable[0] if all(name in own for own in usable))


def own_overrides(settings: Mapping[str, str], files: Files) -> Members:
    """A member for each NCCL variable that is set, which takes it away; and one for a configuration file of the user.

    The environment wins over /etc/nccl.conf, but only what that disables has a value that undoes it.
    """
    names = [name for name in sorted(settings) if name.startswith("NCCL_") and not name.startswith(lch002.WATCHING)]
    variables = tuple(Member(f"no {name}", {name: None}, f"{name}={settings[name]}") for name in names)
    own = [path for path in files if not path.startswith("/etc/")]
    user = (Member(f"no {path}", {_CONF_FILE: "/dev/null"}, path) for path in own[:1])
    disabled = (
        Member(f"no {name}", {name: "0"}, f"{name}=1 in {path}")
        for path, rows in files.items()
        for name, value in rows.items()
        if path.startswith("/etc/") and name not in settings and name.endswith("_DISABLE") and value.strip() == "1"
    )
    return (*variables, *user, *disabled)


def interface_overrides(names: Sequence[str]) -> Members:
    """One alternative for each interface."""
    return tuple(
        Member(
            f"{IFNAME.member.name} {name}",
            {variable: f"{value}{name}" for variable, value in IFNAME.member.env.items()},
            IFNAME.member.what,
        )
        for name in names
    )
