"""Make lines for a shell: variables of a fix, the file of `--write-workaround`, and commands that exclude hosts."""

import re
from collections.abc import Mapping, Sequence
from shlex import quote

from ddpdiag.model import Report
from ddpdiag.render.page import one_line
from ddpdiag.text import fold_hosts, times_text

# A longer list of hosts is not worth pasting.
_MAX_LIST_LETTERS = 1_000
_NAMES_SHOWN = 8
# The signs of extended regular expressions. re.escape also escapes "-", which POSIX leaves undefined.
_ERE_SIGN, _ESCAPED = re.compile(r"[][\\.^$*+?(){}|]"), r"\\\g<0>"
# The reason why there are no variables to set, by the code of the finding that shows it.
_REASON_BY_FINDING = {
    "P2P003.unfinished": "no variables: the search for them was not finished",
    "P2P003.nothing": "no variables: the job's backend failed with all that were tried",
}


def shell_lines(variables: Mapping[str, str | None]) -> list[str]:
    """Lines that set variables, or unset those whose value is None, quoted for any POSIX shell."""
    return [_shell_line(name, value) for name, value in variables.items()]


def _shell_line(name: str, value: str | None) -> str:
    if value is None:
        return f"unset {quote(name)}"
    if value.startswith("=") and quote(value) == value:
        return f"export {quote(name)}='{value}'"  # without quotes, zsh would replace =NAME by the path of a command
    return f"export {quote(name)}={quote(value)}"


def render(report: Report) -> str:
    """The text of a file that users source before the job. It has only a comment if no variables are needed."""
    codes = {finding.code for finding in report.findings}
    if report.workarounds:
        reason = f"variables that {report.world.backend} needs here, as tested"
    elif reasons := [reason for code, reason in _REASON_BY_FINDING.items() if code in codes]:
        reason = reasons[0]
    else:
        # The search for variables (P2P003) has no findings. Its check in the report shows whether it ran.
        search = next((check for check in report.checks if check.code == "P2P003"), None)
        skipped = f" ({' '.join(search.skipped_because.split())})" if search and search.skipped_because else ""
        reason = f"no variables: none were tried{skipped}"
        if search is not None and search.statuses:
            reason = "no variables: none is needed"
    # The comment must stay on one line: after a line end in a name, the rest of the name would be a command.
    lines = (f"# {one_line(f'ddpdiag, run {report.run_id}: {reason}')}", *shell_lines(report.workarounds))
    return "".join(f"{line}\n" for line in lines)


def exclude_lines(report: Report) -> tuple[tuple[str, str], ...]:
    """(sentence, line to paste) pairs that exclude failing hosts, and hosts that only slow the job down; may be empty.

    If Slurm runs the job, the line is an srun command, else one that makes a new hostfile (mpirun, deepspeed).
    """
    failing, slow = report.hosts.failing, tuple(name for name in report.hosts.slow if name not in report.hosts.failing)
    if len(report.world.hosts) < 2 and not report.world.scheduler:
        return ()
    # If half of the hosts are slow, excluding them may not help.
    are_few = 2 * len(slow) < len(report.world.hosts)
    without_failing = [_exclude_failing(report, failing)] if failing else []
    return (*without_failing, *([_exclude_slow(report, slow)] if slow and are_few else []))


def _exclude_failing(report: Report, failing: Sequence[str]) -> tuple[str, str]:
    noun = "failing host" if len(failing) == 1 else "failing hosts"
    line = _exclude_command(report, failing)
    if len(line) > _MAX_LIST_LETTERS:
        line = _exclude_file_command(report, failing, "failing")
        return f"Without the {len(failing):,} {noun}: run again with --write-failing-hosts failing, then", line
    return f"Without the {noun} ({fold_hosts(failing, limit=_NAMES_SHOWN)}):", line


def _exclude_slow(report: Report, slow: Sequence[str]) -> tuple[str, str]:
    """The sentence and line for slow hosts. The line also excludes failing hosts: the job fails there."""
    lost_share = max(report.hosts.slow[name] for name in slow)
    verb = "host is" if len(slow) == 1 else "hosts are up to"
    sentence = f"{len(slow):,} {verb} {times_text(1 / max(1 - lost_share, 1e-6))} slower than the others"
    failing, them = report.hosts.failing, "it" if len(slow) == 1 else "them"
    line = _exclude_command(report, (*failing, *slow))
    if len(line) > _MAX_LIST_LETTERS:
        line = _exclude_file_command(report, slow, "slow")
        return f"{sentence}. Without {them}: run again with --write-slow-hosts slow, then", line
    names = fold_hosts(slow, limit=_NAMES_SHOWN) + (" and the failing ones" if failing else "")
    return f"{sentence}. Without {them} ({names}):", line


def _exclude_command(report: Report, excluded: Sequence[str]) -> str:
    if report.world.scheduler:
        return f"srun {_remaining_size_options(report, excluded)}--exclude={quote(fold_hosts(excluded))} ..."
    # "n1 slots=8", "n1:8" or "n1.cluster", but not "n10" or "n1-ib".
    pattern = f"^[[:space:]]*({'|'.join(_ERE_SIGN.sub(_ESCAPED, name) for name in sorted(excluded))})([[:space:]:.]|$)"
    return f"grep -vE {quote(pattern)} hostfile > healthy-hosts"


def _exclude_file_command(report: Report, excluded: Sequence[str], file: str) -> str:
    if report.world.scheduler:
        return f"srun {_remaining_size_options(report, excluded)}--exclude=./{file} ..."
    return (
        'awk \'NR == FNR {bad[$1]; next} {split($1, part, ":"); split(part[1], name, ".")} '
        f"!(part[1] in bad) && !(name[1] in bad)' {file} hostfile > healthy-hosts"
    )


def _remaining_size_options(report: Report, excluded: Sequence[str]) -> str:
    """srun's options for the nodes and tasks that remain after exclusion; empty if their numbers are not known. Without
    these options srun requests all nodes of its job, and fails."""
    tasks, hosts = (report.measurements.get(f"slurm.{name}") for name in ("tasks", "hosts"))
    if not isinstance(tasks, int) or not isinstance(hosts, int) or len(excluded) >= hosts or tasks % hosts:
        return ""
    remaining_hosts = hosts - len(excluded)
    return f"--nodes={remaining_hosts} --ntasks={tasks // hosts * remaining_hosts} "
