"""The facts from which P2P003's search starts: COL001's result, the user's variables, the overrides that may help."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddpdiag.bandwidth import busbw
from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import is_echo, missing_backend_errors, ranks_failed_outside_backend
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.host import limits as hst004
from ddpdiag.checks.hosts import data_by_host, ranks_text
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.p2p.fallback.search import Override, Overrides, SearchInput
from ddpdiag.checks.p2p.fallback.variables import BETWEEN_HOSTS, INSIDE_HOSTS, VARIABLES, interface_overrides
from ddpdiag.checks.rendezvous import interfaces
from ddpdiag.model import Outcome, Severity, Status, Trial
from ddpdiag.probes.gpu.links import FABRIC_JOINED
from ddpdiag.probes.net.tcp_connect import is_loopback

# Errors that no variable avoids: texts that have no known-error card, and checks of GPUs to which such cards refer.
_UNRELATED_ERRORS = ("Unknown backend type", "torch sees none")
_GPU_CHECKS = frozenset({"GPU001", "GPU002", "GPU008"})
_SEPARATOR = ", "


class SearchOrder(NamedTuple):
    """The order of the search: `named_in_errors` are tried alone, then `names`, each added to the earlier ones."""

    names: tuple[str, ...]
    named_in_errors: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, str]:
        """The order as parameters, which each trial records, so that later findings do not change the order."""
        return {"order": _SEPARATOR.join(self.names), "named": _SEPARATOR.join(self.named_in_errors)}


class AllReduceResult(NamedTuple):
    """The result of COL001's all-reduce over one backend; `busbw` is in bytes/s (None: it failed or was not timed)."""

    trial: Trial
    works: bool
    busbw: float | None


def col001_result(seen: Seen[Any], backend: str) -> AllReduceResult | None:
    """The result of COL001's all-reduce of all ranks over this backend, or None if there was none."""
    all_reduces = seen.of(all_reduce.CHECK)
    for trial in all_reduces.trials:
        if trial.params.get("backend") == backend:
            rows = [row.data for row in all_reduces.rows if row.trial is trial]
            works = all_reduces.succeeded(trial) and not any(data.wrong for data in rows)
            slowest = max((data.large_seconds.median for data in rows), default=0.0)
            rate = busbw("all_reduce", rows[0].large_bytes, slowest, rows[0].ranks) if works and slowest > 0 else None
            return AllReduceResult(trial, works, rate)
    return None


def why_no_search(seen: Seen[Any]) -> str | None:
    """The reason why a search is not needed or cannot help, or None."""
    backend = seen.world.backend
    job, gloo = col001_result(seen, backend), col001_result(seen, "gloo")
    outcomes = (o for o in seen.recording.outcomes if o.code in (all_reduce.CHECK.code, seen.check.code))
    if ranks_without_backend := missing_backend_errors(outcomes):
        return f"torch has no {backend} on {ranks_text(tuple(ranks_without_backend))}"
    if job is None:
        return None
    if job.works:
        return f"{backend} works as it is"
    if any(found.code == "LCH002.process-group" for found in seen.findings_of("LCH002")):
        return f"ranks open different process groups for {backend}, which {lch002.GROUP_CLASS_VARIABLE} chooses"
    failed = [o for o in seen.recording.outcomes if o.trial == job.trial.number and o.status is not Status.DONE]
    if failed and (reason := _unrelated_error(seen, failed)):
        return f"{backend} fails for a reason that no variable avoids: {reason}"
    if ranks := ranks_failed_outside_backend(failed, backend):
        return f"{ranks_text(ranks)} stopped the all-reduce, however GPUs are joined (RUN003 says how)"
    if gloo is not None and not gloo.works:
        return f"gloo fails as well as {backend}: the cause is the network or a host, not paths between GPUs"
    return None


def _unrelated_error(seen: Seen[Any], failed: Sequence[Outcome]) -> str:
    """A sentence that ranks share a GPU, or the first error if no failed rank's error is about GPU paths; else ""."""
    shared = next((found for found in seen.findings_of("GPU002") if found.code == "GPU002.shared"), None)
    if shared is not None:
        return f"{ranks_text(shared.ranks)} share a GPU ({shared.code})"
    # Errors have several lines: NCCL's message follows torch's.
    errors = [o.error for o in failed if not o.interrupted and not is_echo(o)]
    lines = [next((line for line in error.split("\n") if _is_unrelated_error(line)), None) for error in errors]
    return lines[0] or "" if lines and None not in lines else ""


def _is_unrelated_error(line: str) -> bool:
    card = known_error(line)
    return any(text in line for text in _UNRELATED_ERRORS) or (card is not None and card.check_code in _GPU_CHECKS)


def search_input(seen: Seen[Any]) -> SearchInput:
    """The facts and overrides from which the search starts."""
    job, excluded, order = col001_result(seen, seen.world.backend), excluded_overrides(seen), search_order(seen)

    def overrides_of(names: Sequence[str], group: Sequence[Override] = (*INSIDE_HOSTS, *BETWEEN_HOSTS)) -> Overrides:
        known = {override.name: override for override in group if override.name not in excluded}
        return tuple(known[name] for name in names if name in known)

    return SearchInput(
        failed_before=job is not None and not job.works,
        hosts=tuple(seen.world.hosts.values()),
        user_variables=user_variables(seen),
        inside_hosts=overrides_of(order.names, INSIDE_HOSTS),
        between_hosts=overrides_of(order.names, BETWEEN_HOSTS),
        alternatives=interface_overrides(_common_interfaces(seen)) if "IFNAME" not in excluded else (),
        named_in_errors=overrides_of(order.named_in_errors),
    )


def search_order(seen: Seen[Any]) -> SearchOrder:
    """The recorded order. Before the first trial: overrides named in errors, then suspected in findings, others."""
    if seen.trials:
        params = seen.trials[0].params
        names, named = (tuple(filter(None, str(params[key]).split(_SEPARATOR))) for key in ("order", "named"))
        return SearchOrder(names, named)
    default_order = tuple(override.name for override in (*INSIDE_HOSTS, *BETWEEN_HOSTS))
    earlier = col001_result(seen, seen.world.backend)
    if earlier is None or earlier.works:
        return SearchOrder(default_order)  # no search follows, and reading the findings of a large world takes time
    failed = [o for o in seen.recording.outcomes if o.trial == earlier.trial.number]
    # Only errors of ranks and NCCL's warnings are read: the other output with NCCL_DEBUG=INFO names every feature.
    warnings = (line for o in failed for line in o.detail.split("\n") if "NCCL WARN" in line)
    text = "\n".join((*(o.error for o in failed), *warnings))
    named = tuple(name for name in default_order if any(part in text for part in VARIABLES[name].error_texts))
    suspected = [
        name
        for name in default_order[1:]  # the first override stays first if none is suspected
        for code in VARIABLES[name].finding_codes
        if any(finding.severity is not Severity.NOTE for finding in seen.findings_of(code))
    ]
    # With NVSwitches NCCL uses NVLS for most sizes. If the fabric manager is at fault, NVLS hangs or fails.
    if any(card.health.fabric.state == FABRIC_JOINED for card in cards_of(seen.of(memory_errors.CHECK))):
        suspected.append("NVLS")
    priorities = dict.fromkeys(suspected, 1) | dict.fromkeys(named, 0)
    return SearchOrder(tuple(sorted(default_order, key=lambda name: priorities.get(name, 2))), named)


def user_variables(seen: Seen[Any]) -> Overrides:
    """One override for each NCCL variable that LCH002 found on any rank. The override unsets the variable."""
    variables: dict[str, str] = {}
    for data in seen.of(lch002.CHECK).by_rank.values():
        variables = data.variables | variables
    names = [n for n in sorted(variables) if n.startswith("NCCL_") and not n.startswith(lch002.OBSERVING_PREFIXES)]
    return tuple(Override(f"no {name}", {name: None}, f"{name}={variables[name]}") for name in names)


def excluded_overrides(seen: Seen[Any]) -> dict[str, str]:
    """The names of the overrides that cannot help in this run, each with the reason."""
    hosts = tuple(seen.world.hosts.values())
    fabrics = [card.health.fabric for card in cards_of(seen.of(memory_errors.CHECK))]
    # NCCL also starts its network inside a host, and uses the network if it is faster or no other path exists
    # (ncclTopoCheckNet in graph/paths.cc). A host whose bus could not be read (None) may have a device.
    devices = [row.rdma for row in seen.of(hst004.CHECK).by_rank.values()]
    no_rdma = bool(devices) and all(rdma is not None and not rdma for rdma in devices)
    no_switches = bool(fabrics) and all(fabric.state is None for fabric in fabrics)
    no_links_between_hosts = bool(fabrics) and not any(fabric.may_span_hosts for fabric in fabrics)
    rules: tuple[tuple[bool, Sequence[str], str], ...] = (
        (max(map(len, hosts), default=0) < 2, (*(each.name for each in INSIDE_HOSTS), "PXN"), "each host has one rank"),
        (no_switches, ("NVLS",), "no GPU belongs to an NVSwitch fabric"),
        (no_rdma, ("GDR", "PXN", "IB"), "no host has an InfiniBand or RoCE device"),
        (no_links_between_hosts, ("MNNVL",), "no GPU belongs to a domain of NVLinks between hosts"),
        (len(_common_interfaces(seen)) < 2, ("IFNAME",), "the hosts have no two interfaces in common"),
        (len(hosts) < 2, ("MNNVL", "PXN", "IFNAME"), "there is one host"),
    )
    return {name: reason for applies, names, reason in rules if applies for name in names}


def _common_interfaces(seen: Seen[Any]) -> tuple[str, ...]:
    """Names of the interfaces that are up on every host and have an address that is not a loopback address."""
    answers = [next(iter(rows.values())) for _, rows in data_by_host(seen.of(interfaces.CHECK))]
    usable = [
        [each.name for each in data.interfaces or () if each.running and not all(map(is_loopback, each.addresses))]
        for data in answers
    ]
    if len(usable) < len(seen.world.hosts):
        return ()
    return tuple(name for name in usable[0] if all(name in names for names in usable))
