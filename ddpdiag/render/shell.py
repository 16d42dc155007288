"""Variables as a shell reads them: single lines in a finding, and the file of `--write-workaround`."""

from collections.abc import Mapping, Sequence
from shlex import quote

from ddpdiag.model import Report
from ddpdiag.render.page import one_line
from ddpdiag.text import fold_hosts, times_text

# A longer list of hosts is not worth pasting.
_LONGEST_LIST = 1_000
# Why there are no variables to set, by the finding that shows it.
_WITHOUT = {
    "P2P003.unfinished": "no variables: the search for them was not finished",
    "P2P003.nothing": "no variables: the job's backend failed with all that were tried",
}


def shell_lines(variables: Mapping[str, str | None]) -> list[str]:
    """Lines that set or unset variables, in words that every POSIX shell reads back as they are."""
    return [_line(name, value) for name, value in variables.items()]


def _line(name: str, value: str | None) -> str:
    if value is None:
        return f"unset {quote(name)}"
    if value.startswith("=") and quote(value) == value:
        return f"export {quote(name)}='{value}'"  # bare, zsh would look for a command of that name
    return f"export {quote(name)}={quote(value)}"


def render(report: Report) -> str:
    """The text of a file to be sourced before the job starts. Only a comment if nothing has to be set."""
    found = {finding.code for finding in report.findings}
    if report.workarounds:
        why = f"variables that {report.world.backend} needs here, as tested"
    elif known := [reason for code, reason in _WITHOUT.items() if code in found]:
        why = known[0]
    else:
        # Without findings of the search, its check says whether it ran.
        search = next((check for check in report.checks if check.code == "P2P003"), None)
        skipped = f" ({' '.join(search.skipped_because.split())})" if search and search.skipped_because else ""
        why = f"no variables: none were tried{skipped}"
        if search is not None and search.statuses:
            why = "no variables: none is needed"
    # The comment is put on one line, because the text after a line end in a name would be a command.
    lines = (f"# {one_line(f'ddpdiag, run {report.run_id}: {why}')}", *shell_lines(report.workarounds))
    return "".join(f"{line}\n" for line in lines)


def exclude_lines(report: Report) -> tuple[tuple[str, str], ...]:
    """Pairs of a sentence and a line to paste, to leave out failing hosts, and hosts that only slow the job down.

    Empty if there is no other host. The line is a command of srun if Slurm runs the job, else the list of hosts.
    """
    bad, slow = report.hosts.failing, tuple(name for name in report.hosts.slow if name not in report.hosts.failing)
    if len(report.world.hosts) < 2 and not report.world.scheduler:
        return ()
    # The others may be no better where half of the hosts are slow.
    few = 2 * len(slow) < len(report.world.hosts)
    return (*([_without_failing(report, bad)] if bad else ()), *([_without_slow(report, slow)] if slow and few else ()))


def _without_failing(report: Report, bad: Sequence[str]) -> tuple[str, str]:
    who = "failing host" if len(bad) == 1 else "failing hosts"
    listed = fold_hosts(bad)
    if not report.world.scheduler:
        long = len(listed) > _LONGEST_LIST
        return (
            (f"{len(bad):,} {who}, one per line:", "--write-failing-hosts failing") if long else (f"The {who}:", listed)
        )
    if len(listed) > _LONGEST_LIST:
        return (
            f"Without the {who}: run again with --write-failing-hosts failing, then",
            f"srun {_rest(report, bad)}--exclude=./failing ...",
        )
    return f"Without the {who}:", f"srun {_rest(report, bad)}--exclude={quote(listed)} ..."


def _without_slow(report: Report, slow: Sequence[str]) -> tuple[str, str]:
    """The pair for slow hosts. It leaves out failing hosts as well, so that one line leaves only healthy hosts."""
    share = max(report.hosts.slow[name] for name in slow)
    are = "host is" if len(slow) == 1 else "hosts are up to"
    sentence = f"{len(slow):,} {are} {times_text(1 / max(1 - share, 1e-6))} slower than the others"
    bad = report.hosts.failing
    listed = fold_hosts((*bad, *slow) if report.world.scheduler else slow)
    if not report.world.scheduler:
        return f"{sentence}:", listed
    too = " and the failing ones" if bad else ""
    return f"{sentence}. Without {'it' if len(slow) == 1 else 'them'}{too}:", (
        f"srun {_rest(report, (*bad, *slow))}--exclude={quote(listed)} ..."
    )


def _rest(report: Report, left_out: Sequence[str]) -> str:
    """Options of srun for the nodes and tasks that are left in a Slurm step: without these options srun asks for all
    nodes of its job, and fails. Empty if their numbers are not known."""
    tasks, hosts = (report.measurements.get(f"slurm.{name}") for name in ("tasks", "hosts"))
    if not isinstance(tasks, int) or not isinstance(hosts, int) or len(left_out) >= hosts or tasks % hosts:
        return ""
    left = hosts - len(left_out)
    return f"--nodes={left} --ntasks={tasks // hosts * left} "
