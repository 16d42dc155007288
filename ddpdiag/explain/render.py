"""Show the explanations of logs and error texts: the first cause in full, then its consequences."""

from collections.abc import Iterable, Iterator, Sequence
from shlex import quote

from ddpdiag.evidence.attribution import Job, rank_lines
from ddpdiag.explain.card import Card, Role
from ddpdiag.explain.log_files import doubt_about_job
from ddpdiag.explain.tally import Call, Explanation, Sighting
from ddpdiag.model import Finding, Report, Severity
from ddpdiag.render.blocks import Block, Fold, Items, Mark, Text
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.stats import OddRanks, find_odd_ranks
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
    "the scheduler's record of the job."
)
_ONLY_ROOT_CAUSE = (
    "torchrun saw it exit first, and no line shows why. Read that rank's own output (torchrun --log-dir DIR "
    "--redirects 3 keeps it); if it only lost another rank, look at those of other hosts."
)
_ONLY_NOTES = (
    "No failure found in this {}. Healthy jobs print such lines, too. If the job failed, look at the output of its "
    "other ranks and hosts, and test the allocation itself with `ddpdiag check`."
)
_ONLY_HINTS = (
    "No failure found in this {}. Healthy jobs print such lines, too; if the job hangs or failed, start with {}. Look "
    "also at the output of its other ranks and hosts, and test the allocation itself with `ddpdiag check`."
)


def render(blocks: Iterable[Block], *, width: int, color: bool, details: bool = False) -> str:
    """The blocks as text."""
    page = Page(color=color, width=width)
    paint(page, blocks, details=details)
    return page.text().rstrip("\n") + "\n"


def log_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield the blocks of an explanation: the sightings in order, with echoes and notes in brief, and a conclusion."""
    sightings, is_one_log = explanation.sightings, len(explanation.line_counts) == 1
    if not explanation.is_pasted:
        yield Text(f"ddpdiag: {_logs_text(explanation)}")
    if doubt := doubt_about_job([*explanation.line_counts]):
        yield Text(f"They are read as the logs of one job, but {doubt}. Explain the logs of other jobs alone.")
    echoes = [sighting for sighting in sightings[1:] if sighting.card.role is Role.ECHO]
    for number, sighting in enumerate(sightings):
        if sighting in echoes and (len(echoes) > 1 or not is_one_log):
            if sighting is echoes[0]:
                yield Text(_echoes_text(sightings[0], echoes, is_one_log), Role.ECHO.value, Mark.DIM)
            continue
        is_brief = number >= _FULL_SHOWN or (number > 0 and sighting.card.role in (Role.ECHO, Role.NOTE))
        location = "; ".join(filter(None, (_origins_text(sighting), _lines_text(sighting, is_one_log))))
        name = sighting.card.name if explanation.is_pasted else f"{sighting.card.name} ({location})"
        yield Text(name, sighting.card.role.value, _MARKS[sighting.card.role])
        yield Items((sighting.card.meaning,) if is_brief else tuple(_details(sighting, explanation)))
    if sentence := _closing_sentence(explanation):
        yield Text(sentence)
    if not is_one_log:
        texts = {log: [one for one in sightings if log in one.lines_by_log] for log in explanation.line_counts}
        lines = (f"{log}: {_first_text(texts[log], log)}" for log in explanation.line_counts)
        yield Fold("Logs", (Items(tuple(map(one_line, lines))),))


def lead_sentence(explanation: Explanation) -> str:
    """The meaning of the first cause and its place, for the error file of a launcher; empty if nothing is explained."""
    if not explanation.is_explained:
        return ""
    return f"{explanation.sightings[0].card.meaning} {_closing_sentence(explanation)}"


def _first_text(sightings: Sequence[Sighting], log: str) -> str:
    """The first sighting in a log: its card and the line."""
    return f"{sightings[0].card.name}, line {sightings[0].lines_by_log[log]:,}" if sightings else "no known text"


def _logs_text(explanation: Explanation) -> str:
    """The name of the only log or the number of logs, with the numbers of lines and of known and unknown texts."""
    logs, sightings = explanation.line_counts, explanation.sightings
    known = sum(not sighting.card.is_fallback for sighting in sightings)
    parts = [count(sum(logs.values()), "line"), count(known, "known text")]
    parts += [f"{len(sightings) - known} unknown"] if known < len(sightings) else []
    if len(logs) == 1:
        return f"{one_line(next(iter(logs)))}: {', '.join(parts)}"
    silent = [one_line(log) for log in logs if not any(log in sighting.lines_by_log for sighting in sightings)]
    names = listed(silent, None) if len(silent) <= _NAMES_SHOWN else f"{len(silent):,} of them"
    absence = f". No known text in {names}" if 0 < len(silent) < len(logs) else ""
    return f"{len(logs):,} logs of one job: {', '.join(parts)}{absence}"


def _lines_text(sighting: Sighting, is_one_log: bool) -> str:
    """The place of a text: "line 3", "2 times, lines 3 to 7", "2 times, first in rank1.log, line 3"."""
    first = sighting.first
    place = f"line {first.line:,}" if is_one_log else f"{one_line(first.log)}, line {first.line:,}"
    if sighting.count == 1:
        return place
    lines = f"lines {first.line:,} to {sighting.last_line:,}" if is_one_log else f"first in {place}"
    return f"{sighting.count:,} times, {lines}"


def _echoes_text(first: Sighting, echoes: Sequence[Sighting], is_one_log: bool) -> str:
    """Count the other ranks that report only that another process failed, and name the echoes."""
    lost_ranks = first.ranks if first.card.role in (Role.CAUSE, Role.FAILURE) else ()
    ranks = {rank for echo in echoes for rank in echo.ranks}.difference(lost_ranks) if lost_ranks else set()
    number = len(ranks) or sum(echo.count for echo in echoes)
    subject = f"{count(number, 'other rank' if ranks else 'line')} {'reports' if number == 1 else 'report'}"
    lost = _ranks_text(lost_ranks) if len(lost_ranks) == 1 else "another process"
    names = listed([f"{echo.card.name} ({_lines_text(echo, is_one_log)})" for echo in echoes], _FULL_SHOWN)
    end = "the end of the job" if first.card.code == "RUN004.told" else f"the loss of {lost}"
    if lost_ranks and not ranks:  # only the failed rank itself, or ranks that no line names, printed them
        return f"{count(number, 'line')} {'follows' if number == 1 else 'follow'} from it: {names}"
    return f"{subject} {end}: {names}"


def card_blocks(query: str, cards: Sequence[Card], *, is_found: bool) -> Iterator[Block]:
    """Yield the card that has all words of the query in full (`is_found`), and what the other cards mean."""
    cards = [card.with_values({}) for card in cards]
    no_file = "" if " " in query else " (there is no such file or folder)"
    subject, others = f'"{one_line(query)}"{no_file}', cards[is_found:]
    if not cards:
        yield Text(f"{subject} is not a code, not the name of a check, and has no words of a known error text.")
        yield Text(_NO_KNOWN_ERROR)
    if is_found:
        yield Text(cards[0].name, cards[0].role.value, _MARKS[cards[0].role])
        yield Items((f'"{cards[0].example}"', *_card_lines(cards[0])))
    if others:
        beginning = "Other texts with these words" if is_found else f"No known error text is {subject}. The nearest are"
        yield Text(f"{beginning} (`ddpdiag explain {others[0].name}` shows one in full):")
        yield Items(tuple(f"{card.name}: {card.meaning}" for card in others))


def run_blocks(name: str, report: Report) -> Iterator[Block]:
    """Yield the verdict and the first finding of a run of ddpdiag."""
    yield Text(f"ddpdiag: {one_line(name)}: {one_line(str(report))}")
    for finding in [finding for finding in report.findings if finding.severity is not Severity.NOTE][:1]:
        mark = Mark.ERROR if finding.severity is Severity.ERROR else Mark.WARNING
        yield Text(f"{finding.code}: {finding.title}", finding.severity.value, mark)
        yield Items((finding.message, f"Do: {finding.fix}", f"Page: ddpdiag explain {finding.code}"))
    yield Text(f"`ddpdiag judge {quote(name)}` shows the whole report.")


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


def _details(sighting: Sighting, explanation: Explanation) -> Iterator[str]:
    card = sighting.card
    if not explanation.is_pasted:
        yield f'"{one_line(sighting.first.excerpt)}"'
    if sighting.frame:
        odd_ranks = find_odd_ranks(sighting.frame_by_rank)
        yield f"Raised in: {one_line(sighting.frame) if odd_ranks is None else _places_text(odd_ranks)}"
    meaning, *instructions = _card_lines(card)
    yield meaning
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
    yield from instructions


def _card_lines(card: Card) -> tuple[str, ...]:
    return card.meaning, f"Confirm: {card.confirm}", f"Do: {card.fix}", f"Page: ddpdiag explain {card.code}"


def _call_text(call: Call) -> str:
    return call.operation if call.elements is None else f"{call.operation} of {count(call.elements, 'element')}"


def _differing_calls_text(sighting: Sighting) -> str:
    """The different collectives to which ranks gave one sequence number, each with its ranks; then the odd ranks."""
    calls = [f"{_call_text(call)} on {_ranks_text(ranks)}" for call, ranks in sighting.differing_calls[-_FULL_SHOWN:]]
    odd = sighting.odd_callers
    verb = "differs" if len(odd) == 1 else "differ"
    odd_ranks = f" {_ranks_text(odd).capitalize()} {verb} from most." if odd else ""
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
    is_one_log = len(explanation.line_counts) == 1
    kind = "text" if explanation.is_pasted else "log" if is_one_log else "job"
    start = f"Start with {_location(first, is_one_log)}"
    if all(sighting.card.role is Role.NOTE for sighting in explanation.sightings):
        return _ONLY_NOTES.format(kind)
    if not explanation.is_pasted and not explanation.has_failure:
        return _ONLY_HINTS.format(kind, _location(first, is_one_log))
    if not explanation.is_explained:
        exits = (one for one in explanation.sightings if one.card.is_root_cause)
        root_cause = next((_location(one, is_one_log) for one in exits), "")
        return f"Start with {root_cause}: {_ONLY_ROOT_CAUSE}" if root_cause else _ONLY_ECHOES
    if explanation.is_pasted:
        return ""
    if first.card.is_fallback:
        return f"No known text explains this {kind}. {start.replace('with', 'with its first unknown failure:', 1)}."
    suspicion = _suspicion(explanation)
    if first.card.role is Role.WAIT:
        path = " A rank that itself took another path waits, too." if first.card.code == "RUN003.hung" else ""
        undecided = f"{start}: no line shows for which rank it waited.{path} "
        return (
            f"{suspicion or undecided}`ddpdiag watch` shows the rank and its line when the job hangs again; "
            "`ddpdiag check` tests the hosts and the network."
        )
    return f"{suspicion or f'{start}; '}`ddpdiag explain {first.card.code}` is its page."


def _suspicion(explanation: Explanation) -> str:
    """The sentence that names the ranks for which others wait, if the lines show them; else empty."""
    first = explanation.sightings[0]
    is_wait = first.card.role is Role.WAIT
    waits = [one for one in explanation.sightings if one.card.role is Role.WAIT] if is_wait else [first]
    suspects, reason = next(filter(None, map(_suspects, waits)), ((), ""))
    if is_wait and not suspects and (suspects := explanation.silent_ranks):
        reason = "every other rank reports that it waited or lost a rank"
    elif is_wait and not suspects and (odd_ranks := find_odd_ranks(explanation.waiting_places)) is not None:
        suspects, places = odd_ranks.ranks, _places_text(odd_ranks)
        if not suspects:
            return f"The ranks waited at different lines, and no line shows which took another path: {places}. "
        subject = "it" if len(suspects) == 1 else "they"
        reason = f"most ranks waited at another line, so {subject} probably took another path in the code: {places}"
    ended = {rank for one in explanation.sightings if one.card.name == "worker-terminated" for rank in one.ranks}
    # torchrun ended these ranks after the first failure that it observed, which it calls the root cause.
    remark = "torchrun's `Root Cause` is another rank: the first that exited. " if ended.issuperset(suspects) else ""
    return f"Start with {_ranks_text(suspects)}: {reason}. {remark}" if suspects else ""


def _suspects(sighting: Sighting) -> tuple[tuple[int, ...], str] | None:
    """The ranks for which others wait, and the reason, if the lines of a text show them."""
    if ranks := sighting.odd_callers:
        return ranks, f"collective number {sighting.differing_work} is another one there than on most ranks"
    if ranks := sighting.ranks_behind:
        lowest, *_, highest = sighting.ranks_by_work
        return ranks, f"the last collective there is number {lowest}, on other ranks {highest}"
    if ranks := sighting.missing_ranks:
        waiting = _ranks_text(sighting.ranks) if sighting.ranks else "other ranks"
        return ranks, f"{waiting} waited for {'it' if len(ranks) == 1 else 'them'} in vain"
    if reporter := sighting.first.values.get("reporter"):
        return (int(reporter),), "it reported the time-out first"
    return None


def _places_text(odd_ranks: OddRanks) -> str:
    """The places in the user's code, each with its ranks, the fewest ranks first."""
    sides = sorted(odd_ranks.by_value.items(), key=lambda side: (len(side[1]), side[1]))
    return listed([f"{one_line(str(frame))} ({_ranks_text(ranks)})" for frame, ranks in sides], _FULL_SHOWN)


def _location(first: Sighting, is_one_log: bool) -> str:
    origins, origin = _origins_text(first), first.first.origin
    processes = max(first.ranks, first.local_ranks, key=len)
    if len(processes) > 1 and not is_one_log:
        process = f"local rank {origin.local_rank}" if origin.rank is None else f"rank {origin.rank}"
        host = f" on {one_line(origin.host)}" if origin.host else ""
        origins = f"{process}{host}, the first of {len(processes)}"
    log = "" if is_one_log else f"{one_line(first.first.log)}, "
    return f"{first.card.name} in {log}line {first.first.line:,}{f' ({origins})' if origins else ''}"
