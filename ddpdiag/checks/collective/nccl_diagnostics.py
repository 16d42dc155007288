"""Faults that NCCL's own diagnostics report, beside what this run measured.

NCCL 2.31 and newer can examine a new communicator. Its RAS diagnostics compare GPUs, drivers, NVLinks, ECC errors and,
since 2.32, Xid lines of all ranks. Its active diagnostics copy data between the GPUs of a host. NCCL gives no verdict:
it marks faults with the same word, INFO, as data that it could not get. COL001 turns both on in its communicator, and
this check sorts the lines. If a check of ddpdiag also found the symptom, NCCL's lines are a note beside that finding.
Otherwise they are a warning that says so, since one of the two is wrong or looked at another moment.

Runs over several hosts use the active diagnostics only with --depth standard or deep: there they also measure the
network with ib_write_bw, if it is installed. NCCL's comparison of variables is left out: LCH002 makes it, and ddpdiag's
own variables differ.

Findings:

Fix: do what the finding of ddpdiag recommends, or else NCCL's line.

Confirm by hand: Run the job once with NCCL_RUN_DIAGNOSTICS=1 NCCL_RUN_RAS_DIAGNOSTICS=1 and look for `NCCL DIAG` in the
output of rank 0; in a running job `ncclras -D`.

Sources: NCCL user guide, diagnostics (docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/
diagnostics.html); NCCL's src/diagnostics, src/ras and src/transport/net_ib/wqe_lat_mon.cc.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, SkipReason, Stage, optional
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.launch import versions
from ddpdiag.checks.matrix import find_pattern
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.world import short_name
from ddpdiag.evidence.nccl_diagnostics import Diagnostic
from ddpdiag.model import Finding, Severity


class Symptom(NamedTuple):
    """A fault that lines of NCCL show: the title, a pattern of the lines, and the checks that look for the same."""

    title: str
    pattern: str
    codes: tuple[str, ...]
    fix: str


# Lines with the level INFO that match no pattern are about data that NCCL could not get. They are not reported.
SYMPTOMS = {
    "p2p": Symptom(
        "copies between GPUs fail",
        r"p2p: (read mismatch|write mismatch|peer-memory import failed|destination buffer|local CUDA setup failed"
        r"|topology check failed|launch/check failed|setup failed)",
        ("P2P002", "COL001", "P2P003"),
        "Run `nvidia-smi topo -m` and `nvidia-smi topo -p2p p`. Without NVLink, turn off the IOMMU and ACS; in "
        "containers, share the IPC namespace of the ranks.",
    ),
    "memory": Symptom(
        "GPUs have memory errors",
        r"ECC: (un)?corrected volatile errors (on|at)",
        ("GPU003",),
        "Run `nvidia-smi -q -d ECC` on these hosts, and have GPUs with uncorrected errors reset or replaced.",
    ),
    "nvlink": Symptom(
        "NVLinks are inactive, slow or missing",
        r"NVLink: (link-count|inactive|inconsistent)",
        ("GPU006",),
        "Run `nvidia-smi nvlink -s` on these hosts, and have the GPU, bridge or switch with that link repaired.",
    ),
    "mixed": Symptom(
        "GPUs or drivers differ",
        r"GPU inventory: \w+ mismatch|\w[\w ]* driver version: mismatch",
        ("GPU001", "LCH003"),
        "Use hosts of one kind: compare `nvidia-smi -L` and the driver's version on all hosts.",
    ),
    "xid": Symptom(
        "the driver logged Xids",
        r"S?Xid \d+ detected (?!.*No user action)",
        ("GPU011",),
        "Run `dmesg -T | grep -i xid` on these hosts and do what NVIDIA's catalog says about the number.",
    ),
    "network": Symptom(
        "adapters are slow or fail",
        r"net bw: .*(>30% off median|tool run (failed|timed out)|no usable IB device)|rdma_topo check: failed",
        ("FAB001", "HST007"),
        "Run `ibstat` and `ib_write_bw` between these hosts and one of the others, and check cables and rates.",
    ),
    "stall": Symptom(
        "network requests do not complete",
        r"NET/IB: WQE stall",
        ("FAB001", "HST007"),
        "Check the named adapter and port with `ibstat`, its counters with `perfquery`, and the cable and switch port.",
    ),
    "attention": Symptom(
        "NCCL reports a reduced mode",
        r"(?!NET/IB: WQE)",
        (),
        "Do what the line says. `ddpdiag explain` knows causes of many lines.",
    ),
}
FINDINGS = {
    word: FindingSpec(f"{symptom.title}. A warning; a note if the finding of another check agrees.")
    for word, symptom in SYMPTOMS.items()
}
_BANDWIDTH = re.compile(r"([\d.]+) Gbit/s, >30% off median ([\d.]+)")
# NCCL's diagnostics exist since this version.
_FIRST_VERSION = (2, 31)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    lines = _lines(seen)
    for word, symptom in SYMPTOMS.items():
        level = "ATTN" if word in ("stall", "attention") else "INFO"
        matching = [line for line in lines if line.level == level and re.match(symptom.pattern, line.text)]
        if slow_or_failed := [line for line in matching if not _is_faster(line)]:
            yield _finding(seen, word, {line: lines[line] for line in slow_or_failed})


def _lines(seen: Seen[Nothing]) -> dict[Diagnostic, list[int]]:
    """The lines of all ranks, each with the ranks that printed it."""
    lines: dict[Diagnostic, list[int]] = {}
    for row in seen.of(all_reduce.CHECK).rows:
        for line in row.data.diagnostics:
            lines.setdefault(line, []).append(row.place.rank)
    return lines


def _is_faster(line: Diagnostic) -> bool:
    """Whether the line is about an adapter that is faster than the median."""
    rates = _BANDWIDTH.search(line.text)
    return rates is not None and float(rates[1]) > float(rates[2])


def _finding(seen: Seen[Nothing], word: str, lines: Mapping[Diagnostic, Sequence[int]]) -> Finding:
    symptom, ranks = SYMPTOMS[word], _blamed(seen, lines)
    by_short_name = {short_name(name): name for name, _ in seen.world.hosts}
    printed_names = [by_short_name.get(short_name(host)) for line in lines for host in line.hosts]
    hosts = tuple(dict.fromkeys((*seen.world.host_names(ranks), *filter(None, printed_names))))
    links = [link for line in lines for link in line.links]
    named = {*hosts, *seen.world.host_names([rank for link in links for rank in link])}
    own = [finding for code in symptom.codes for finding in seen.findings_of(code)]
    there = [finding for finding in own if not (named and finding.hosts) or named & {*finding.hosts}]
    agreeing = list(dict.fromkeys(finding.code for finding in there if finding.severity is not Severity.NOTE))
    texts = [f"{ranks_text(printed)}: {line.text!r}" for line, printed in lines.items()]
    return seen.finding(
        word,
        f"NCCL's diagnostics: {symptom.title}" + (f" ({ranks_text(ranks)})" if ranks else ""),
        f"Printed by NCCL on {names_text(texts, 1)}.{_comparison(symptom, agreeing, there)}",
        severity=Severity.NOTE if agreeing else Severity.WARNING,
        ranks=ranks,
        hosts=hosts,
        links=[f"rank {source} -> rank {target}" for source, target in links],
        evidence={"lines": [line.text for line in lines], "findings": [*agreeing]},
        fix=f"See {agreeing[0]}." if agreeing else symptom.fix,
    )


def _comparison(symptom: Symptom, agreeing: Sequence[str], there: Sequence[Finding]) -> str:
    """Say which findings of this report agree, or that none of `there`, which are notes, does."""
    if agreeing or not symptom.codes:
        return f" {names_text(agreeing)} of this report says the same." if agreeing else ""
    checks = " and ".join(f"{code} ({check_by_code(code).name})" for code in symptom.codes)
    notes = names_text(list(dict.fromkeys(finding.code for finding in there)))
    return f" {checks} reported no such fault there{f', only {notes}' if notes else ''}."


def _blamed(seen: Seen[Nothing], lines: Iterable[Diagnostic]) -> tuple[int, ...]:
    """The ranks that explain the failed links, and those that lines name.

    A line about a difference names the ranks that differ from the first one. If these are half of all ranks or more, it
    blames none.
    """
    failed = {link for line in lines for link in line.links}
    ends = {rank for link in failed for rank in link}
    tested_hosts = [ranks for ranks in seen.world.hosts.values() if ends.intersection(ranks)]
    tested = {(a, b) for ranks in tested_hosts for a in ranks for b in ranks if a != b}
    pattern = find_pattern(failed, tested - failed)
    explaining = (*pattern.hosts, *pattern.senders, *pattern.receivers) if pattern is not None else ()
    is_odd = {line: "differ from" not in line.text or 2 * len(line.ranks) < seen.world.size for line in lines}
    named = {rank for line in lines if is_odd[line] for rank in line.ranks}
    return tuple(sorted({*explaining, *named}))


def skip(seen: Seen[Nothing]) -> SkipReason | None:
    """Skip if COL001 has no lines: over gloo, with one rank, or with NCCL before 2.31."""
    if _lines(seen):
        return None
    version = next((row.nccl for row in seen.of(versions.CHECK).by_rank.values() if row.nccl), None)
    if seen.world.backend != "nccl" or version is None:
        return optional("NCCL was not used")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    is_old = parts < _FIRST_VERSION
    return optional(f"NCCL {version} has no diagnostics, 2.31 and newer have" if is_old else "NCCL printed no lines")


CHECK: Check[Nothing] = Check(__name__, "COL003", "nccl-diagnostics", Stage.COLLECTIVE, Scope.WORLD)
