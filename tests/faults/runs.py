"""A fault of the gallery, run and looked at: from a `Fault` to a `Result`."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cgroups import Unavailable
from cores import cores
from fault import Fault
from jobs import CHECK
from launch import Launched, launch
from network import Network

GALLERY = Path(__file__).parent / "gallery"
# Most of a run is waiting for a deadline; more at once would make healthy ranks late on two cores.
AT_ONCE = 3
# The start of the interpreter and of torchrun, and the way out, with other runs beside this one.
AROUND_SECONDS = 20.0
_SEVERITIES = ("note", "warning", "error")


@dataclass(frozen=True)
class Result:
    """What became of one run; `skipped` says why there was none."""

    name: str
    fault: Fault
    seconds: float
    report: Mapping | None = None
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    errors_of: Mapping[str, str] = field(default_factory=dict)  # standard error by job
    ended: bool = False
    reached: bool = False
    has_traceback: bool = False
    left: tuple[str, ...] = ()
    told: str = ""
    skipped: str | None = None
    tries: int = 1

    @property
    def flaws(self) -> list[str]:
        """What is wrong with it, in words; nothing if all is as it should be."""
        expected, wanted = self.fault.expect or dict(self.fault.says), self.fault.exit_code
        code = self.report["exit_code"] if self.report else None
        flaws = {
            "not over in time": not self.ended,
            "the injected fault never began": not self.reached,
            f"{expected} is missing": not self.is_detected,
            f"{self.fault.blame} was expected": not self.blames_right,
            f"blamed without guilt: {', '.join(self.innocents)}": bool(self.innocents),
            f"{self.seconds:.1f} s, {self.fault.budget:g} s allowed": not self.is_in_time,
            f"left behind: {', '.join(self.left)}": bool(self.left),
            "a traceback": self.has_traceback,
            f"{self.sorted_hosts} are called good and bad": not self._sorts_hosts,
            f"exit code {code} in place of {wanted}": self.fault.reports and code != wanted,
        }
        return [] if self.skipped else [text for text, is_there in flaws.items() if is_there]

    @property
    def findings(self) -> list[Mapping]:
        """All findings of the report."""
        return list(self.report["findings"]) if self.report else []

    @property
    def errors(self) -> list[Mapping]:
        """Those that say that something is broken."""
        return [finding for finding in self.findings if finding["severity"] == "error"]

    @property
    def expected(self) -> list[Mapping]:
        """Those that were expected, serious enough."""
        least = _SEVERITIES.index(self.fault.severity)
        return [
            finding
            for finding in self.findings
            if finding["code"] in self.fault.expect and _SEVERITIES.index(finding["severity"]) >= least
        ]

    @property
    def is_detected(self) -> bool:
        """Is an expected finding there, and every sentence that was expected?"""
        said = all(words in self.errors_of.get(job, "") for job, words in self.fault.says.items())
        return said and (bool(self.expected) or not self.fault.expect)

    @property
    def blames_right(self) -> bool:
        """Do the findings that count name exactly whom they must?"""
        blame = self.fault.blame
        counted = self.errors if self.fault.severity == "error" else self.expected
        named = {key: {name for finding in counted for name in finding[key]} for key in ("ranks", "hosts", "links")}
        if not self.fault.expect:
            return True  # whoever is named all the same is innocent
        if blame.links:  # neither end alone is to blame
            return named["links"] == set(blame.links) and not named["hosts"] - set(blame.tolerated)
        if blame.hosts:
            return named["hosts"] - set(blame.tolerated) == set(blame.hosts)
        if blame.ranks:
            return named["ranks"] - self._tolerated_ranks == set(blame.ranks)
        return not any(named.values())

    @property
    def innocents(self) -> tuple[str, ...]:
        """Ranks and hosts that an error names, and that have done nothing."""
        blame, bed = self.fault.blame, self.fault.bed
        ends = {end for link in blame.links for end in link.split(" -> ")}
        guilty_nodes = set(blame.hosts) | set(blame.tolerated) | ends | {f"h{bed.host_of(r)}" for r in blame.ranks}
        guilty_ranks = set(blame.ranks) | self._tolerated_ranks | self._ranks_of(set(blame.hosts) | ends)
        ranks = {rank for finding in self.errors for rank in finding["ranks"]} - guilty_ranks
        nodes = {node for finding in self.errors for node in finding["hosts"]} - guilty_nodes
        links = {link for finding in self.errors for link in finding["links"]} - set(blame.links)
        if blame.hosts:  # every link of a bad host is bad
            links = {link for link in links if not set(blame.hosts).intersection(link.split(" -> "))}
        return (*(f"rank {rank}" for rank in sorted(ranks)), *sorted(nodes), *sorted(links))

    @property
    def sorted_hosts(self) -> tuple[set[str], set[str]]:
        """The hosts that the report calls good, and those that it calls bad."""
        hosts = (self.report or {}).get("hosts", {})
        return set(hosts.get("healthy", ())), set(hosts.get("failing", ()))

    @property
    def _sorts_hosts(self) -> bool:
        guilty = {f"h{self.fault.bed.host_of(rank)}" for rank in self.fault.blame.ranks} | self.fault.blame.hosts
        bad = guilty if self.fault.severity == "error" else set()
        return self.fault.good is None or self.sorted_hosts == (set(self.fault.good), bad)

    @property
    def is_in_time(self) -> bool:
        """Was the run over inside its budget?"""
        known = self.report["seconds"] <= self.fault.budget if self.report else True
        return self.ended and known and self.seconds <= self.fault.budget + AROUND_SECONDS

    @property
    def _tolerated_ranks(self) -> set[int]:
        return self._ranks_of(self.fault.blame.tolerated)

    def _ranks_of(self, nodes: object) -> set[int]:
        bed = self.fault.bed
        return {rank for rank in range(bed.size) if f"h{bed.host_of(rank)}" in nodes}


def faults() -> dict[str, Fault]:
    """Every fault of the gallery by its name, module by module."""
    known: dict[str, Fault] = {}
    for path in sorted(GALLERY.glob("*.py")):
        found = importlib.import_module(f"gallery.{path.stem}").FAULTS
        if twice := known.keys() & found.keys():
            raise ValueError(f"{path.name} has faults of names that are taken: {', '.join(sorted(twice))}")
        known |= found
    return known


def check_command(fault: Fault) -> tuple[str, ...]:
    """The check, as the fault is met by it."""
    return (*CHECK, "--json", "{json}", "--budget", f"{fault.budget:g}", *fault.options)


def run(name: str, fault: Fault, folder: Path, begun: Callable[[Launched], None] = lambda _running: None) -> Result:
    """Make the hosts, break something, run the check, and note what it said and what it left."""
    with cores(), Network(len(fault.bed.ranks), folder / "network") as network:
        try:
            running = start(fault, network, check_command(fault), folder / "run")
        except Unavailable as error:
            return Result(name, fault, 0.0, skipped=str(error))
        try:
            begun(running)
            before = _files(network)
            reached = play(fault, network, running)
            ended = running.is_over(running.begin + 2 * AROUND_SECONDS + fault.budget - time.monotonic())
            shared = () if fault.keeps else sorted(_files(network) - before)
            return _noted(name, fault, running, shared, _judged(network), ended=ended, reached=reached)
        finally:
            running.destroy()


def start(fault: Fault, network: Network, command: Sequence[str], folder: Path) -> Launched:
    """Break what is broken from the start, and start a command."""
    shared = network.folder / "shared"
    shared.mkdir()
    if fault.before is not None:
        fault.before(network)
    if fault.inject:
        for host in network:
            host.variables["DDPDIAG_TEST_FAULT"] = fault.inject
    return launch(network, fault.bed, [word.replace("{shared}", str(shared)) for word in command], folder)


def play(fault: Fault, network: Network, running: Launched) -> bool:
    """Wait for the injected fault to begin, and do what is done then; False if it never began."""
    if fault.when_reached is None:
        return True
    reached = running.wait_until_reached(fault.budget + AROUND_SECONDS)
    if reached:
        fault.when_reached(network, running)
    return reached


def _files(network: Network) -> set[str]:
    """What lies in the shared directory."""
    return {str(path) for path in (network.folder / "shared").rglob("*")}


def _judged(network: Network) -> dict[str, Any] | None:
    """The report that the records in the shared directory give, where rank 0 was lost."""
    for records in (network.folder / "shared").glob("ddpdiag-*-*"):
        words = (sys.executable, "-m", "ddpdiag", "judge", str(records), "--json", "-")
        judged = subprocess.run(words, capture_output=True, check=False, timeout=60)
        return json.loads(judged.stdout) if judged.stdout else None
    return None


def _noted(
    name: str,
    fault: Fault,
    running: Launched,
    shared: Iterable[str],
    judged: dict[str, Any] | None,
    *,
    ended: bool,
    reached: bool,
) -> Result:
    jobs = running.jobs
    left = [*shared] if ended else ["the run itself"]
    if ended:
        left += map(str, next(iter(jobs.values())).left_processes())
        left += [f"{job}: {path}" for job, own in jobs.items() if job not in fault.keeps for path in own.left_files()]
    told = running.told()
    result = Result(
        name=name,
        fault=fault,
        seconds=running.seconds if ended else fault.budget + 2 * AROUND_SECONDS,
        report=json.loads(running.json.read_text()) if running.json.exists() else judged,
        exit_codes={job: own.process.returncode for job, own in jobs.items()} if ended else {},
        errors_of={job: own.stderr for job, own in jobs.items()},
        ended=ended,
        reached=reached and (not fault.inject or running.reached.exists()),
        has_traceback=any(job.has_traceback for job in jobs.values()),
        left=tuple(left),
        told=told,
    )
    shutil.rmtree(running.folder, ignore_errors=True)
    return result


class Pool:
    """Runs of several faults at once, in the order in which they are asked for; `result` waits for one."""

    def __init__(self, chosen: Mapping[str, Fault], folder: Path) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, "fault")
        self._chosen, self._folder = chosen, folder
        self._running: list[Launched] = []
        self._is_closed = False
        self._futures: dict[str, Future[Result]] = {
            name: self._threads.submit(run, name, chosen[name], folder / name, self._begun) for name in chosen
        }

    def result(self, name: str) -> Result:
        """What became of a fault; whatever its run raised."""
        return self._futures[name].result()

    def again(self, name: str) -> Result:
        """Once more, alone: three runs beside each other on two busy cores make healthy ranks late."""
        wait(self._futures.values())
        result = run(name, self._chosen[name], self._folder / f"{name}-again", self._begun)
        return replace(result, tries=2)

    def close(self) -> None:
        """Forget what has not begun, end what has, and wait until all have cleaned up."""
        self._is_closed = True
        for running in list(self._running):
            if not running.is_over():
                running.destroy()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begun(self, running: Launched) -> None:
        self._running.append(running)
        if self._is_closed:
            running.destroy()
