"""This run, compared with an earlier one.

`--baseline FILE` names a recording or a JSON report of an earlier run of the same world, to compare its figures with
this run's. A difference counts only if it is larger than the noise of both runs, and than a share. For the work of the
median rank in a training step the share is 40 %, and the quartiles of the runs must not overlap. For the all-reduce the
share is 50 %, and the difference must exceed twice the spread of the calls in either run (from the quickest to the 95th
percentile); the quickest call of one run must be slower than the 95th percentile of the other. Images per second have
no repeats, so a change by 50 % is reported and not judged. A rank or GPU slower than its peers is TRN003's or GPU012's.

Times on GPUs are judged. Times on CPUs are judged where TRN003 measured that the ranks had at least 90 % of their cores
in both runs; otherwise the report states that they were not.

The bus bandwidth of `ddpdiag allreduce-bench` is compared at sizes that show it, on equal hardware: a twentieth less,
and more than the spread of the calls of either run.

`ddpdiag compare OLD NEW` compares two files by the same rules, and also the verdicts and the findings. A finding of a
check that did not run in one of the runs is neither new nor gone. The exit code is 1 for a regression; without one it
is 3 where no figure was compared, or where the new run's verdict is UNKNOWN, else 0.

Findings:

Fix: look at what has changed since: driver, firmware, clocks, cables, other jobs on the same hosts and switches. If the
change is intended, use this run as the new baseline.

Confirm by hand: Run the old and the new state in turns, several times each, on hosts without other users, and compare
with `ddpdiag compare`.

Sources: quartiles as in Hyndman and Fan, 1996 (type 7);
tests/benchmarks/compare.py (how often a difference was found between equal runs).
"""

from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.comparison import Direction, compare_facts, compare_figures, why_incomparable
from ddpdiag.model import Finding
from ddpdiag.text import begun

FINDINGS = {
    "worse": FindingSpec.warning("the world, or a benchmark, is slower than in the baseline."),
    "incomparable": FindingSpec.unchecked(
        "the runs have different numbers of ranks or hosts, another backend, or a benchmark of other hardware or "
        "sizes, so that something was not compared."
    ),
    "changed": FindingSpec.note("versions or variables that differ, and figures that are better."),
}

RUN_AGAIN = (
    "Run again to exclude a temporary load. Then compare with the time of the baseline: driver and clocks "
    "(`nvidia-smi -q -d CLOCK`, `lscpu`), link speed (`ethtool INTERFACE`, `ibstat`), and other jobs on these hosts "
    "(`top`)."
)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Findings about differences from the baseline; none without a baseline."""
    old = seen.options.baseline
    if old is None:
        return
    new = snapshot_of(seen.world, seen.recording, seen.sections)
    _, changes = compare_figures(old, new)
    difference = why_incomparable(old.shape, new.shape)
    # The purpose of a benchmark is its figures, so a figure that was not compared is reported: it may be worse.
    unjudged = [change.text for change in changes if change.direction is Direction.UNJUDGED] if new.series else []
    if difference or unjudged:
        yield seen.finding(
            "incomparable",
            "this run cannot be compared with the baseline",
            f"Not compared with the baseline of {old.created}: {difference or '; '.join(unjudged)}.",
            fix="Pass --baseline a recording or report of the same command with the same ranks, hosts, backend, sizes.",
        )
    if difference:
        return
    for change in changes:
        if change.direction is Direction.REGRESSION:
            yield seen.finding(
                "worse",
                f"slower than the baseline: {change.name}",
                f"{begun(change.text)}. The baseline is of {old.created}.",
                evidence={"old": change.old, "new": change.new, "ratio": change.ratio, "noise_share": change.noise},
                fix=RUN_AGAIN,
            )
    others = (change for change in changes if change.direction is not Direction.REGRESSION)
    texts = [change.text for change in (*others, *compare_facts(old.facts, new.facts)) if change.text not in unjudged]
    if texts:
        yield seen.finding(
            "changed",
            "figures, versions or variables differ from the baseline",
            f"Since the baseline of {old.created}: {'; '.join(texts)}.",
            fix="Nothing to do if these changes are intended. Run again where a figure fell: it may vary between runs.",
        )


CHECK: Check[Nothing] = Check(__name__, "CMP001", "baseline", Stage.RUN, Scope.WORLD)
