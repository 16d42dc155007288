"""Who finds the slow hosts of a fleet, in how many rounds, and at the price of how many healthy ones?

    python tests/benchmarks/fabric.py --runs 400 [--hosts 16384] [--only 25] [--at-once 2]

The same simulated fleets (`ddpdiag.simulate.Fleet`, seeds 0, 1, ...) are searched by the procedure of FAB001 and by
what others do (see schemes.py); everyone is told the nominal rate. The rounds are what costs time, whatever the number
of groups in one. The conditions:

    1 % of hosts 25 % or 10 % slower   deviation of a test 2 %; 1 % of tests are halved, whoever takes part
    no fault                           the same noise
    fleet 8 % under, 5 % over nominal  all hosts alike; 1 % of them are 10 % slower than that
    3 to N hosts                       log-uniformly, 0 to a quarter of them 25 % slower
    congested leaves                   correlated: on 0.5 % of the leaves of 32 hosts congestion begins in each round,
                                       halves all that goes there, and stays with 50 %; 1 % of hosts 25 % slower. No
                                       host is at fault for it, though it fails with partner after partner
    narrow uplinks                     congestion by the tests themselves: those of 0.5 % of the leaves carry half of
                                       what their hosts can send; 1 % of hosts 25 % slower
    congested leaves to the end        as congested leaves, but congestion that began once stays

Shown are means over the runs: rounds (and the most), tests per host, healthy hosts blamed per run with the wider of
two 95 % intervals (exact for Poisson counts, and by the deviation among the runs), and the bad hosts missed.

Not the same for all: a simulated test of a large group is halved by chance as rarely as that of a pair, which is in
favour of bisection. DLRover's own bar is twice the median time, which none of these faults reaches: here it has 5 %.
"""

import argparse
import math
import statistics
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import Random
from typing import NamedTuple

from schemes import OURS, SCHEMES, Scheme, ours

from ddpdiag.simulate.fleet import HOSTS_PER_LEAF, Fault, Faults, Fleet, Noise

MOST_HOSTS = 16_384
FEWEST_HOSTS = 3
Z95 = 1.96


class Condition(NamedTuple):
    """A kind of fleet. `bad` is the share of slow hosts; `any_size` draws both it and the number of hosts."""

    name: str
    bad: float = 0.01
    slower: float = 0.25
    level: float = 1.0
    congested: float = 0.0
    lasting: float = 0.5
    narrow: float = 0.0
    any_size: bool = False

    def fleet(self, hosts: int, seed: int) -> Fleet:
        """One fleet; the same for the same seed."""
        count = int(self.bad * hosts)
        if self.any_size:
            random = Random(seed)
            hosts = round(math.exp(random.uniform(math.log(FEWEST_HOSTS), math.log(hosts))))
            count = random.randint(0, hosts // 4)
        noise = Noise(sigma=0.02, transients=0.01, congestion=self.congested, persistence=self.lasting)
        kinds = [(Fault.SLOW_HOST, count)]
        if self.narrow:
            kinds.append((Fault.UPLINK, max(1, round(self.narrow * hosts / HOSTS_PER_LEAF))))
        fleet = Fleet(hosts, Faults(tuple(kinds), self.slower), noise, seed=seed, healthy_bytes_per_s=1.0)
        fleet.rate_factor = self.level
        return fleet

    def chosen(self, word: str) -> list[str]:
        """The names of the schemes that hold this word."""
        return [name for name in self.schemes if word in name]

    @property
    def schemes(self) -> dict[str, Scheme | None]:
        """Everybody's; and ours with known leaves where leaves matter, None, because they hang on the fleet."""
        return {**SCHEMES, **({f"{OURS}, leaves known": None} if self.congested or self.narrow else {})}


CONDITIONS = (
    Condition("1 % of hosts 25 % slower"),
    Condition("1 % of hosts 10 % slower", slower=0.1),
    Condition("no fault", bad=0.0),
    Condition("fleet 8 % under nominal, 1 % of hosts 10 % slower", slower=0.1, level=0.92),
    Condition("fleet 5 % over nominal, 1 % of hosts 10 % slower", slower=0.1, level=1.05),
    Condition("3 to N hosts, 0 to 25 % of them 25 % slower", any_size=True),
    Condition("congested leaves, 1 % of hosts 25 % slower", congested=0.005),
    Condition("narrow uplinks, 1 % of hosts 25 % slower", narrow=0.005),
    Condition("congested leaves to the end, 1 % of hosts 25 % slower", congested=0.005, lasting=1.0),
)


class Run(NamedTuple):
    """What one search cost and found."""

    hosts: int
    rounds: int
    tests: int
    false: int
    missed: int
    bad: int


def run(condition: Condition, scheme: str, hosts: int, seed: int) -> Run:
    """One search of one fleet."""
    fleet = condition.fleet(hosts, seed)
    leaves = {host: fleet.leaf_of(host) for host in range(fleet.hosts)}
    start = condition.schemes[scheme] or partial(ours, floor=0.05, leaves=leaves)
    # Another chance than the fleet's own: shuffled alike, the bad ones would never meet each other.
    search = start(range(fleet.hosts), zlib.crc32(f"{seed}".encode()))
    rounds = tests = 0
    try:
        groups = next(search)
        while True:
            rounds, tests = rounds + 1, tests + len(groups)
            fleet.next_round(groups)
            groups = search.send({group: fleet.rate(group) for group in groups})
    except StopIteration as end:
        blamed: set[int] = end.value
    return Run(fleet.hosts, rounds, tests, len(blamed - fleet.failing), len(fleet.failing - blamed), len(fleet.failing))


def interval(counts: Sequence[int]) -> tuple[float, float]:
    """For the mean of counts, with 95 %: exact for Poisson counts (Wilson-Hilferty); wider where they cluster."""
    number, runs = sum(counts), len(counts)
    least = number * (1 - 1 / (9 * number) - Z95 / (3 * math.sqrt(number))) ** 3 if number else 0.0
    most = (number + 1) * (1 - 1 / (9 * (number + 1)) + Z95 / (3 * math.sqrt(number + 1))) ** 3
    away = Z95 * statistics.stdev(counts) / math.sqrt(runs) if runs > 1 else 0.0
    mean = number / runs
    return max(0.0, min(least / runs, mean - away)), max(most / runs, mean + away)


def row(scheme: str, runs: Sequence[Run]) -> str:
    """One line of the table, without the condition."""
    rounds = [one.rounds for one in runs]
    mean, most = statistics.mean(rounds), max(rounds)
    false = [one.false for one in runs]
    low, high = interval(false)
    tests = sum(one.tests for one in runs) / sum(one.hosts for one in runs)
    bad = sum(one.bad for one in runs)
    cells = (
        scheme,
        f"{most}" if mean == most else f"{mean:.1f} (<= {most})",
        f"{tests:.2f}",
        f"{_short(statistics.mean(false))} ({_short(low)}-{_short(high)})",
        f"{100 * sum(one.missed for one in runs) / bad:.2f} %" if bad else "-",
    )
    return " | ".join(cells)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def rows(conditions: Sequence[Condition], word: str, hosts: int, runs: int, pool: ProcessPoolExecutor) -> Iterator[str]:
    """The table's lines, each as soon as it is known."""
    yield f"{runs} runs each, N = {hosts:,} hosts\n"
    yield "| condition | scheme | rounds | tests per host | healthy hosts blamed per run (95 %) | bad hosts missed |"
    yield "|---|---|---|---|---|---|"
    for condition in conditions:
        name = condition.name
        for scheme in condition.chosen(word):
            done = list(pool.map(partial(run, condition, scheme, hosts), range(runs), chunksize=4))
            yield f"| {name} | {row(scheme, done)} |"
            name = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="fleets for each line (default: 20)")
    parser.add_argument("--hosts", type=int, default=MOST_HOSTS, help=f"of each fleet (default: {MOST_HOSTS})")
    parser.add_argument("--only", default="", help="the conditions whose names hold this word")
    parser.add_argument("--scheme", default="", help="the schemes whose names hold this word")
    parser.add_argument("--at-once", type=int, default=1, help="processes (default: 1)")
    asked = parser.parse_args()
    if asked.runs < 1 or asked.hosts < FEWEST_HOSTS:
        parser.error(f"at least 1 run and {FEWEST_HOSTS} hosts")
    chosen = [condition for condition in CONDITIONS if asked.only in condition.name]
    if not chosen:
        parser.error(f"--only {asked.only}: no condition holds that word")
    with ProcessPoolExecutor(asked.at_once) as pool:
        for line in rows(chosen, asked.scheme, asked.hosts, asked.runs, pool):
            print(line, flush=True)


if __name__ == "__main__":
    main()
