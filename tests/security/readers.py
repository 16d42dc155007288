"""Every reader of a file that somebody else may have written, and a sound file of its kind to begin with."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ddpdiag.cli import judge
from ddpdiag.cli.outputs import LintOptions, Outputs
from ddpdiag.codec import encode
from ddpdiag.compare import command as compare
from ddpdiag.explain import command as explain
from ddpdiag.judgement.reading import read_baseline as read_run
from ddpdiag.lint import command as lint
from ddpdiag.model.trial import Collective, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.runtime.launchers.slurm import read_topology
from ddpdiag.watch import WatchOptions, command
from ddpdiag.watch.look import Look, Witness

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


def stall(**more: object) -> Look:
    """A look at two ranks."""
    process = ProcessState(pid=7, state="S", wchan="futex", stack=("step (train.py:7)",), busy=True)
    posted = Collective(seq=3, name="nccl:all_reduce", elements=4)
    ranks = tuple(Witness(rank=rank, pid=7 + rank, process=process, collectives=(posted,)) for rank in range(2))
    facts = {"host": "n0", "unix_seconds": 1.7e9, "silent_seconds": 300.0, "stall_seconds": 300.0, "command": "train"}
    uses = (GpuUse(index=0, busy_share=0.5, memory_bytes=1 << 30, power_watts=80.0, pids=(7,)),)
    return Look(**facts | {"world_size": 4, "ranks": ranks, "gpus": uses} | more)


def _recordings() -> list[bytes]:
    return [path.read_bytes() for path in sorted((TESTS / "recordings").rglob("*.jsonl"))]


def _reports() -> list[bytes]:
    return [report_of(HEALTHY), HEALTHY.read_bytes()]


def _looks() -> list[bytes]:
    other = stall(host="n1", ranks=(), unix_seconds=1.7e9 + 5)
    return [b"".join(encode(look) + b"\n" for look in (stall(), stall(looks=2, unix_seconds=1.7e9 + 300), other))]


def _judge(path: Path) -> None:
    # The page takes a second, the others some milliseconds.
    kinds = ["json", "markdown", "prometheus", "record", *(["html"] if path.stat().st_size % 8 == 0 else [])]
    with TemporaryDirectory() as folder:
        files = {kind: f"{folder}/{kind}" for kind in kinds}
        judge.run([str(path)], Outputs(**files, details=True))
        judge.run([str(path)], Outputs(quiet=True, need_hosts=1))


def _compare(path: Path) -> None:
    for old, new in ((path, HEALTHY), (HEALTHY, path), (path, path)):
        compare.run(str(old), str(new), markdown="/dev/null")
    read_run(str(path))


READERS = {
    "recording": Reader(_judge, _recordings),
    "report": Reader(_compare, _reports),
    "watch": Reader(lambda path: command.read([str(path)], WatchOptions()), _looks),
    "lint": Reader(
        lambda path: lint.run([str(path)], LintOptions(details=True)),
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
