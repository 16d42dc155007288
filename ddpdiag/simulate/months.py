"""Reports of an invented fleet over months, with planted faults, to measure what `ddpdiag history` finds.

Equal seeds give equal reports. Jobs take hosts next to each other, most of them one or a few and some hundreds, as
schedulers do. Every host fails now and then by chance, and the chance differs from host to host. Planted are:

- lemons, which fail in a share of their runs; some failures blame a neighbour as well, always the same one;
- repairs: from a day on a lemon is like the others;
- pairs whose path fails now and then; its failures blame both hosts, or the link;
- retries: a job that failed starts again on the same hosts within the hour, and mostly fails again;
- bad days of a leaf switch, on which many of its hosts are blamed;
- drifts: from a day on a host loses a share of its bandwidth every week. The load of a run and of a day moves all;
- failing cables: from a day on the port of a host has more errors, and its TCP more lost segments, every week. Other
  ports have bursts of errors of some days, and reboots reset the counters.
"""

import math
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import NamedTuple

from ddpdiag.model import TCP_PART, CheckSummary, Counters, Finding, Report, Severity, Verdict, WorldSummary
from ddpdiag.model.report import HostKind, HostLists, Scalar
from ddpdiag.simulate.fleet import host_name

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
# Numbers of hosts of a job, with their shares. Most jobs are small, and most host-runs belong to large ones (Meta,
# "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024, figure 6).
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SIZE_SHARES = (35, 15, 12, 12, 10, 8, 5, 2, 1)
_HOSTS_PER_LEAF = 32
_CODES = ("FAB001.host", "GPU003.remap", "RDZ004.dropped", "COL001.hung")
_CHECKS = tuple(
    CheckSummary(code=code, name=name, stage=stage, statuses={"done": 1})
    for code, name, stage in (
        ("LCH003", "versions", "launch"),
        ("GPU003", "gpu-health", "gpu"),
        ("RDZ004", "links", "rendezvous"),
        ("COL001", "all-reduce", "collective"),
        ("FAB001", "hosts", "fabric"),
    )
)
_HEALTHY_BYTES_PER_S, _FORWARD_SECONDS = 45e9, 0.0112


class Plan(NamedTuple):
    """The fleet and its planted faults, as numbers of hosts. Shares are of the runs of a host.

    `lemon_shares` are the lowest and the highest failure rate of a lemon. A lemon that is repaired is repaired on
    `repair_day`, and drifts begin on `drift_day`. `failure_share` is the mean of the failure rates of the other hosts.
    """

    hosts: int = 2_000
    days: int = 90
    jobs_per_day: int = 300
    lemons: int = 20
    lemon_shares: tuple[float, float] = (0.08, 0.3)
    repaired: int = 5
    repair_day: int = 40
    pairs: int = 10
    pair_share: float = 0.2
    drifting: int = 20
    drift_share_per_week: float = 0.01
    drift_day: int = 0
    failing_cables: int = 20
    cable_day: int = 30
    cable_factor_per_week: float = 2.0
    failure_share: float = 0.003
    retry_share: float = 0.5
    bad_leaf_days_share: float = 0.2
    unknown_share: float = 0.02
    noise_share: float = 0.02
    gpus_per_host: int = 0


class _HostCounters:
    """The counters of a host, which go on between its runs, and are 0 after a reboot."""

    def __init__(self, random: Random) -> None:
        self._random, self._day, self._totals = random, 0.0, Counter[str]()
        self._burst_days = 0.0
        # Congestion makes some hosts lose more segments than others.
        self._lost_per_million = random.lognormvariate(3, 0.7)

    def read(self, host: str, day: float, cable_errors_per_day: float) -> tuple[Counters, ...]:
        """Count on until `day`, and return the counters."""
        random, days = self._random, day - self._day
        self._day = day
        if random.random() < 0.01 * days:
            self._totals.clear()
        sent = int(days * random.lognormvariate(18, 0.5))
        lost = (self._lost_per_million + 30 * cable_errors_per_day) * random.lognormvariate(0, 0.3)
        errors = cable_errors_per_day * days * random.lognormvariate(0, 0.7)
        if random.random() < 0.01 * days:
            self._burst_days = random.uniform(1, 7)
        burst_days = min(days, self._burst_days)
        self._burst_days -= burst_days
        errors += burst_days * random.lognormvariate(3, 1) if burst_days else 0
        rises = {"sent_segments": sent, "resent_segments": int(sent * lost / 1e6), "symbol_error": int(errors)}
        self._totals.update(rises)
        port, tcp = (
            {name: self._totals[name] for name in names if self._totals[name]}
            for names in (("symbol_error",), ("sent_segments", "resent_segments"))
        )
        return Counters(host=host, part="mlx5_0:1", totals=port), Counters(host=host, part=TCP_PART, totals=tcp)


class FleetMonths:
    """A fleet with its planted faults. `lemons` maps each host to its failure rate."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self._random = random = Random(seed)
        chosen = random.sample(range(1, plan.hosts - 1), min(plan.hosts - 2, plan.lemons + plan.drifting + plan.pairs))
        lemons = chosen[: plan.lemons]
        self.lemons = {host: random.uniform(*plan.lemon_shares) for host in lemons}
        self.repaired = frozenset(lemons[: plan.repaired])
        self.drifting = frozenset(chosen[plan.lemons : plan.lemons + plan.drifting])
        counter_random = Random(seed + 1)  # of their own, so that a seed's faults do not depend on the counters
        self.failing_cables = frozenset(counter_random.sample(range(plan.hosts), min(plan.hosts, plan.failing_cables)))
        self._counters = [_HostCounters(counter_random) for _ in range(plan.hosts)]
        self.pairs = frozenset((host, host + 1) for host in chosen[plan.lemons + plan.drifting :])
        # A gamma distribution with shape 2: a host in twenty fails more than twice as often as the mean.
        self._shares = [random.gammavariate(2.0, max(1e-9, plan.failure_share / 2)) for _ in range(plan.hosts)]

    def reports(self) -> Iterator[Report]:
        """Yield the reports of all days, in order of time."""
        for day in range(self.plan.days):
            yield from self._day(day)

    def _day(self, day: int) -> Iterator[Report]:
        random, plan = self._random, self.plan
        leaf = (
            random.randrange(-(-plan.hosts // _HOSTS_PER_LEAF)) if random.random() < plan.bad_leaf_days_share else None
        )
        load = random.lognormvariate(0, 0.03)
        begins = sorted(random.uniform(0, 86_400) for _ in range(plan.jobs_per_day))
        for number, begin in enumerate(begins):
            size = min(plan.hosts, random.choices(_SIZES, _SIZE_SHARES)[0])
            first = random.randrange(plan.hosts)
            hosts = [(first + each) % plan.hosts for each in range(size)]
            findings = tuple(self._findings(hosts, day, leaf))
            time = BEGIN + timedelta(days=day, seconds=begin)
            yield self._report(f"{day:03d}-{number:05d}", time, hosts, findings, load, day)
            retry = 0
            while findings and retry < 4 and random.random() < plan.retry_share:
                retry += 1
                time += timedelta(minutes=10)
                findings = (*findings, *self._findings(hosts, day, None))
                yield self._report(f"{day:03d}-{number:05d}-{retry}", time, hosts, findings, load, day)

    def _findings(self, hosts: list[int], day: int, leaf: int | None) -> Iterator[Finding]:
        random, plan = self._random, self.plan
        present = set(hosts)
        for host in hosts:
            share, is_lemon = self._shares[host], host in self.lemons
            if is_lemon and not (host in self.repaired and day >= plan.repair_day):
                share = self.lemons[host]
            if random.random() < share:
                # A neighbour on the same switch is blamed with a lemon in three of ten failures.
                together = is_lemon and host + 1 in present and random.random() < 0.3
                code = _CODES[host % len(_CODES)] if is_lemon else random.choice(_CODES)
                yield _finding(code, (host, host + 1) if together else (host,))
        for pair in self.pairs:
            if present.issuperset(pair) and random.random() < plan.pair_share:
                yield _finding("COL001.wrong", pair)
        if leaf is not None:
            behind = tuple(host for host in hosts if host // _HOSTS_PER_LEAF == leaf)
            if len(hosts) > 1 and behind and random.random() < 0.5:
                # Where the switch is known one finding has all its hosts; else each host has its own.
                for blamed in (behind,) if random.random() < 0.5 else ((host,) for host in behind):
                    yield _finding("RDZ004.dropped", blamed)

    def _report(
        self, run_id: str, time: datetime, hosts: list[int], findings: tuple[Finding, ...], load: float, day: int
    ) -> Report:
        random, plan = self._random, self.plan
        names = tuple(map(host_name, hosts))
        failing = tuple(dict.fromkeys(name for finding in findings for name in finding.hosts))
        is_unknown = not findings and random.random() < plan.unknown_share
        verdict = Verdict.UNFIT if findings else Verdict.UNKNOWN if is_unknown else Verdict.FIT
        weeks = max(0, day - plan.drift_day) / 7
        run_load = load * random.lognormvariate(0, 0.05)
        rows: list[dict[str, Scalar]] = []
        for number, host in enumerate(hosts):
            drift = (1 - plan.drift_share_per_week) ** weeks if host in self.drifting else 1.0
            rate = _HEALTHY_BYTES_PER_S * run_load * drift * max(0.1, random.gauss(1, plan.noise_share))
            seconds = _FORWARD_SECONDS / run_load * max(0.1, random.gauss(1, plan.noise_share))
            for gpu in range(max(1, plan.gpus_per_host)):
                rows.append(
                    {
                        "rank": number * max(1, plan.gpus_per_host) + gpu,
                        "local_rank": gpu,
                        "host": names[number],
                        "gpu_uuid": f"GPU-{host:05d}-{gpu}" if plan.gpus_per_host else None,
                        "host_busbw_bytes_per_s": rate,
                        "forward_seconds": seconds,
                    }
                )
        now = (time - BEGIN) / timedelta(days=1)
        counters = [
            row
            for host, name in zip(hosts, names, strict=True)
            for row in self._counters[host].read(name, now, self._cable_errors_per_day(host, now))
        ]
        return Report(
            verdict=verdict,
            sentence="simulated",
            exit_code={Verdict.FIT: 0, Verdict.UNFIT: 1, Verdict.UNKNOWN: 3}[verdict],
            seconds=30.0,
            budget_seconds=120.0,
            run_id=run_id,
            world=WorldSummary(size=len(rows), hosts=names, launcher="simulated", backend="nccl"),
            ranks=tuple(rows),
            stages=(),
            checks=_CHECKS,
            findings=findings,
            hosts=HostLists(failing=failing, healthy=() if is_unknown else tuple(n for n in names if n not in failing)),
            inventory=(
                HostKind(
                    hosts=names,
                    parts={"kernel": "6.8.0-79-generic", "driver": "570.86", "torch": "2.13.0", "NCCL": "2.27.3"},
                ),
            ),
            counters=tuple(counters),
            created=time.isoformat(),
            version="simulated",
        )

    def _cable_errors_per_day(self, host: int, day: float) -> float:
        if host not in self.failing_cables or day < self.plan.cable_day:
            return 0.0
        return math.pow(self.plan.cable_factor_per_week, (day - self.plan.cable_day) / 7)


def _finding(code: str, hosts: tuple[int, ...]) -> Finding:
    return Finding(
        code=code, severity=Severity.ERROR, title="a planted fault", message="", hosts=tuple(map(host_name, hosts))
    )
