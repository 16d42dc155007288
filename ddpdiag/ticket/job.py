"""The job that a ticket is about: its reports, recordings and logs, and the outputs of commands on this host."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from glob import escape, iglob
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import Struct

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import assemble, disassemble, open_file, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.reading import read_run
from ddpdiag.model import Finding, Recording, Report, Severity, Verdict
from ddpdiag.model.options import ALONE
from ddpdiag.sanitize import HIDDEN, is_secret, without_secrets
from ddpdiag.text import fold_hosts

_WARNING = re.compile(r"^.*\bNCCL WARN\b.*$", re.MULTILINE)
# NCCL 2.26 and newer begin a warning with the time.
_TIMESTAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*)\]")
_MAX_LOGS = 4096
# Only the two ends of a log are read: at most 8 MiB of each log, and 64 MiB of all.
_MAX_END_BYTES, _MAX_ALL_BYTES = 4 << 20, 64 << 20


class Job(Struct, frozen=True, kw_only=True):
    """The evidence for a ticket.

    `files` are names of reports and recordings. `logs` has texts by name. `outputs` has the outputs of commands on
    this host (None: there is no such command). It and `machine`, a description of this host, are empty if this host is
    not one of the job's hosts.
    """

    files: tuple[str, ...] = ()
    reports: tuple[Report, ...] = ()  # those that say UNFIT are first
    recordings: tuple[Recording, ...] = ()
    logs: dict[str, str] = {}
    outputs: dict[str, str | None] = {}
    machine: str = ""

    @property
    def runs(self) -> tuple[Report, ...]:
        """The reports of runs, not those of `ddpdiag host`."""
        return tuple(report for report in self.reports if report.world.launcher != ALONE)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host for report in self.reports for host in report.world.hosts))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The errors, then the warnings, of all reports."""
        known = {(f.code, f.title): f for report in self.reports for f in report.findings}
        levels = (Severity.ERROR, Severity.WARNING)
        return tuple(finding for level in levels for finding in known.values() if finding.severity is level)

    @property
    def warnings(self) -> dict[str, str]:
        """The first NCCL WARN of each log that has one, by the log's name; the earliest first, if they have times."""
        lines = {name: match[0] for name, text in self.logs.items() if (match := _WARNING.search(text))}
        return dict(sorted(lines.items(), key=lambda item: (_TIMESTAMP.findall(item[1]) or ["~"])[0]))


def read_job(files: Sequence[str], logs: Sequence[str]) -> Job:
    """Read reports, recordings and logs of one job. UsageError for a file that is none, or is another job's."""
    contents = {readable(file): read_run(file) for file in files}
    parts: defaultdict[str, list[Recording]] = defaultdict(list)
    for each in contents.values():
        if isinstance(each, Recording):
            parts[each.header.run_id].append(each)
    recordings = [
        assemble(chain(*map(disassemble, run)), chain(*(each.problems for each in run))) for run in parts.values()
    ]
    reports = {f"run {each.header.run_id}": judge(each, all_checks()) for each in recordings}
    # A recording has more than the JSON report of its run.
    reports |= {name: each for name, each in contents.items() if isinstance(each, Report) and each.run_id not in parts}
    largest = max(reports, key=lambda name: len(reports[name].world.hosts), default="")
    for name, report in reports.items():
        hosts, all_hosts = report.world.hosts, reports[largest].world.hosts
        if not {*hosts} <= {*all_hosts}:
            one, other = (fold_hosts(names, limit=4) for names in (hosts, all_hosts))
            raise UsageError(f"{name} ({one}) and {largest} ({other}) are of different jobs; give the files of one job")
    return Job(
        files=tuple(map(os.path.basename, contents)),
        reports=tuple(
            msgspec.convert(hidden(msgspec.to_builtins(report)), Report)
            for report in sorted(reports.values(), key=lambda report: report.verdict is not Verdict.UNFIT)
        ),
        recordings=tuple(recordings),
        logs=_read_logs(logs) or _logs_of_runs(recordings, reports.values()),
    )


def _logs_of_runs(recordings: Iterable[Recording], reports: Iterable[Report]) -> dict[str, str]:
    """The output of each rank whose trials failed, and NCCL's warnings, from runs of ddpdiag."""
    logs: defaultdict[str, str] = defaultdict(str)
    for outcome in (outcome for recording in recordings for outcome in recording.outcomes):
        if text := "\n".join(filter(None, (outcome.error, outcome.detail))):
            logs[f"rank-{outcome.rank}.txt"] += f"{outcome.code}:\n{without_secrets(text)}\n"
    for finding in (finding for report in reports for finding in report.findings if finding.code == "P2P004.warned"):
        lines = finding.evidence.get("warnings")
        logs["nccl.txt"] += "".join(f"NCCL WARN {line}\n" for line in (lines if isinstance(lines, list) else ()))
    return dict(logs)


def log_files(words: Iterable[str]) -> list[str]:
    """The files that --log names: files, all files below folders, and those of patterns. UsageError for none."""
    paths: dict[str, None] = {}
    for word in words:
        # NCCL replaces %h and %p in NCCL_DEBUG_FILE by the host and the process id.
        pattern = os.path.join(escape(word), "**") if os.path.isdir(word) else re.sub("%[hp]", "*", word)
        found = [word] if os.path.isfile(word) else sorted(islice(iglob(pattern, recursive=True), _MAX_LOGS))
        if not (files := [os.path.abspath(path) for path in found if os.path.isfile(path)]):
            raise UsageError(f"--log {readable(word)}: no such file")
        paths |= dict.fromkeys(files)
    return [*paths]


def _read_logs(paths: Sequence[str]) -> dict[str, str]:
    """Read the logs. Their names are relative to the folder that all share."""
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    end_bytes = min(_MAX_END_BYTES, _MAX_ALL_BYTES // (2 * len(paths) or 1))
    return {readable(os.path.relpath(path, folder)): _read_ends(path, end_bytes) for path in paths}


def _read_ends(path: str, end_bytes: int) -> str:
    """Read the first and last `end_bytes` bytes of a file as text without secrets. UsageError if it is unreadable."""
    try:
        with open_file(path) as file:
            data = file.read(end_bytes)
            if (left := os.fstat(file.fileno()).st_size - 2 * end_bytes) > 0:
                file.seek(-end_bytes, os.SEEK_END)
                data += f"\n... {left:,} bytes are left out ...\n".encode()
            text = (data + file.read(end_bytes)).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"--log {readable(path)}: {error.strerror or error}") from error
    return "".join(map(without_secrets, text.splitlines(keepends=True)))


def hidden(value: Any, name: str = "") -> Any:  # noqa: ANN401 - any tree of plain data
    """`value` with secrets hidden: in its strings, and as values of variables whose names may mean a secret."""
    match value:
        case str():
            return HIDDEN if name.isupper() and is_secret(name) else without_secrets(value)
        case dict():
            return {key: hidden(item, key) for key, item in value.items()}
        case list() | tuple():
            return [hidden(item) for item in value]
        case _:
            return value
