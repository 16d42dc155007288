"""This run, held against an earlier one.

With `--baseline FILE`, a recording or a JSON report of an earlier run of the same world, the figures of both are
compared. A difference counts only beyond the noise that the repeats of both runs show, and beyond a share. A rank's own
work in a training step is held against that of the other ranks at the same moments: 10 %, and two standard errors. That
work of the usual rank is held against itself: 40 %, and the quartiles of both runs must lie apart. So is the
all-reduce: 50 %, twice what the calls of either run spread (from the quickest to the 95th percentile), and the quickest
call of one run must be slower than the 95th percentile of the other. Images a second in training have no repeats, so
that a change by 50 % is told and not judged.

Times on GPUs are judged. On CPUs they are where TRN003 saw that the ranks had at least 60 % of their cores (90 % for
the whole machine's) in both runs; else that is said.

`ddpdiag compare OLD NEW` holds two files against each other by the same rules. Beyond that it tells of the verdict, of
findings and of the rates between pairs of hosts or GPUs, and compares the bus bandwidth of benchmarks and the images a
second of `ddpdiag train`, which this check does not. What one of the runs did not look at is neither new nor gone; but
an error of a check that looks into what went wrong elsewhere is new where nothing had gone wrong there before. It
leaves with 1 for a regression. Without one it leaves with 3 where no figure was compared, or where the new run's
verdict is UNKNOWN, else with 0. `ddpdiag allreduce-bench` has a `--baseline` of its own.

Findings:

Fix: look at what has changed since: driver, firmware, clocks, cables, neighbours. If it is meant to be so, take this
run as the new baseline.

Confirm by hand: Run the old and the new state in turns, several times each, on hosts that nobody else uses, and compare
with `ddpdiag compare`.

Sources: quartiles as in Hyndman and Fan, 1996 (type 7); arXiv 2510.15596 (9 % of GPU time varies in a healthy fleet);
tests/benchmarks/compare.py (how often equal runs were told apart, and slow ranks found).
"""

from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.comparison.figures import Change, Direction, changed_facts, comparable, compared_figures
from ddpdiag.model import Finding
from ddpdiag.text import begun

FINDINGS = {
    "worse": Explained.warning("a rank, or the whole world, is slower than it was."),
    "incomparable": Explained.not_seen(
        "the runs have different numbers of ranks or hosts, or another backend, so nothing was compared."
    ),
    "changed": Explained.note("versions or variables that differ: good to know."),
    "better": Explained.note("what is quicker than it was: good to know."),
}

_SHOWN = 20
_JUDGED = (Direction.REGRESSION, Direction.IMPROVEMENT)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Nothing without a baseline."""
    old = seen.options.baseline
    if old is None:
        return
    new = snapshot_of(seen.world, seen.recording)
    if (why := comparable(old, new)) is not None:
        yield seen.finding(
            "incomparable",
            "this run cannot be compared with the baseline",
            f"Nothing was compared with the baseline of {old.created}: {why}.",
            fix="Give the recording of a run of this world.",
        )
        return
    _, changes = compared_figures(old, new)
    for change in changes:
        if change.direction in _JUDGED:
            yield _changed(seen, change, old.created)
    others = (change for change in changes if change.direction not in _JUDGED)
    told = [change.text for change in (*others, *changed_facts(old.facts, new.facts))]
    if told:
        more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        yield seen.finding(
            "changed",
            "not all is as it was in the baseline",
            f"Since the baseline of {old.created}: {'; '.join(told[:_SHOWN])}{more}.",
        )


def _changed(seen: Seen[Nothing], change: Change, created: str) -> Finding:
    is_worse = change.direction is Direction.REGRESSION
    return seen.finding(
        "worse" if is_worse else "better",
        f"{'slower' if is_worse else 'quicker'} than the baseline: {change.name}",
        f"{begun(change.text)}. The baseline is of {created}.",
        ranks=change.ranks,
        evidence={"old": change.old, "new": change.new, "ratio": change.ratio, "noise_share": change.noise},
        fix="Look at what has changed since: driver, firmware, clocks, cables, neighbours." if is_worse else "",
    )


CHECK = Check(
    "CMP001", "baseline", Stage.RUN, Scope.WORLD, manual=__doc__ or "", findings=FINDINGS, judge=judge, data=Nothing
)
