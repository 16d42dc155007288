"""The judgement, which makes a report from a recording. Each step is a module.

The steps are: adjust the recording to the end of the run (`ending`), judge each check (`check_judgements`), summarize
stages and checks (`stages`), find missing evidence (`doubt`), list the failing and the healthy hosts (`hosts`), and
decide the verdict with its sentence (`verdict`). The same version gives the same report on any machine, at any time.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ddpdiag.checks.api import Check
from ddpdiag.checks.findings import Section
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.checks.world import World
from ddpdiag.judgement.check_judgements import Judgements, judge_checks
from ddpdiag.judgement.doubt import doubt_of
from ddpdiag.judgement.ending import recording_forms
from ddpdiag.judgement.hosts import fastest_first, leaves_of, sort_hosts
from ddpdiag.judgement.stages import summaries_of
from ddpdiag.judgement.verdict import conclude
from ddpdiag.model import EventKind, Recording, Report, Scalar, Severity, WorldSummary
from ddpdiag.model.options import Snapshot
from ddpdiag.model.report import INVENTORY, UNKNOWN, HostKind

_WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def judge(recording: Recording, checks: Sequence[Check[Any]]) -> Report:
    """Judge a run and return its report. The report depends only on the recording and on this version's checks."""
    forms = recording_forms(recording)
    world = world_of(forms.recording)
    judgements = judge_checks(world, forms, checks)
    summaries = summaries_of(forms.recording, judgements)
    doubt = doubt_of(world, forms.recording, judgements, summaries.stages)
    hosts = sort_hosts(world, forms.recording, judgements, doubt)
    workarounds = next((each.contribution.workarounds for each in judgements if each.contribution.workarounds), {})
    used_workarounds = workarounds if world.options.uses_workarounds else {}
    conclusion = conclude(world, forms.recording, judgements, doubt, used_workarounds)
    rows = _rank_rows(world, judgements)
    sections = [each.contribution.section for each in judgements if each.contribution.section is not None]
    header, end = forms.recording.header, forms.recording.end
    missing_end = () if end else ("the recording has no end: the run was killed, or this is one rank's part of it",)
    return Report(
        verdict=conclusion.verdict,
        degraded=conclusion.degraded,
        sentence=conclusion.sentence,
        exit_code=conclusion.exit_code,
        seconds=end.seconds if end else max((event.seconds for event in forms.recording.events), default=0.0),
        budget_seconds=header.options.budget_seconds,
        run_id=header.run_id,
        world=WorldSummary(
            size=world.size,
            hosts=tuple(dict.fromkeys(host for host, _ in world.hosts)),
            launcher=world.launcher,
            backend=world.backend,
            hosts_by_leaf_switch=leaves_of(world),
            scheduler="slurm" if world.in_slurm else "",
        ),
        ranks=rows,
        stages=summaries.stages,
        checks=summaries.checks,
        findings=tuple(
            sorted((f for each in judgements for f in each.findings), key=lambda f: _WORST_FIRST.index(f.severity))
        ),
        measurements={name: value for each in judgements for name, value in each.contribution.figures.items()},
        recording_problems=(
            *forms.recording.problems,
            *missing_end,
            *(each.unreadable for each in judgements if each.unreadable),
        ),
        hosts=fastest_first(hosts, rows),
        bench=next((each.bench for each in sections if each.bench is not None), None),
        train=next((each.train for each in sections if each.train is not None), None),
        matrices=tuple(matrix for each in judgements for matrix in each.contribution.matrices),
        workarounds=dict(workarounds),
        inventory=_inventory(world, judgements),
        counters=tuple(row for each in judgements for row in each.contribution.counters),
        created=header.created,
        version=header.version,
        snapshot=_snapshot(world, forms.established, sections),
    )


def _snapshot(world: World, recording: Recording, sections: Sequence[Section]) -> Snapshot | None:
    """The figures for comparisons with other runs, or None if this version cannot read the recorded data."""
    try:
        return snapshot_of(world, recording, sections)
    except (ValueError, ArithmeticError, LookupError):
        return None  # `judge_checks` has added a sentence about this to the report


def world_of(recording: Recording) -> World:
    """The world at the end of the run, without lost ranks. Ranks that a signal ended still belong to the world."""
    return World(
        size=recording.header.world_size,
        launcher=recording.header.launcher,
        options=recording.header.options,
        arrivals=recording.arrivals,
        inactive_ranks=frozenset(e.rank for e in recording.events if e.kind is EventKind.LOST and e.rank is not None),
    )


def _rank_rows(world: World, judgements: Judgements) -> tuple[dict[str, Scalar], ...]:
    rows: list[dict[str, Scalar]] = []
    for rank, place in sorted(world.places.items()):
        row: dict[str, Scalar] = {"rank": rank, "local_rank": place.local_rank, "host": place.host, "gpu_uuid": None}
        for each in judgements:
            row.update(each.contribution.columns.get(rank, {}))
        rows.append(row)
    return tuple(rows)


def _inventory(world: World, judgements: Judgements) -> tuple[HostKind, ...]:
    """The hosts grouped by their parts (INVENTORY), as checks report the parts. Empty if no check reports parts."""
    inventories = [each.contribution.inventory for each in judgements if each.contribution.inventory]
    kinds: dict[tuple[str, ...], list[str]] = {}
    for (host, _), ranks in world.hosts.items() if inventories else ():
        parts = dict.fromkeys(INVENTORY, UNKNOWN)
        for inventory in inventories:
            texts_of: defaultdict[str, dict[str, None]] = defaultdict(dict)
            for part, text in (item for rank in ranks for item in inventory.get(rank, {}).items()):
                texts_of[part][text] = None
            parts |= {part: " and ".join(texts) for part, texts in texts_of.items()}
        kinds.setdefault(tuple(parts.values()), []).append(host)
    return tuple(
        HostKind(hosts=tuple(hosts), parts=dict(zip(INVENTORY, texts, strict=True))) for texts, hosts in kinds.items()
    )
