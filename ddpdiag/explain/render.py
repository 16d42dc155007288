"""Show the explanations of logs and error texts: the first cause in full, then its consequences."""

from collections.abc import Iterator, Sequence

from ddpdiag.evidence.attribution import Job, rank_lines
from ddpdiag.explain.card import Role
from ddpdiag.explain.tally import Call, Explanation, Sighting
from ddpdiag.model import Finding
from ddpdiag.render.blocks import Block, Items, Mark, Text
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.text import count, fold_hosts, fold_ranks, listed, ranks_text

_MARKS = {
    Role.CAUSE: Mark.ERROR,
    Role.FAILURE: Mark.ERROR,
    Role.HINT: Mark.WARNING,
    Role.WAIT: Mark.WARNING,
    Role.ECHO: Mark.DIM,
    Role.NOTE: Mark.DIM,
}
_NAMES_SHOWN = 8
# So many sightings are shown with all details.
_FULL_SHOWN = 3

_NO_KNOWN_ERROR = (
    "No known error found. The job may still have failed: look for the first error of the rank that ended first "
    "(torchrun --log-dir DIR --redirects 3 keeps each rank's output; NCCL_DEBUG=WARN and TORCH_DISTRIBUTED_DEBUG=INFO "
    "make it more detailed). Test the allocation itself with `ddpdiag check`, and run a job that hangs under "
    "`ddpdiag watch`."
)
_ONLY_ECHOES = (
    "These lines only show that another process failed. The first failure is not in this text, or it is not a known "
    "error. Look at the output of the ranks and hosts that are not named here, at the kernel's log (dmesg -T) and at "
    "sacct -j JOB -o JobID,State,ExitCode."
)
_ONLY_NOTES = (
    "No failure found in this {}. Healthy jobs print such lines, too. If the job failed, look at the output of its "
    "other ranks and hosts, and test the allocation itself with `ddpdiag check`."
)
_ONLY_HINTS = (
    "No failure found in this {}. Healthy jobs print such lines, too; if the job hangs or failed, start with {}. Look "
    "also at the output of its other ranks and hosts, and test the allocation itself with `ddpdiag check`."
)


def render(explanations: Sequence[Explanation], *, width: int, color: bool) -> str:
    """The explanations as text. Of several logs, those without a known text are only named at the end."""
    unexplained = [log for log in explanations if len(explanations) > 1 and not log.sightings]
    page = Page(color=color, width=width)
    for log in explanations:
        if log not in unexplained:
            paint(page, blocks(log))
    if unexplained:
        paint(page, _unexplained_logs(unexplained, explained_count=len(explanations) - len(unexplained)))
    return page.text().rstrip("\n") + "\n"


def blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield the blocks of an explanation: the sightings in order, with echoes and notes in brief, and a conclusion."""
    if explanation.source:
        known = sum(not sighting.card.is_fallback for sighting in explanation.sightings)
        unknown = len(explanation.sightings) - known
        parts = [count(explanation.line_count, "line"), count(known, "known text")]
        parts += [f"{unknown} unknown"] if unknown else []
        yield Text(f"ddpdiag: {one_line(explanation.source)}: {', '.join(parts)}")
    for number, sighting in enumerate(explanation.sightings):
        is_brief = number >= _FULL_SHOWN or (number > 0 and sighting.card.role in (Role.ECHO, Role.NOTE))
        lines = f"{sighting.count:,} times, lines {sighting.first_line:,} to {sighting.last_line:,}"
        lines = f"line {sighting.first_line:,}" if sighting.count == 1 else lines
        location = "; ".join(filter(None, (_origins_text(sighting), lines)))
        name = f"{sighting.card.name} ({location})" if explanation.source else sighting.card.name
        yield Text(name, sighting.card.role.value, _MARKS[sighting.card.role])
        details = [sighting.card.meaning] if is_brief else _details(sighting, is_log=bool(explanation.source))
        yield Items(tuple(details))
    if sentence := _closing_sentence(explanation):
        yield Text(sentence)


def render_job(job: Job, faults: Sequence[Finding], *, width: int, color: bool) -> str:
    """The faults that flight-recorder dumps of a job show, and what each rank does, as text."""
    page = Page(color=color, width=width)
    paint(page, _job_blocks(job, faults), details=True)
    return page.text()


def _job_blocks(job: Job, faults: Sequence[Finding]) -> Iterator[Block]:
    absent = f"; none of {_ranks_text(tuple(sorted(job.absent)))}" if job.absent else ""
    dumps = count(len(job.witnesses), "flight-recorder dump")
    yield Text(f"ddpdiag: {dumps}, {_ranks_text(tuple(job.witnesses))}{absent}")
    for fault in faults:
        yield Text(fault.title, fault.severity.value, Mark.ERROR if fault.ranks else Mark.WARNING)
        yield Items((fault.message, f"Do: {fault.fix}"))
    if not faults:
        yield Text("No operation is open in these dumps, or the last ones were posted by all ranks: they show no hang.")
    yield Items(tuple(rank_lines(job)), "ranks")


def _unexplained_logs(logs: Sequence[Explanation], *, explained_count: int) -> Iterator[Block]:
    """Name the logs without a known text. If no other log was explained, also say what to do."""
    names = listed([one_line(log.source) for log in logs], _NAMES_SHOWN)
    yield Text(f"ddpdiag: no known text in {count(len(logs), 'other file' if explained_count else 'file')}: {names}")
    if not explained_count:
        yield Text(_NO_KNOWN_ERROR)


def _details(sighting: Sighting, *, is_log: bool) -> Iterator[str]:
    card = sighting.card
    if is_log:
        yield f'"{one_line(sighting.excerpt)}"'
    if sighting.frame:
        yield f"Raised in: {one_line(sighting.frame)}"
    yield card.meaning
    if sighting.missing_ranks:
        yield f"Waited for: {_ranks_text(sighting.missing_ranks)}."
    if sighting.differing_calls:
        yield f"Collectives: {_differing_calls_text(sighting)}"
    elif len(sighting.ranks_by_work) > 1:
        # Ranks whose last collective has a lower number took another path in the code, or hang before the next one.
        first_work, *later = sighting.ranks_by_work.items()
        last_calls = [f"number {work} on {_ranks_text(ranks)}" for work, ranks in (first_work, *later[-_FULL_SHOWN:])]
        ranks_behind = first_work[1]
        behind = f"{_ranks_text(ranks_behind).capitalize()} lag{'s' if len(ranks_behind) == 1 else ''} behind."
        yield f"Collectives: {'; '.join(last_calls)}. {behind}"
    yield f"Confirm: {card.confirm}"
    yield f"Do: {card.fix}"
    yield f"Page: ddpdiag explain {card.code}"


def _call_text(call: Call) -> str:
    return call.operation if call.elements is None else f"{call.operation} of {count(call.elements, 'element')}"


def _differing_calls_text(sighting: Sighting) -> str:
    """The different collectives to which ranks gave one sequence number, each with its ranks; then the odd ranks."""
    *minority_calls, (_, majority) = sighting.differing_calls
    calls = [f"{_call_text(call)} on {_ranks_text(ranks)}" for call, ranks in sighting.differing_calls[-_FULL_SHOWN:]]
    minority = tuple(sorted(rank for _, ranks in minority_calls for rank in ranks))
    verb = "differs" if len(minority) == 1 else "differ"
    odd_ranks = f" {_ranks_text(minority).capitalize()} {verb} from most." if len(majority) > len(minority) else ""
    return f"number {sighting.differing_work} is {'; '.join(calls)}.{odd_ranks}"


def _origins_text(sighting: Sighting) -> str:
    """The ranks, tasks and hosts that printed a text: "ranks 0,2; host n1". Empty if none is known."""
    parts = [_ranks_text(sighting.ranks)] if sighting.ranks else []
    if sighting.local_ranks:
        parts.append(f"local {_ranks_text(sighting.local_ranks)}")
    if sighting.tasks:
        tasks = fold_ranks(sighting.tasks, limit=_NAMES_SHOWN)
        parts.append(f"{'task' if len(sighting.tasks) == 1 else 'tasks'} {tasks}")
    if sighting.hosts:
        hosts = one_line(fold_hosts(sighting.hosts, limit=_NAMES_SHOWN))
        parts.append(f"{'host' if len(sighting.hosts) == 1 else 'hosts'} {hosts}")
    return "; ".join(parts)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return ranks_text(ranks, limit=_NAMES_SHOWN)


def _closing_sentence(explanation: Explanation) -> str:
    if not explanation.sightings:
        return _NO_KNOWN_ERROR
    first = explanation.sightings[0]
    kind = "log" if explanation.source else "text"
    if all(sighting.card.role is Role.NOTE for sighting in explanation.sightings):
        return _ONLY_NOTES.format(kind)
    if explanation.source and not explanation.has_failure:
        return _ONLY_HINTS.format(kind, _location(first))
    if not explanation.is_explained:
        return _ONLY_ECHOES
    if not explanation.source:
        return ""
    if first.card.is_fallback:
        return f"No known text explains this log. Start with its first unknown failure: {_location(first)}."
    if first.card.role is Role.WAIT:
        awaited = _ranks_text(first.missing_ranks) if first.missing_ranks else "the rank for which it waited"
        return (
            f"Start with {_location(first)}: it only waited, so look at {awaited}. `ddpdiag watch` shows the rank and "
            "its line when the job hangs again; `ddpdiag check` tests the hosts and the network."
        )
    return f"Start with {_location(first)}; `ddpdiag explain {first.card.code}` is its page."


def _location(first: Sighting) -> str:
    origins = _origins_text(first)
    return f"{first.card.name} in line {first.first_line:,}{f' ({origins})' if origins else ''}"
