"""First appearances of findings, beside the changes of versions that may explain them.

For each finding and version (of the kernel, driver, torch, CUDA or NCCL, or the model of GPU), the share of host-days
with the finding is compared between hosts with the version and hosts with another one. A version that came later than
the others, and with which the finding is much more frequent on two hosts or more, is named. They appeared together;
whether the version is the cause is not tested.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from msgspec import Struct

from ddpdiag.history.distributions import binomial_tail
from ddpdiag.history.rows import DAY_SECONDS, Run

# So low because some hundred pairs of finding and version are tested.
_MAX_P_VALUE = 1e-5
# The share of host-days with the finding is at least so many times higher with the version.
_MIN_RATIO = 3.0
_MIN_HOST_DAYS = 3
# One host with a new version may fail for another reason.
_MIN_HOSTS = 2


class Version(Struct, frozen=True, kw_only=True):
    """A version ("NCCL 2.28.3") that appeared at `first_seconds`, and the finding's host-days with and without it."""

    fact: str
    first_seconds: float
    found: int
    host_days: int
    found_without: int
    host_days_without: int


class Appearance(Struct, frozen=True, kw_only=True):
    """A finding that first appeared within the window, after a part of the window without it.

    `runs` is the number of runs with it, `hosts` those that it blames, `first_host` the first. `clean_runs` is the
    number of earlier runs in which its check gave a result. `version` is the version that coincides, if any.
    """

    code: str
    title: str
    first_seconds: float
    first_run: str
    first_host: str
    runs: int
    hosts: int
    clean_runs: int
    version: Version | None = None


def appearances(runs: Sequence[Run]) -> tuple[Appearance, ...]:
    """Find what is new. `runs` are in order of time. A finding of the first fifth of the runs is not new."""
    first: dict[str, tuple[int, str, str]] = {}
    found_runs: Counter[str] = Counter()
    hosts: dict[str, set[str]] = defaultdict(set)
    days: dict[str, set[float]] = defaultdict(set)
    facts = _FactCounts()
    for number, run in enumerate(runs):
        codes_by_host: dict[str, set[str]] = defaultdict(set)
        for blame in run.blames:
            first.setdefault(blame.code, (number, blame.title, blame.hosts[0]))
            hosts[blame.code].update(blame.hosts)
            days[blame.code].add(run.begin_seconds // DAY_SECONDS)
            for host in blame.hosts:
                codes_by_host[host].add(blame.code)
        found_runs.update({blame.code for blame in run.blames})
        facts.add(run, codes_by_host)
    facts.end_day()
    answers = []
    for code, (number, title, host) in first.items():
        clean_runs = sum(code.partition(".")[0] in run.codes for run in runs[:number])
        version = facts.explanation(code)
        if len(days[code]) >= 2 and (version is not None or clean_runs >= max(10, len(runs) // 5)):
            answers.append(
                Appearance(
                    code=code,
                    title=title,
                    first_seconds=runs[number].begin_seconds,
                    first_run=runs[number].run_id,
                    first_host=host,
                    runs=found_runs[code],
                    hosts=len(hosts[code]),
                    clean_runs=clean_runs,
                    version=version,
                )
            )
    return tuple(sorted(answers, key=lambda each: (each.version is None, each.first_seconds, each.code)))


class _FactCounts:
    """Counts of the days of hosts by version, and by finding and version. A job that is retried counts once a day."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._host_days: Counter[tuple[str, str]] = Counter()  # by check and version
        self._found: Counter[tuple[str, str]] = Counter()  # by finding and version
        self._hosts: dict[tuple[str, str], set[str]] = defaultdict(set)  # by finding and version
        self._day = -1
        # Of the present day, by host and version: the checks and the findings.
        self._today: dict[tuple[str, str], tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))

    def add(self, run: Run, codes_by_host: dict[str, set[str]]) -> None:
        day = int(run.begin_seconds // DAY_SECONDS)
        if day != self._day:
            self.end_day()
            self._day = day
        for row in run.hosts:
            for fact in row.facts:
                self._first.setdefault(fact, run.begin_seconds)
                checks, codes = self._today[row.host, fact]
                checks |= run.codes
                codes |= codes_by_host.get(row.host, set())

    def end_day(self) -> None:
        for (host, fact), (checks, codes) in self._today.items():
            self._host_days.update((check, fact) for check in checks)
            for code in codes:
                self._found[code, fact] += 1
                self._hosts[code, fact].add(host)
        self._today.clear()

    def explanation(self, code: str) -> Version | None:
        """The version with which the finding is most surprisingly frequent, among versions that came later."""
        check = code.partition(".")[0]
        best: tuple[float, Version] | None = None
        for fact, first_seconds in self._first.items():
            name = fact.partition(" ")[0]
            others = [other for other in self._first if other != fact and other.partition(" ")[0] == name]
            if not others or first_seconds < min(map(self._first.__getitem__, others)) + DAY_SECONDS:
                continue  # the only version, or one of those that were there from the beginning
            found = self._found[code, fact]
            host_days = max(found, self._host_days[check, fact])
            without = sum(self._found[code, other] for other in others)
            host_days_without = sum(self._host_days[check, other] for other in others)
            if found < _MIN_HOST_DAYS or len(self._hosts[code, fact]) < _MIN_HOSTS or not host_days_without:
                continue
            rate_without = (without + 0.5) / (host_days_without + 1)
            p_value = binomial_tail(found, host_days, min(0.999, rate_without))
            if p_value <= _MAX_P_VALUE and found / host_days >= _MIN_RATIO * without / host_days_without:
                version = Version(
                    fact=fact,
                    first_seconds=first_seconds,
                    found=found,
                    host_days=host_days,
                    found_without=without,
                    host_days_without=host_days_without,
                )
                if best is None or p_value < best[0]:
                    best = p_value, version
        return best[1] if best is not None else None
