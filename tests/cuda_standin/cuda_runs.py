"""A check on the CUDA stand-in, run and looked at: from a `CudaFault` and a class of groups to a `CudaResult`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cuda_faults import CudaFault, other
from cuda_standin import Standin
from jobs import CHECK, Job, by_hand, free_port

# The start of the interpreter and the way out, with another run beside this one.
AROUND_SECONDS = 30.0
_SEVERITIES = ("note", "warning", "error")
# What the machine lacks, and no finding about GPUs: fewer cores and less memory than GPUs need, and other runs beside.
_OF_THE_MACHINE = {"HST001.oversubscribed", "HST002.short", "HST003.short", "TRN001.stolen-cores"}


@dataclass(frozen=True)
class CudaResult:
    """What became of one run."""

    name: str
    group: str
    fault: CudaFault
    seconds: float
    report: Mapping | None
    told: str
    has_traceback: bool = False
    left: tuple[str, ...] = field(default=())

    @property
    def findings(self) -> list[Mapping]:
        """Those that count: what the machine lacks is not the fault's."""
        found = list(self.report["findings"]) if self.report else []
        return [finding for finding in found if finding["code"] not in _OF_THE_MACHINE]

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
    def named(self) -> set[int]:
        """Ranks that findings name which are at least as serious as what is expected."""
        least = _SEVERITIES.index(self.fault.severity)
        counted = [finding for finding in self.findings if _SEVERITIES.index(finding["severity"]) >= least]
        return {rank for finding in counted for rank in finding["ranks"]}

    @property
    def pairs(self) -> set[str]:
        """Pairs of GPUs that expected findings name."""
        found = set()
        for finding in self.expected:
            texts = finding["evidence"].get("pairs") or _pairs_in(str(finding))
            found.update(texts)
        return found

    @property
    def is_fixed(self) -> bool:
        """Is the fix advised, in words or as a variable?"""
        name, _, value = self.fault.fix.partition("=")
        texts = " ".join(str(finding["fix"]) for finding in self.expected)
        return self.fault.fix in texts or any((own["env"] or {}).get(name) == value for own in self.expected)

    @property
    def verdict(self) -> str:
        """As the report has it."""
        return str(self.report["verdict"]).upper() if self.report else "none"

    @property
    def flaws(self) -> list[str]:
        """What is wrong with it, in words; nothing if all is as it should be."""
        fault, code = self.fault, self.report["exit_code"] if self.report else None
        found = sorted({finding["code"] for finding in self.findings if finding["severity"] != "note"})
        texts = " ".join(f"{own['code']} {own['fix']} {own['env']}" for own in self.findings)
        wrong = [word for word in fault.never if word in texts]
        flaws = {
            f"{' or '.join(fault.expect)} is missing: {', '.join(found) or 'nothing was found'}": bool(fault.expect)
            and not self.expected,
            f"ranks {sorted(self.named)} are named in place of {sorted(fault.ranks)}": self.named != set(fault.ranks),
            f"pairs {sorted(self.pairs)} in place of {sorted(fault.pairs)}": bool(fault.pairs)
            and self.pairs != set(fault.pairs),
            f"{fault.fix} is not the fix": not self.is_fixed,
            f"{', '.join(wrong)} is said": bool(wrong),
            f"exit code {code} in place of {fault.exit_code}": code != fault.exit_code,
            f"{self.seconds:.0f} s, {fault.budget:g} s allowed": self.seconds > fault.budget + AROUND_SECONDS,
            f"left behind: {', '.join(self.left)}": bool(self.left),
            "a traceback": self.has_traceback,
        }
        return [text for text, is_there in flaws.items() if is_there]

    @property
    def row(self) -> tuple[str, ...]:
        """One line of the table."""
        first = next(iter(self.expected), None)
        ranks = ",".join(map(str, sorted(self.named)))
        culprit = ", ".join(filter(None, (f"rank {ranks}" if ranks else "", *sorted(self.pairs)))) or "none"
        fix = self.fault.fix if first and self.fault.fix and self.is_fixed else "-"
        code = first["code"] if first else "-" if not self.fault.expect else "MISSING"
        told = "right" if not self.flaws else f"WRONG: {'; '.join(self.flaws)}"
        return self.name, self.group, self.verdict, code, culprit, fix, f"{self.seconds:.0f}", told


COLUMNS = ("fault", "group", "verdict", "code", "culprit", "fix", "s", "")


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of text, columns aligned."""
    lines = [COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def healthy(gpus: int) -> CudaFault:
    """Nothing is wrong. Comparing every word of 56 pairs takes two busy cores longer than a GPU."""
    options = ("--set", "P2P002.deadline_seconds=90", "--set", "TRN001.others_share=9")
    return CudaFault(about="healthy", expect=(), exit_code=0, gpus=gpus, options=options, severity="warning")


def run(standin: Standin, name: str, fault: CudaFault, group: str, folder: Path) -> CudaResult:
    """Run the check on so many GPUs, and note what it said and what it left."""
    variables = standin.variables(fault.gpus, group)
    variables |= fault.environment
    options = ("--json", "{json}", "--budget", f"{fault.budget:g}", *fault.options)
    python = str(standin.python)
    if fault.of_rank:
        jobs = _by_hand(fault, group, variables, options, folder, python)
    else:
        arguments = (*CHECK, "--nproc-per-node", str(fault.size), *options)
        jobs = [Job(folder / "run", arguments, variables, python=python)]
    try:
        ended = [job.is_over(fault.budget + 2 * AROUND_SECONDS) for job in jobs]
        left = [*map(str, jobs[0].left_processes(5.0)), *(path for job in jobs for path in job.left_files())]
        return CudaResult(
            name,
            group,
            fault,
            jobs[0].end - jobs[0].begin if all(ended) else fault.budget + 2 * AROUND_SECONDS,
            jobs[0].report if jobs[0].json.exists() else None,
            "".join(job.told() for job in jobs),
            any(job.has_traceback for job in jobs),
            tuple(left) if all(ended) else ("the run itself",),
        )
    finally:
        for job in jobs:
            job.destroy()


def _by_hand(
    fault: CudaFault, group: str, variables: dict[str, str], options: Sequence[str], folder: Path, python: str
) -> list[Job]:
    """Each rank, as a user starts it in a shell, with variables of its own."""
    port, jobs = free_port(), list[Job]()
    for rank in range(fault.size):
        own = {key: other(value, group) for key, value in fault.of_rank.get(rank, {}).items()}
        place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(fault.size)}
        mark = jobs[0].mark if jobs else None
        arguments = by_hand(rank, fault.size, port, *options[2:])
        jobs.append(Job(folder / f"rank{rank}", arguments, variables | place | own, mark=mark, python=python))
    return jobs


def _pairs_in(text: str) -> list[str]:
    """ "GPU 0 -> GPU 1" in the text of a finding that has no list of them."""
    return re.findall(r"GPU \d+ -> GPU \d+", text)
