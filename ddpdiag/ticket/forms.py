"""The issue forms of NVIDIA/nccl and PyTorch: one section for each field, under the field's label.

GitHub turns an answered form into such sections. Labels and order are those of NVIDIA/nccl,
.github/ISSUE_TEMPLATE/ISSUE.yaml (June 2026), and pytorch/pytorch, .github/ISSUE_TEMPLATE/bug-report.yml (2026).
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ddpdiag.checks.blame import is_echo
from ddpdiag.model import Report, Severity, Status
from ddpdiag.model.report import NONE, UNKNOWN
from ddpdiag.render.blocks import Block, Code, Fold, Items, Matrix, Section, Text
from ddpdiag.render.findings import finding_boxes
from ddpdiag.render.report import kinds_of_hosts, sections
from ddpdiag.render.shell import shell_lines
from ddpdiag.sanitize import without_secrets
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
_FINDINGS_SHOWN, _MAX_LETTERS = 6, 12_000
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+\.\d+\S*)")
_FAILED = {"hung", "died", "raised", "unheard"}
_NCCL_VARIABLES = "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=ncclDebug.%h.%p NCCL_TOPO_DUMP_FILE=ncclSystem.txt"


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
    version = nccl_version(job)
    fields: dict[str, Iterable[Part]] = {
        "How is this issue impacting you?": [Text(impact_of(job) or f"Please specify: {', '.join(_IMPACTS)}")],
        "Share Your Debug Logs": _logs(job, attached),
        "Steps to Reproduce the Issue": [*_steps(job), *_environment(job), *_history(job)],
        "NCCL Version": [Text(version) if version else Gap("strings libnccl.so.2 | grep 'NCCL version'")],
        "Your platform details": _platform(job),
        "Error Message & Behavior": _behavior(job),
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


def nccl_version(job: Job) -> str | None:
    """The version with its CUDA, such as "2.27.1+cuda12.8": from a log, else as torch reports both; None if unknown."""
    if match := next(filter(None, map(_VERSION.search, job.logs.values())), None):
        return match[1]
    parts = (kind.parts for report in job.reports for kind in report.inventory)
    known = ((each.get("NCCL", NONE), each.get("CUDA", NONE)) for each in parts)
    return next((f"{nccl}+cuda{cuda}" for nccl, cuda in known if not {nccl, cuda} & {NONE, UNKNOWN}), None)


def _logs(job: Job, attached: str) -> Iterator[Part]:
    if attached:
        yield Text(attached, "Attached")
    names = job.warnings | {name: "no NCCL WARN" for name in job.logs if name not in job.warnings}
    yield Items(tuple(f"{name}: {line}" for name, line in names.items()), "Logs, with the first NCCL WARN of each")
    if nccl_version(job) is None or not names:
        yield Gap(f"export {_NCCL_VARIABLES}", "before the job")
        yield Gap("ddpdiag ticket nccl --log 'ncclDebug.*' --log ncclSystem.txt", "after the job")


def _steps(job: Job) -> Iterator[Part]:
    """Yield the command that repeats the trials that failed, and the variables with which they do not fail."""
    if (run := job.run) is None:
        yield Gap("ddpdiag check --json report.json", "started like the job, for impact, steps and behavior")
        return
    yield Code(_started(run, _repeating_words(run)), "Minimal Steps")
    if run.workarounds:
        yield Code("\n".join(shell_lines(run.workarounds)), "With these variables it works, as tested")


def _repeating_words(run: Report) -> str:
    """The command and options that repeat the benchmark of a run, or its checks that failed or found something."""
    if run.bench is not None:
        request = run.bench.request
        lists = {"--collective": request.collective, "-d": request.datatype, "--backend": request.backend}
        options = "".join(f" {name} {','.join(values)}" for name, values in lists.items() if values)
        return f"allreduce-bench -b {request.minbytes} -e {request.maxbytes} -f {request.stepfactor:g}{options}"
    failed = [check.code for check in run.checks if check.statuses.keys() & _FAILED]
    found = [each.code.partition(".")[0] for each in run.findings if each.severity is not Severity.NOTE]
    codes = ",".join(dict.fromkeys(failed or found))
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
        facts = [section.blocks[0] for section in sections(report) if section.name == "environment"]
        yield from facts or [Items(_parts(report), "Environment Details")]


def _parts(report: Report) -> tuple[str, ...]:
    """The parts of each kind of host, such as "8 hosts: 8 x NVIDIA H100 ...; torch 2.13.0; ..."."""
    return tuple(f"{hosts}: {text}" for hosts, text in kinds_of_hosts(report))


def _history(job: Job) -> Iterator[Part]:
    """Yield whether NCCL was used, how often trials failed, and how to try an older NCCL."""
    if job.run is not None and job.run.world.backend != "nccl":
        yield Text(f"This run used {job.run.world.backend}, not NCCL.", "Backend")
        yield Gap(_started(job.run, "check --backend nccl --json report.json"))
    for check in job.run.checks if job.run is not None else ():
        for status in sorted(check.statuses.keys() & _FAILED):
            number, total = check.statuses[status], sum(check.statuses.values())
            yield Text(
                f"{check.code} ({check.name}): {status} in {number} of {count(total, 'result')}.", "Intermittency"
            )
    version, _, cuda = (nccl_version(job) or "").partition("+cuda")
    yield Text("An older NCCL was not tried.", "Previous Success")
    older = f"'nvidia-nccl-cu{cuda.partition('.')[0] or '12'}{version and f'<{version}'}'"
    yield Gap(f"python -m pip install {older}", "in a copy of the environment; then repeat the steps")


def _platform(job: Job) -> Iterator[Part]:
    for report in job.reports:
        yield Items(_parts(report), "GPU & Network")
        yield from (Fold(section.title, section.blocks) for section in sections(report) if section.name == "ranks")
        yield from (Matrix(each.title, each) for each in report.matrices if each.name.startswith("p2p.topology."))
    for command in TOOLS[Kind.NCCL]:
        output = job.outputs.get(command)
        yield Gap(command) if output is None else Fold(command, (_output(output),))
    yield Text(job.machine, "Environment") if job.machine else Gap("systemd-detect-virt")
    if job.run is not None:
        ranks = f"{count(job.run.world.size, 'rank')} on {count(len(job.run.world.hosts), 'host')}"
        yield Text(f"The run had {ranks}; fewer were not tried.", "Scalability")
        yield Gap("ddpdiag check --nproc-per-node 2")


def _behavior(job: Job) -> Iterator[Part]:
    for name, line in [*job.warnings.items()][:1]:
        yield Code(line, f"First Error (in {name})", "text")
    yield Text("Every rank completes each step with exact results, at the expected rates.", "Expected")
    for report in job.reports:
        yield Text(f"{report.verdict_text}: {report.sentence}", "Actual")
    boxes = [
        Fold(f"{finding.severity.value} {finding.code}: {finding.title}", parts)
        for finding, parts in finding_boxes(job.findings)
    ]
    yield from boxes[:_FINDINGS_SHOWN]
    yield Items(tuple(box.title for box in boxes[_FINDINGS_SHOWN:]), "Other findings")
    if not boxes and not job.warnings:
        yield Text("Please describe what you expected and what happened: the reports have no error.")


def _error(job: Job) -> Iterator[Part]:
    """Yield the output of the first rank that raised or died, if a recording has it."""
    outcomes = (outcome for recording in job.recordings for outcome in recording.outcomes)
    failed = [o for o in outcomes if o.status in (Status.RAISED, Status.DIED) and (o.detail or o.error)]
    for first in sorted(failed, key=lambda outcome: (outcome.trial, is_echo(outcome)))[:1]:
        yield _output(without_secrets(first.detail or first.error), f"Output of rank {first.rank}")


def _output(text: str, title: str = "") -> Code:
    """The beginning of an output. It is cut, because an issue on GitHub has at most 65,536 characters."""
    left = len(text) - _MAX_LETTERS
    return Code(text[:_MAX_LETTERS] + (f"\n... {count(left, 'more character')}" if left > 0 else ""), title, "text")
