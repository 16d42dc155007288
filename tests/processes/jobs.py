"""Real runs of the command, each in a world of its own: a temporary folder, and a mark in its environment.

Every process that descends from a run inherits the mark, whatever it is called and whoever adopted it, so the mark
finds what a run left behind.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket

INJECT = Path(__file__).parent.parent / "inject"
CHECK = ("-m", "ddpdiag", "check")
REPORT_HEAD = re.compile(r"^ddpdiag: [A-Z]+(?:, degraded)?: \d+ ranks? on ", re.MULTILINE)

# A report may quote a worker's traceback as evidence, which it indents by four.
_OURS_IN_TRACEBACK = re.compile(r'^ {0,3}File ".*/ddpdiag/', re.MULTILINE)
_PROGRESS = re.compile(r"^ddpdiag \[\d+ s(?: of \d+ s)?\] .*\n", re.MULTILINE)
_MARK = "DDPDIAG_TEST_MARK"
_PIDS = re.compile(r"^NSpid:.*?(\d+)$", re.MULTILINE)
# What a launcher around the tests would tell the runs.
_FOREIGN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SLURM_.*|OMPI_.*"
    r"|PMIX?_.*|DDPDIAG_.*|OMP_NUM_THREADS|PYTHON.*)"
)


@dataclass(frozen=True)
class Process:
    """One process of a run, as /proc shows it; `inner_pid` is its number in its own PID namespace."""

    pid: int
    parent: int
    command: str
    environ: Mapping[str, str] = field(repr=False)
    inner_pid: int
    name: str

    @property
    def rank(self) -> str | None:
        """Of which rank it is; a worker was forked from a process of any rank, and its name says its own."""
        return self.name.removeprefix("ddpdiag-r") if self.is_worker else self.environ.get("RANK")

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker with torch, forked from a fork server."""
        return self.is_fork_server and self.name.startswith("ddpdiag-r")

    @property
    def is_fork_server(self) -> bool:
        """Whether it is a fork server, or forked from one."""
        return "ddpdiag.runtime.supervisor.fork_server" in self.command

    def kill(self, signum: int) -> None:
        os.kill(self.pid, signum)


def processes(mark: str) -> list[Process]:
    """All living processes with this mark; a zombie has no environment, and so none."""
    found = [_process(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    return [process for process in found if process is not None and process.environ.get(_MARK) == mark]


def _process(pid: int) -> Process | None:
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        inner = _PIDS.search((folder / "status").read_text())
        name = (folder / "comm").read_text().strip()
    except OSError:
        return None
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    return Process(pid, parent, command, environ, int(inner[1]) if inner else pid, name)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket(AF_INET, SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(count: int, *options: str) -> tuple[str, ...]:
    """torchrun's own arguments for `count` ranks on this host; another port than that of anybody else's tests."""
    return ("-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port", str(free_port()), *options)


def accused(report: Mapping) -> set[str]:
    """Errors of a cancelled run, but for the one that says so, and warnings that name a rank, host, GPU or link."""
    named = ("ranks", "hosts", "gpus", "links")
    return {
        finding["code"]
        for finding in report["findings"]
        if (finding["severity"] == "error" and finding["code"] != "RUN004.told")
        or (finding["severity"] != "note" and any(finding[name] for name in named))
    }


def by_hand(rank: int, size: int, port: int, *options: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    """One rank of the check, as a user starts it in a shell."""
    place = ("--rank", str(rank), "--world-size", str(size), "--master-addr", address, "--master-port", str(port))
    return (*CHECK, *place, "--json", "{json}", *options)


class Job:
    """One started command: `python` with these arguments, behind `prefix` (such as nsenter, to start it elsewhere).

    Jobs with one `mark` are one run.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        stdout: int | None = None,
        *,
        prefix: Sequence[str] = (),
        mark: str | None = None,
        python: str = sys.executable,
    ):
        self.folder = folder
        self.mark = mark or uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.json = folder / "report.json"
        self.reached = folder / "reached"
        self.begin = time.monotonic()
        self._out, self._err = folder / "stdout", folder / "stderr"
        environ = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}
        ours = {
            _MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(INJECT),
            "OMP_NUM_THREADS": "1",  # as torchrun sets it; threads that fight for two cores take ten times as long
            "DDPDIAG_TEST_REACHED": str(self.reached),
        }
        if "check" in arguments:
            ours["DDPDIAG_SET"] = "TRN001.others_share=9"  # other tests run beside this one
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*prefix, python, *(argument.replace("{json}", str(self.json)) for argument in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                cwd=folder,
                env=environ | ours | dict(variables),
                start_new_session=True,
            )
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    # What it says ----------------------------------------------------------------------------------------------------

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        """Without the lines that say how far the run is: they are no complaint."""
        return _PROGRESS.sub("", self._err.read_text())

    @property
    def progress(self) -> list[str]:
        """What standard error says of how far the run is."""
        return _PROGRESS.findall(self._err.read_text())

    @property
    def report(self) -> dict:
        """The JSON report that `--json {json}` wrote."""
        return json.loads(self.json.read_text())

    @property
    def reports(self) -> int:
        """How many reports for people are on standard output."""
        return len(REPORT_HEAD.findall(self.stdout))

    @property
    def has_traceback(self) -> bool:
        """Whether a traceback shows ddpdiag's code; torchrun prints one of its own whenever a rank fails."""
        return bool(_OURS_IN_TRACEBACK.search(self.stdout + self.stderr)) or "this is a bug" in self.stderr

    @property
    def errors(self) -> list[dict]:
        """Findings that say that something is broken."""
        return [finding for finding in self.report["findings"] if finding["severity"] == "error"]

    @property
    def blamed(self) -> set[int]:
        """Ranks that any error finding names."""
        return {rank for finding in self.errors for rank in finding["ranks"]}

    def recorded(self, rank: int = 0, word: str = "") -> int:
        """How many lines with a word there are in a rank's record, while the run goes on."""
        records = self.temporary.glob(f"ddpdiag-*/rank-{rank}.jsonl")
        with contextlib.suppress(FileNotFoundError):
            return sum(word in line for record in records for line in record.read_text().splitlines())
        return 0

    # How it ends -----------------------------------------------------------------------------------------------------

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code; a run that takes longer than `seconds` from its start has broken its promise."""
        self._waiter.join(max(0.1, self.begin + seconds - time.monotonic()))
        if self._waiter.is_alive():
            left = "\n".join(map(str, processes(self.mark)))
            raise AssertionError(f"not over after {seconds:g} s; alive:\n{left}\n{self.told()}")
        assert self.end - self.begin <= seconds, f"it took {self.end - self.begin:.1f} s\n{self.told()}"
        return self.process.returncode

    def wait_until(self, true: Callable[[], object], seconds: float = 60.0) -> None:
        """Poll until something is true of a run that goes on."""
        end = time.monotonic() + seconds
        while not true():
            assert self._waiter.is_alive(), self.told()
            assert time.monotonic() < end, f"not within {seconds:g} s\n{self.told()}"
            time.sleep(0.02)

    def is_over(self, seconds: float = 0.0) -> bool:
        """Whether it ends within so many seconds from now."""
        self._waiter.join(seconds)
        return not self._waiter.is_alive()

    def _wait(self) -> None:
        self.process.wait()
        self.end = time.monotonic()

    def told(self) -> str:
        """Everything it wrote, for a failed assertion."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def left_processes(self, seconds: float = 30.0) -> list[Process]:
        """Its processes that are still alive after `seconds`."""
        end = time.monotonic() + seconds
        while (alive := processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.02)
        return alive

    def left_files(self) -> list[str]:
        """What lies in its temporary folder; torchrun's own folders are not ours."""
        paths = [path.relative_to(self.temporary) for path in self.temporary.rglob("*")]
        return sorted(str(path) for path in paths if not path.parts[0].startswith(("torchelastic_", "torchinductor_")))

    def check_left_nothing(self) -> None:
        """No process and no file."""
        assert self.left_processes() == []
        assert self.left_files() == []

    def destroy(self) -> None:
        """End what a failed test left behind."""
        for process in processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                process.kill(signal.SIGKILL)
        self._waiter.join(10)

    # Who is who ------------------------------------------------------------------------------------------------------

    def fork_server(self, rank: int) -> Process:
        """The process in which a rank's torch lives, and whose children are the rank's torch workers."""
        alive = processes(self.mark)
        workers = [process for process in alive if process.is_worker and process.rank == str(rank)]
        servers = [process for process in alive if process.is_fork_server and not process.is_worker]
        wanted = workers[-1].parent if workers else None
        found = [process for process in servers if process.pid == wanted or process.parent == self.supervisor(rank).pid]
        return (found or servers)[0]

    def worker(self, rank: int) -> Process:
        """The rank's newest worker with torch."""
        own = [p for p in processes(self.mark) if p.is_worker and p.rank == str(rank)]
        return max(own, key=lambda process: process.pid)

    def supervisor(self, rank: int) -> Process:
        """The process that the launcher started for a rank: it has started a worker without torch by itself."""
        alive, module = processes(self.mark), "ddpdiag.runtime.supervisor.worker"
        parent = next(p.parent for p in alive if module in p.command and p.environ.get("RANK") == str(rank))
        return next(process for process in alive if process.pid == parent)


Start = Callable[..., Job]
