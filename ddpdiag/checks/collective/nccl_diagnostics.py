"""Faults that NCCL's own diagnostics report, beside what this run measured.

NCCL 2.31 and newer can examine a new communicator. Its RAS diagnostics compare GPUs, drivers, NVLinks, ECC errors and,
since 2.32, Xid lines of all ranks. Its active diagnostics copy data between the GPUs of a host. NCCL gives no verdict:
it marks faults with the same word, INFO, as data that it could not get. COL001 turns both on in its communicator. This
check sorts the lines by the cards of `ddpdiag explain`, which also have the meaning and the fix. Lines about a fault
are a warning, or a note if the check of ddpdiag that looks for this fault found it, too. The message names that check.

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
from contextlib import suppress

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, SkipReason, Stage, optional
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.known_errors import KnownError, explain_line
from ddpdiag.checks.matrix import find_pattern
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.world import short_name
from ddpdiag.evidence.nccl_diagnostics import Diagnostic
from ddpdiag.model import Finding, Severity

FINDINGS = {
    "reported": FindingSpec(
        "a fault that NCCL reports: a warning; a note if a finding of another check agrees, or for PCIe settings that "
        "many working hosts have."
    )
}

# Cards of lines that show no fault, and of NCCL's comparison of variables.
_IGNORED_CARDS = ("nccl-diag", "nccl-diag-environment")
_SETTINGS_CARD = "nccl-diag-pci"
_BANDWIDTH = re.compile(r"([\d.]+) Gbit/s, >30% off median ([\d.]+)")


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each card, with all lines that it explains."""
    by_card: dict[str, tuple[KnownError, dict[Diagnostic, list[int]]]] = {}
    for line, ranks in _lines(seen).items():
        # No card matches a line that is cut off or damaged.
        with suppress(IndexError):
            if line.level != "OK" and not _is_faster(line):
                error = explain_line(line.text)
                by_card.setdefault(error.name, (error, {}))[1][line] = ranks
    for name, (error, lines) in by_card.items():
        if name not in _IGNORED_CARDS:
            yield _finding(seen, error, lines)


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


def _finding(seen: Seen[Nothing], error: KnownError, lines: Mapping[Diagnostic, Sequence[int]]) -> Finding:
    ranks = _blamed(seen, lines)
    by_short_name = {short_name(name): name for name, _ in seen.world.hosts}
    printed_names = [by_short_name.get(short_name(host)) for line in lines for host in line.hosts]
    hosts = tuple(dict.fromkeys((*seen.world.host_names(ranks), *filter(None, printed_names))))
    links = [link for line in lines for link in line.links]
    named = {*hosts, *seen.world.host_names([rank for link in links for rank in link])}
    own = seen.findings_of(error.check_code)
    there = [finding for finding in own if not (named and finding.hosts) or named & {*finding.hosts}]
    agreeing = list(dict.fromkeys(finding.code for finding in there if finding.severity is not Severity.NOTE))
    texts = [f"{ranks_text(printed)}: {line.text!r}" for line, printed in lines.items()]
    return seen.finding(
        "reported",
        f"a fault{f' of {ranks_text(ranks)}' if ranks else ''}",
        f"NCCL printed on {names_text(texts, 1)}. {_comparison(seen, error.check_code, agreeing, there)}",
        severity=Severity.NOTE if agreeing or error.name == _SETTINGS_CARD else Severity.WARNING,
        ranks=ranks,
        hosts=hosts,
        links=[f"rank {source} -> rank {target}" for source, target in links],
        evidence={"lines": [line.text for line in lines], "findings": [*agreeing]},
        known_error=error,
    )


def _comparison(seen: Seen[Nothing], code: str, agreeing: Sequence[str], there: Sequence[Finding]) -> str:
    """Say which findings of the check `code` agree, or that none of `there`, which are notes, does."""
    check = check_by_code(code)
    if agreeing:
        return f"{names_text(agreeing)} of this report agrees."
    if check.measure is not None and not seen.of(check).trials:
        return f"{code} ({check.name}), which looks for it, did not run."
    notes = names_text(list(dict.fromkeys(finding.code for finding in there)))
    return f"{code} ({check.name}) found no such fault there{f', only {notes}' if notes else ''}."


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
    return None if _lines(seen) else optional("NCCL did not run, or is older than 2.31 and has no diagnostics")


CHECK: Check[Nothing] = Check(__name__, "COL003", "nccl-diagnostics", Stage.COLLECTIVE, Scope.WORLD)
