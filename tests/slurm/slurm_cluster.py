"""A real Slurm cluster on one machine: slurmctld, one slurmd for each host of a network, and a munged of its own.

    with Cluster(4, folder) as cluster:               # nodes h0 to h3; the login host, with slurmctld, is h4
        job = cluster.sbatch("srun hostname", "-N4", "-n4")
        assert cluster.wait(job).exit_code == 0

Everything lives in the namespaces of the hosts (see tests/hosts/network.py) and in `folder`: two clusters may have the
same names, addresses and ports, and never meet, and nothing stays behind, whatever happens. `folder` must have a short
path (munge's socket has at most 107 characters), and is what all hosts share. It needs root, slurm-wlm and munge.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import network
from namespaces import NetworkError
from network import Host, Network

INJECT = Path(__file__).parents[1] / "inject"
_TOOLS = ("munged", "munge", "unmunge", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
_START_SECONDS = 60.0
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
# What a launcher around the tests would tell the jobs.
_FOREIGN = re.compile(r"(RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|TORCHELASTIC_.*|S?LURM_.*|OMPI_.*|DDPDIAG_.*|PYTHON.*)")
# cred_expire is also how long a requeued job waits.
_CONF = """
ClusterName=tests
SlurmctldHost={login}({login_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=30
MessageTimeout=5
TCPTimeout=2
KillWait=2
JobRequeue=1
"""


class SlurmError(Exception):
    """A daemon did not start, or a command failed; the text says what it answered."""


@dataclass(frozen=True)
class Ended:
    """A batch job that is over: Slurm's word for it, its exit code, and what it wrote."""

    state: str
    exit_code: int
    output: str


class Cluster:
    """`nodes` are the hosts by name; commands run on the host `login`, which runs no jobs."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.conf = folder / "slurm.conf"
        self._network = Network(count + 1, folder / "network")
        try:
            self.hosts: dict[str, Host] = {host.name: host for host in self._network.hosts[:-1]}
            self.login = self._network[count]
            self._write_files()
            self._start_daemons()
            self.wait_until_idle()
        except BaseException:
            self._network.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names, in order."""
        return tuple(self.hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every daemon and every job; the folder stays."""
        self._network.close()

    # Daemons ---------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        for name in ("state", "shared", "bin"):
            (self.folder / name).mkdir()
        # Elsewhere munged listens where these look by default.
        for name in ("munge", "unmunge"):
            program = self.folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={self.folder}/munge.socket "$@"\n')
            program.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        text = _CONF.format(login=self.login.name, login_address=self.login.address, folder=self.folder)
        # More CPUs than there are, so that jobs share the hosts.
        nodes = [f"NodeName={name} NodeAddr={host.address} CPUs=8 RealMemory=4000" for name, host in self.hosts.items()]
        partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4"
        self.conf.write_text("\n".join([text, *nodes, partition, ""]))
        # A slurmd of version 22.05 stops at once without a plug-in that it can start; what it would mount is there.
        unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        plugin = "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n" if unified else "CgroupPlugin=cgroup/v1\n"
        (self.folder / "cgroup.conf").write_text(f"{plugin}CgroupAutomount=yes\n")

    def _start_daemons(self) -> None:
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        socket = self.folder / "munge.socket"
        # --force: whose folders lead there is not for us to say.
        self.login.background("munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key", *munge)
        _until(socket.exists, "munged does not listen")
        self.login.background("slurmctld", "-D", "-f", self.conf)
        for name in self.hosts:
            self.start_slurmd(name)

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd (again)."""
        self.hosts[node].background("slurmd", "-D", "-N", node, "-f", self.conf)

    def wait_until_idle(self) -> None:
        """Until all nodes are up and nothing runs on them."""
        _until(lambda: self._states() == {"idle"}, f"not all nodes are idle; see {self.folder}")

    def _states(self) -> set[str]:
        try:
            return set(self.call("sinfo", "-h", "-N", "-o", "%T").split())
        except SlurmError:
            return set()  # slurmctld is not up yet

    # Commands --------------------------------------------------------------------------------------------------------

    def run(
        self, *command: object, seconds: float = 120.0, host: Host | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host (or another one), in the shared directory; it may fail."""
        words = [*(host or self.login).enter(self.shared), *map(str, command)]
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env={**self._environ(), **variables},
        )

    def call(self, *command: object) -> str:
        """Output of a command on the login host; a SlurmError if it fails."""
        done = self.run(*command)
        if done.returncode != 0:
            raise SlurmError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def srun(self, *arguments: object, seconds: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """A job of its own from the login host."""
        return self.run("srun", *arguments, seconds=seconds, **variables)

    def sbatch(self, script: Path | str, *options: object, arguments: Sequence[object] = (), **variables: str) -> int:
        """Submit a script, as a path or as its text without the first line, with its arguments; the job's number."""
        if isinstance(script, str):
            text, script = script, self.folder / f"script-{time.monotonic_ns()}"
            script.write_text(f"#!/bin/bash\n{text}\n")
        output = f"--output={self.shared}/job-%j.out"
        command = ("sbatch", "--parsable", output, "--open-mode=append", *options, script, *arguments)
        done = self.run(*command, **variables)
        if done.returncode != 0:
            raise SlurmError(f"sbatch {script}: {done.stderr.strip()}")
        return int(done.stdout.strip())

    def output(self, job: int) -> str:
        """What a batch job has written so far."""
        path = self.shared / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, NodeList, ExcNodeList, Restarts and so on."""
        text = self.call("scontrol", "show", "job", "--oneliner", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job: int, seconds: float = 180.0) -> Ended:
        """A batch job's end; one that is requeued goes on."""
        _until(lambda: self._is_over(job), lambda: f"job {job} goes on: {self.told(job)}", seconds)
        now = self.state(job)
        return Ended(now["JobState"], int(now["ExitCode"].partition(":")[0]), self.output(job))

    def _is_over(self, job: int) -> bool:
        now = self.state(job)
        return now["JobState"] in _OVER and now["EndTime"] != "Unknown"

    def wait_for_output(self, job: int, text: str, seconds: float = 120.0) -> None:
        """Until a batch job has written this."""
        _until(lambda: text in self.output(job), lambda: f"no {text!r} in job {job}: {self.told(job)}", seconds)

    def told(self, job: int) -> str:
        """All that is known of a job, for a failed assertion."""
        return f"{self.state(job)}\n{self.output(job)}"

    def _environ(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}
        path = [
            str(self.folder / "bin"),
            str(Path(sys.executable).parent),
            os.environ.get("PATH", ""),
            "/usr/sbin",
            "/sbin",
        ]
        return {
            **ours,
            "PATH": os.pathsep.join(path),
            "SLURM_CONF": str(self.conf),
            "PYTHONPATH": str(INJECT),
            "OMP_NUM_THREADS": "1",
        }

    # Faults ----------------------------------------------------------------------------------------------------------

    def kill_slurmd(self, node: str) -> None:
        """Its slurmd dies, as for want of memory; what runs there goes on, until Slurm misses the node."""
        self.hosts[node].call("pkill", "-KILL", "-x", "slurmd")  # sees the processes of this host only

    def slow(self, node: str, rate: str = "100mbit") -> None:
        """A bad cable: so much comes in and goes out."""
        self.hosts[node].slow(rate)
        self.hosts[node].slow(rate, incoming=True)

    def cut_off(self, node: str) -> None:
        """Pull the node's cable out."""
        self.hosts[node].cut()

    def power_off(self, node: str) -> None:
        """The node is gone: no cable, and no process lives."""
        self.cut_off(node)
        self.crash(node)

    def crash(self, node: str) -> None:
        """No process of the node lives; its kernel refuses connections."""
        # Of its own process table, and so of this host alone, -1 is all but the first and the one that asks.
        self.hosts[node].call("sh", "-c", "kill -KILL -1")

    def miss(self, node: str) -> None:
        """Slurm misses a node at once, not only after SlurmdTimeout."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=missed")

    def restore(self) -> None:
        """As at the beginning: no job, no fault, every slurmd up, every node idle."""
        self.call("scancel", "--quiet", "--user=root")
        for host in self.hosts.values():
            host.heal()
        states = dict(line.split() for line in self.call("sinfo", "-h", "-N", "-o", "%N %t").splitlines())
        for name, state in states.items():
            if state.startswith(("drain", "drng")):
                self.call("scontrol", "update", f"nodename={name}", "state=resume")
            self._restart_if_gone(name, state)
        self.wait_until_idle()

    def _restart_if_gone(self, node: str, state: str) -> None:
        """A slurmd that starts tells slurmctld at once; one that lives would be asked after most of a minute."""
        host = self.hosts[node]
        if state.startswith("down") or state.endswith("*"):
            self.run("pkill", "-KILL", "-x", "slurmd", host=host)
            _until(lambda: not self._has_slurmd(host), f"slurmd on {node} does not end")
        if not self._has_slurmd(host):
            self.start_slurmd(node)

    def _has_slurmd(self, host: Host) -> bool:
        return self.run("pgrep", "-x", "slurmd", host=host).returncode == 0


def _until(true: Callable[[], object], otherwise: str | Callable[[], str], seconds: float = _START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            told = otherwise if isinstance(otherwise, str) else otherwise()
            raise SlurmError(f"{told} (waited {seconds:g} s)")
        time.sleep(0.1)


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for a cluster, gone afterwards; pytest's own have paths too long for a socket."""
    with TemporaryDirectory(prefix="ddpdiag-slurm-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@cache
def reason_against() -> str | None:
    """Why no cluster can be started here, or None. It tries."""
    if reason := network.reason_against():
        return reason
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        with folder() as own, Cluster(1, own):
            return None
    except (SlurmError, NetworkError) as error:
        return str(error)
