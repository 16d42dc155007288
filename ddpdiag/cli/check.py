"""`ddpdiag check`: make the options of a run from the command line, then run one rank or start all ranks."""

import math
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from msgspec import structs

from ddpdiag.checks.api import FIRST_USE_SECONDS
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.training.soak import extra_budget_seconds
from ddpdiag.checks.world import USUAL_RANKS_PER_CORE
from ddpdiag.cli.edge import complain, guarded, too_many_files_text
from ddpdiag.cli.exit_codes import exit_code_of
from ddpdiag.cli.options import CheckArgs
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import assemble, readable
from ddpdiag.errors import ExitCode, OutputNotWritten, UsageError, did_you_mean
from ddpdiag.judgement import judge
from ddpdiag.judgement.ending import with_signal
from ddpdiag.judgement.reading import read_baseline
from ddpdiag.judgement.selection import validate
from ddpdiag.model import Place, RunOptions
from ddpdiag.model.bench import BenchRequest
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.news import Listener
from ddpdiag.model.recording import Line
from ddpdiag.model.train import TrainRequest
from ddpdiag.probes.gpu.visibility import visible_gpu_count
from ddpdiag.probes.host.kernel import proc_root
from ddpdiag.render.files import Display, display_of
from ddpdiag.render.progress import SilentListener, listener
from ddpdiag.runtime.launchers import read_own_launch
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.launchers.slurm import cut_budget, job_left_seconds, read_topology
from ddpdiag.runtime.run import Run, follow, lead, prepare, start_ranks


def run(
    launch_args: LaunchArgs,
    check_args: CheckArgs,
    outputs: Outputs,
    *,
    bench: BenchRequest | None = None,
    train: TrainRequest | None = None,
) -> int:
    """Take part in a run as one rank, or start all ranks of this host, and return the exit code."""
    _require_utf8("--run-id", launch_args.run_id)
    _require_utf8("--backend", check_args.backend)
    check_backend(check_args.backend)
    launch = read_own_launch(launch_args)
    for option, seconds in (("--budget", check_args.budget), ("--join-timeout", launch_args.join_timeout)):
        if seconds is not None and not math.isfinite(seconds):
            raise UsageError(f"{option} {seconds}: expected a finite number of seconds, since every run must end")
    options = structs.replace(_run_options(launch, launch_args, check_args, outputs), bench=bench, train=train)
    validate(options, all_checks())
    if launch.place.rank == 0:
        outputs.check([path for path in (check_args.baseline, check_args.topology) if path is not None])
        for sentence in () if outputs.quiet else (launch.notice, why_no_nccl(check_args.backend)):
            if sentence:
                complain(sentence)
    prepared = prepare(
        launch,
        options,
        all_checks(),
        join_wait=launch_args.join_timeout,
        control_port=launch_args.control_port,
        require_auth=launch_args.require_auth,
    )
    if launch.ranks:
        return start_ranks(prepared, lambda place: guarded(lambda: _take_part(prepared, place, outputs)))
    return _take_part(prepared, launch.place, outputs)


def _take_part(run: Run, place: Place, outputs: Outputs) -> int:
    """Run one rank's part and return the exit code. Rank 0 also plans, judges, writes the report and ends the run."""
    display = _display(place, outputs, starts_all_ranks=run.launch.starts_all_ranks)
    display = outputs.listener(display) if place.rank == 0 else display
    if place.rank != 0:
        return follow(run, place, display)
    with lead(run, place, display) as leader:
        lines = leader.measure()
        display.close()
        exit_code, sentence = leader.run_with_heartbeats(lambda: _report(lines, outputs, leader.late_signal))
        leader.set_exit(exit_code, sentence)
    return exit_code


def _display(place: Place, outputs: Outputs, *, starts_all_ranks: bool) -> Listener:
    """Start the display of a rank's progress. It starts a thread, so call this in the process of the rank.

    Rank 0 shows the run. Other ranks show that they look for rank 0. They share logs and terminals, so only rank 1 (on
    a terminal, one rank per host) does so, and none if one process started all ranks (`is_whole_world`).
    """
    if display_of(sys.stderr, os.environ) is Display.LIVE:
        prints = place.rank == 0 or not (starts_all_ranks or place.local_rank)
    else:
        prints = place.rank == 0 or (not starts_all_ranks and place.rank == 1)
    if not prints or outputs.quiet:
        return SilentListener()
    return listener(sys.stderr, os.environ)


def _report(lines: Sequence[Line], outputs: Outputs, late_signal: Callable[[], int | None]) -> tuple[int, str]:
    """Judge, write and show the report, and return exit code and sentence. A late signal changes only the exit code."""
    report = with_signal(judge(assemble(lines), all_checks()), late_signal())
    try:
        publish(report, lines, outputs, sys.stdout, sys.stderr)
    except BrokenPipeError:
        return exit_code_of(report, outputs.exit_codes) or ExitCode.CLOSED_PIPE, report.sentence
    except (OutputNotWritten, OSError, ValueError) as error:
        sentence = too_many_files_text(error) or str(error)
        complain(sentence)  # the verdict does not change, and all ranks still receive it
        # The code must not be 0, because a script may need the file.
        return report.exit_code or int(ExitCode.UNKNOWN), report.sentence
    return exit_code_of(with_signal(report, late_signal()), outputs.exit_codes), report.sentence


def _run_options(launch: Launch, launch_args: LaunchArgs, check_args: CheckArgs, outputs: Outputs) -> RunOptions:
    gpus = visible_gpu_count(os.environ, proc_root(os.environ)) if check_args.backend.strip().lower() != "gloo" else 0
    budget, soak = check_args.budget, check_args.soak
    if budget is None:
        budget = _default_budget(launch, gpus=gpus)
        budget += 0.0 if soak is None else extra_budget_seconds(soak, launch.place.world_size)
    elif soak is not None and budget <= soak:
        raise UsageError(f"--budget {budget:g}: expected more than the {soak:g} s of --soak, or no --budget")
    is_rank_0 = launch.place.rank == 0
    # Only rank 0 queries the scheduler for the remaining time of the job.
    left_seconds = job_left_seconds(os.environ) if is_rank_0 else None
    return RunOptions(
        depth=check_args.depth,
        stages=check_args.stage,
        skip_stages=check_args.skip_stage,
        select=check_args.select,
        ignore=check_args.ignore,
        backend=check_args.backend.strip().lower(),  # as torch does
        expect_gpus=check_args.expect_gpus,
        budget_seconds=cut_budget(budget, left_seconds),
        job_left_seconds=left_seconds,
        wanted_budget_seconds=budget if cut_budget(budget, left_seconds) < budget else None,
        shared_dir=_shared_directory("--shared-dir", check_args.shared_dir, launch),
        strict=outputs.strict,
        max_slower_share=outputs.max_slowdown,
        port_range=launch_args.port_range,
        uses_workarounds=outputs.write_workaround is not None,
        # Only rank 0 plans and judges, so only its host needs these files.
        topology=read_topology(check_args.topology) if check_args.topology is not None and is_rank_0 else {},
        baseline=read_baseline(check_args.baseline) if check_args.baseline is not None and is_rank_0 else None,
        settings=dict(check_args.set_),
        soak_seconds=soak,
    )


# All in seconds. The first use of NCCL may take all of its deadline.
_NCCL_BUDGET = FIRST_USE_SECONDS
# For each GPU: 8 GPUs are expected to take 46 to 60 s more than one, for NCCL's ranks and copies between pairs of GPUs.
_GPU_BUDGET = 5.0
# For each rank beyond the usual: gloo connects each rank with every other, with 2 ms of a core for each (128 ranks on 2
# cores: 17 s, measured, torch 2.13), in the groups of COL001 (two), FAB001 and TRN001; four times that on busy hosts.
# 120 s are enough for 16 ranks.
_RANK_BUDGET, _USUAL_RANKS = 0.035, 16
# For each rank per core beyond the usual: 16 and 32 healthy ranks on 2 cores took 6 to 7 s for each rank on a core
# (training included). Imports are 3 s of this time.
_CROWDED_BUDGET = 8.0


def _default_budget(launch: Launch, *, gpus: int) -> float:
    """The default of --budget in seconds. `gpus` is the number of GPUs of this host that NCCL may use.

    The budget is 60 if all ranks are on one host, else 120. Time is added for many ranks on several hosts, for
    NCCL, and if many ranks share a core. Ranks that this process starts share its cores. Other ranks may each be bound
    to some cores of the host, so all cores of the host count.
    """
    place = launch.place
    local_ranks = place.local_world_size or 0
    cores = len(os.sched_getaffinity(0)) if launch.ranks else os.cpu_count() or 1
    budget = 60.0 if local_ranks >= place.world_size else 120.0
    if local_ranks < place.world_size:
        budget += math.ceil(_RANK_BUDGET * max(0, place.world_size - _USUAL_RANKS))
    if gpus:
        budget += _NCCL_BUDGET + _GPU_BUDGET * (local_ranks or gpus)
    return budget + _CROWDED_BUDGET * max(0.0, local_ranks / cores - USUAL_RANKS_PER_CORE)


def _require_utf8(option: str, text: str | None) -> str | None:
    """Return `text`. UsageError if it is not UTF-8, because other hosts and the recording receive it as JSON."""
    if text is not None and readable(text) != text:
        raise UsageError(f"{option} {readable(text)}: the name is not UTF-8; give another name, such as a link")
    return text


def _absolute_path(option: str, path: str | None) -> str | None:
    try:
        return None if path is None else _require_utf8(option, str(Path(path).absolute()))
    except OSError as error:  # the current directory was removed
        raise UsageError(f"{option} {path}: {error.strerror or error}; give an absolute path") from error


def _shared_directory(option: str, path: str | None, launch: Launch) -> str | None:
    """Make the path absolute. UsageError if this process starts all ranks and no such directory exists."""
    absolute = _absolute_path(option, path)
    if launch.starts_all_ranks and path is not None and not Path(path).is_dir():
        raise UsageError(f"{option} {path}: no such directory on {socket.gethostname()}")
    return absolute


# The backend that --backend names -------------------------------------------------------------------------------------

# torch.distributed.Backend.backend_list of torch 2.6 to 2.15, and names that its CUDA builds register.
_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "nccl2", "nccl-legacy", "nccl-lazy")


def check_backend(name: str) -> None:
    """Raise UsageError if no version of torch has a backend with this name.

    If an installed package declares an entry point "torch.backends", any name is accepted: torch loads the package,
    and the package may register a backend (docs.pytorch.org/tutorials/unstable/python_extension_autoload.html).
    """
    backend = name.strip().lower()
    if backend in _BACKENDS or (backend and ":" in backend) or (backend and entry_points(group="torch.backends")):
        return
    suggestion = did_you_mean(backend, _BACKENDS)
    raise UsageError(f"--backend {name}: expected a backend that torch knows, such as nccl or gloo{suggestion}")


def refuse_nccl_without_gpus(backend: str) -> None:
    """Raise UsageError if `backend` is nccl and this host has no visible GPU, before any rank fails."""
    if (reason := why_no_nccl(backend)) is not None:
        raise UsageError(reason)


def why_no_nccl(backend: str) -> str | None:
    """The reason why nccl cannot run on this host, with a fix; None if a GPU is visible or `backend` is not nccl."""
    if backend.strip().lower() != "nccl" or visible_gpu_count(os.environ, proc_root(os.environ)):
        return None
    torch_build = torch_version()
    if torch_build is not None and torch_build.endswith("+cpu"):
        return (
            f"--backend nccl: no GPU is visible on this host, and torch {torch_build} is a CPU build; "
            "install a CUDA build on a host with GPUs, or use --backend gloo"
        )
    return (
        "--backend nccl: no GPU is visible on this host; make its GPUs visible (CUDA_VISIBLE_DEVICES), or use "
        "--backend gloo"
    )


def torch_version() -> str | None:
    """The version of torch ("2.13.0+cpu") from the package's metadata, without an import. None if not installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
