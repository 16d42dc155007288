"""Every reader of a file that somebody else may have written, and a sound file of its kind to begin with."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ddpdiag.cli import judge
from ddpdiag.cli.outputs import LintArgs, Outputs
from ddpdiag.compare import command as compare
from ddpdiag.errors import UsageError
from ddpdiag.explain import command as explain
from ddpdiag.judgement.reading import read_baseline as read_run
from ddpdiag.lint import command as lint
from ddpdiag.runtime.launchers.slurm import read_topology
from ddpdiag.ticket import Kind, TicketArgs
from ddpdiag.ticket import command as ticket

TESTS = Path(__file__).parent.parent
HEALTHY = TESTS / "recordings" / "healthy-2-ranks.jsonl"


class Reader(NamedTuple):
    """`read` reads and shows a file as the command does; `sound` makes files that it likes."""

    read: Callable[[Path], object]
    sound: Callable[[], list[bytes]]


def report_of(recording: Path) -> bytes:
    """The JSON report of a recording."""
    with TemporaryDirectory() as folder:
        path = f"{folder}/report.json"
        judge.run([str(recording)], Outputs(json=path))
        return Path(path).read_bytes()


def _recordings() -> list[bytes]:
    return [path.read_bytes() for path in sorted((TESTS / "recordings").rglob("*.jsonl"))]


def _reports() -> list[bytes]:
    return [report_of(HEALTHY), HEALTHY.read_bytes()]


def _judge(path: Path) -> None:
    # The page takes a second, the others some milliseconds.
    kinds = ["json", "markdown", "prometheus", "record", *(["html"] if path.stat().st_size % 8 == 0 else [])]
    with TemporaryDirectory() as folder:
        files = {kind: f"{folder}/{kind}" for kind in kinds}
        judge.run([str(path)], Outputs(**files, details=True))
        judge.run([str(path)], Outputs(quiet=True))


def _compare(path: Path) -> None:
    for old, new in ((path, HEALTHY), (HEALTHY, path), (path, path)):
        compare.run(str(old), str(new), markdown="/dev/null")
    read_run(str(path))


def _ticket(path: Path) -> None:
    with suppress(UsageError):  # a sound log is no report
        ticket.run(Kind.PYTORCH, [str(path)], TicketArgs())
    ticket.run(Kind.NCCL, [str(HEALTHY)], TicketArgs(log=(str(path),), write_bundle="/dev/null"))


READERS = {
    "recording": Reader(_judge, _recordings),
    "report": Reader(_compare, _reports),
    "ticket": Reader(_ticket, _reports),
    "lint": Reader(
        lambda path: lint.run([str(path)], LintArgs(details=True)),
        lambda: [path.read_bytes() for path in sorted((TESTS / "unit" / "scripts").glob("*.py"))],
    ),
    "explain": Reader(
        lambda path: explain.run([str(path)]),
        lambda: [path.read_bytes() for path in sorted((TESTS / "recordings" / "logs").iterdir())],
    ),
    "topology": Reader(
        lambda path: read_topology(str(path)),
        lambda: [
            b"n0 leaf0\nn1 leaf0\n# two\nn2 leaf1\n",
            b"SwitchName=s0 Nodes=n[0-3,7]\nSwitchName=top Switches=s0\n",
        ],
    ),
}
