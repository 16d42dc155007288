"""What is done first on a real machine: on one GPU, then on eight. A test fails where a step could not be done to its
end; what a step found is shown at the end of the run, and is in the archive (see field.py).

No driver, service or setting of a GPU is changed.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from acts import SILENT_SECONDS
from field import ON_ONE_GPU, FieldRun, ForkServer, Kill, Step, unexpected_in
from jobs import Job, Start, free_port
from smi import differences

from ddpdiag.checks.failure_evidence import crash_line
from ddpdiag.codec import decode
from ddpdiag.probes.gpu.health import GpuReading
from ddpdiag.probes.gpu.kernel_log import kernel_log, kmsg_path
from ddpdiag.probes.gpu.nvml import enumerate_gpus, gpu_uses
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.supervisor.processes import is_alive

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.usefixtures("gpus")]
ACTS = str(Path(__file__).with_name("acts.py"))
# Ranks that share a GPU, each with an NCCL_HOSTID of its own.
SHARED = ("LCH002.host-id",)
_NCCL_TRIAL = '"params":{"backend":"nccl"'


@contextmanager
def step(field: FieldRun, name: str) -> Iterator[Step]:
    """A step of the field run; why it was not done to its end is noted as well."""
    own, begin = Step(name), time.monotonic()
    field.steps.append(own)
    try:
        yield own
    except (AssertionError, OSError, ValueError, LookupError) as error:
        own.unexpected.append(f"not done to its end: {str(error).partition(chr(10))[0]}")
        raise
    finally:
        own.seconds = time.monotonic() - begin


class Runs:
    """Runs of ddpdiag within a step."""

    def __init__(self, field: FieldRun, start: Start, own: Step, folder: Path) -> None:
        self.field, self.start, self.step, self.folder = field, start, own, folder

    def begin(self, name: str, *arguments: str, **variables: str) -> Job:
        """Start one that is recorded."""
        files = ("--record", str(self.folder / f"{name}.jsonl"), "--json", "{json}")
        return self.start("-m", "ddpdiag", *arguments, *files, **variables)

    def end(self, name: str, job: Job, seconds: float, **expected: object) -> dict:
        """Its report, when it is over; what is unexpected in it is noted."""
        try:
            job.wait(time.monotonic() - job.begin + min(seconds, max(30.0, self.field.left)))
        finally:
            self.field.keep_recording(name, self.folder / f"{name}.jsonl")
            self.field.keep_text(f"logs/{name}.txt", job.told())
        report = job.report
        self.step.facts[name] = f"{report['verdict']} in {report['seconds']:.1f} s"
        found = unexpected_in(report, **expected)
        found += ["a traceback of ddpdiag"] if job.has_traceback else []
        found += [f"{own.command} is still alive" for own in job.left_processes(10)]
        self.step.unexpected += [f"{name}: {text}" for text in found]
        return report

    def run(self, name: str, *arguments: str, seconds: float = 150, **options: object) -> dict:
        """One from its start to its end; upper-case options are variables."""
        variables = {key: str(value) for key, value in options.items() if key.isupper()}
        expected = {key: value for key, value in options.items() if not key.isupper()}
        return self.end(name, self.begin(name, *arguments, **variables), seconds, **expected)

    def pair(self, name: str, *options: str, seconds: float, **expected: object) -> tuple[dict, list[Job]]:
        """Two ranks on one GPU, started by hand; with `stop` the second one's worker stops as NCCL begins."""
        stop = expected.pop("stop", False)
        port = str(free_port())
        place = ("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--backend", "nccl")
        own = ON_ONE_GPU | {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
        second = self.start("-m", "ddpdiag", "check", *place, "--rank", "1", *options, **own, NCCL_HOSTID="field-1")
        first = self.begin(name, "check", *place, "--rank", "0", *options, **own, NCCL_HOSTID="field-0")
        if stop:
            second.wait_until(lambda: second.recorded(1, _NCCL_TRIAL), 90)
            second.worker(1).kill(signal.SIGSTOP)
        report = self.end(name, first, seconds, **expected)
        self.field.keep_text(f"logs/{name}-rank-1.txt", second.told())
        return report, [first, second]


@pytest.fixture
def runs(field: FieldRun, start: Start, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Runs of a step that is named as the test is."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    with step(field, name) as own:
        yield Runs(field, start, own, tmp_path)


def said(job: Job, seconds: float) -> dict:
    """The JSON that an act of acts.py writes last."""
    job.wait(seconds)
    return json.loads(next(line for line in reversed(job.stdout.splitlines()) if line.startswith("{")))


def is_ready(job: Job) -> bool:
    """Has an act begun?"""
    return "ready" in job.stdout.splitlines()


def nvidia_smi(*options: str) -> str | None:
    """What it prints; None where there is none, or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(("nvidia-smi", *options), capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else None


# One GPU --------------------------------------------------------------------------------------------------------------


def test_1_check_cold_and_warm(runs: Runs) -> None:
    alone = ("check", "--nproc-per-node", "1", "--details")
    cold = runs.run("check-cold", *alone, seconds=180, CUDA_VISIBLE_DEVICES="0")
    warm = runs.run("check-warm", *alone, seconds=120, CUDA_VISIBLE_DEVICES="0")
    if warm["seconds"] > 1.5 * cold["seconds"]:
        runs.step.unexpected.append("the second run took half as long again as the first")


@pytest.mark.parametrize("visible", ["0", "uuid"])
def test_2_the_fork_server_before_its_first_fork(runs: Runs, visible: str) -> None:
    if visible == "uuid":
        visible = enumerate_gpus(lambda _: None).gpus[0].uuid or "0"
    job = runs.start(ACTS, "fork-server", CUDA_VISIBLE_DEVICES=visible)
    found = said(job, 90)
    runs.step.facts |= found
    server = ForkServer(**found | {"threads": tuple(found["threads"]), "devices": tuple(found["devices"])})
    runs.step.unexpected += server.unexpected


def test_3_a_killed_process_with_a_spinning_kernel(runs: Runs) -> None:
    log = kernel_log(kmsg_path(os.environ))
    before = gpu_uses()[0].memory_bytes
    job = runs.start(ACTS, "spin", CUDA_VISIBLE_DEVICES="0")
    job.wait_until(lambda: is_ready(job), 90)
    during, begin = gpu_uses()[0].memory_bytes, time.monotonic()
    os.kill(job.process.pid, signal.SIGKILL)
    gone = _until(lambda: not is_alive(job.process.pid), DEADLINES.kill_gpu)
    seconds = time.monotonic() - begin if gone else None
    _until(lambda: (gpu_uses()[0].memory_bytes or 0) <= (before or 0) + (32 << 20), 10)
    later = kernel_log(kmsg_path(os.environ))
    xids = tuple(f"Xid {xid.code}, {xid.text}" for xid in later.xids if log.last is not None and xid.line > log.last)
    kill = Kill(seconds, before, during, gpu_uses()[0].memory_bytes, xids)
    runs.step.facts |= vars(kill) | {"kernel log": later.error or "readable"}
    runs.step.unexpected += kill.unexpected(DEADLINES.kill)


def _until(true: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("state", ["idle", "loaded"])
def test_4_each_field_of_the_gpus_beside_nvidia_smi(runs: Runs, state: str) -> None:
    if state == "loaded":
        load = runs.start(ACTS, "load", CUDA_VISIBLE_DEVICES="0")
        load.wait_until(lambda: is_ready(load), 90)
    job = runs.start(ACTS, "look")
    job.wait(60)
    look, document = decode(job.stdout.encode(), GpuReading), nvidia_smi("-q", "-x")
    runs.field.keep_text(f"look-{state}.json", job.stdout)
    if document is None:
        runs.step.facts["nvidia-smi"] = "not there, or it fails"
    else:
        runs.field.keep_text(f"nvidia-smi-q-{state}.xml", document)
        runs.field.keep_text(f"nvidia-smi-q-{state}.txt", nvidia_smi("-q") or "")
        runs.step.unexpected += differences(look, document)
    # A load is what GPU008 must see, as somebody else's.
    known = ("GPU008.in-use",) if state == "loaded" else ()
    runs.run(f"gpus-{state}", "check", "--nproc-per-node", "1", "--stage", "gpu", seconds=90, known=known)


def test_5_two_ranks_on_one_gpu(runs: Runs) -> None:
    # Both refuse two ranks on one GPU, rightly.
    options = ("--ignore", "LCH001,GPU002", "--budget", "150")
    report, _ = runs.pair("two-ranks", *options, seconds=170, known=SHARED)
    done = {check["code"]: check["statuses"].get("done", 0) for check in report["checks"]}
    runs.step.facts["done"] = {code: count for code, count in done.items() if count}
    for code in ("COL001", "TRN001", "P2P004"):
        if not done.get(code):
            runs.step.unexpected.append(f"{code} has no result")


def test_5_what_torch_knows_where_a_rank_is_stopped(runs: Runs) -> None:
    port = str(free_port())
    own = ON_ONE_GPU | {"CUDA_VISIBLE_DEVICES": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    own |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
    ranks = [runs.start(ACTS, "rank", **own, RANK=str(rank), NCCL_HOSTID=f"field-{rank}") for rank in range(2)]
    try:
        assert _until(lambda: all(map(is_ready, ranks)) or any(job.is_over() for job in ranks), 90), (
            "no all-reduce in 90 s"
        )
        if any(job.is_over() for job in ranks):
            runs.step.unexpected.append(f"the ranks ended at once: {crash_line(ranks[0].stderr)}")
            return
        os.kill(ranks[1].process.pid, signal.SIGSTOP)
        found = said(ranks[0], time.monotonic() - ranks[0].begin + SILENT_SECONDS + 30)
    finally:
        for rank, job in enumerate(ranks):
            runs.field.keep_text(f"logs/stopped-rank-{rank}.txt", job.told())
    runs.step.facts["traces"] = found["traces"]
    if not found["traces"]:
        runs.step.unexpected.append(f"torch's collective trace is {'empty' if found['traces'] == [] else 'unreadable'}")


def test_5_a_rank_that_is_stopped_before_it_has_a_communicator(runs: Runs) -> None:
    options = ("--select", "LCH003,COL001", "--budget", "60", "--set", "COL001.deadline_seconds=8")
    report, _ = runs.pair(
        "stopped-in-init", *options, seconds=90, stop=True, verdict="unfit", known=SHARED, blamed=(1,)
    )
    runs.step.facts["errors"] = [own["code"] for own in report["findings"] if own["severity"] == "error"]


# Eight GPUs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def eight(gpus: int) -> None:
    """Skip where there are fewer."""
    if gpus < 8:
        pytest.skip(f"{gpus} of 8 GPUs are here")


FAULTS = ("sleep", "exit", "segv")


@pytest.mark.usefixtures("eight")
def test_6_three_checks_of_eight_gpus(runs: Runs) -> None:
    for number in range(3):
        runs.run(f"eight-{number}", "check", "--details", seconds=240)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("nvls", ["1", "0"])
def test_7_bandwidth_beside_nccl_tests(runs: Runs, nvls: str) -> None:
    for ranks in (2, 4, 8):
        options = ("--nproc-per-node", str(ranks), "-b", "8", "-e", "1G", "-T", "60")
        runs.run(f"bench-{ranks}-nvls-{nvls}", "allreduce-bench", *options, seconds=120, NCCL_NVLS_ENABLE=nvls)
        runs.step.facts[f"all_reduce_perf, {ranks} ranks"] = _nccl_tests(runs.field, ranks, nvls)


def _nccl_tests(field: FieldRun, ranks: int, nvls: str) -> str:
    if shutil.which("all_reduce_perf") is None:
        return "not in PATH"
    command = ("all_reduce_perf", "-b", "8", "-e", "1G", "-f", "2", "-g", str(ranks))
    env = os.environ | {"NCCL_NVLS_ENABLE": nvls}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    field.keep_text(f"logs/all_reduce_perf-{ranks}-nvls-{nvls}.txt", done.stdout + done.stderr)
    return f"exit code {done.returncode}"


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("preset", ["NCCL_P2P_DISABLE=1", "NCCL_NVLS_ENABLE=0"])
def test_8_a_variable_that_is_set_already(runs: Runs, preset: str) -> None:
    name, _, value = preset.partition("=")
    # What such a variable costs is said as a warning of the launch.
    runs.run(f"preset-{name.lower()}", "check", seconds=240, known=("LCH002",), **{name: value})


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("fault", FAULTS)
def test_9_who_is_blamed_for_a_rank_that_fails(runs: Runs, fault: str) -> None:
    options = ("--select", "LCH003,COL001", "--budget", "90")
    expected = {"verdict": "unfit", "blamed": (3,), "DDPDIAG_TEST_FAULT": f"{fault} 3"}
    runs.run(f"fault-{fault}", "check", *options, seconds=150, **expected)
    busy = [use.index for use in gpu_uses() if use.pids]
    runs.step.unexpected += [f"GPU {index} still has processes" for index in busy]


@pytest.mark.usefixtures("eight")
def test_10_the_spread_of_steps_and_copies(runs: Runs) -> None:
    for number in range(10):
        runs.run(f"spread-{number}", "check", "--select", "GPU002,GPU003,P2P002,TRN001,TRN003", seconds=150)


def test_each_recording_of_the_archive_is_judged_as_the_run_was(field: FieldRun, tmp_path: Path, start: Start) -> None:
    with step(field, "each recording is judged again") as own:
        field.write_archive(tmp_path / "field.tar.gz", {})
        shutil.unpack_archive(tmp_path / "field.tar.gz", tmp_path, filter="data")
        for path in sorted(tmp_path.glob("*/recordings/*.jsonl")):
            job = start("-m", "ddpdiag", "judge", str(path), "--json", "{json}")
            job.wait(60)
            own.facts[path.stem] = job.report["verdict"]
            if not str(next((s.facts[path.stem] for s in field.steps if path.stem in s.facts), "")).startswith(
                job.report["verdict"]
            ):
                own.unexpected.append(f"{path.stem} is judged {job.report['verdict']}")
