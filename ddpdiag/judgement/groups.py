"""Process groups of a running job, as `ddpdiag.preflight(groups=...)` checks them in the processes of the training.

A rank or link is slow if it is slower than its peers in each of two measurements. With fewer than two peers, it is
compared with itself in the job's first check. The peers of a link belong to groups of the same name, and are between
hosts if the link is.

Findings:
- absent: a rank did not reach the check within join_timeout.
- hung: a rank reached the check, and did not end it within the budget.
- failed: a rank raised an error of torch that no other rank explains.
- stuck: the ranks of a group began an operation that did not end within the budget. No rank is blamed.
- wrong: an all-reduce or a message has wrong values.
- slow-rank: a matrix product takes a rank longer: its speed is below 75 % of the others.
- slow-link: messages of a rank arrive at less than half of the usual rate. Below a tenth, it is an error.
- store: the job's store does not answer.

Sources: docs/python.md; the thresholds are those of NVRx (ranks) and DLRover (links).
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from msgspec import structs

import ddpdiag
from ddpdiag.bandwidth import algbw, busbw
from ddpdiag.checks.blame import contains_echo
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.rates import FAR_BELOW_SHARE, severity_of_rate
from ddpdiag.errors import ExitCode
from ddpdiag.model import Finding, Report, Scalar, Severity, Verdict
from ddpdiag.model.groups import NO_GROUP, GroupArrival, GroupCheck, GroupKey, GroupRecord
from ddpdiag.model.report import WorldSummary
from ddpdiag.stats import quantile
from ddpdiag.text import begun, count, rate_text, share_of_expected_text, share_text, size_text, time_text, times_text

K = TypeVar("K")

CODE = "GRP001"
# The share of its peers' speed below which a rank is slow: the threshold of NVRx's straggler detection.
_MIN_SPEED_SHARE = 0.75
# The same for a link: DLRover reports a node that takes more than twice the median time.
_MIN_RATE_SHARE = 0.5
# The launch of a GPU kernel may take so long, and says nothing about a link.
_MIN_EXCESS_SECONDS = 1e-4
_STACK_FIX = "Look at its stack (`py-spy dump --pid PID`), and whether it is stopped (`ps -o stat,wchan -p PID`)."
_LINK_FIX = "Run `ddpdiag check` on these hosts. It tests the GPUs, network cards and links between them."


class _Link(NamedTuple):
    """Messages of `size_bytes` in a group called `name`, from the rank `source` to `rank`."""

    name: str
    is_inside_host: bool
    source: int
    rank: int
    size_bytes: int

    @property
    def ends(self) -> tuple[int, int]:
        return self.source, self.rank


class _Slow(NamedTuple):
    """The last value, the expected value with its source, and the share of it that each measurement reached."""

    value: float
    expected: float
    source: str
    shares: tuple[float, ...]


def judge_groups(check: GroupCheck) -> tuple[Finding, ...]:
    """Return all findings. If a rank is absent or a measurement ended early, speeds are not judged."""
    ended = tuple(_ended_early(check) if check.rounds else _absent(check))
    if ended or not check.rounds:
        return ended
    slow_ranks = dict(_slow_ranks(check))
    ranks = (_slow_rank(check, rank, slow) for rank, slow in slow_ranks.items())
    return (*_wrong_values(check), *ranks, *_slow_links(check, slow_ranks))


def reporters(sent: Sequence[int], world_size: int) -> Sequence[int]:
    """The ranks that took part, for a rank that gets no answer from rank 0. `sent` are those that sent a value.

    Rank 0 waits for missing ranks. If none is missing, it is at fault itself, whatever it sent before.
    """
    return sent if len(sent) < world_size else [rank for rank in sent if rank != 0]


def needs_repetition(findings: Sequence[Finding]) -> bool:
    """Whether all findings are about speed, so that a second measurement may refute them."""
    return bool(findings) and all(".slow-" in finding.code for finding in findings)


def group_report(check: GroupCheck, findings: tuple[Finding, ...], *, strict: bool) -> Report:
    """The report of a check, without its seconds. With `strict`, its exit code is 1 after any finding."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    hosts = tuple(dict.fromkeys(host for _, host in sorted(check.hosts.items())))
    world = count(check.world_size, "rank") + (f" on {count(len(hosts), 'host')}" if hosts else "")
    records = check.rounds[-1] if check.rounds else {}
    names = list(dict.fromkeys(times.name for record in records.values() for times in record.groups))
    sentence = f"{world}: no {'errors' if findings else 'problems'} found"
    groups = "group" if len(names) == 1 else "groups"
    sentence += f" in the {groups} {names_text(names)}" if names else "; no group has two ranks, so none was tested"
    if errors:
        sentence = f"{world} cannot train: {errors[0].title}"
    elif findings:
        sentence += f"; but {findings[0].title}" + (" (an error, because of strict=True)" if strict else "")
    elif len(check.rounds) > 1 and (unconfirmed := judge_groups(structs.replace(check, rounds=check.rounds[:1]))):
        sentence += f"; only in the first of two measurements, {unconfirmed[0].title}"
    return Report(
        verdict=Verdict.UNFIT if errors else Verdict.FIT,
        sentence=f"{sentence}.",
        exit_code=ExitCode.UNFIT if errors or (strict and findings) else ExitCode.FIT,
        seconds=0.0,
        budget_seconds=check.budget_seconds,
        run_id="",
        world=WorldSummary(size=check.world_size, hosts=hosts, launcher="", backend=""),
        ranks=(),
        stages=(),
        checks=(),
        findings=findings,
        measurements=dict(_figures(records)) if records else {},
        version=ddpdiag.__version__,
        degraded=bool(findings) and not errors,
    )


def _figures(records: Mapping[int, GroupRecord]) -> Iterator[tuple[str, float]]:
    """The median and longest time of a product on a rank, and the median rates in the groups of each name."""
    yield "product.seconds", median(record.product_seconds for record in records.values())
    yield "product.longest_seconds", max(record.product_seconds for record in records.values())
    all_times = [times for record in records.values() for times in record.groups]
    for name in dict.fromkeys(times.name for times in all_times):
        group = [times for times in all_times if times.name == name]
        busbws = (busbw("all_reduce", t.size_bytes, t.all_reduce_seconds, t.group_size) for t in group)
        yield f"{name}.all_reduce.busbw_bytes_per_s", median(busbws)
        yield f"{name}.message.bytes_per_s", median(algbw(t.size_bytes, t.receive_seconds) for t in group)


def _finding(
    check: GroupCheck,
    word: str,
    title: str,
    message: str,
    fix: str,
    *,
    ranks: tuple[int, ...] = (),
    link: tuple[int, ...] = (),
    severity: Severity = Severity.ERROR,
    **evidence: Scalar | list[Scalar],
) -> Finding:
    """A finding that blames `ranks`, or the link between two ranks."""
    ends = [*dict.fromkeys(check.hosts[rank] for rank in link)]
    ends = ends if len(ends) > 1 else [f"rank {rank}" for rank in link]
    return Finding(
        code=f"{CODE}.{word}",
        severity=severity,
        title=title,
        message=message,
        fix=fix,
        ranks=ranks,
        hosts=tuple(dict.fromkeys(check.hosts[rank] for rank in ranks if rank in check.hosts)),
        links=(" -> ".join(ends),) if ends else (),
        evidence=evidence,
    )


def _subject(check: GroupCheck, *ranks: int) -> str:
    """Describe ranks and their hosts: "rank 3 on n1". Before its first check, the host of a rank is not known."""
    hosts = [*dict.fromkeys(check.hosts[rank] for rank in ranks if rank in check.hosts)]
    return ranks_text(ranks) + (f" on {names_text(hosts)}" if hosts else "")


def lost_store(check: GroupCheck, text: str) -> Finding:
    """The finding of a rank that the job's store does not answer. `text` is the error, or empty."""
    title = f"the job's store, through which the ranks exchange the results, does not answer{text and f': {text}'}"
    fix = "Look at rank 0, whose process or launcher serves the store, and at the network of its host."
    return _finding(check, "store", title, "", fix)


def find_mistake(arrivals: Mapping[int, GroupArrival]) -> str:
    """Return why the ranks cannot check their groups together, as a sentence; empty if they can."""
    texts = {
        rank: ", ".join(f"{name} ({size_text(each.sizes[name])})" for name in each.groups) or "none"
        for rank, each in arrivals.items()
    }
    if odd := next((rank for rank in texts if texts[rank] != texts[0]), None):
        return f"preflight(groups=...): groups {texts[odd]} on rank {odd}, but {texts[0]} on rank 0; expected the same"
    for (name, (size, _)), ranks in _ranks_by_group(arrivals).items():
        if len(ranks) != size:
            found = f"only {ranks_text(ranks)} passed it"
            return f"preflight(groups=...): group {name} of rank {ranks[0]} has {count(size, 'rank')}, but {found}"
    return ""


def _ranks_by_group(arrivals: Mapping[int, GroupArrival]) -> dict[tuple[str, GroupKey], list[int]]:
    """The ranks of each group, by its name and key."""
    ranks_by_group: dict[tuple[str, GroupKey], list[int]] = {}
    for rank, arrival in sorted(arrivals.items()):
        for name, key in arrival.groups.items():
            if key != NO_GROUP:
                ranks_by_group.setdefault((name, key), []).append(rank)
    return ranks_by_group


# Measurements that did not end ----------------------------------------------------------------------------------------


def _absent(check: GroupCheck) -> Iterator[Finding]:
    if absent := tuple(rank for rank in range(check.world_size) if rank not in check.arrivals):
        is_majority = 2 * len(absent) > check.world_size
        yield _finding(
            check,
            "absent",
            f"{_subject(check, *absent)} did not reach the check of the groups",
            f"{_subject(check, *check.arrivals)} waited {time_text(check.join_seconds)}."
            f"{' Most ranks are absent, so no rank is blamed.' if is_majority else ''}",
            f"{_STACK_FIX} All ranks must check at the same step. If a rank may be late, raise join_timeout.",
            ranks=() if is_majority else absent,
        )


def _ended_early(check: GroupCheck) -> Iterator[Finding]:
    """Blame ranks that reported nothing, else ranks that raised. Else name the groups that do not communicate."""
    records = check.rounds[-1]
    if silent := tuple(rank for rank in range(check.world_size) if rank not in records):
        title = f"{_subject(check, *silent)} stopped during the check of the groups"
        message = f"It began the check, and did not end it within {time_text(check.budget_seconds)}."
        yield _finding(check, "hung", title, message, _STACK_FIX, ranks=silent)
        return
    stopped = {rank: record for rank, record in sorted(records.items()) if record.stopped_at}
    raised = [rank for rank, each in stopped.items() if not each.timed_out and not contains_echo(each.error)]
    for rank in raised:
        message = f"{begun(stopped[rank].stopped_at)} raised: {stopped[rank].error}."
        fix = "`ddpdiag explain` knows many errors of torch and NCCL."
        yield _finding(check, "failed", f"{_subject(check, rank)} failed", message, fix, ranks=(rank,))
    # A rank that has stopped in one group is missing in its later groups. Ranks measure the groups in the same order.
    order = {name: number for arrival in check.arrivals.values() for number, name in enumerate(arrival.groups)}
    explained = set(stopped) if raised else set[int]()
    groups = _ranks_by_group(check.arrivals)
    for rank, record in sorted(stopped.items(), key=lambda item: order.get(item[1].stopped_in, -1)):
        key = check.arrivals[rank].groups.get(record.stopped_in, NO_GROUP)
        members = groups.get((record.stopped_in, key), [rank])
        if explained.isdisjoint(members):
            title = f"{_subject(check, *members)} did not end {record.stopped_at}"
            message = f"All ranks began the check. Rank {rank} after {time_text(check.budget_seconds)}: {record.error}."
            link = tuple(members) if len(members) == 2 else ()
            yield _finding(check, "stuck", title, message, _LINK_FIX, link=link, group=record.stopped_in)
        explained.update(members)


def _wrong_values(check: GroupCheck) -> Iterator[Finding]:
    fix = f"Do not train. {_LINK_FIX}"
    groups = _ranks_by_group(check.arrivals)
    for rank, t in ((rank, t) for rank, record in sorted(check.rounds[-1].items()) for t in record.groups):
        elements = count(t.wrong_received or t.wrong_sums, "element")
        if t.wrong_received:
            title = f"{_subject(check, rank)} receives wrong values from {_subject(check, t.source)}"
            message = f"In group {t.name}, {elements} of {size_text(t.size_bytes)} differ from those that were sent."
            yield _finding(check, "wrong", title, message, fix, link=(t.source, rank))
        elif t.wrong_sums:
            title = f"the all-reduce of group {t.name} is wrong on {_subject(check, rank)}"
            members = groups[t.name, check.arrivals[rank].groups[t.name]]
            message = f"{elements} of {size_text(t.size_bytes)} differ from the sum over {ranks_text(members)}."
            yield _finding(check, "wrong", title, message, fix, members=[*members])


# Speed ----------------------------------------------------------------------------------------------------------------


def _slow_among(
    peers: Sequence[K], rounds: Sequence[Mapping[K, float]], first: Mapping[K, float], min_share: float
) -> Iterator[tuple[K, _Slow]]:
    """Compare the values of peers, of which more is better. Yield those below `min_share` of the usual in all rounds.

    The usual value is the median of the others, or of two peers the own one in the first check (not known: none).
    """
    has_usual = len(peers) > 2
    source = f"the median of {len(peers) - 1:,} others" if has_usual else "the first check of this job"
    ordered = [sorted(values[peer] for peer in peers) for values in rounds]
    for peer in peers:
        own = [values[peer] for values in rounds]
        usual = [*map(_median_without, ordered, own)] if has_usual else [first.get(peer, 0.0)] * len(rounds)
        shares = tuple(value / expected if expected else math.inf for value, expected in zip(own, usual, strict=True))
        if max(shares) < min_share:
            yield peer, _Slow(own[-1], usual[-1], source, shares)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of sorted values without one of them. To sort the others for each of 10,000 peers takes 15 s."""
    index = bisect_left(ordered, value)
    return quantile([*ordered[:index], *ordered[index + 1 :]], 0.5)


def _slow_ranks(check: GroupCheck) -> Iterator[tuple[int, _Slow]]:
    """The slow ranks. Where ranks share cores, only the time in which a rank had a core counts."""
    last = check.rounds[-1]
    cores_of: dict[str, set[int]] = {}
    for rank, record in last.items():
        cores_of.setdefault(check.hosts[rank], set()).update(record.cores)
    rank_counts = Counter(check.hosts[rank] for rank in last)
    is_shared = any(len(cores) < rank_counts[host] for host, cores in cores_of.items())

    def speeds(records: Mapping[int, GroupRecord]) -> dict[int, float]:
        each = {rank: r.core_seconds if is_shared else r.product_seconds for rank, r in records.items()}
        return {rank: 1 / max(seconds, 1e-9) for rank, seconds in each.items()}

    return _slow_among(sorted(last), [*map(speeds, check.rounds)], speeds(check.first), _MIN_SPEED_SHARE)


def _slow_rank(check: GroupCheck, rank: int, slow: _Slow) -> Finding:
    own, usual = 1 / slow.value, 1 / slow.expected
    core_share = check.rounds[-1][rank].core_seconds / own
    cause = f" Other processes use its core: it had {share_text(core_share)} of it." if core_share < 0.8 else ""
    return _finding(
        check,
        "slow-rank",
        f"{_subject(check, rank)} computes {times_text(own / usual)} slower",
        f"A matrix product takes it {time_text(own)}, against {time_text(usual)} ({slow.source}).{cause}",
        "Look there for other processes (`nvidia-smi`, `top`), and compare its clocks and temperature with another "
        "rank's (`nvidia-smi -q -d CLOCK,TEMPERATURE`, `lscpu`).",
        ranks=(rank,),
        severity=Severity.WARNING,
        own_seconds=own,
        usual_seconds=usual,
        slower_share=1 - usual / own,
    )


def _slow_links(check: GroupCheck, slow_ranks: Mapping[int, _Slow]) -> Iterator[Finding]:
    """Findings about slow links. A rank explains links that are not much slower than it computes. A rank with most of
    the slow links is blamed.

    Inside a host, ranks on CPUs exchange messages through memory, so only the time on a core would be judged.
    """
    *rounds, first = (_rates(check, records) for records in (*check.rounds, check.first))
    peers: dict[tuple[str, bool], list[_Link]] = {}
    for link in rounds[-1]:
        if check.rounds[-1][link.rank].device != "cpu" or not link.is_inside_host:
            peers.setdefault((link.name, link.is_inside_host), []).append(link)
    slow_links = {
        link: slow
        for links in peers.values()
        for link, slow in _slow_among(links, rounds, first, _MIN_RATE_SHARE)
        if not any(slow.shares[-1] > 0.5 * slow_ranks[end].shares[-1] for end in link.ends if end in slow_ranks)
        and link.size_bytes / slow.value - link.size_bytes / slow.expected > _MIN_EXCESS_SECONDS
    }
    ends = Counter(rank for link in {frozenset(link.ends) for link in slow_links} for rank in link).most_common(2)
    blamed = ends[0][0] if len(ends) > 1 and ends[0][1] > max(1, ends[1][1]) else None
    reported: set[object] = set()
    for link, slow in sorted(slow_links.items(), key=lambda item: item[1].shares[-1]):
        ranks = (blamed,) if blamed in link.ends else ()
        subject: object = ranks or frozenset(link.ends)  # both directions of a link are one finding
        if subject not in reported:
            reported.add(subject)
            yield _slow_link(check, link, slow, ranks)


def _slow_link(check: GroupCheck, link: _Link, slow: _Slow, ranks: tuple[int, ...]) -> Finding:
    ends = f"from {_subject(check, link.source)} to {_subject(check, link.rank)}"
    return _finding(
        check,
        "slow-link",
        f"{_subject(check, *ranks)} has slow links" if ranks else f"the link {ends} is slow",
        f"In group {link.name}, {size_text(link.size_bytes)} {ends} arrive at {rate_text(slow.value)}, "
        f"{share_of_expected_text(slow.value, slow.expected)} ({slow.source}).",
        _LINK_FIX,
        ranks=ranks,
        link=() if ranks else link.ends,
        severity=severity_of_rate(slow.shares, min_share=_MIN_RATE_SHARE, error_below=FAR_BELOW_SHARE)
        or Severity.WARNING,
        group=link.name,
        bytes_per_s=slow.value,
        expected_bytes_per_s=slow.expected,
        slower_share=1 - slow.shares[-1],
    )


def _rates(check: GroupCheck, records: Mapping[int, GroupRecord]) -> dict[_Link, float]:
    hosts = check.hosts
    return {
        _Link(t.name, hosts[t.source] == hosts[rank], t.source, rank, t.size_bytes): algbw(
            t.size_bytes, t.receive_seconds
        )
        for rank, record in records.items()
        for t in record.groups
    }
