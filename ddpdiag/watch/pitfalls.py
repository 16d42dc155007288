"""Pitfalls that `ddpdiag lint` reports at lines where ranks wait, and that let only some ranks reach these lines.

lint runs in a process of its own: it is another feature, and it must not hold up a look.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct, structs

from ddpdiag.codec import readable
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.host.kernel import age_seconds
from ddpdiag.probes.host.programs import python_command, run_until, with_package_path
from ddpdiag.text import begun
from ddpdiag.watch.evidence import path_from_here
from ddpdiag.watch.look import Activity, RankState, subject

# A collective, or a call of a DistributedDataParallel, that only some ranks reach.
_RULES = "LNT018,LNT019"
_MAX_FILES = 8
_LINT_SECONDS, _GRACE_SECONDS = 1.5, 0.3


class _Report(Struct, frozen=True):
    findings: tuple[Finding, ...]


def find_pitfalls(states: Sequence[RankState]) -> tuple[Finding, ...]:
    """Return a finding for each pitfall at a line where ranks wait, within 2 s: a file system may not respond."""
    findings: list[Finding] = []
    thread = threading.Thread(target=lambda: findings.extend(_findings(states)), daemon=True)
    thread.start()
    thread.join(_LINT_SECONDS + _GRACE_SECONDS)
    return tuple(findings)


def _findings(states: Sequence[RankState]) -> Iterator[Finding]:
    waiting = [state for state in states if state.activity in (Activity.WAITING, Activity.MAY_WAIT)]
    pids = {frame.path: state.pid for state in waiting for frame in state.user_frames if frame.path.endswith(".py")}
    paths = {file: path for path, pid in list(pids.items())[:_MAX_FILES] if (file := _unchanged_file(path, pid))}
    with contextlib.suppress(OSError, msgspec.DecodeError):  # a timeout is an OSError
        names = {readable(file): path for file, path in paths.items()}
        for finding in _lint(tuple(paths)) if paths else ():
            if ranks := _ranks_at(waiting, names, finding.evidence):
                yield _with_ranks(finding, ranks)


@lru_cache(maxsize=8)
def _lint(files: tuple[str, ...]) -> tuple[Finding, ...]:
    """The findings of lint on `files`. Raises TimeoutError, another OSError or msgspec.DecodeError if it has none."""
    command = python_command("ddpdiag", "lint", "--json", "-", "--select", _RULES, *files)
    completed = run_until(command, time.monotonic() + _LINT_SECONDS, env=with_package_path(os.environ))
    if completed is None:
        raise TimeoutError
    return msgspec.json.decode(completed.stdout, type=_Report).findings


def _unchanged_file(path: str, pid: int) -> str | None:
    """The name of a file of a process from here, if the file did not change since the start of the process."""
    file, age = os.path.normpath(path_from_here(pid, path)), age_seconds(pid)
    with contextlib.suppress(OSError):
        if age is not None and os.stat(file).st_mtime < time.time() - age:
            return file
    return None


def _ranks_at(states: Sequence[RankState], names: Mapping[str, str], evidence: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks with a frame at a line that lint reports; `names` has the path in frames by the path in lint."""
    places = {(names.get(evidence["path"]), evidence.get(line)) for line in ("line", "helper_line")}
    return tuple(state.rank for state in states if any((each.path, each.line) in places for each in state.user_frames))


def _with_ranks(finding: Finding, ranks: Sequence[int]) -> Finding:
    place = f"{os.path.basename(str(finding.evidence['path']))}:{finding.evidence['line']}"
    title = (
        f"{subject(ranks, 'waits', 'wait')} at {place}, which only some ranks reach ({finding.code} of `ddpdiag lint`)"
    )
    return structs.replace(finding, title=title, message=begun(finding.message) + ".", severity=Severity.WARNING)
