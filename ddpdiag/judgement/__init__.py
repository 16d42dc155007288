"""The judgement, which makes a report from a recording. Each step is a module.

The steps are the end of the run (`ending`), the findings of each check (`judged`), the lines of stages and checks
(`stages`), missing evidence (`doubt`), hosts to leave out (`hosts`), and the verdict with its sentence (`verdict`).

Judgement is pure: it gives the same report on the cluster, on a laptop, and years later.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ddpdiag.checks.api import Check
from ddpdiag.checks.findings import Section
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.checks.world import World
from ddpdiag.judgement.doubt import doubt_of
from ddpdiag.judgement.ending import run_of
from ddpdiag.judgement.hosts import fastest_first, leaves_of, sort_hosts
from ddpdiag.judgement.judged import Judged, judge_checks
from ddpdiag.judgement.stages import lines_of
from ddpdiag.judgement.verdict import conclude
from ddpdiag.model import EventKind, Recording, Report, Scalar, Severity, WorldLine
from ddpdiag.model.options import Snapshot
from ddpdiag.model.report import INVENTORY, UNKNOWN, HostKind

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def judge(recording: Recording, checks: Sequence[Check[Any]]) -> Report:
    """The report of a run. It depends only on the recording and on this version's checks."""
    run = run_of(recording)
    world = world_of(run.recording)
    judged = judge_checks(world, run, checks)
    lines = lines_of(run.recording, judged)
    doubt = doubt_of(world, run.recording, judged, lines.stages)
    hosts = sort_hosts(world, run.recording, judged, doubt)
    workarounds = next((own.added.workarounds for own in judged if own.added.workarounds), {})
    needed = workarounds if world.options.uses_workarounds else {}
    conclusion = conclude(world, run.recording, judged, doubt, needed)
    rows = _rank_rows(world, judged)
    sections = [own.added.section for own in judged if own.added.section is not None]
    header, end = run.recording.header, run.recording.end
    unfinished = () if end else ("the recording has no end: the run was killed, or this is one rank's part of it",)
    return Report(
        verdict=conclusion.verdict,
        degraded=conclusion.degraded,
        sentence=conclusion.sentence,
        exit_code=conclusion.exit_code,
        seconds=end.seconds if end else max((event.seconds for event in run.recording.events), default=0.0),
        budget_seconds=header.options.budget_seconds,
        run_id=header.run_id,
        world=WorldLine(
            size=world.size,
            hosts=tuple(dict.fromkeys(node for node, _ in world.hosts)),
            launcher=world.launcher,
            backend=world.backend,
            leaves=leaves_of(world),
            scheduler="slurm" if world.in_slurm else "",
        ),
        ranks=rows,
        stages=lines.stages,
        checks=lines.checks,
        findings=tuple(sorted((f for own in judged for f in own.findings), key=lambda f: _ORDER.index(f.severity))),
        measurements={name: value for own in judged for name, value in own.added.figures.items()},
        notes=(*run.recording.notes, *unfinished, *(own.unreadable for own in judged if own.unreadable)),
        hosts=fastest_first(hosts, rows),
        bench=next((own.bench for own in sections if own.bench is not None), None),
        train=next((own.train for own in sections if own.train is not None), None),
        matrices=tuple(matrix for own in judged for matrix in own.added.matrices),
        workarounds=dict(workarounds),
        inventory=_inventory(world, judged),
        created=header.created,
        version=header.version,
        snapshot=_snapshot(world, run.established, sections),
    )


def _snapshot(world: World, recording: Recording, sections: Sequence[Section]) -> Snapshot | None:
    """The figures for a comparison with other runs; None if this version cannot read the recorded data."""
    try:
        return snapshot_of(world, recording, sections)
    except (ValueError, ArithmeticError, LookupError):
        return None  # `judge_checks` added a note about this to the report


def world_of(recording: Recording) -> World:
    """The world at the end of the run, without lost ranks. A rank that a signal ended still belongs to it."""
    return World(
        size=recording.header.world_size,
        launcher=recording.header.launcher,
        options=recording.header.options,
        arrivals=recording.arrivals,
        out=frozenset(e.rank for e in recording.events if e.kind is EventKind.LOST and e.rank is not None),
    )


def _rank_rows(world: World, judged: Sequence[Judged]) -> tuple[dict[str, Scalar], ...]:
    rows: list[dict[str, Scalar]] = []
    for rank, place in sorted(world.places.items()):
        row: dict[str, Scalar] = {"rank": rank, "local_rank": place.local_rank, "host": place.host, "gpu_uuid": None}
        for own in judged:
            row.update(own.added.columns.get(rank, {}))
        rows.append(row)
    return tuple(rows)


def _inventory(world: World, judged: Sequence[Judged]) -> tuple[HostKind, ...]:
    """The hosts grouped by their parts (INVENTORY), as checks report them; empty if no check reports any."""
    known = [own.added.inventory for own in judged if own.added.inventory]
    kinds: dict[tuple[str, ...], list[str]] = {}
    for (node, _), ranks in world.hosts.items() if known else ():
        parts = dict.fromkeys(INVENTORY, UNKNOWN)
        for inventory in known:
            found: defaultdict[str, dict[str, None]] = defaultdict(dict)
            for part, text in (item for rank in ranks for item in inventory.get(rank, {}).items()):
                found[part][text] = None
            parts |= {part: " and ".join(texts) for part, texts in found.items()}
        kinds.setdefault(tuple(parts.values()), []).append(node)
    return tuple(
        HostKind(hosts=tuple(hosts), parts=dict(zip(INVENTORY, texts, strict=True))) for texts, hosts in kinds.items()
    )
