"""`ddpdiag watch` around real trainings that stop, spin or hide, and around commands that just run."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs import Job, processes, torchrun

from ddpdiag.watch.evidence import find_py_spy

WATCH = ("-m", "ddpdiag", "watch")
STALL = 3.0
# Who is done earlier waits no longer.
SECONDS = 60

# Says that it lives until all ranks have met, then once a step; a file makes rank 1 do what it is called.
TRAINING = """
import ctypes, os, threading, time
import torch, torch.distributed as dist

met, rank = threading.Event(), int(os.environ["RANK"])

def alive():
    while not met.wait(0.5):
        print("starting", flush=True)

def spin():
    return sum(iter(int, 1))  # never ends, and never leaves C

def trouble():
    if rank == 1 and os.path.exists("hide"):
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
    if rank == 1 and os.path.exists("spin"):
        spin()

threading.Thread(target=alive).start()
dist.init_process_group("gloo")
dist.barrier()
met.set()
for step in range(10_000):
    trouble()
    dist.all_reduce(torch.ones(4))
    print("step", step, flush=True)
    time.sleep(1.0)
"""
needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")


@pytest.fixture
def training(start, tmp_path):
    """training(prefix=...): a watched training of two ranks that has begun, and how often it was told of."""

    def begin(*options: str, prefix: Sequence[str] = ()) -> tuple[Job, int]:
        script = tmp_path / "train.py"
        script.write_text(TRAINING)
        command = (sys.executable, *torchrun(2, str(script)))
        job = start(*WATCH, "--stall", str(STALL), *options, "--", *command, prefix=prefix)
        job.wait_until(lambda: "step 1" in job.stdout, 120)
        return job, len(reports(job))  # a busy machine is silent before it trains

    return begin


def reports(job: Job) -> list[str]:
    """What was told so far, a text each."""
    return job.stderr.split("ddpdiag watch: ")[1:]


def next_report(job: Job, told: int) -> str:
    """The next report, once it is whole: a stack or the notes are at its end."""
    job.wait_until(lambda: len(reports(job)) > told, 60)
    job.wait_until(lambda: "innermost first" in reports(job)[told] or "notes" in reports(job)[told], 60)
    return " ".join(reports(job)[told].split())


def attached(pid: int) -> tuple[int, str | None]:
    """The exit code of `ddpdiag watch --pid`, and which of two words its report has."""
    done = subprocess.run([sys.executable, *WATCH, "--pid", str(pid)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, next((word for word in ("progress", "stopped") if word in done.stdout), None)


@contextlib.contextmanager
def repeated(pid: int) -> Iterator[Callable[..., None]]:
    """told_by(text, signum) waits until `ddpdiag watch --pid --every 1` has told the text, and sends it the signal."""
    command = [sys.executable, *WATCH, "--pid", str(pid), "--every", "1"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as own:

        def told_by(text: str, signum: int = 0) -> None:
            end = time.monotonic() + SECONDS
            while text not in (told := os.pread(log.fileno(), 1 << 20, 0).decode()) and time.monotonic() < end:
                own.send_signal(signum)
                time.sleep(0.3)
            assert text in told, told

        try:
            yield told_by
            own.send_signal(signal.SIGINT)
            assert own.wait(SECONDS) == 130
            told_by("progress in")
        finally:
            own.kill()


@needs_py_spy
def test_a_stopped_rank_is_named_and_the_job_goes_on(training):
    job, before = training()
    own = [p for p in processes(job.mark) if p.environ.get("LOCAL_RANK") == "1" and "train.py" in p.command]
    stopped = min(own, key=lambda process: process.pid)
    assert attached(stopped.pid) == (0, "progress")
    with repeated(job.process.pid) as told_by:
        told_by("the job makes progress")
        stopped.kill(signal.SIGSTOP)
        told_by("rank 1 is stopped")
        told_by("rank 0 waited for rank 1 in", signal.SIGUSR1)
    assert attached(job.process.pid) == (1, "stopped")
    told = next_report(job, before)
    assert f"kill -CONT {stopped.pid}" in told
    assert "rank 0: sleeping in <module> (train.py:26), in all_reduce (distributed_c10d.py)" in told
    stopped.kill(signal.SIGCONT)
    steps = job.stdout.count("step")
    job.wait_until(lambda: job.stdout.count("step") > steps, 60)


@pytest.mark.deep
@needs_py_spy
def test_a_slow_job_is_left_alone_and_a_rank_that_spins_in_c_is_named_and_ended(training):
    job, before = training("--kill")
    time.sleep(1.5 * STALL)
    assert len(reports(job)) == before, f"a step takes a third of the stall\n{job.told()}"
    (job.folder / "spin").touch()
    told = next_report(job, before)
    assert [word for word in ("rank 0", "rank 1", "spin (train.py:", "GIL") if word not in told] == []
    assert job.wait(SECONDS) == 1
    assert "--kill: nothing new for" in job.stderr
    job.check_left_nothing()


# All ranks but rank 1, which waits for a batch that its worker does not finish, wait in a barrier.
LOADING = """
import os, time
import torch.distributed as dist
from torch.utils.data import DataLoader

class Slow:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index == 1:
            time.sleep(3600)
        return index

dist.init_process_group("gloo")
for batch in DataLoader(Slow(), num_workers=2):
    print("step", int(batch), flush=True)
    dist.barrier()
"""


@pytest.mark.deep
@needs_py_spy
def test_a_worker_sleeps(start, tmp_path):
    """The worker is shown, and files in torchrun's --log-dir are output.

    The name is short, because a folder of this name has sockets, whose paths have at most 107 characters.
    """
    script = tmp_path / "train.py"
    script.write_text(LOADING)
    command = (sys.executable, *torchrun(2, "--log-dir", str(tmp_path / "logs"), "--redirects", "3", str(script)))
    job = start(*WATCH, "--stall", str(STALL), "--kill", "--", *command)
    assert job.wait(SECONDS) == 1
    told = " ".join(reports(job)[-1].split())
    line = 1 + LOADING.splitlines().index("            time.sleep(3600)")
    worker = f"is sleeping, in Slow.__getitem__ (train.py:{line})."
    expected = ("rank 0 waits in barrier at train.py:", "rank 1 is not in it", "The worker of rank 1, pid ", worker)
    assert [text for text in expected if text not in told.replace("Rank", "rank")] == [], told
    assert "stack of pid " in told
    assert "/dev/null" not in job.stderr, "the log files show progress"


@pytest.mark.deep
@needs_py_spy
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes a capability from itself")
def test_a_rank_whose_stack_is_refused_is_named_(training):
    # A process that is not dumpable is closed even to its own user, unless that has the capability.
    without = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    job, before = training(prefix=without)
    (job.folder / "hide").touch()
    (job.folder / "spin").touch()
    told = next_report(job, before)
    expected = ("rank 0", "all_reduce", "rank 1", "dumpable", "--cap-add=SYS_PTRACE")
    assert [word for word in expected if word not in told] == []


# Around any command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def watch() -> Iterator[Callable[..., subprocess.Popen]]:
    """watch(command, options=...): a watched command whose output goes through pipes."""
    with contextlib.ExitStack() as stack:

        def start(*command: str, options: tuple[str, ...] = (), **settings) -> subprocess.Popen:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
            own = subprocess.Popen([sys.executable, *WATCH, "-q", *options, "--", *command], **pipes)
            stack.enter_context(own)
            stack.callback(own.kill)
            return own

        yield start


PYTHON = (sys.executable, "-c")


def test_it_leaves_as_its_command_does(watch):
    codes = {
        ("sh", "-c", "exit 7"): 7,
        ("sh", "-c", "kill -TERM $$"): -signal.SIGTERM,
        ("sh", "-c", "kill -SEGV $$"): -signal.SIGSEGV,
        ("no-such-command",): 127,
        ("/etc/passwd",): 126,
    }
    watches = {command: watch(*command) for command in codes}
    assert {command: own.wait(SECONDS) for command, own in watches.items()} == codes


def test_output_passes_unchanged_and_at_once(watch):
    own = watch("sh", "-c", "printf 'a\\r'; read line; printf \"$line\" >&2", stdin=subprocess.PIPE)
    assert os.read(own.stdout.fileno(), 10) == b"a\r"
    assert own.communicate("b") == ("", "b")


def test_why_a_command_failed_is_reported_behind_its_output(watch):
    own = watch("sh", "-c", "echo 'OSError: [Errno 24] Too many open files' >&2; exit 7")
    out, err = own.communicate()
    assert (own.returncode, out) == (7, "")
    told, reported = err.split("\n", 1)
    assert told == "OSError: [Errno 24] Too many open files"
    assert "the command failed (exit code 7)" in reported
    assert "ulimit -n" in reported


def test_a_command_that_was_told_to_end_is_not_explained(watch):
    own = watch("sh", "-c", "trap 'exit 5' TERM; echo 'OSError: [Errno 24] Too many open files'; sleep 60 & wait")
    own.stdout.readline()
    own.send_signal(signal.SIGTERM)
    assert own.wait(SECONDS) == 5
    assert own.stderr.read() == ""


def test_the_command_keeps_the_terminal(watch):
    outer, inner = pty.openpty()
    program = "import os, sys; print(sys.stdin.isatty(), sys.stderr.isatty(), os.ttyname(1))"
    own = watch(*PYTHON, program, stdin=inner, stdout=inner, stderr=inner)
    assert own.wait(SECONDS) == 0
    assert os.read(outer, 1000).decode().strip() == f"True True {os.ttyname(inner)}"
    os.close(outer)
    os.close(inner)


def test_a_parent_that_ignores_its_children_changes_nothing(watch):
    own = watch("sh", "-c", "exit 7", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert own.wait(SECONDS) == 7


def test_a_reader_that_leaves_ends_the_command(watch):
    own = watch("yes")
    own.stdout.read(10)
    own.stdout.close()
    assert own.wait(SECONDS) == -signal.SIGPIPE


def asked(watches: Sequence[subprocess.Popen], logs: Sequence[Path], text: str) -> list[str]:
    """What each has told, once one of them says this: the last of them is asked until then."""
    end = time.monotonic() + SECONDS
    while text not in " ".join(" ".join(log.read_text() for log in logs).split()) and time.monotonic() < end:
        watches[-1].send_signal(signal.SIGUSR1)
        time.sleep(0.3)
    told = [" ".join(log.read_text().split()) for log in logs]
    assert any(text in one for one in told), told
    return told


def test_watches_of_one_host_make_one_report_and_sigusr1_asks_for_it(watch, tmp_path):
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid()), "WORLD_SIZE": "2"}
    program = "import time; print('up', flush=True); time.sleep(60)"
    logs, both = [tmp_path / f"{rank}.log" for rank in range(2)], []
    for rank, log in enumerate(logs):
        with log.open("w") as stderr:
            env = {**os.environ, **job, "RANK": str(rank)}
            both.append(watch(*PYTHON, program, options=("--stall", "60"), env=env, stderr=stderr))
    for own in both:
        own.stdout.readline()
    told = asked(both, logs, "ranks 0-1: sleeping")
    assert sorted(bool(text) for text in told) == [False, True], "one of them tells, and of both"
    assert "requested: " in "".join(told)
    for own in both:
        own.terminate()
    assert [own.wait(SECONDS) for own in both] == [-signal.SIGTERM] * 2


def test_a_script_that_becomes_the_training_is_its_rank(watch, tmp_path):
    # Of an executable that is no Python by its name, as of a console script.
    train = tmp_path / "train"
    train.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    train.chmod(0o755)
    script = "echo up; while [ ! -e go ]; do sleep 0.2; done; export RANK=3 LOCAL_RANK=1 WORLD_SIZE=4; exec ./train"
    log = tmp_path / "log"
    with log.open("w") as stderr:
        own = watch("bash", "-c", script, options=("--stall", "60"), cwd=tmp_path, stderr=stderr)
    own.stdout.readline()
    asked([own], [log], "rank 0: sleeping")
    (tmp_path / "go").touch()
    asked([own], [log], "rank 3: sleeping")
    own.terminate()
    assert own.wait(SECONDS) == -signal.SIGTERM


@pytest.mark.deep
def test_another_file_that_grows_is_output_too(watch, tmp_path):
    log = tmp_path / "rank0.log"
    program = f"import time\nfor _ in range(14):\n    open({str(log)!r}, 'a').write('x'); time.sleep(0.5)"
    own = watch(*PYTHON, program, options=("--stall", "5", "--output", str(tmp_path / "*.log")))
    assert own.communicate(timeout=SECONDS) == ("", "")


def test_the_flight_recorder_is_set_only_if_asked(watch, tmp_path):
    program = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('TORCH_')}))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    assert json.loads(watch(*PYTHON, program, env=clean).communicate()[0]) == {}
    asked = watch(*PYTHON, program, options=("--flight-recorder",), env=clean | {"TMPDIR": str(tmp_path)})
    variables = json.loads(asked.communicate()[0])
    assert variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].startswith(str(tmp_path))
    assert variables["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert list(Path(tmp_path).iterdir()) == []
    assert watch("srun", "true", options=("--flight-recorder",)).wait(SECONDS) == 2, "its hosts lack the directory"
