"""`ddpdiag host`, as a Prolog runs it: an empty environment, no peer, no network, a deadline."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fake_nvml
import pytest
from jobs import Job, Start, processes

HOST = ("-m", "ddpdiag", "host")
DDPDIAG = Path(sys.executable).with_name("ddpdiag")
needs_compiler = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")


def test_an_empty_environment_is_enough(tmp_path: Path) -> None:
    """No PATH, no HOME, the root directory, nothing to read: `env -i /path/ddpdiag host`."""
    done = subprocess.run([DDPDIAG, "host"], env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(f"ddpdiag: FIT: host {os.uname().nodename}")


def test_an_unfit_host_is_unfit_though_its_report_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([DDPDIAG, "host", "--expect-gpus", "8"], env={}, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr


def test_a_broken_installation_is_no_unfit_host(start: Start, tmp_path: Path) -> None:
    """Python would leave with 1 for an import that fails."""
    (tmp_path / "typer.py").write_text("raise ImportError('half of typer is gone')\n")
    job = start(*HOST, PYTHONPATH=str(tmp_path))
    assert job.wait() == 4
    assert job.stderr.startswith("ddpdiag: ")
    assert "half of typer is gone" in job.stderr


def test_nothing_is_imported_that_it_does_not_need(start: Start) -> None:
    job = start("-X", "importtime", *HOST)
    assert job.wait() == 0
    imported = {line.rpartition("|")[2].strip() for line in job.stderr.splitlines() if line.startswith("import time:")}
    assert "ddpdiag.runtime.single_rank" in imported
    assert not imported & {
        "torch",
        "numpy",
        "zmq",
        "ddpdiag.runtime.run",
        "ddpdiag.bench.blocks",
        "ddpdiag.simulate.fleet",
    }


def calls(trace: Path) -> list[str]:
    """System calls that concern the network, without those on sockets within the host."""
    kinds = ("AF_UNIX", "AF_NETLINK", "---", "+++")
    return [line for line in trace.read_text().splitlines() if not any(kind in line for kind in kinds)]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("options", [(), pytest.param(("--torch",), marks=pytest.mark.deep)], ids=["plain", "torch"])
def test_it_talks_to_nobody(start: Start, tmp_path: Path, options: tuple[str, ...]) -> None:
    trace = tmp_path / "trace"
    opening = "trace=socket,connect,bind,sendto,sendmsg,sendmmsg"
    job = start(*HOST, *options, "--budget", "60", prefix=("strace", "-f", "-e", opening, "-o", str(trace)))
    assert job.wait(90) == 0, job.told()
    assert "AF_UNIX" not in "".join(line for line in trace.read_text().splitlines() if " connect(" in line)
    reached = [line for line in calls(trace) if "socket(" not in line and "sendto(" not in line]
    # gloo listens on the loopback interface, which needs no peer; nothing connects, and no name is looked up.
    assert all(re.search(r'bind\(.*inet_addr\("127\.0\.0\.1"\)', line) for line in reached), reached
    assert not reached or options == ("--torch",)
    assert not [line for line in calls(trace) if "sendto(" in line and "sa_family" in line]


def test_torch_computes(start: Start) -> None:
    job = start(*HOST, "--torch", "--json", "{json}", "--budget", "60")
    assert job.wait() == 0, job.told()
    statuses = {check["code"]: check["statuses"] for check in job.report["checks"]}
    assert statuses["HST005"] == {"done": 1}
    assert statuses["LCH003"] == {"done": 1}
    assert job.report["world"]["launcher"] == "alone"
    job.check_left_nothing()


def test_a_torch_that_cannot_be_imported_is_found_by_torch_only(start: Start, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    job = start(*HOST, "--torch", "--json", "{json}", PYTHONPATH=str(tmp_path))
    assert job.wait() == 1, job.told()
    assert "libcudart.so.12" in job.errors[0]["message"]
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_the_recording_is_judged_alike_elsewhere(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    job = start(*HOST, "--expect-gpus", "8", "--record", str(record), "--json", "{json}")
    assert job.wait() == 1, job.told()
    again = start("-m", "ddpdiag", "judge", str(record), "--json", "{json}")
    assert again.wait() == 1, again.told()
    assert again.report["sentence"] == job.report["sentence"]
    assert (
        [f["code"] for f in again.report["findings"]] == [f["code"] for f in job.report["findings"]] == ["GPU001.fewer"]
    )


def gpus(tmp_path: Path, name: str) -> dict[str, str]:
    """Eight GPUs behind a stand-in for NVML."""
    (tmp_path / "kmsg").write_text("")
    return {
        "LD_LIBRARY_PATH": str(fake_nvml.build(name, tmp_path)),
        "DDPDIAG_PROCFS": str(fake_nvml.driver_of_eight(tmp_path)),
        "DDPDIAG_KMSG": str(tmp_path / "kmsg"),
        "FAKE_NVML_STARTS": str(tmp_path / "starts"),
        "FAKE_NVML_LATER": "0",
    }


@needs_compiler
@pytest.mark.parametrize(
    ("name", "code", "found"), [("healthy", 0, []), ("ecc-uncorrected", 1, ["GPU003.uncorrected"])]
)
def test_all_gpus_of_the_host_are_asked(start: Start, tmp_path: Path, name: str, code: int, found: list[str]) -> None:
    job = start(*HOST, "--json", "{json}", **gpus(tmp_path, name))
    assert job.wait() == code, job.told()
    assert [finding["code"] for finding in job.report["findings"]] == found
    assert all(finding["gpus"] == [fake_nvml.uuid_of(5)] for finding in job.report["findings"])
    job.check_left_nothing()


@needs_compiler
@pytest.mark.parametrize(
    ("options", "code", "found"),
    [
        # Less time than the check's own: some drivers start slowly, and nobody is drained for it.
        (("--budget", "8"), 3, "RUN004.unfinished"),
        pytest.param(("--set", "GPU003.deadline_seconds=1"), 1, "RUN003.hung", marks=pytest.mark.deep),
    ],
    ids=["budget", "deadline"],
)
def test_a_driver_that_hangs_is_told_in_time(
    start: Start, tmp_path: Path, options: tuple[str, ...], code: int, found: str
) -> None:
    job = start(*HOST, "--json", "{json}", *options, **gpus(tmp_path, "hanging"))
    assert job.wait() == code, job.told()
    (error,) = job.errors
    assert error["code"] == found
    assert f"GPU 5 (PCI {fake_nvml.pci_of(5)})" in error["message"]
    job.check_left_nothing()


def inner(job: Job) -> int:
    """The process that looks at the host: the child of the one that was started, once it asks in a child of its own."""
    found = processes(job.mark)
    children = {p.pid for p in found if p.parent == job.process.pid}
    return next((p.parent for p in found if p.parent in children), 0)


@needs_compiler
def test_whatever_becomes_of_the_process_itself_there_is_an_answer(start: Start, tmp_path: Path) -> None:
    """What held up too long is killed in the same way, see test_watched."""
    job = start(*HOST, **gpus(tmp_path, "hanging"))
    job.wait_until(lambda: inner(job))
    os.kill(inner(job), signal.SIGKILL)
    assert job.wait() == 3, job.told()
    assert re.search(r"pid \d+ .*'test the host'.*SIGKILL.*", job.stderr)
    job.check_left_nothing()


@needs_compiler
def test_sigterm_ends_it_with_what_is_known(start: Start, tmp_path: Path) -> None:
    job = start(*HOST, "--json", "{json}", **gpus(tmp_path, "hanging"))
    job.wait_until(lambda: inner(job))
    job.process.terminate()
    assert job.wait() == 143, job.told()
    assert job.report["verdict"] == "unknown"
    assert not job.has_traceback, job.told()
    job.check_left_nothing()
