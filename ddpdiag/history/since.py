"""First appearances of findings, beside the changes of versions that may explain them.

For each finding, the share of host-runs with it is compared between the hosts that had a version (of driver, torch,
CUDA, NCCL or the kind of GPU) and the host-runs with another one. A version that came later than the first half of the
runs and with which the finding is much more frequent is named. It coincides; whether it is the cause is not tested.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from msgspec import Struct

from ddpdiag.history.distributions import binomial_tail
from ddpdiag.history.rows import DAY_SECONDS, Run

# With a bar for each of some hundred pairs of finding and version, a false one is rare.
_MAX_P_VALUE = 1e-5
# The share of host-runs with the finding is at least so many times higher with the version.
_MIN_RATIO = 3.0
_MIN_HOST_RUNS = 3


class Version(Struct, frozen=True, kw_only=True):
    """A version ("NCCL 2.28.3") that appeared at `first_seconds`, and the finding's host-runs with and without it."""

    fact: str
    first_seconds: float
    found: int
    host_runs: int
    found_without: int
    host_runs_without: int


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
    facts = _FactCounts()
    for number, run in enumerate(runs):
        codes_by_host: dict[str, set[str]] = defaultdict(set)
        for blame in run.blames:
            first.setdefault(blame.code, (number, blame.title, blame.hosts[0]))
            hosts[blame.code].update(blame.hosts)
            for host in blame.hosts:
                codes_by_host[host].add(blame.code)
        found_runs.update({blame.code for blame in run.blames})
        facts.add(run, codes_by_host)
    answers = []
    for code, (number, title, host) in first.items():
        clean_runs = sum(code.partition(".")[0] in run.codes for run in runs[:number])
        version = facts.explanation(code)
        if found_runs[code] >= 2 and (version is not None or clean_runs >= max(10, len(runs) // 5)):
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
    """Counts of host-runs by version, and by finding and version."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._host_runs: Counter[tuple[str, str]] = Counter()  # by check and version
        self._found: Counter[tuple[str, str]] = Counter()  # by finding and version

    def add(self, run: Run, codes_by_host: dict[str, set[str]]) -> None:
        number_of_facts = Counter(row.facts for row in run.hosts)
        for facts, number in number_of_facts.items():
            for fact in facts:
                self._first.setdefault(fact, run.begin_seconds)
                for check in run.codes:
                    self._host_runs[check, fact] += number
        for row in run.hosts:
            for code in codes_by_host.get(row.host, ()):
                for fact in row.facts:
                    self._found[code, fact] += 1

    def explanation(self, code: str) -> Version | None:
        """The version with which the finding is most surprisingly frequent, among versions that came later."""
        check = code.partition(".")[0]
        best: tuple[float, Version] | None = None
        for fact, first_seconds in self._first.items():
            name = fact.partition(" ")[0]
            others = [other for other in self._first if other != fact and other.partition(" ")[0] == name]
            if not others or first_seconds < min(map(self._first.__getitem__, others)) + DAY_SECONDS:
                continue  # the only version, or one of those that were there from the begin
            found = self._found[code, fact]
            host_runs = max(found, self._host_runs[check, fact])
            without = sum(self._found[code, other] for other in others)
            host_runs_without = sum(self._host_runs[check, other] for other in others)
            if found < _MIN_HOST_RUNS or not host_runs_without:
                continue
            rate_without = (without + 0.5) / (host_runs_without + 1)
            p_value = binomial_tail(found, host_runs, min(0.999, rate_without))
            if p_value <= _MAX_P_VALUE and found / host_runs >= _MIN_RATIO * without / host_runs_without:
                version = Version(
                    fact=fact,
                    first_seconds=first_seconds,
                    found=found,
                    host_runs=host_runs,
                    found_without=without,
                    host_runs_without=host_runs_without,
                )
                if best is None or p_value < best[0]:
                    best = p_value, version
        return best[1] if best is not None else None
