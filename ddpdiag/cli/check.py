"""`ddpdiag check`: turn options into data, then run one rank's part, or start all ranks of this host."""

import math
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from msgspec import structs

from ddpdiag.checks.api import FIRST_USE_SECONDS
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.world import USUAL_RANKS_PER_CORE
from ddpdiag.cli.edge import complain, guarded, too_many_files
from ddpdiag.cli.options import CheckOptions
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import assemble, readable
from ddpdiag.errors import ExitCode, Unwritten, UsageError, nearest
from ddpdiag.judgement import judge
from ddpdiag.judgement.ending import with_signal
from ddpdiag.judgement.reading import read_baseline
from ddpdiag.judgement.selection import validate
from ddpdiag.model import Options, Place
from ddpdiag.model.bench import Bench
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.news import Listener
from ddpdiag.model.recording import Line
from ddpdiag.model.train import Train
from ddpdiag.probes.gpu.visibility import visible_gpus
from ddpdiag.probes.host.kernel import proc_root
from ddpdiag.render.files import Display, display_of
from ddpdiag.render.progress import SilentListener, listener
from ddpdiag.runtime.launchers import read_launch
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.launchers.slurm import cut_budget, job_left_seconds, read_topology
from ddpdiag.runtime.run import Run, follow, lead, prepare, start_ranks


def run(
    args: LaunchArgs,
    asked: CheckOptions,
    outputs: Outputs,
    *,
    bench: Bench | None = None,
    train: Train | None = None,
) -> int:
    """Take part in a run as one rank, or start all ranks of this host. Returns the exit code."""
    _utf8("--run-id", args.run_id)
    _utf8("--backend", asked.backend)
    check_backend(asked.backend)
    launch = launched(args)
    for option, seconds in (("--budget", asked.budget), ("--join-timeout", args.join_timeout)):
        if seconds is not None and not math.isfinite(seconds):
            raise UsageError(f"{option} {seconds}: expected a finite number of seconds, since every run must end")
    options = structs.replace(
        _options(launch, args, asked, outputs),
        bench=bench,
        train=train,
    )
    validate(options, all_checks())
    if launch.place.rank == 0:
        outputs.check([path for path in (asked.baseline, asked.topology) if path is not None])
    for note in (
        (launch.notice, nccl_without_gpus(asked.backend)) if launch.place.rank == 0 and not outputs.quiet else ()
    ):
        if note:
            complain(note)
    prepared = prepare(
        launch,
        options,
        all_checks(),
        join_wait=args.join_timeout,
        control_port=args.control_port,
        require_auth=args.require_auth,
    )
    if launch.ranks:
        return start_ranks(
            prepared,
            lambda place: guarded(lambda: _take_part(prepared, place, outputs)),
        )
    return _take_part(prepared, launch.place, outputs)


def _take_part(run: Run, place: Place, outputs: Outputs) -> int:
    """Run one rank's part; returns the exit code. Rank 0 measures, judges, writes the report and ends the run."""
    display = _display(place, outputs, whole=run.launch.starts_all_ranks)
    if place.rank != 0:
        return follow(run, place, display)
    with lead(run, place, display) as leader:
        lines = leader.measure()
        display.close()
        exit_code, sentence = leader.run_with_heartbeats(lambda: _report(lines, outputs, leader.late_signal))
        leader.set_exit(exit_code, sentence)
    return exit_code


def _display(place: Place, outputs: Outputs, *, whole: bool) -> Listener:
    """The display of a rank's progress. It has a thread, so it must be made in the rank's own process.

    Rank 0 shows the run. While other ranks look for rank 0 they share logs and terminals, so only one of them prints,
    and none of them if one process started all ranks.
    """
    if display_of(sys.stderr, os.environ) is Display.LIVE:
        prints = place.rank == 0 or not (whole or place.local_rank)
    else:
        prints = place.rank == 0 or (not whole and place.rank == 1)
    if not prints or outputs.quiet:
        return SilentListener()
    return listener(sys.stderr, os.environ)


def _report(lines: Sequence[Line], outputs: Outputs, late_signal: Callable[[], int | None]) -> tuple[int, str]:
    """Judge, write, print; returns exit code and sentence. A signal meanwhile changes only the exit code."""
    report = with_signal(judge(assemble(lines), all_checks()), late_signal())
    try:
        publish(report, lines, outputs, sys.stdout, sys.stderr)
    except (Unwritten, OSError, ValueError) as error:
        sentence = too_many_files(error) or str(error)
        complain(sentence)  # the verdict stands, and every rank still receives it
        # A script that waits for the file must not go on.
        return report.exit_code or int(ExitCode.UNKNOWN), report.sentence
    return with_signal(report, late_signal()).exit_code, report.sentence


def launched(args: LaunchArgs) -> Launch:
    """Read the launch of this process from the command line, else from the launcher's variables."""
    return read_launch(
        os.environ,
        args,
        host=readable(socket.gethostname()),
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        cores=os.cpu_count() or 1,
        unique_id=secrets.token_hex(6),
    )


def _options(launch: Launch, args: LaunchArgs, asked: CheckOptions, outputs: Outputs) -> Options:
    gpus = visible_gpus(os.environ, proc_root(os.environ)) if asked.backend.strip().lower() != "gloo" else 0
    budget = asked.budget if asked.budget is not None else _default_budget(launch, gpus=gpus)
    leads = launch.place.rank == 0
    # Only rank 0 asks the scheduler for the remaining time of the job.
    left = job_left_seconds(os.environ) if leads else None
    return Options(
        depth=asked.depth,
        stages=asked.stage,
        skip_stages=asked.skip_stage,
        select=asked.select,
        ignore=asked.ignore,
        backend=asked.backend.strip().lower(),  # as torch does
        expect_gpus=asked.expect_gpus,
        budget_seconds=cut_budget(budget, left),
        job_left_seconds=left,
        wanted_budget_seconds=budget if cut_budget(budget, left) < budget else None,
        shared_dir=_directory("--shared-dir", asked.shared_dir, launch),
        strict=outputs.strict,
        port_range=args.port_range,
        uses_workarounds=outputs.write_workaround is not None,
        # Rank 0 plans and judges: these files need not be on other hosts.
        topology=read_topology(asked.topology) if asked.topology is not None and leads else {},
        baseline=read_baseline(asked.baseline) if asked.baseline is not None and leads else None,
        settings=dict(asked.set_),
    )


# A first use of NCCL may take all of its own deadline.
_NCCL_BUDGET = FIRST_USE_SECONDS
# What 8 GPUs are expected to take (46 to 60 s) beyond one, for each: NCCL's ranks, and copies between pairs of GPUs.
_GPU_BUDGET = 5.0
# gloo connects each rank with every other: 2 ms of a core for each (128 ranks on 2 cores: 17 s, measured, torch 2.13),
# in the groups of COL001 (two), FAB001 and TRN001; four times that on busy hosts. 120 s are enough for 16 ranks.
_RANK_BUDGET, _USUAL_RANKS = 0.035, 16
# 16 and 32 ranks on 2 cores (nothing wrong, training included) took 6 to 7 s for each rank on a core; imports alone are
# 3 s of it.
_CROWDED_BUDGET = 8.0


def _default_budget(launch: Launch, *, gpus: int) -> float:
    """The budget in seconds: 60 on one host, 120 on several, or if the launcher does not say how many ranks a host has.

    More for many ranks on several hosts, for NCCL (`gpus` of this host are visible to it), and if many ranks share a
    core. Ranks that this process starts share its cores; other ranks may each be bound to some cores of the host.
    """
    place = launch.place
    here = place.local_world_size or 0
    cores = len(os.sched_getaffinity(0)) if launch.ranks else os.cpu_count() or 1
    usual = 60.0 if here >= place.world_size else 120.0
    if here < place.world_size:
        usual += math.ceil(_RANK_BUDGET * max(0, place.world_size - _USUAL_RANKS))
    if gpus:
        usual += _NCCL_BUDGET + _GPU_BUDGET * (here or gpus)
    return usual + _CROWDED_BUDGET * max(0.0, here / cores - USUAL_RANKS_PER_CORE)


def _utf8(option: str, text: str | None) -> str | None:
    """Return `text`. Raises UsageError if it is not UTF-8: other hosts and the recording receive it as JSON."""
    if text is not None and readable(text) != text:
        raise UsageError(f"{option} {readable(text)}: the name is not UTF-8; give another name, such as a link")
    return text


def _absolute(option: str, path: str | None) -> str | None:
    try:
        return None if path is None else _utf8(option, str(Path(path).absolute()))
    except OSError as error:  # the current directory was removed
        raise UsageError(f"{option} {path}: {error.strerror or error}; give an absolute path") from error


def _directory(option: str, path: str | None, launch: Launch) -> str | None:
    """The absolute path. Raises UsageError if a run of one host lacks the directory; on several, a check tests it."""
    absolute = _absolute(option, path)
    if launch.starts_all_ranks and path is not None and not Path(path).is_dir():
        raise UsageError(f"{option} {path}: no such directory on {socket.gethostname()}")
    return absolute


# The backend that --backend names: does torch know it, and can it run here? -------------------------------------------

# torch.distributed.Backend.backend_list of torch 2.6 to 2.15, and names that its CUDA builds register.
_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "nccl2", "nccl-legacy", "nccl-lazy")


def check_backend(name: str) -> None:
    """Raise UsageError for a backend that torch cannot know.

    Further backends come with packages that torch loads automatically, since they declare an entry point
    (docs.pytorch.org/tutorials/unstable/python_extension_autoload.html).
    """
    wanted = name.strip().lower()
    if wanted in _BACKENDS or (wanted and ":" in wanted) or (wanted and entry_points(group="torch.backends")):
        return
    near = nearest(wanted, _BACKENDS)
    raise UsageError(f"--backend {name}: expected a backend that torch knows, such as nccl or gloo{near}")


def refuse_nccl_without_gpus(backend: str) -> None:
    """Raise UsageError if nccl cannot run here, at once rather than from every rank."""
    if (reason := nccl_without_gpus(backend)) is not None:
        raise UsageError(reason)


def nccl_without_gpus(backend: str) -> str | None:
    """The reason why nccl cannot run here, with its fix; None for another backend, or where a GPU is visible."""
    if backend.strip().lower() != "nccl" or visible_gpus(os.environ, proc_root(os.environ)):
        return None
    build = torch_version()
    if build is not None and build.endswith("+cpu"):
        return (
            f"--backend nccl: no GPU is visible on this host, and torch {build} is a CPU build; "
            "install a CUDA build on a host with GPUs, or use --backend gloo"
        )
    return (
        "--backend nccl: no GPU is visible on this host; make its GPUs visible (CUDA_VISIBLE_DEVICES), or use "
        "--backend gloo"
    )


def torch_version() -> str | None:
    """The version of torch ("2.13.0+cpu"), without importing torch. None if it is not installed as a package."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
