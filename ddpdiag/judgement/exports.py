"""What becomes of errors that the exports of P2P003, or variables that are set, get around."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from ddpdiag.checks.api import Check, Seen
from ddpdiag.checks.collective.all_reduce import check as all_reduce
from ddpdiag.checks.launch import variables
from ddpdiag.checks.p2p.copies import check as copies
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.run.trials import check as run003
from ddpdiag.checks.world import World
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import Finding, Recording, Severity

_LADDER = fallback.CHECK
_NO_P2P = "NCCL_P2P_DISABLE"
# What P2P002 finds wrong with ways between GPUs, which is an error for a job that takes them.
_COPIES = ("wrong", "hung", "died", "raised")


def exports_of(world: World, recording: Recording, judged: Sequence[Judged]) -> dict[str, str | None]:
    """The variables that the job needs, if there was a climb that this version can read."""
    seen = Seen(world, _LADDER, recording)
    return fallback.exports(seen) if _can_read(judged, _LADDER, variables.CHECK, all_reduce.CHECK) else {}


def _can_read(judged: Sequence[Judged], *checks: Check[Any]) -> bool:
    """Can this version read what these checks recorded, as far as they ran?"""
    return all(own.readable for own in judged if own.check in checks)


def needed_of(world: World, recording: Recording, judged: Sequence[Judged]) -> dict[str, str | None]:
    """Those without which it does not work, where the job will have them."""
    exports = exports_of(world, recording, judged) if world.options.exports else {}
    return exports if exports and fallback.works_with_exports(Seen(world, _LADDER, recording)) else {}


def with_exports(world: World, recording: Recording, judged: Sequence[Judged]) -> list[Judged]:
    """Errors of the job's backend as it was without the exports are warnings, where the job will have them.

    So are those of copies between GPUs where NCCL takes no such copies, and works.
    """
    reasons: dict[tuple[str, str], str] = {}
    needed = needed_of(world, recording, judged)
    if needed:
        reasons |= dict.fromkeys(
            _own_failures(world, recording, judged), f"With the exports of {_LADDER.code} it works."
        )
    if _can_read(judged, variables.CHECK, all_reduce.CHECK) and _goes_without_p2p(world, recording, needed):
        why = "NCCL_P2P_DISABLE=1 is set for the job, so that NCCL makes no such copies, and it works."
        reasons |= dict.fromkeys(((copies.CHECK.code, f"{copies.CHECK.code}.{word}") for word in _COPIES), why)
    return [structs.replace(own, findings=tuple(_eased(own.findings, own.check.code, reasons))) for own in judged]


def _eased(findings: Sequence[Finding], code: str, reasons: Mapping[tuple[str, str], str]) -> Iterator[Finding]:
    for finding in findings:
        why = reasons.get((code, finding.code)) or reasons.get((code, finding.title))
        if why is None or finding.severity is not Severity.ERROR:
            yield finding
        else:
            yield structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {why}")


def _own_failures(world: World, recording: Recording, judged: Sequence[Judged]) -> Iterator[tuple[str, str]]:
    """Check and title of each finding on COL001 over the job's own backend."""
    trials = {
        trial.number
        for trial in recording.trials
        if trial.code == all_reduce.CHECK.code and trial.params.get("backend") == world.backend
    }
    for own in judged:
        for finding in own.findings:
            wrong = own.check is all_reduce.CHECK and finding.evidence.get("backend") == world.backend
            if wrong or (own.check is run003.CHECK and finding.evidence.get("trial") in trials):
                yield own.check.code, finding.title


def _goes_without_p2p(world: World, recording: Recording, needed: Mapping[str, str | None]) -> bool:
    """Does the job's NCCL make no copies between GPUs, because of the exports or of what is set on all ranks?"""
    if needed.get(_NO_P2P) == "1":
        return True
    rows = Seen(world, variables.CHECK, recording).by_rank
    everywhere = bool(rows) and all(row.variables.get(_NO_P2P) == "1" for row in rows.values())
    return everywhere and Seen(world, all_reduce.CHECK, recording).own_backend_works
