"""Variables as a shell reads them: single lines in a finding, and the file of `--env-file`."""

from collections.abc import Mapping
from shlex import quote

from ddpdiag.model import Report
from ddpdiag.render.hosts import fold_hosts

# A list of hosts that nobody would paste any more.
_LONGEST_LIST = 1_000
# Why what could be set is not known.
_WITHOUT = {
    "P2P003.unfinished": "nothing, since the search for variables was not finished",
    "P2P003.nothing": "nothing, since it failed with all that was tried",
    "P2P003.unreliable": "nothing, since what worked failed again",
    "P2P003.both": "nothing, since gloo fails as well and no variable was looked for",
}


def shell_line(name: str, value: str | None) -> str:
    """A line that sets or unsets a variable; a value with unseen characters is written so that bash reads it back."""
    if value is None:
        return f"unset {quote(name)}"
    if value.startswith("=") and quote(value) == value:
        return f"export {quote(name)}='{value}'"  # bare, zsh would look for a command of that name
    if value.isprintable():
        return f"export {quote(name)}={quote(value)}"
    escaped = value.encode("unicode_escape").decode().replace("'", "\\'")
    return f"export {quote(name)}=$'{escaped}'"


def render(report: Report) -> str:
    """A file to be sourced before the job starts; a comment alone where nothing has to be set."""
    return "".join(f"{line}\n" for line in (f"# ddpdiag, run {report.run_id}: {_why(report)}", *_lines(report.exports)))


def _lines(exports: Mapping[str, str | None]) -> list[str]:
    return [shell_line(name, value) for name, value in exports.items()]


def _why(report: Report) -> str:
    found = {finding.code for finding in report.findings}
    if report.exports:
        does = "needs here" if "P2P003.fallback" in found else "is faster with"
        return f"what {report.world.backend} {does}, as it was tried"
    return next((said for code, said in _WITHOUT.items() if code in found), None) or _unasked(report)


def _unasked(report: Report) -> str:
    """Where nothing was found: was anything looked for?"""
    ladder = next((check for check in report.checks if check.code == "P2P003"), None)
    if ladder is not None and ladder.statuses:
        return "no variable was found to be needed, or to help"
    why = f" ({' '.join(ladder.skipped_because.split())})" if ladder and ladder.skipped_because else ""
    return f"nothing, since no variable was looked for{why}"


def exclude_line(report: Report) -> tuple[str, str] | None:
    """A sentence, and the line to paste that leaves the bad hosts out, where that can mean something."""
    bad = report.hosts.bad
    if not bad or (len(report.world.nodes) < 2 and report.world.launcher != "slurm"):
        return None
    listed = quote(fold_hosts(bad))
    if len(listed) > _LONGEST_LIST:
        return (
            "Without the bad hosts: run again with --exclude-file bad, then",
            f"srun {_rest(report)}--exclude=./bad ...",
        )
    return f"Without the bad {'host' if len(bad) == 1 else 'hosts'}:", f"srun {_rest(report)}--exclude={listed} ..."


def _rest(report: Report) -> str:
    """In a step of Slurm, the nodes and tasks that are left: within its job srun asks for all of them otherwise, and
    fails."""
    tasks, hosts = (report.measurements.get(f"slurm.{name}") for name in ("tasks", "hosts"))
    if not isinstance(tasks, int) or not isinstance(hosts, int) or len(report.hosts.bad) >= hosts or tasks % hosts:
        return ""
    left = hosts - len(report.hosts.bad)
    return f"--nodes={left} --ntasks={tasks // hosts * left} "
