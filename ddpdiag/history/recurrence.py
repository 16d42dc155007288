"""Hosts and GPUs that fail more often than the fleet, and pairs of hosts that fail only together.

Counts. A host's runs are those that name it as healthy, failing or blamed by a warning; other runs say nothing about
it. Failures that follow each other within 20 hours, without a healthy run of the same checks between, are one incident:
a job that is retried on a broken host five times shows one fault, even if a Prolog runs `ddpdiag host` before each. A
finding with several hosts is shared out among them by how often each is blamed alone.

Test. The number of incidents is compared with what the other hosts' rate makes likely, under a beta-binomial
distribution, because healthy hosts differ from each other as well; how much is estimated from hosts with few
incidents. Each host is tested for all failures together and for each check (Bonferroni); Benjamini and Hochberg's
procedure keeps the share of false ones among the named hosts at `MAX_FALSE_SHARE`.

Company. A finding about a link blames both ends, as one with two hosts does. An incident that a finding blames on
several hosts is explained by an established host among them, and no longer counts for the others. A host that shares
most of its incidents with one partner, or is not remarkable without these, is not named; the pair is.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.history.distributions import (
    beta_binomial_log,
    beta_binomial_tail,
    binomial_tail,
    false_discovery_limit,
    rate_interval,
    solve,
)
from ddpdiag.history.rows import DAY_SECONDS, Blame, HostRow, Run, State
from ddpdiag.stats import quantile

# At most this share of the named hosts is expected to be there by chance.
MAX_FALSE_SHARE = 0.05
# A host with fewer runs, and few incidents, is not judged: with 10 healthy runs, a host that fails in every fourth run
# is still not excluded with 95 % confidence (the rule of three: 3 / 10).
MIN_RUNS = 10
# With fewer, a host that fails in 1 % of its runs would be left out for good wherever the others nearly never fail.
MIN_INCIDENTS = 3
# A host has recovered if a series of healthy runs as long as its last one has this probability at its earlier rate.
RECOVERED_PROBABILITY = 0.01
# Less than a day: a host that fails each day, some minutes earlier than the day before, fails each day.
_INCIDENT_SECONDS = 20 * 3600.0
_ALL = ""  # the test of all codes together
_SHOWN_CODES = 3
# Of rates, because a beta distribution has none for 1.
_MAX_RATE = 0.999
# A beta distribution with this a + b is as narrow as a single rate.
_ALIKE = 1e6
# A host passes the test of all hosts first. Whether it or the pair with its partner is named is one more question about
# this host alone, so its limit is not divided by the number of hosts.
_MAX_P_ALONE = 0.05
# The accepted subjects are usually the same from the third repetition on.
_MAX_REPETITIONS = 10
# Weights are sums of shares, so that a whole number may miss a little.
_ROUNDING = 1e-9
# At least three of four subjects are taken for usual ones, and all with at most this number of incidents. With nine of
# ten, a fifth of the hosts can be sick and hide each other; with half, hosts of small fleets that merely differ are
# named (in 6 of 20 simulated fleets of 20 hosts without a fault).
_USUAL_SHARE, _FEW_INCIDENTS = 0.75, 2
_RUN_CLASSES = 12
_SPREADS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0)
_RATE_FACTORS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.45, 1.7, 2.0, 2.5)


class Recurring(Struct, frozen=True, kw_only=True):
    """A host or GPU that fails again and again.

    `check` is the check in which it differs most from the others, or empty if that is all checks together. It has
    `incidents` in `runs` runs with this check, of which `alone` blame no other host; `low_share` and `high_share` are
    the limits of the rate (95 %), and `fleet_share` is the rate of the others. `codes` counts the incidents of all
    checks by finding, the most frequent first. `first_seconds` and `last_seconds` are the times of the first and last,
    and `healthy_since` counts the healthy runs of the failed checks after the last. `has_recovered`: so many are
    unlikely at the earlier rate. `has_errors`: not all incidents are warnings. `hosts` are the hosts that had a GPU,
    the present one at the end.
    """

    name: str
    check: str
    incidents: int
    runs: int
    low_share: float
    high_share: float
    fleet_share: float
    p_value: float
    alone: int
    codes: dict[str, int]
    first_seconds: float
    last_seconds: float
    healthy_since: int
    has_recovered: bool
    has_errors: bool
    hosts: tuple[str, ...] = ()


class RecurringPair(Struct, frozen=True, kw_only=True):
    """Two hosts that are blamed together on `days` days, and not often enough without each other.

    `runs` counts the runs of the window in which both took part.
    """

    hosts: tuple[str, str]
    days: int
    runs: int
    codes: dict[str, int]


class Recurrence(Struct, frozen=True, kw_only=True):
    """The answer for hosts or for GPUs. `judged` subjects had enough runs, `unjudged` are the names of the others.

    `fleet_share` is the rate of incidents of those that are not named. A host with the median number of
    runs, `median_runs`, is found with a probability of 80 % if it fails in `detectable_share` of its runs (None: no
    host was judged).
    """

    recurring: tuple[Recurring, ...]
    recovered: tuple[Recurring, ...]
    pairs: tuple[RecurringPair, ...]
    judged: int
    unjudged: tuple[str, ...]
    fleet_share: float
    median_runs: int
    detectable_share: float | None


class Incident(NamedTuple):
    """Failures of a subject within a day. `company` is the smallest set of others that one finding blamed with it."""

    seconds: float
    codes: frozenset[str]
    company: frozenset[str]
    has_error: bool = True

    @property
    def checks(self) -> frozenset[str]:
        """The checks that failed."""
        return frozenset(code.partition(".")[0] for code in self.codes)


class Subject(NamedTuple):
    """The record of a host or GPU: its incidents, its healthy runs, and for each set of checks the runs with them."""

    incidents: tuple[Incident, ...]
    healthy: int
    runs_by_codes: Mapping[frozenset[str], int]

    def alone_with(self, codes: frozenset[str]) -> float:
        """The number of incidents with one of the `codes` that blame no other, and a half, as a weight."""
        return 0.5 + sum(not each.company and not codes.isdisjoint(each.codes) for each in self.incidents)


class Trial(NamedTuple):
    """A run of a subject in which it is known whether it was at fault. A healthy one has no `failures`.

    `has_error` is False if all failures are warnings.
    """

    seconds: float
    codes: frozenset[str]  # the checks of the run
    failures: frozenset[str] = frozenset()
    company: frozenset[str] = frozenset()
    has_error: bool = False


def host_trials(
    runs: Iterable[Run],
    moved_gpus: frozenset[str] = frozenset(),
    homes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, list[Trial]]:
    """The trials of each host, in order of time.

    Failures of `moved_gpus` are not the host's: they follow the GPU. Neither are those of GPUs that other hosts have
    now: `homes` has the hosts of each GPU, the present one at the end.
    """

    def is_of_host(blame: Blame, host: str) -> bool:
        has_left = homes is not None and all(host in homes.get(gpu, ())[:-1] for gpu in blame.gpus)
        return not blame.gpus or not (has_left or moved_gpus.issuperset(blame.gpus))

    return _trials(runs, lambda row: (row.host,), lambda blame: [h for h in blame.hosts if is_of_host(blame, h)])


def gpu_trials(runs: Iterable[Run]) -> dict[str, list[Trial]]:
    """The trials of each GPU, by UUID, in order of time."""
    return _trials(runs, lambda row: row.gpus, lambda blame: blame.gpus)


def _trials(
    runs: Iterable[Run],
    present: Callable[[HostRow], Sequence[str]],
    blamed: Callable[[Blame], Sequence[str]],
) -> dict[str, list[Trial]]:
    trials: dict[str, list[Trial]] = defaultdict(list)
    for run in runs:
        codes: dict[str, set[str]] = defaultdict(set)
        company: dict[str, frozenset[str]] = {}
        with_error: set[str] = set()
        for blame in run.blames:
            together = frozenset(blamed(blame))
            with_error.update(together if blame.is_error else ())
            for name in together:
                codes[name].add(blame.code)
                company[name] = min(company.get(name, together), together, key=len)
        healthy = Trial(run.begin_seconds, run.codes)  # one for all healthy hosts of the run
        for row in run.hosts:
            for name in present(row):
                if name in codes:
                    others = company[name] - {name}
                    failures = frozenset(codes[name])
                    trials[name].append(Trial(run.begin_seconds, run.codes, failures, others, name in with_error))
                elif row.state is State.HEALTHY:
                    trials[name].append(healthy)
                else:
                    trials.setdefault(name, [])  # it is known, but this run says nothing about it
    return trials


def subject_of(trials: Sequence[Trial]) -> Subject:
    """Join the failures of `trials`, which are in order of time, to incidents."""
    incidents: list[Incident] = []
    healthy = 0
    is_open = False  # whether a failure may still belong to the last incident
    for trial in trials:
        if not trial.failures:
            healthy += 1
            is_open = is_open and not incidents[-1].checks <= trial.codes
        elif is_open and trial.seconds - (last := incidents[-1]).seconds <= _INCIDENT_SECONDS:
            company = min(last.company, trial.company, key=len)
            codes, has_error = last.codes | trial.failures, last.has_error or trial.has_error
            incidents[-1] = last._replace(codes=codes, company=company, has_error=has_error)
        else:
            incidents.append(Incident(trial.seconds, trial.failures, trial.company, trial.has_error))
            is_open = True
    return Subject(tuple(incidents), healthy, Counter(trial.codes for trial in trials))


class _Score(NamedTuple):
    p_value: float
    name: str
    check: str


class _Counts(NamedTuple):
    """For one test: the incidents of the subjects that have any, and the runs of all subjects."""

    incidents: dict[str, float]
    runs: dict[str, int]


def recurrence(trials: Mapping[str, Sequence[Trial]], homes: Mapping[str, Sequence[str]] | None = None) -> Recurrence:
    """Find the subjects of `trials` that fail more often than the others. `homes` has the hosts of each GPU."""
    subjects = {name: subject_of(rows) for name, rows in trials.items()}
    established: dict[str, _Score] = {}
    pairs: dict[tuple[str, str], list[Incident]] = {}
    while scores := _accepted_scores(subjects, established):
        added: dict[str, _Score] = {}
        for score in scores:
            incidents = _unexplained(subjects[score.name], established)
            if any(incident.company & added.keys() for incident in incidents):
                continue  # the next round sees which of these incidents are explained
            partner = _most_frequent_partner(incidents)
            if partner and not _stands_without(partner, score.name, subjects, established):
                first, second = sorted((score.name, partner))
                pairs[first, second] = [incident for incident in incidents if partner in incident.company]
                continue
            added[score.name] = score
        if not added:
            break
        established |= added
    pairs = {pair: shared for pair, shared in pairs.items() if established.keys().isdisjoint(pair)}
    remarkable = {*established, *(name for pair in pairs for name in pair)}
    others = _counts(subjects, remarkable, _ALL)
    rates = {_ALL: _fleet_rate(others)}
    for check in {score.check for score in established.values()} - {_ALL}:
        rates[check] = _fleet_rate(_counts(subjects, remarkable, check))
    named = [
        _recurring(score, subjects[name], trials[name], rates[score.check], (homes or {}).get(name, ()))
        for name, score in established.items()
    ]
    named.sort(key=lambda each: (-each.low_share, each.name))
    runs = {name: subject.healthy + len(subject.incidents) for name, subject in subjects.items()}
    judged = sorted(number for number in runs.values() if number >= MIN_RUNS)
    middle = int(quantile(judged, 0.5)) if judged else 0
    return Recurrence(
        recurring=tuple(each for each in named if not each.has_recovered),
        recovered=tuple(each for each in named if each.has_recovered),
        pairs=tuple(_pair(pair, shared, trials) for pair, shared in sorted(pairs.items())),
        judged=len(judged),
        unjudged=tuple(sorted(name for name, n in runs.items() if n < MIN_RUNS and name not in established)),
        fleet_share=rates[_ALL],
        median_runs=middle,
        detectable_share=_detectable_share(middle, others, len(subjects) * len(_tests(subjects))) if judged else None,
    )


def _unexplained(subject: Subject, established: Collection[str]) -> list[Incident]:
    return [incident for incident in subject.incidents if incident.company.isdisjoint(established)]


def _counts(subjects: Mapping[str, Subject], established: Collection[str], check: str) -> _Counts:
    """Count the incidents and runs of all subjects that are not established, for one check or for all (`_ALL`)."""
    incidents: dict[str, float] = {}
    runs: dict[str, int] = {}
    for name, subject in subjects.items():
        if name in established:
            continue
        own = _unexplained(subject, established) if subject.incidents else []
        tested, runs[name] = _tested(subject, own, check)
        if tested:
            incidents[name] = _weight(name, tested, subjects)
    return _Counts(incidents, {name: number for name, number in runs.items() if number})


def _tested(subject: Subject, incidents: Sequence[Incident], check: str) -> tuple[Sequence[Incident], int]:
    """The `incidents` of a check, and the runs with this check."""
    if check == _ALL:
        return incidents, subject.healthy + len(incidents)
    own = [incident for incident in incidents if any(code.partition(".")[0] == check for code in incident.codes)]
    runs = sum(number for codes, number in subject.runs_by_codes.items() if check in codes)
    # Trials that one incident joined count once, as they do in the test of all checks.
    runs -= sum(subject.runs_by_codes.values()) - subject.healthy - len(subject.incidents)
    return own, max(len(own), runs)


def _weight(name: str, incidents: Iterable[Incident], subjects: Mapping[str, Subject]) -> float:
    """The number of incidents of a subject. One that blames several is shared out by how often each is blamed alone."""
    total = 0.0
    for incident in incidents:
        own = subjects[name].alone_with(incident.codes)
        others = (subjects[other].alone_with(incident.codes) for other in incident.company if other in subjects)
        total += own / (own + sum(others))
    return total


def _fleet_rate(counts: _Counts) -> float:
    return sum(counts.incidents.values()) / max(1, sum(counts.runs.values()))


def _tests(subjects: Mapping[str, Subject]) -> list[str]:
    """The tests of each subject: all checks together, and each check. With one check, the former is its test."""
    checks = {
        code.partition(".")[0] for subject in subjects.values() for each in subject.incidents for code in each.codes
    }
    return [_ALL, *(sorted(checks) if len(checks) > 1 else ())]


def _accepted_scores(subjects: Mapping[str, Subject], established: Collection[str]) -> list[_Score]:
    """Test all subjects that are not established. Returns the accepted ones, the clearest first."""
    tests = _tests(subjects)
    best: dict[str, _Score] = {}
    spread = 0.0
    for check in tests:
        counts = _counts(subjects, established, check)
        # Failures of one check are too few to show how hosts differ: at least as much as in all checks together.
        own, own_spread = _p_values(counts, spread)
        spread = own_spread if check == _ALL else spread
        for name, p_value in own.items():
            # Bonferroni over the tests of one subject, so that it counts once among all subjects.
            score = _Score(min(1.0, p_value * len(tests)), name, check)
            best[name] = min(score, best.get(name, score))
    # Established subjects count as accepted, as they would if all were judged at once.
    p_values = [*(score.p_value for score in best.values()), *([0.0] * len(established))]
    limit = false_discovery_limit(p_values, len(subjects), MAX_FALSE_SHARE)
    return sorted(score for score in best.values() if score.p_value <= limit)


def _p_values(counts: _Counts, least_spread: float = 0.0) -> tuple[dict[str, float], float]:
    """The p-value of each subject with enough incidents: the probability of as many or more at the others' rate.

    The rate is that of the subjects that are not accepted themselves, found by repetition, at first without those that
    are unusual. Also returns the spread, which is at least `least_spread`.
    """
    candidates = {name: weight for name, weight in counts.incidents.items() if weight >= MIN_INCIDENTS}
    total, runs = sum(counts.incidents.values()), sum(counts.runs.values())
    p_values: dict[str, float] = {}
    usual = _usual_incidents(counts)
    accepted = {name for name, weight in candidates.items() if weight > usual}
    spread = max(least_spread, _spread(counts)) if candidates else least_spread
    for _ in range(_MAX_REPETITIONS):
        for name, weight in candidates.items():
            others = accepted | {name}
            other_weight = total - sum(counts.incidents[other] for other in others)
            other_runs = runs - sum(counts.runs[other] for other in others)
            # Half an incident and one run more: without incidents of others their rate is small, but not 0.
            a, b = _beta(min(_MAX_RATE, (other_weight + 0.5) / (other_runs + 1)), spread)
            p_values[name] = beta_binomial_tail(int(weight + _ROUNDING), counts.runs[name], a, b)
        limit = false_discovery_limit([*p_values.values()], len(counts.runs), MAX_FALSE_SHARE)
        before, accepted = accepted, {name for name, p_value in p_values.items() if p_value <= limit}
        if accepted == before:
            break
    return p_values, spread


def _beta(rate: float, spread: float) -> tuple[float, float]:
    """The parameters of the beta distribution with the mean `rate` and the variance `spread` * rate**2."""
    # The variance of a beta distribution is p (1 - p) / (a + b + 1).
    concentration = min(_ALIKE, max(2.0, (1 - rate) / (rate * spread) - 1)) if spread > 0 else _ALIKE
    return rate * concentration, (1 - rate) * concentration


def _usual_incidents(counts: _Counts) -> int:
    """The number of incidents that most subjects have at most."""
    numbers = sorted(counts.incidents.get(name, 0.0) for name in counts.runs)
    return max(_FEW_INCIDENTS, int(quantile(numbers, _USUAL_SHARE) + _ROUNDING)) if numbers else _FEW_INCIDENTS


def _spread(counts: _Counts) -> float:
    """The variance of the subjects' rates as a share of the squared mean.

    It is the most likely one for the subjects with few incidents, given that they have few (a truncated distribution):
    those that recur, whose number is not known yet, would make it too large, and then hide each other.
    """
    if not counts.runs:
        return 0.0
    rows = sorted((runs, int(counts.incidents.get(name, 0.0) + _ROUNDING)) for name, runs in counts.runs.items())
    most = _usual_incidents(counts)
    few = [(runs, incidents) for runs, incidents in rows if incidents <= most]
    rate = sum(incidents for _, incidents in few) / max(1, sum(runs for runs, _ in few))
    # Subjects with similar numbers of runs are counted together.
    size = -(-len(few) // _RUN_CLASSES)
    classes = [
        (max(most, round(sum(runs for runs, _ in part) / len(part))), Counter(incidents for _, incidents in part))
        for part in (few[begin : begin + size] for begin in range(0, len(few), size))
    ]

    def likelihood(spread: float, factor: float) -> float:
        a, b = _beta(min(0.9, rate * factor), spread)
        total = 0.0
        for runs, numbers in classes:
            logs = [beta_binomial_log(incidents, runs, a, b) for incidents in range(most + 1)]
            total += sum(number * logs[incidents] for incidents, number in numbers.items())
            total -= numbers.total() * math.log(sum(map(math.exp, logs)))
        return total

    # Those with few incidents have a lower rate than all.
    return max(product(_SPREADS, _RATE_FACTORS), key=lambda pair: likelihood(*pair))[0] if rate else 0.0


def _most_frequent_partner(incidents: Sequence[Incident]) -> str | None:
    partners = Counter(other for incident in incidents for other in sorted(incident.company))
    return partners.most_common(1)[0][0] if partners else None


def _stands_without(partner: str, name: str, subjects: Mapping[str, Subject], established: Collection[str]) -> bool:
    """Whether most incidents do not concern `partner`, and the subject is still remarkable without the others."""
    counts = _counts(subjects, established, _ALL)
    own = [each for each in _unexplained(subjects[name], established) if partner not in each.company]
    if 2 * len(own) < len(_unexplained(subjects[name], established)):
        return False
    incidents = {**counts.incidents, name: _weight(name, own, subjects)}
    runs = {**counts.runs, name: max(1, subjects[name].healthy + len(own))}
    # If the partner is at fault, its incidents say nothing about the fleet.
    incidents.pop(partner, None)
    runs.pop(partner, None)
    return _p_values(_Counts(incidents, runs))[0].get(name, 1.0) <= _MAX_P_ALONE


def _recurring(
    score: _Score, subject: Subject, trials: Sequence[Trial], rate: float, hosts: Sequence[str]
) -> Recurring:
    tested, runs = _tested(subject, subject.incidents, score.check)
    incidents = len(tested)
    low, high = rate_interval(incidents, runs)
    # A healthy run without these checks, such as one of `ddpdiag host`, does not show that they would pass.
    failed = frozenset({score.check} if score.check != _ALL else chain.from_iterable(each.checks for each in tested))
    healthy = [trial.seconds for trial in trials if not trial.failures and failed <= trial.codes]
    healthy_since = sum(seconds > tested[-1].seconds for seconds in healthy)
    silence = _probability_of_silence(incidents, len(healthy), healthy_since)
    codes = Counter(code for incident in subject.incidents for code in sorted(incident.codes))
    return Recurring(
        name=score.name,
        check=score.check,
        incidents=incidents,
        runs=runs,
        low_share=low,
        high_share=high,
        fleet_share=rate,
        p_value=score.p_value,
        alone=sum(not incident.company for incident in tested),
        codes=dict(codes.most_common(_SHOWN_CODES)),
        first_seconds=tested[0].seconds,
        last_seconds=tested[-1].seconds,
        healthy_since=healthy_since,
        has_recovered=silence < RECOVERED_PROBABILITY,
        has_errors=any(incident.has_error for incident in tested),
        hosts=tuple(hosts),
    )


def _probability_of_silence(incidents: int, healthy: int, healthy_since: int) -> float:
    """The probability of the last `healthy_since` of all `healthy` runs, at the rate before them (uniform prior)."""
    a, b = incidents + 1.0, healthy - healthy_since + 1.0
    return math.exp(math.lgamma(a + b) - math.lgamma(b) + math.lgamma(b + healthy_since) - math.lgamma(a + healthy + 1))


def _pair(pair: tuple[str, str], shared: Sequence[Incident], trials: Mapping[str, Sequence[Trial]]) -> RecurringPair:
    first, second = ({trial.seconds for trial in trials.get(name, ())} for name in pair)
    return RecurringPair(
        hosts=pair,
        days=len({int(incident.seconds // DAY_SECONDS) for incident in shared}),
        runs=len(first & second),
        codes=dict(Counter(code for incident in shared for code in sorted(incident.codes)).most_common(_SHOWN_CODES)),
    )


def _detectable_share(runs: int, others: _Counts, tests: int) -> float | None:
    """The rate at which a subject with `runs` runs is found with a probability of 80 %, as the only one in `tests`.

    None if it never is.
    """
    a, b = _beta(min(_MAX_RATE, max(_fleet_rate(others), 1e-9)), _spread(others))
    limit = MAX_FALSE_SHARE / tests
    numbers = range(MIN_INCIDENTS, runs + 1)
    least = next((number for number in numbers if beta_binomial_tail(number, runs, a, b) <= limit), None)
    return None if least is None else solve(lambda share: binomial_tail(least, runs, share), 0.8)
