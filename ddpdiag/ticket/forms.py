"""The issue forms of NVIDIA/nccl and PyTorch: one section for each field, under the field's label.

GitHub turns an answered form into such sections. Labels and order are those of NVIDIA/nccl,
.github/ISSUE_TEMPLATE/ISSUE.yaml (June 2026), and pytorch/pytorch, .github/ISSUE_TEMPLATE/bug-report.yml (2026).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from shlex import join
from typing import NamedTuple

from ddpdiag.model import Finding, Recording, Report, Severity, Status, Verdict
from ddpdiag.model.report import NONE, UNKNOWN
from ddpdiag.render.blocks import Block, Code, Fold, Items, Matrix, Section, Text
from ddpdiag.render.findings import finding_boxes
from ddpdiag.render.report import kinds_of_hosts, sections
from ddpdiag.render.shell import shell_lines
from ddpdiag.text import count, fold_hosts, fold_ranks
from ddpdiag.ticket import Kind
from ddpdiag.ticket.job import Job

NEW_ISSUE = {
    Kind.NCCL: "https://github.com/NVIDIA/nccl/issues/new?template=ISSUE.yaml",
    Kind.PYTORCH: "https://github.com/pytorch/pytorch/issues/new?template=bug-report.yml",
}
COLLECT_ENV = "python -m torch.utils.collect_env"
# The commands whose output a form asks for.
TOOLS = {Kind.NCCL: ("nvidia-smi", "nvidia-smi topo -m", "ibstatus"), Kind.PYTORCH: (COLLECT_ENV,)}
_FINDINGS_SHOWN, _TOPOLOGIES_SHOWN, _MAX_LETTERS = 6, 2, 12_000
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+\.\d+\S*)")
_FAILED = (Status.UNHEARD, Status.DIED, Status.RAISED, Status.HUNG)
_IMPACT, _NCCL_VERSION = "How is this issue impacting you?", "NCCL Version"
_BUG, _VERSIONS = "🐛 Describe the bug", "Versions"
_TITLES = {Kind.NCCL: "[Issue]: ", Kind.PYTORCH: ""}
# The checks that use the job's backend. Findings of stage "run" name the backend of the trial.
_OF_BACKEND = ("COL", "P2P", "FAB", "TRN")
# `--select` accepts no checks that only judge the run.
_NOT_SELECTABLE = ("RUN", "CMP")
_TRACEBACK = re.compile(r"^(Traceback \(most recent call last\):|Fatal Python error:)", re.MULTILINE)
_NCCL_VARIABLES = "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=ncclDebug.%h.%p NCCL_TOPO_DUMP_FILE=ncclSystem.txt"
_NOT_AVAILABLE = "Not available; to get it"
_NO_WARNING = Text("There is no NCCL WARN in the reports and logs.", "First Error")
_TOPOLOGY = "topology (NCCL_TOPO_DUMP_FILE)"
_NCCL_LINE = re.compile(r"\bNCCL (INFO|WARN|version)\b")
# The answers to the first question of NCCL's form, with the findings that show each. The first match counts: a crash
# explains the hangs around it.
_IMPACTS = {
    "Data corruption": re.compile(r"\.(host-)?wrong\b|\.(diverged|unequal|gradient)|wrong values"),
    "Application crash": re.compile(r"\.(died|raised|unheard|fails|failed)\b|\b(raises|dies)\b"),
    "Application hang": re.compile(r"\.(hung|hangs|mismatch|survived)\b|\bhangs\b"),
    "Lower performance than expected": re.compile(r"slow|below|straggler|\.(sockets|no-gdr|inside|host|path|alone)\b"),
}


class Gap(NamedTuple):
    """A command that gives what is not available, and where to run it (empty: on the job's hosts)."""

    command: str
    place: str = ""


Part = Block | Gap


def nccl_form(job: Job, attached: str) -> list[Block]:
    """The form of NVIDIA/nccl. `attached` is the name of the bundle, or empty."""
    fields: dict[str, Iterable[Part]] = {
        _IMPACT: [Text(impact_of(job) or f"Please specify: {', '.join(_IMPACTS)}")],
        "Share Your Debug Logs": _logs(job, attached),
        "Steps to Reproduce the Issue": [*_steps(job), *_environment(job), *_history(job)],
        _NCCL_VERSION: _version(job),
        "Your platform details": _platform(job),
        "Error Message & Behavior": [*([] if job.warnings else [_NO_WARNING]), *_behavior(job)],
    }
    return [*_head(job, Kind.NCCL), *(_field(label, parts, job) for label, parts in fields.items())]


def pytorch_form(job: Job, attached: str) -> list[Block]:
    """The bug report of PyTorch. `attached` is the name of the bundle, or empty."""
    output = job.outputs.get(COLLECT_ENV)
    fields: dict[str, Iterable[Part]] = {
        _BUG: [*_behavior(job), *_error(job), *_steps(job), *_attached(job, attached)],
        _VERSIONS: [*_environment(job), _output(output) if output else Gap(COLLECT_ENV)],
    }
    return [*_head(job, Kind.PYTORCH), *(_field(label, parts, job) for label, parts in fields.items())]


FORMS = {Kind.NCCL: nccl_form, Kind.PYTORCH: pytorch_form}


def unanswered(job: Job, kind: Kind) -> list[str]:
    """The required fields that the evidence does not fill in."""
    fields: dict[str, object] = {"Title": job.findings}
    if kind is Kind.NCCL:
        fields |= {_IMPACT: impact_of(job), _NCCL_VERSION: nccl_version(job)}
    else:
        fields |= {_BUG: job.findings, _VERSIONS: job.outputs.get(COLLECT_ENV)}
    return [label for label, answer in fields.items() if not answer]


def warning_of(job: Job, kind: Kind) -> str:
    """The sentence for a form of NCCL about a run in which nothing involves NCCL; else empty."""
    if kind is not Kind.NCCL or not job.runs or job.warnings or any(_involves_nccl(job, each) for each in job.findings):
        return ""
    backends = sorted({run.world.backend for run in job.runs})
    if not job.findings and all(run.verdict is Verdict.FIT for run in job.runs):
        reason = "ddpdiag found no problem, so there is nothing to report"
    elif "nccl" not in backends:
        reason = f"the run used {', '.join(backends)}"
    else:
        reason = f"it has {', '.join(dict.fromkeys(each.code for each in job.findings)) or 'no findings'}"
    return f"No finding of this run involves NCCL; {reason}."


def _involves_nccl(job: Job, finding: Finding) -> bool:
    text = f"{finding.title} {finding.message}".lower()
    is_of_backend = finding.code.startswith(_OF_BACKEND) and "gloo" not in text
    is_named = finding.code.startswith((*_OF_BACKEND, "RUN")) and "nccl" in text
    return (is_of_backend or is_named) and any(run.world.backend == "nccl" for run in job.runs)


def _head(job: Job, kind: Kind) -> Iterator[Block]:
    """Yield the warning and the title, which is that of the first finding about NCCL, if there is one."""
    if sentence := warning_of(job, kind):
        yield Text(sentence)
    findings = sorted(job.findings, key=lambda finding: not _involves_nccl(job, finding))
    text = findings[0].title.replace("`", "'") if findings else "(please describe the issue in one line)"
    yield Text(f"`{_TITLES[kind]}{text}`", "Title")


def _field(label: str, parts: Iterable[Part], job: Job) -> Section:
    """A field of the form. Successive commands for what is not available are one block."""
    hosts = fold_hosts(job.hosts, limit=8) or "a host of the job"
    blocks: list[Block] = []
    for part in parts:
        if not isinstance(part, Gap):
            blocks.append(part)
            continue
        lines = f"{part.command}   # {part.place or f'on {hosts}'}"
        if blocks and isinstance(last := blocks[-1], Code) and last.title == _NOT_AVAILABLE:
            blocks.pop()
            lines = f"{last.text}\n{lines}"
        blocks.append(Code(lines, _NOT_AVAILABLE))
    return Section(label, tuple(blocks))


def impact_of(job: Job) -> str | None:
    """The impact that the findings show, errors before warnings; None if they show none."""
    for level in (Severity.ERROR, Severity.WARNING):
        texts = [f"{finding.code} {finding.title}" for finding in job.findings if finding.severity is level]
        for impact, pattern in _IMPACTS.items():
            if any(map(pattern.search, texts)):
                return impact
    return None


def nccl_version(job: Job) -> str:
    """NCCL's version with its CUDA, such as "2.27.1+cuda12.8": its own in a log, else as torch reports it, or empty."""
    parts = (kind.parts for report in job.reports for kind in report.inventory)
    known = ((each.get("NCCL", NONE), each.get("CUDA", NONE)) for each in parts)
    of_torch = (f"{nccl}+cuda{cuda}" for nccl, cuda in known if not {nccl, cuda} & {NONE, UNKNOWN})
    return _logged_version(job) or next(of_torch, "")


def _logged_version(job: Job) -> str:
    """The first version in the logs that NCCL_DEBUG=INFO gives, or empty."""
    return next((match[1] for text in job.logs.values() if (match := _VERSION.search(text))), "")


def _version(job: Job) -> Iterator[Part]:
    version = nccl_version(job)
    yield Text(version or "not known")
    if not version:
        yield Gap("python -c 'import torch; print(torch.cuda.nccl.version(), torch.version.cuda)'")


def _logs(job: Job, attached: str) -> Iterator[Part]:
    yield from _attached(job, attached)
    lines = job.warnings | {name: _log_kind(text) for name, text in job.logs.items() if name not in job.warnings}
    yield Items(tuple(f"{name}: {line}" for name, line in lines.items()), "Logs, with the first NCCL WARN of each")
    if not (_logged_version(job) and _TOPOLOGY in lines.values()):
        yield Gap(f"export {_NCCL_VARIABLES}", "before the job")
        yield Gap(
            f"{join(('ddpdiag', 'ticket', 'nccl', *job.files))} --log 'ncclDebug.*' --log ncclSystem.txt", "after it"
        )


def _log_kind(text: str) -> str:
    """The kind of a log without NCCL WARN."""
    if "<system version" in text[:1000]:
        return _TOPOLOGY
    return "log of NCCL without NCCL WARN" if _NCCL_LINE.search(text) else "no log of NCCL"


def _attached(job: Job, attached: str) -> Iterator[Part]:
    """Yield the name of the bundle and what is in it."""
    nouns = ["topology file" if _log_kind(text) == _TOPOLOGY else "log" for text in job.logs.values()]
    nouns += ["command output" for output in job.outputs.values() if output is not None]
    numbers = {"ddpdiag report": len(job.reports), "recording": len(job.recordings), **Counter(nouns)}
    parts = ", ".join(count(number, noun) for noun, number in numbers.items() if number)
    missing = "" if any(map(_NCCL_LINE.search, job.logs.values())) else "; no NCCL log"
    if attached:
        yield Text(f"{attached} ({parts}{missing})", "Attached")


def _steps(job: Job) -> Iterator[Part]:
    """Yield the command that repeats the trials that failed, and the variables with which they do not fail."""
    recordings = {recording.header.run_id: recording for recording in job.recordings}
    for run in job.runs[:1]:
        yield Code(_started(run, _repeating_words(run)), "Minimal Steps")
        if run.bench is None and run.train is None and run.run_id in recordings:
            original = _original_command(recordings[run.run_id])
            yield Text(f"`{original}` (launcher: {run.world.launcher})", "Original Command")
        if run.workarounds:
            yield Code("\n".join(shell_lines(run.workarounds)), "With these variables it works, as tested")
    if not job.runs:
        yield Gap("ddpdiag check --json report.json", "started like the job, for impact, steps and behavior")


def _repeating_words(run: Report) -> str:
    """The command and options that repeat the benchmark of a run, or its checks that failed or found something."""
    if run.bench is not None:
        request = run.bench.request
        lists = {"--collective": request.collective, "-d": request.datatype, "--backend": request.backend}
        options = "".join(f" {name} {','.join(values)}" for name, values in lists.items() if values)
        return f"allreduce-bench -b {request.minbytes} -e {request.maxbytes} -f {request.stepfactor:g}{options}"
    found = {level: [f.code.partition(".")[0] for f in run.findings if f.severity is level] for level in Severity}
    known = _failed_codes(run) or found[Severity.ERROR] or found[Severity.WARNING]
    codes = ",".join(dict.fromkeys(code for code in known if not code.startswith(_NOT_SELECTABLE)))
    return f"check{f' --select {codes}' if codes else ''} --backend {run.world.backend}"


def _failed_codes(run: Report) -> list[str]:
    return [check.code for check in run.checks if check.statuses.keys() & {status.value for status in _FAILED}]


def _original_command(recording: Recording) -> str:
    """The command line of the recording's check, by its options."""
    options = recording.header.options
    lists = {"--stage": options.stages, "--skip-stage": options.skip_stages, "--select": options.select}
    lists |= {"--ignore": options.ignore, "--backend": (options.backend,)}
    words = (word for name, values in lists.items() if values for word in (name, ",".join(values)))
    return join(("ddpdiag", "check", *words))


def _started(run: Report, words: str) -> str:
    """The command line that starts `ddpdiag <words>` with as many ranks and hosts as a run had."""
    size, hosts = run.world.size, run.world.hosts or ("localhost",)
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0]}:29500 " if len(hosts) > 1 else ""
    options = f"--nnodes {len(hosts)} --nproc-per-node {-(-size // len(hosts))}"
    return f"torchrun {options} {rendezvous}-m ddpdiag {words}"


def _environment(job: Job) -> Iterator[Part]:
    """Yield the parts of the hosts, the versions and the variables."""
    for report in job.reports[:1]:
        facts = report.snapshot.facts.values() if report.snapshot is not None else ()
        lines = (f"{name}={value}" for values in facts for name, value in values.items())
        yield Items((*_parts(report), *lines), "Environment Details")


def _parts(report: Report) -> tuple[str, ...]:
    """The parts of each kind of host, such as "8 hosts: 8 x NVIDIA H100 ...; torch 2.13.0; ..."."""
    return tuple(f"{hosts}: {text}" for hosts, text in kinds_of_hosts(report))


def _history(job: Job) -> Iterator[Part]:
    """Yield how to use NCCL, if it was not used, how often trials failed, and how to try an older NCCL."""
    for run in job.runs[:1]:
        if run.world.backend != "nccl":
            yield Gap(_started(run, "check --backend nccl --json report.json"), "the same with NCCL")
    yield from (Text(sentence, "Intermittency") for each in job.recordings for sentence in _failed_trials(each))
    yield Text("Please answer: did it work with an older NCCL?", "Previous Success")
    version, _, cuda = nccl_version(job).partition("+cuda")
    if version:
        older = f"'nvidia-nccl-cu{cuda.partition('.')[0] or '12'}<{version}'"
        yield Gap(f"python -m pip install {older}", "in a copy of the environment; then repeat the steps")


def _failed_trials(recording: Recording) -> Iterator[str]:
    """Yield for each check that failed how many of its trials failed over each backend, and on which ranks.

    Experiments are left out: trials with other variables, and those that may fail.
    """
    statuses: defaultdict[int, dict[int, Status]] = defaultdict(dict)
    for outcome in recording.outcomes:
        statuses[outcome.trial][outcome.rank] = Status.SKIPPED if outcome.interrupted else outcome.status
    trials: defaultdict[str, defaultdict[str, list[dict[int, Status]]]] = defaultdict(lambda: defaultdict(list))
    for trial in recording.trials:
        if "backend" in trial.params and not trial.env and not trial.may_fail:
            trials[trial.code][str(trial.params["backend"]).replace("nccl", "NCCL")].append(statuses[trial.number])
    for code, by_backend in trials.items():
        texts = [text for name, of_backend in by_backend.items() if (text := _trials_text(name, of_backend))]
        if any(" failed (" in text for text in texts):
            yield f"{code}: {'; '.join(sorted(texts))}."


def _trials_text(backend: str, trials: list[dict[int, Status]]) -> str:
    """Describe the trials over a backend that ended: "1 of 1 trial over NCCL failed (hung on ranks 0-1)"."""
    failed = [statuses for statuses in trials if not {*statuses.values()}.isdisjoint(_FAILED)]
    done = [statuses for statuses in trials if {*statuses.values()} == {Status.DONE}]
    if not failed:
        return f"{backend} passed ({count(len(done), 'trial')})" if done else ""
    ranks = {status: {r for each in failed for r in each if each[r] is status} for status in _FAILED}
    words = (f"{s.value} on rank{'s' * (len(ranks[s]) > 1)} {fold_ranks(ranks[s], limit=8)}" for s in ranks if ranks[s])
    return f"{len(failed)} of {count(len(failed + done), 'trial')} over {backend} failed ({'; '.join(words)})"


def _platform(job: Job) -> Iterator[Part]:
    for report in job.reports:
        yield Items(_parts(report), "GPU & Network")
        if report.world.backend == "nccl" and "COL001" not in _failed_codes(report):
            yield from (Fold(section.title, section.blocks) for section in sections(report) if section.name == "ranks")
        topologies = [each for each in report.matrices if each.name.startswith("p2p.topology.")]
        yield from (Matrix(f"{each.title} ({each.name})", each) for each in topologies[:_TOPOLOGIES_SHOWN])
    for command in TOOLS[Kind.NCCL]:
        output = job.outputs.get(command)
        place = "this host does not have it" if command in job.outputs else ""
        yield Gap(command, place) if output is None else Fold(command, (_output(output),))
    yield Text(job.machine, "Environment") if job.machine else Gap("systemd-detect-virt")
    for run in job.runs:
        ranks = f"{count(run.world.size, 'rank')} on {count(len(run.world.hosts), 'host')}"
        yield Text(f"The run had {ranks}.", "Scalability")
        if run.world.size > 2:
            yield Gap("ddpdiag check --nproc-per-node 2")


def _behavior(job: Job) -> Iterator[Part]:
    """Yield the first NCCL WARN, the verdicts and the findings."""
    for name, line in [*job.warnings.items()][:1]:
        yield Code(line, f"First Error (in {name})", "text")
    yield Text("Every rank completes each step with exact results, at the expected rates.", "Expected")
    sentences = [f"{run.verdict_text}: {run.sentence}" for run in job.runs]
    yield Text(" ".join(sentences) or "Please describe it: no report of a run was given.", "Actual")
    boxes = [
        Fold(f"{finding.severity.value} {finding.code}: {finding.title}", parts)
        for finding, parts in finding_boxes(job.findings, advice=False)
    ]
    yield from boxes[:_FINDINGS_SHOWN]
    yield Items(tuple(box.title for box in boxes[_FINDINGS_SHOWN:]), "Other findings")


def _error(job: Job) -> Iterator[Part]:
    """Yield the output of the first blamed rank that has one, and the first traceback: its own, else a peer's."""
    blamed = [f"rank-{rank}.txt" for finding in job.findings for rank in finding.ranks]
    blamed = [name for name in blamed if name in job.logs][:1]
    starts = {name: match.start() for name in job.logs if (match := _TRACEBACK.search(job.logs[name]))}
    if not blamed or blamed[0] not in starts:
        yield from (_output(job.logs[name], name) for name in blamed)
        if impact_of(job) == "Application crash":
            yield Gap("export PYTHONFAULTHANDLER=1", "before the job, for the stack at a signal")
    for name in [*(name for name in blamed if name in starts), *starts][:1]:
        yield _output(job.logs[name][starts[name] :], f"First Traceback (in {name})")


def _output(text: str, title: str = "") -> Code:
    """The beginning of an output. It is cut, because an issue on GitHub has at most 65,536 characters."""
    text = text.strip()
    left = len(text) - _MAX_LETTERS
    return Code(text[:_MAX_LETTERS] + (f"\n... {count(left, 'more character')}" if left > 0 else ""), title, "text")
