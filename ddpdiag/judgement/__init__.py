"""From a recording to a report: every check's findings, the verdict and its sentence; and reports of earlier runs.

Pure: the same on the cluster, on a laptop, and years later.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Seen, Stage
from ddpdiag.checks.findings import Section, Workarounds
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.checks.world import World
from ddpdiag.codec import SMALLEST_NUMBER, decode, read_bytes, read_recording, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement.cancelled import established, not_tried
from ddpdiag.judgement.hosts import fastest_first, leaves_of, sort_hosts
from ddpdiag.judgement.judged import Judged, affected_by_code, by_code, concerns_of, selected, stages_of
from ddpdiag.judgement.rank_0_lost import with_end
from ddpdiag.judgement.verdict import conclude, verdict_of_needed_hosts
from ddpdiag.model import CheckLine, EventKind, Finding, Outcome, Recording, Report, Scalar, Severity, Skip, WorldLine
from ddpdiag.model.options import Snapshot
from ddpdiag.model.report import INVENTORY, SCHEMA, UNKNOWN, HostKind

AnyCheck = Check[Any]
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
# Kinds of Outcome.timings that are no measurement.
_SPENT = ("context", "group", "gate")


def judge(recording: Recording, checks: Sequence[AnyCheck]) -> Report:
    """The report of a run. It depends on nothing but the recording and this version's checks."""
    recording = not_tried(with_end(recording))
    world = world_of(recording)
    shown = established(recording)
    known = recording.header.checks or [check.code for check in checks]
    chosen = [
        check
        for check in checks
        if check.stage is Stage.RUN or (check.code in known and selected(check, recording.header.options))
    ]
    notes = list(recording.notes)
    if recording.end is None:
        notes.append("the recording has no end: the run was killed, or this is one rank's part of it")
    kept: dict[str, tuple[Finding, ...]] = {}
    judged = _excused([_judge_check(Seen(world, check, shown, kept=kept), notes) for check in chosen])
    sections = [own.added.section for own in judged if own.added.section is not None]
    workarounds = next((own.added.workarounds for own in judged if own.added.workarounds), Workarounds())
    judged = [_without_guesses(own, workarounds) for own in judged]
    needed = workarounds.variables if workarounds.needed and world.options.uses_workarounds else {}
    conclusion = conclude(world, recording, judged, needed)
    findings = sorted((f for j in judged for f in j.findings), key=lambda f: _ORDER.index(f.severity))
    hosts, on_hosts = sort_hosts(world, recording, judged, conclusion.verdict)
    conclusion = verdict_of_needed_hosts(world, shown, judged, conclusion, hosts, needed)
    rows = _rank_rows(world, judged)
    outcomes = by_code(recording)
    concerns = concerns_of(judged)
    affected = affected_by_code(concerns)
    return Report(
        verdict=conclusion.verdict,
        degraded=conclusion.degraded,
        sentence=conclusion.sentence,
        exit_code=conclusion.exit_code,
        seconds=recording.end.seconds
        if recording.end
        else max((event.seconds for event in recording.events), default=0.0),
        budget_seconds=recording.header.options.budget_seconds,
        run_id=recording.header.run_id,
        world=_world_line(world),
        ranks=rows,
        stages=stages_of(recording, judged, outcomes, concerns),
        checks=tuple(_check_line(j, outcomes.get(j.check.code, ()), affected.get(j.check.code, {})) for j in judged),
        findings=tuple(findings),
        measurements=_measurements(shown, judged),
        notes=(*notes, *on_hosts),
        hosts=fastest_first(hosts, rows),
        bench=next((own.bench for own in sections if own.bench is not None), None),
        train=next((own.train for own in sections if own.train is not None), None),
        matrices=tuple(matrix for own in judged for matrix in own.added.matrices),
        workarounds=dict(workarounds.variables),
        # Versions first.
        settings=tuple(sorted((s for own in judged for s in own.added.settings), key=lambda s: s.kind != "version")),
        inventory=_inventory(world, judged),
        created=recording.header.created,
        version=recording.header.version,
        snapshot=_snapshot(world, shown, sections),
    )


def _snapshot(world: World, recording: Recording, sections: Sequence[Section]) -> Snapshot | None:
    """What another run can be compared with; None of a recording that this version cannot read."""
    try:
        return snapshot_of(world, recording, sections)
    except (ValueError, ArithmeticError, LookupError):
        return None  # `_judge_check` has noted it


def _world_line(world: World) -> WorldLine:
    return WorldLine(
        size=world.size,
        hosts=tuple(dict.fromkeys(node for node, _ in world.hosts)),
        launcher=world.launcher,
        backend=world.backend,
        leaves=leaves_of(world),
        scheduler="slurm" if world.in_slurm else "",
    )


def world_of(recording: Recording) -> World:
    """The world as it was at the end. A rank that a signal ended took part in all that is judged."""
    return World(
        size=recording.header.world_size,
        launcher=recording.header.launcher,
        options=recording.header.options,
        arrivals=recording.arrivals,
        out=frozenset(e.rank for e in recording.events if e.kind is EventKind.LOST and e.rank is not None),
    )


def _judge_check(seen: Seen[Any], notes: list[str]) -> Judged:
    check = seen.check
    skip = _skip_of(seen)
    try:
        return Judged(
            check=check,
            findings=seen.findings,
            added=check.report(seen),
            skip=skip,
        )
    except (ValueError, ArithmeticError, LookupError) as error:  # msgspec's own errors are ValueErrors
        notes.append(f"{check.code} was not judged: this version of ddpdiag cannot read its recorded data ({error})")
        return Judged(check=check, readable=False)


def _revised(judged: Judged, revise: Callable[[Finding], Finding]) -> Judged:
    """The check with each of its findings revised, also where it concerns other stages."""
    concerns = tuple(concern._replace(finding=revise(concern.finding)) for concern in judged.added.concerns)
    return structs.replace(
        judged,
        findings=tuple(map(revise, judged.findings)),
        added=structs.replace(judged.added, concerns=concerns) if concerns else judged.added,
    )


def _without_guesses(judged: Judged, workarounds: Workarounds) -> Judged:
    """Findings in which a workaround that was confirmed takes the place of a guess."""
    if not workarounds.needed:
        return judged

    def confirmed(finding: Finding) -> Finding:
        if not finding.guess:
            return finding
        return structs.replace(finding, fix=finding.fix.replace(finding.guess, workarounds.fix), guess="")

    return _revised(judged, confirmed)


def _excused(judged: Sequence[Judged]) -> list[Judged]:
    """Errors of which a check knows that they do not concern the job are warnings."""
    excuses = [own.added.excuse for own in judged if own.added.excuse is not None]

    def eased(finding: Finding) -> Finding:
        if finding.severity is not Severity.ERROR:
            return finding
        why = next(filter(None, (_excuse_text(excuse, finding) for excuse in excuses)), None)
        if why is None:
            return finding
        return structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {why}")

    return [_revised(own, eased) for own in judged]


def _excuse_text(excuse: Callable[[Finding], str | None], finding: Finding) -> str | None:
    try:
        return excuse(finding)
    except (ValueError, ArithmeticError, LookupError):  # what another check recorded cannot be read
        return None


def _skip_of(seen: Seen[Any]) -> Skip | None:
    """Why the check was left out, if it was; of one that runs nothing itself, its ground decides here."""
    check = seen.check
    reason = check.skip(seen) if check.measure is None else None
    if reason is not None:
        return reason.skip(check, seen.options)
    return next((skip for skip in seen.recording.skips if skip.code == check.code), None)


def _rank_rows(world: World, judged: Sequence[Judged]) -> tuple[dict[str, Scalar], ...]:
    rows: list[dict[str, Scalar]] = []
    for rank, place in sorted(world.places.items()):
        row: dict[str, Scalar] = {"rank": rank, "local_rank": place.local_rank, "host": place.host, "gpu_uuid": None}
        for own in judged:
            row.update(own.added.columns.get(rank, {}))
        rows.append(row)
    return tuple(rows)


def _inventory(world: World, judged: Sequence[Judged]) -> tuple[HostKind, ...]:
    """The hosts by what the checks know of them; nothing where no check knows of any."""
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


def _check_line(judged: Judged, outcomes: Sequence[Outcome], affected: Mapping[str, int]) -> CheckLine:
    check = judged.check
    return CheckLine(
        code=check.code,
        name=check.name,
        stage=check.stage.value,
        statuses={status.value: count for status, count in Counter(o.status for o in outcomes).items()},
        skipped_because=judged.skip.reason if judged.skip else None,
        measures=check.measure is not None,
        affected=dict(affected),
    )


def _measurements(recording: Recording, judged: Sequence[Judged]) -> dict[str, Scalar]:
    """The checks' figures, and what the run cost: of each kind, the sum over the trials of the rank that spent most."""
    figures = {name: value for own in judged for name, value in own.added.figures.items()}
    spent = {name: figures.pop(name) for name in [*figures] if name.startswith("seconds.")}
    sums: dict[str, defaultdict[int, float]] = {}
    for outcome in recording.outcomes:
        for kind in _SPENT if outcome.timings else ():
            if kind in outcome.timings:
                sums.setdefault(kind, defaultdict(float))[outcome.rank] += outcome.timings[kind]
    return figures | spent | {f"seconds.{kind}": max(ranks.values()) for kind, ranks in sums.items()}


# Reports of earlier runs ---------------------------------------------------------------------------------------------


class _Head(Struct):
    schema: str = ""


def read_run(path: str) -> Recording | Report:
    """The recording in a file or folder, or the JSON report in a file; UsageError for anything else."""
    try:
        return read_recording([Path(path)])
    except UsageError as error:
        if os.path.isdir(path):
            raise
        refused = error
    where = readable(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror or error}") from error
    try:
        schema = decode(data, _Head).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise refused from None  # many lines, and so no JSON by itself
    if schema.startswith("ddpdiag.recording/"):
        raise refused
    if schema != SCHEMA:
        raise UsageError(
            f"{where} is neither a recording (--record) nor a report (--json) of ddpdiag"
            + (f": its schema is {readable(schema)!r}" if schema else "")
        )
    try:
        return decode(data, Report, least=SMALLEST_NUMBER)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not a report that this version of ddpdiag can read: {error}") from error


def read_report(path: str) -> Report:
    """The report in a JSON file, or that of a recording; UsageError for anything else."""
    run = read_run(path)
    return run if isinstance(run, Report) else judge(run, all_checks())


def read_baseline(path: str) -> Snapshot:
    """What a run can be compared with; UsageError, with the option as its subject, where the file has no such thing."""
    try:
        snapshot = read_report(path).snapshot
    except UsageError as error:
        raise UsageError(f"--baseline: {error}") from error
    if snapshot is None or not (snapshot.figures or snapshot.series):
        raise UsageError(f"--baseline {readable(path)}: that run measured nothing; give the recording of one that did")
    return snapshot
