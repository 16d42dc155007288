"""What becomes of errors that the exports of P2P003 get around, in a job that takes them. Pure."""

from collections.abc import Iterator, Sequence

from msgspec import structs

from ddpdiag.check import Seen
from ddpdiag.checks import col001, p2p003, run003
from ddpdiag.judgement.verdict import Judged
from ddpdiag.model import Finding, Recording, Severity
from ddpdiag.world import World


def exports_of(world: World, recording: Recording, judged: Sequence[Judged]) -> dict[str, str | None]:
    """The variables that the job needs, if there was a climb that this version can read."""
    seen = Seen(world, p2p003.CHECK, recording)
    readable = any(own.check is p2p003.CHECK and own.readable for own in judged)
    return p2p003.exports(seen) if readable else {}


def needed_of(world: World, recording: Recording, judged: Sequence[Judged]) -> dict[str, str | None]:
    """Those without which it does not work, where the job will have them."""
    exports = exports_of(world, recording, judged) if world.options.exports else {}
    return exports if exports and p2p003.works_with_exports(Seen(world, p2p003.CHECK, recording)) else {}


def with_exports(world: World, recording: Recording, judged: Sequence[Judged]) -> list[Judged]:
    """Errors of the job's backend as it was without the exports are warnings, where the job will have them."""
    if not needed_of(world, recording, judged):
        return list(judged)
    return [structs.replace(own, findings=tuple(_healed(own, world, recording))) for own in judged]


def _healed(own: Judged, world: World, recording: Recording) -> Iterator[Finding]:
    before = {trial.number for trial in recording.trials if not trial.env}
    for finding in own.findings:
        concerned = (own.check is col001.CHECK and world.backend in finding.title) or (
            own.check is run003.CHECK and finding.evidence.get("trial") in before & _over(world, recording)
        )
        if finding.severity is Severity.ERROR and concerned:
            said = f"{finding.message} With the exports of {p2p003.CHECK.code} it works."
            yield structs.replace(finding, severity=Severity.WARNING, message=said)
        else:
            yield finding


def _over(world: World, recording: Recording) -> set[int]:
    """The trials of COL001 over the job's own backend."""
    return {
        trial.number
        for trial in recording.trials
        if trial.code == col001.CHECK.code and trial.params.get("backend") == world.backend
    }
