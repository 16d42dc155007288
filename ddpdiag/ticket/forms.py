"""The issue forms of NVIDIA/nccl and PyTorch: one section for each field, under the field's label.

GitHub turns an answered form into such sections. Labels and order are those of NVIDIA/nccl,
.github/ISSUE_TEMPLATE/ISSUE.yaml (June 2026), and pytorch/pytorch, .github/ISSUE_TEMPLATE/bug-report.yml (2026).
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ddpdiag.model import Report, Severity
from ddpdiag.model.report import NONE, UNKNOWN
from ddpdiag.render.blocks import Block, Code, Fold, Items, Matrix, Section, Text
from ddpdiag.render.findings import finding_boxes
from ddpdiag.render.report import kinds_of_hosts, sections
from ddpdiag.render.shell import shell_lines
from ddpdiag.text import count, fold_hosts
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
_FAILED = {"hung", "died", "raised", "unheard"}
_NCCL_VARIABLES = "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=ncclDebug.%h.%p NCCL_TOPO_DUMP_FILE=ncclSystem.txt"
_NO_WARNING = Text("There is no NCCL WARN in the reports and logs.", "First Error")
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


def nccl_form(job: Job, attached: str) -> list[Section]:
    """The form of NVIDIA/nccl. `attached` is the name of the bundle, or empty."""
    fields: dict[str, Iterable[Part]] = {
        "How is this issue impacting you?": [Text(impact_of(job) or f"Please specify: {', '.join(_IMPACTS)}")],
        "Share Your Debug Logs": _logs(job, attached),
        "Steps to Reproduce the Issue": [*_steps(job), *_environment(job), *_history(job)],
        "NCCL Version": _version(job),
        "Your platform details": _platform(job),
        "Error Message & Behavior": [*([] if job.warnings else [_NO_WARNING]), *_behavior(job)],
    }
    return [_field(label, parts, job) for label, parts in fields.items()]


def pytorch_form(job: Job, attached: str) -> list[Section]:
    """The bug report of PyTorch. `attached` is the name of the bundle, or empty."""
    output = job.outputs.get(COLLECT_ENV)
    bundle = [Text(attached, "Attached")] if attached else []
    fields: dict[str, Iterable[Part]] = {
        "🐛 Describe the bug": [*_behavior(job), *_error(job), *_steps(job), *bundle],
        "Versions": [_output(output)] if output else [*_environment(job), Gap(COLLECT_ENV)],
    }
    return [_field(label, parts, job) for label, parts in fields.items()]


FORMS = {Kind.NCCL: nccl_form, Kind.PYTORCH: pytorch_form}


def _field(label: str, parts: Iterable[Part], job: Job) -> Section:
    """A field of the form. The commands for what is not available are one block at its end."""
    listed = [*parts]
    gaps = dict.fromkeys(part for part in listed if isinstance(part, Gap))
    hosts = fold_hosts(job.hosts, limit=8) or "a host of the job"
    lines = "\n".join(f"{gap.command}   # {gap.place or f'on {hosts}'}" for gap in gaps)
    blocks = [part for part in listed if not isinstance(part, Gap)]
    return Section(label, (*blocks, *([Code(lines, "Not available; these commands give it")] if lines else ())))


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
    if not _logged_version(job):
        place = "to confirm +cuda, which is torch's CUDA" if version else ""
        yield Gap("strings libnccl.so.2 | grep 'NCCL version'", place)


def _logs(job: Job, attached: str) -> Iterator[Part]:
    if attached:
        yield Text(attached, "Attached")
    warnings = job.warnings
    lines = warnings | {name: "no NCCL WARN" for name in job.logs if name not in warnings}
    yield Items(tuple(f"{name}: {line}" for name, line in lines.items()), "Logs, with the first NCCL WARN of each")
    if not (_logged_version(job) and any("<system version" in text[:1000] for text in job.logs.values())):
        yield Gap(f"export {_NCCL_VARIABLES}", "before the job")
        yield Gap("ddpdiag ticket nccl --log 'ncclDebug.*' --log ncclSystem.txt", "after the job")


def _steps(job: Job) -> Iterator[Part]:
    """Yield the command that repeats the trials that failed, and the variables with which they do not fail."""
    for run in job.runs[:1]:
        yield Code(_started(run, _repeating_words(run)), "Minimal Steps")
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
    failed = [check.code for check in run.checks if check.statuses.keys() & _FAILED]
    found = {level: [f.code.partition(".")[0] for f in run.findings if f.severity is level] for level in Severity}
    codes = ",".join(dict.fromkeys(failed or found[Severity.ERROR] or found[Severity.WARNING]))
    return f"check{f' --select {codes}' if codes else ''} --backend {run.world.backend}"


def _started(run: Report, words: str) -> str:
    """The command line that starts `ddpdiag <words>` with as many ranks and hosts as a run had."""
    size, hosts = run.world.size, run.world.hosts or ("localhost",)
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0]}:29500 " if len(hosts) > 1 else ""
    options = f"--nnodes {len(hosts)} --nproc-per-node {-(-size // len(hosts))}"
    return f"torchrun {options} {rendezvous}-m ddpdiag {words}"


def _environment(job: Job) -> Iterator[Part]:
    """Yield the versions and variables, or the parts of the hosts if the report has neither."""
    for report in job.reports[:1]:
        facts = report.snapshot.facts if report.snapshot is not None else {}
        yield from (Items(tuple(f"{name}={values[name]}" for name in values), kind) for kind, values in facts.items())
        if not facts:
            yield Items(_parts(report), "Environment Details")


def _parts(report: Report) -> tuple[str, ...]:
    """The parts of each kind of host, such as "8 hosts: 8 x NVIDIA H100 ...; torch 2.13.0; ..."."""
    return tuple(f"{hosts}: {text}" for hosts, text in kinds_of_hosts(report))


def _history(job: Job) -> Iterator[Part]:
    """Yield whether NCCL was used, how often trials failed, and how to try an older NCCL."""
    for run in job.runs[:1]:
        if run.world.backend != "nccl":
            yield Text(f"This run used {run.world.backend}, not NCCL.", "Backend")
            yield Gap(_started(run, "check --backend nccl --json report.json"))
    for check in (check for run in job.runs for check in run.checks):
        for status in sorted(check.statuses.keys() & _FAILED):
            number, total = check.statuses[status], sum(check.statuses.values())
            yield Text(
                f"{check.code} ({check.name}): {status} in {number} of {count(total, 'result')}.", "Intermittency"
            )
    version, _, cuda = nccl_version(job).partition("+cuda")
    yield Text("ddpdiag did not try an older NCCL.", "Previous Success")
    older = f"'nvidia-nccl-cu{cuda.partition('.')[0] or '12'}{version and f'<{version}'}'"
    yield Gap(f"python -m pip install {older}", "in a copy of the environment; then repeat the steps")


def _platform(job: Job) -> Iterator[Part]:
    for report in job.reports:
        yield Items(_parts(report), "GPU & Network")
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
        for finding, parts in finding_boxes(job.findings)
    ]
    yield from boxes[:_FINDINGS_SHOWN]
    yield Items(tuple(box.title for box in boxes[_FINDINGS_SHOWN:]), "Other findings")


def _error(job: Job) -> Iterator[Part]:
    """Yield the output of the first blamed rank that has one."""
    names = (f"rank-{rank}.txt" for finding in job.findings for rank in finding.ranks)
    for name in [name for name in names if name in job.logs][:1]:
        yield _output(job.logs[name], name)


def _output(text: str, title: str = "") -> Code:
    """The beginning of an output. It is cut, because an issue on GitHub has at most 65,536 characters."""
    left = len(text) - _MAX_LETTERS
    return Code(text[:_MAX_LETTERS] + (f"\n... {count(left, 'more character')}" if left > 0 else ""), title, "text")
