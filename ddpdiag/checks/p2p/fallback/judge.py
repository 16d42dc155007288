"""The findings of the search: the variables that avoid the fault, the hosts where it occurs, and the probable cause."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ddpdiag.bandwidth import Bound
from ddpdiag.checks.api import Seen
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import workarounds_text
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.host import shared_memory
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p.fallback.members import ON_PCIE, VARIABLES, Variable
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Kind, Member, Part, Step, Tried
from ddpdiag.checks.registry import by_code
from ddpdiag.model import Finding, Scalar, Severity, Status
from ddpdiag.probes.gpu.links import JOINED
from ddpdiag.text import begun, count, rate_text, reached_text, times_text


class Places(NamedTuple):
    """The place of the fault in words (" between hosts"), its hosts, and the ranks of a host that fails alone."""

    text: str = ""
    hosts: tuple[str, ...] = ()
    concerned: tuple[int, ...] = ()


class SearchResult(NamedTuple):
    """The end of the search, the steps tried in order, those skipped with the reason, and the rates to compare with.

    gloo's rate is a bus bandwidth in bytes per second.
    """

    end: Step | Ended
    tried: tuple[Tried, ...]
    ground: Ground
    skipped: dict[str, str]
    gloo: float | None = None
    expected: Bound | None = None

    @property
    def as_it_is(self) -> tuple[Tried, ...]:
        """The runs of all ranks in the environment as it is."""
        return tuple(own for own in self.tried if own.step.part is Part.WHOLE and not own.step.members)

    @property
    def first(self) -> Tried:
        """The run in the environment as it is: the one that failed, if one did. There is one, once there is an end."""
        return next((tried for tried in self.as_it_is if not tried.works), self.as_it_is[0])

    @property
    def sets(self) -> str:
        """The number of sets of variables that were tried, as in "2 sets of variables were tried"."""
        number = len({tried.step.set for tried in self.tried if tried.step.members})
        return f"{number or 'no'} {'set of variables was' if number == 1 else 'sets of variables were'} tried"


_VERBS = {
    "hung": "hangs",
    "died": "crashes",
    "raised": "fails",
    "wrong": "gives wrong values",
    "unheard": "gives no result",
}


def findings(seen: Seen[Any], result: SearchResult) -> Iterator[Finding]:
    """At most one."""
    if isinstance(result.end, Step):
        yield _unfinished(seen, result)
        return
    end = result.end
    match end.kind:
        case Kind.FOUND:
            yield _found(seen, result, end)
        case Kind.TRANSIENT:
            yield _transient(seen, result)
        case Kind.UNRELIABLE | Kind.NOTHING:
            yield _nothing(seen, result, end)


def _found(seen: Seen[Any], result: SearchResult, end: Ended) -> Finding:
    """Variables with which the backend works, or is faster."""
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    variables, times = workarounds_text(env), gain_text(result, end)
    where = places(seen, result.tried, end, result.ground)
    avoided = " and ".join(dict.fromkeys(member.what for member in end.members))
    avoids = f"{begun(variables)}, which avoids {avoided},"
    why = cause(seen, end.members, where.hosts)
    does, is_slow = verb(result.first), result.first.works
    if is_slow:
        title = f"{own} is slow; {variables} it is {times} faster"
        gloo = f" (gloo: {rate_text(result.gloo)})" if result.gloo else ""
        message = (
            f"{own} reaches only {rate(result.first)} busbw{gloo}{where.text}. {avoids} it is {times} faster in "
            f"{runs_text(end)}{price(result, end)}. {why}"
        )
        fix = "Until the cause is fixed, add the lines below to the job script."
    else:
        title = f"{own} {does}; {variables} it works"
        gloo = "; gloo works" if result.gloo is not None else ""
        message = (
            f"{own} {does}{where.text}{error_text(result.first)}{gloo}. {avoids} {own} worked in {runs_text(end)}"
            f"{price(result, end)}. {why}"
        )
        fix = (
            "Until the cause is fixed, add the lines below to the job script (`ddpdiag check --write-workaround FILE` "
            "writes them to a file)."
        )
    return seen.finding(
        "slow" if is_slow else "fallback",
        title,
        message.strip(),
        severity=Severity.WARNING if is_slow or seen.options.uses_workarounds else Severity.ERROR,
        hosts=where.hosts,
        gpus=_gpus(seen, where),
        evidence=tried_lines(result),
        fix=fix,
        env=env,
    )


def _transient(seen: Seen[Any], result: SearchResult) -> Finding:
    own, runs = seen.world.backend, len(result.tried)
    return seen.finding(
        "transient",
        f"{own} failed once, then worked {count(runs, 'time')}",
        f"The all-reduce over {own} failed in {all_reduce.CHECK.code}, then worked in {runs} of {runs} runs in new "
        f"processes with the same environment ({rate(result.first)} busbw). A long job will meet such a fault again.",
        evidence=tried_lines(result),
        fix="Run `ddpdiag check` again. On each host run `dmesg -T | grep -i -E 'xid|link'` for errors at the time of "
        "this run, and leave a host with such errors out (Slurm: `--exclude=HOST`). Without any, save checkpoints "
        "often.",
    )


def _nothing(seen: Seen[Any], result: SearchResult, end: Ended) -> Finding:
    own = seen.world.backend
    where = places(seen, result.tried, end, result.ground)
    does = verb(result.first) if not result.first.works else f"is slow ({rate(result.first)} busbw)"
    rate_of_gloo = f" ({rate_text(result.gloo)} busbw)" if result.gloo else ""
    gloo = f"; gloo works{rate_of_gloo}" if result.gloo is not None else ""
    not_tried = f" Not tried: {'; '.join(_skips(result))}." if result.skipped else ""
    if end.kind is Kind.UNRELIABLE:
        bad = next(run for run in reversed(end.runs) if not run.works)
        env = Step(Part.WHOLE, end.members).env
        times = count(len(end.runs) - 1, "time")
        word, told = "unreliable", f"{begun(workarounds_text(env))} it worked {times}, and the next run {verb(bad)}"
    else:
        word, told = "nothing", f"{begun(result.sets)}, and none works"
    return seen.finding(
        word,
        f"{own} {does}, and no variable avoids it{' reliably' if end.kind is Kind.UNRELIABLE else ''}",
        f"{own} {does}{where.text}{error_text(result.first)}{gloo}. {told}.{not_tried}",
        severity=Severity.WARNING if result.first.works else Severity.ERROR,
        hosts=where.hosts,
        gpus=_gpus(seen, where),
        evidence=tried_lines(result),
        fix="Run the job once with NCCL_DEBUG=INFO and give its output to `ddpdiag explain FILE`. Look for `dmesg -T | "
        "grep -i xid` on the hosts. Then try another version of NCCL, or of the driver.",
    )


def _unfinished(seen: Seen[Any], result: SearchResult) -> Finding:
    own = seen.world.backend
    known = result.first if result.as_it_is else None
    if known is not None and not known.works:
        did = f"{own} {verb(known)}{error_text(known)}"
    else:
        did = f"{own} {'failed' if result.ground.broken else 'was slow'} in {all_reduce.CHECK.code}"
    budget = max(180, round(3 * seen.options.budget_seconds))
    return seen.finding(
        "unfinished",
        "the run ended before a workaround was found",
        f"{did}. {begun(result.sets)} before the run ended.",
        evidence=tried_lines(result),
        fix=f"Fix the other errors of this report first, then run again with more time (--budget {budget}).",
    )


def _gpus(seen: Seen[Any], where: Places) -> tuple[str, ...]:
    """The GPUs that the concerned ranks take."""
    taken = seen.of(devices.CHECK).by_rank
    chosen = (taken[rank].gpu for rank in where.concerned if rank in taken)
    return tuple(dict.fromkeys(gpu.uuid for gpu in chosen if gpu is not None and gpu.uuid))


def verb(tried: Tried) -> str:
    """Such as "hangs"."""
    return _VERBS.get(tried.how, "fails")


def error_text(tried: Tried) -> str:
    """The error of a rank, in brackets, where it raised one; with its meaning, if that is known."""
    return f" ({tried.error})" if tried.error and tried.how == "raised" else ""


def runs_text(end: Ended) -> str:
    """Such as "3 of 3 runs"."""
    return f"{sum(run.works for run in end.runs)} of {len(end.runs)} runs"


def rate(tried: Tried) -> str:
    return rate_text(tried.busbw) if tried.busbw is not None else "no"


def _least(runs: Sequence[Tried]) -> float:
    return min((run.busbw for run in runs if run.busbw is not None), default=0.0)


def gain_text(result: SearchResult, end: Ended) -> str:
    """The slowest run over the best as it is: "2.1x"."""
    best = max((tried.busbw or 0.0 for tried in result.as_it_is), default=0.0)
    return times_text(_least(end.runs) / best if best else 0.0)


def price(result: SearchResult, end: Ended) -> str:
    """The rate with the variables, as a share of what the hardware should reach, or beside gloo's."""
    rate = _least(end.runs)
    if not rate:
        return ""
    text = f", at {rate_text(rate)} busbw"
    if result.expected:
        return f"{text}, {reached_text(rate, result.expected.busbw_bytes_per_s)} ({result.expected.source})"
    return text + (f" (gloo: {rate_text(result.gloo)})" if result.gloo else "")


def _skips(result: SearchResult) -> list[str]:
    """Each reason once, with the variables that it concerns."""
    reasons: dict[str, list[str]] = {}
    for name, reason in result.skipped.items():
        reasons.setdefault(reason, []).append(name)
    if isinstance(result.end, Ended) and result.end.inside_works and result.ground.inside:
        names = [override.name for override in result.ground.inside]
        reasons.setdefault("inside each host it works", []).extend(names)
    variables = {name: next(iter(variable.member.env)) for name, variable in VARIABLES.items()}
    return [f"{names_text([variables[name] for name in names])} ({reason})" for reason, names in reasons.items()]


def tried_lines(result: SearchResult) -> dict[str, Scalar | list[Scalar]]:
    """The steps that were tried, in order, and those that were not, as evidence."""
    return {"tried": [_line(tried) for tried in result.tried], "not_tried": [*_skips(result)]}


def _line(tried: Tried) -> str:
    name = tried.step.set or "as it is"
    part = "" if tried.step.part is Part.WHOLE else f", {tried.step.part.value}"
    result = f"works, {rate(tried)}" if tried.works else verb(tried)
    groups = len(tried.failed) + len(tried.busbws)
    if tried.failed and groups > 1:
        result += f" ({names_text([*map(ranks_text, tried.failed)])})"
    return f"{name}{part}: {result}"


# Cause and place ------------------------------------------------------------------------------------------------------


def cause(seen: Seen[Any], members: Sequence[Member], nodes: Sequence[str]) -> str:
    """A sentence on the first member: the finding of another check, else the usual cause; empty if it is the user's.

    A variable that the user has set and that is taken away is its own cause. `nodes` are the hosts on which it fails,
    if that is known: findings on other hosts explain nothing.
    """
    # "IFNAME eth0" is one of several interfaces, "no NCCL_ALGO" what the user has set.
    kinds = [member.name.partition(" ")[0] for member in members]
    variable = next((VARIABLES[kind] for kind in kinds if kind in VARIABLES and VARIABLES[kind].usual), None)
    if variable is None:
        return ""
    cleared = _is_cleared(seen, variable.member.name, nodes)
    refuted = ON_PCIE if cleared else ()
    finding = next((own for own in _findings(seen, variable, nodes) if own.code not in refuted), None)
    if finding is not None:
        return f"Probable cause: {finding.title} ({finding.code}): {finding.message}"
    return variable.cleared if cleared else f"Usual cause: {variable.usual}."


def _findings(seen: Seen[Any], variable: Variable, nodes: Sequence[str]) -> Iterator[Finding]:
    """Findings of other checks on the same cause, likeliest first."""
    for code in variable.seen_by:
        for finding in seen.findings_of(code.partition(".")[0]):
            hosts = finding.hosts or seen.world.hosts_of(finding.ranks)
            elsewhere = nodes and hosts and not set(nodes) & set(hosts)
            counts = finding.severity is not Severity.NOTE or code in ON_PCIE
            if finding.code.startswith(code) and counts and not elsewhere:
                yield finding


def _is_cleared(seen: Seen[Any], name: str, nodes: Sequence[str]) -> bool:
    """Whether a check looked for the usual cause of this variable and found none."""
    match name:
        case "P2P":
            return _copies_are_right(seen, nodes)
        case "NVLS":
            cards = cards_of(seen.of(memory_errors.CHECK))
            return bool(cards) and all(card.health.fabric.state == JOINED for card in cards)
        case "SHM":
            return bool(seen.of(shared_memory.CHECK).by_rank)
    return False


def _copies_are_right(seen: Seen[Any], nodes: Sequence[str]) -> bool:
    """Whether P2P002 made direct copies between GPUs of these hosts, and all of them ended and were right."""
    copies = seen.of(by_code("P2P002"))
    ranks = {rank for (name, _), own in seen.world.hosts.items() if not nodes or name in nodes for rank in own}
    pairs = [pair for row in copies.rows_so_far if row.place.rank in ranks for pair in row.data.pairs if pair.access]
    ended = all(outcome.status is Status.DONE for outcome in copies.outcomes if outcome.rank in ranks)
    return bool(pairs) and ended and not any(pair.wrong for pair in pairs)


def places(seen: Seen[Any], tried: Sequence[Tried], end: Ended, ground: Ground) -> Places:
    """The hosts inside which it fails, as far as the search has separated them."""
    if len(ground.hosts) == 1:
        hosts = seen.world.hosts_of([ground.hosts[0][0]])
        return Places(f" on {hosts[0]}", hosts=hosts)
    if end.inside_works:
        return Places(" between hosts and works inside each host")
    if max(map(len, ground.hosts)) == 1:
        return Places(" between hosts")
    inside = next((own for own in tried if own.step.part is Part.HOSTS and not own.step.members), None)
    if inside is None or not inside.failed or not inside.busbws:
        return Places()
    ranks = tuple(sorted(rank for group in inside.failed for rank in group))
    nodes = seen.world.hosts_of(ranks)
    return Places(f" inside {names_text(nodes)} and works inside the other hosts", nodes, ranks)
