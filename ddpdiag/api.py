"""The Python API of ddpdiag, for training scripts, notebooks and launch scripts.

    import ddpdiag

    ddpdiag.preflight()                              # in every rank, before the training: go on, or UnfitError
    report = ddpdiag.check(nproc_per_node=2)         # as `ddpdiag check --nproc-per-node 2`
    print(report)                                    # the verdict and its sentence
    report.verdict, report.findings
    ddpdiag.judge("run.jsonl")                       # as `ddpdiag judge`
    ddpdiag.explain_text("NCCL WARN Duplicate GPU")  # as `ddpdiag explain`

This module does not import torch.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from msgspec import Struct

import ddpdiag
from ddpdiag.cli.options import option_name
from ddpdiag.codec import SMALLEST_NUMBER, decode, readable
from ddpdiag.errors import ExitCode, UnfitError, UsageError
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.judgement.reading import read_report
from ddpdiag.model import Report, Verdict
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.report import WorldSummary
from ddpdiag.probes.host.programs import ERROR_FILE, python_command, with_package_path
from ddpdiag.runtime.launchers import read_own_launch
from ddpdiag.runtime.launchers.launch import Launch

if TYPE_CHECKING:
    from ddpdiag.periodic import GroupMonitor
    from ddpdiag.workloads.groups import Groups

Option = int | str | float | bool | Sequence[str] | None


def check(*, nproc_per_node: int | str | None = None, **options: Option) -> Report:
    """Run `ddpdiag check` in a subprocess, for this host or as one rank of a launcher, and return the report.

    The options are those of `ddpdiag check`: `check(stage=["rendezvous", "collective"], budget=30, strict=True)`.
    Raises UsageError for wrong options. Raises RuntimeError with the subprocess's standard error if there is no report,
    as on all ranks of a launcher but rank 0.
    """
    run = _run_check({"nproc_per_node": nproc_per_node, **options})
    if run.report is None:
        stderr_text = readable(run.stderr_text.strip())
        raise RuntimeError(f"ddpdiag check exited with {run.exit_code} and wrote no report: {stderr_text}")
    return run.report


@overload
def preflight(
    *, budget: float | None = None, on_unknown: Literal["raise", "go"] = "raise", **options: Option
) -> Report: ...
@overload
def preflight(
    *,
    groups: "Groups",
    every: int | None = None,
    sizes: "int | Mapping[str, int] | None" = None,
    budget: float | None = None,
    join_timeout: float | None = None,
    strict: bool = False,
) -> "GroupMonitor": ...
def preflight(
    *, budget: float | None = None, on_unknown: Literal["raise", "go"] = "raise", **options: Any
) -> "Report | GroupMonitor":
    """Check, from inside the training script, whether the job can train. Return the report, or raise UnfitError.

    Every rank of the job calls it, best as the first line:

        import ddpdiag

        ddpdiag.preflight(budget=60)
        torch.distributed.init_process_group()

    The check runs in processes of its own, with the launcher's variables of this process (torchrun, srun, mpirun,
    accelerate, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT). It imports no torch here, and uses no GPU in this
    process. When the call returns, its processes have ended, and the job's store and environment are unchanged.

    Where only the script knows the rank, as under `torch.multiprocessing.spawn`, give it:
    `preflight(rank=rank, world_size=2, master_addr="localhost", master_port=29500)`. Without any launcher the job is
    one process, and so is the check; `nproc_per_node=8` checks 8 ranks, which a notebook may start later.

    The other options are those of `ddpdiag check`, for example `skip_stage="training"`, `select=["RDZ", "COL"]`,
    `strict=True` or `html="preflight.html"`. After init_process_group, the checks of MASTER_PORT and of the rendezvous
    (RDZ001, RDZ005) are left out, because the job itself uses the port.

    All ranks go on, or all raise UnfitError: for UNFIT, for a run that a signal ended, and for UNKNOWN, unless
    `on_unknown` is "go". A launcher may end the others as soon as rank 0 has raised. A rank that could not take part in
    the check raises in any case. Rank 0 has the full report; the report of every other rank has the verdict and rank
    0's sentence, if it sent one. UsageError: wrong options, or missing variables; nothing was run on this rank.

    With `groups`, a DeviceMesh or process groups in a list or a dict, the ranks check these groups instead, after
    init_process_group and in their own processes:

        monitor = ddpdiag.preflight(groups=mesh, every=1000)   # checks once, now
        for batch in loader:
            ...
            monitor.step()                                     # and again after each 1,000 steps

    Each rank times a matrix product. Each group times an all-reduce and messages between its ranks, of `sizes` bytes
    (a number, or a dict by the names of groups; default 25 MiB, a bucket of DDP), and compares the values with the
    known result. `join_timeout` is the time that ranks wait for the last one (default 600 s, NCCL's own limit), and
    `budget` the time of the measurement (60 s). All ranks raise UnfitError if a rank is absent or stuck, or if values
    are wrong. A slow rank or link is only logged by rank 0; with `strict`, it also raises. `monitor.report` is the
    last report; step() returns it in the step of a check, else None.
    """
    if (groups := options.pop("groups", None)) is not None:
        from ddpdiag.periodic import GroupMonitor

        known = {"every", "sizes", "join_timeout", "strict"}
        if unknown := (options.keys() - known) | ({"on_unknown"} if on_unknown != "raise" else set()):
            raise UsageError(f"preflight(groups=..., {min(unknown)}=...): checks of groups do not have this option")
        return GroupMonitor(groups, budget=budget, **options)
    if on_unknown not in ("raise", "go"):
        raise UsageError(f"preflight(on_unknown={on_unknown!r}): expected 'raise' or 'go'")
    options = {**options, "budget": budget}
    launch = _launch_of(options)
    joined_ranks = _process_group_size()
    if all(options.get(name) is None for name in ("rank", "nproc_per_node", "node_rank")):
        _require_rank(launch, joined_ranks)
    begin = time.monotonic()
    run = _run_check(_job_options(options, launch, is_initialized=joined_ranks > 0))
    report = run.report
    if report is None or report.exit_code != run.exit_code:
        report = _verdict_only(run, launch, time.monotonic() - begin)
    if run.exit_code == ExitCode.FIT or (run.exit_code == ExitCode.UNKNOWN and on_unknown == "go" and not run.is_lost):
        return report
    error = UnfitError(report)
    if report.findings:
        from ddpdiag.render.findings import findings_text

        error.add_note(findings_text(report.findings))
    elif launch is not None and launch.place.rank != 0 and not run.is_lost:
        # A launcher kills the other ranks when one fails, and only rank 0's error has the findings.
        time.sleep(RANK_0_FIRST_SECONDS)
    raise error


def judge(path: str | Path) -> Report:
    """Judge a recording (of `--record`), or read a JSON report (of `--json`). Raises UsageError for another file."""
    return read_report(str(path))


def explain_text(text: str) -> Explanation:
    """Explain an error text or a log. The result's `sightings` are its known errors, the first cause first."""
    return explain_log([text.encode("utf-8", "surrogateescape")], "")


# The job of a training script ----------------------------------------------------------------------------------------

# Scripts read data before the check, so their ranks are further apart than those that a launcher starts.
_JOIN_SECONDS = 60.0
_CHECKS_OF_MASTER_PORT = ("RDZ001", "RDZ005")
RANK_0_FIRST_SECONDS = 2.0  # to import the renderer and to write the error on busy cores


def _launch_of(options: Mapping[str, Option]) -> Launch | None:
    """The launch of this process. None if an option or a variable is wrong: the check then says which one."""
    names = {field.name for field in dataclasses.fields(LaunchArgs)} & options.keys()
    with contextlib.suppress(UsageError, TypeError):
        return read_own_launch(LaunchArgs(**{name: options[name] for name in names}))  # type: ignore[arg-type]
    return None


def _process_group_size() -> int:
    """The number of ranks of the default process group, 0 before init_process_group. torch is not imported."""
    dist = sys.modules.get("torch.distributed")
    return int(dist.get_world_size()) if dist is not None and dist.is_available() and dist.is_initialized() else 0


def _require_rank(launch: Launch | None, joined_ranks: int) -> None:
    """UsageError if this process is one of several of its job, although no variable gives its rank."""
    if joined_ranks > 1:
        reason = f"the process group has {joined_ranks} ranks"
    elif multiprocessing.parent_process() is not None:
        reason = "multiprocessing started this process"
    else:
        return
    if launch.starts_all_ranks if launch is not None else "RANK" not in os.environ:
        raise UsageError(
            f"preflight(): {reason}, but RANK is not set: expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in "
            "os.environ, or preflight(rank=..., world_size=..., master_addr=..., master_port=...)"
        )


def _job_options(options: Mapping[str, Option], launch: Launch | None, *, is_initialized: bool) -> dict[str, Option]:
    """The options of the check: those of the call, and defaults that suit a process of a training."""
    defaults: dict[str, Option] = {"join_timeout": _JOIN_SECONDS}
    if launch is not None and launch.ranks:
        defaults["nproc_per_node"] = 1  # a process of a training is one rank, and starts none for the other GPUs
    unset = {name: value for name, value in defaults.items() if f"DDPDIAG_{name.upper()}" not in os.environ}
    merged = unset | {name: value for name, value in options.items() if value is not None}
    if is_initialized:
        ignored = merged.get("ignore", ())
        ignored = ignored if isinstance(ignored, list | tuple) else [str(ignored)]
        merged["ignore"] = [*ignored, *_CHECKS_OF_MASTER_PORT]
    return merged


def _verdict_only(run: "_CheckRun", launch: Launch | None, seconds: float) -> Report:
    """The report of a rank that has no other: the verdict, and the sentence of rank 0 or of this rank's check."""
    verdicts: dict[int, Verdict] = {ExitCode.FIT: Verdict.FIT, ExitCode.UNFIT: Verdict.UNFIT}
    who = "this process" if launch is None else f"rank {launch.place.rank} of {launch.place.world_size}"
    default = "rank 0 has the report" if run.exit_code == ExitCode.FIT else f"the check exited with {run.exit_code}"
    return Report(
        verdict=verdicts.get(run.exit_code, Verdict.UNKNOWN),
        sentence=(run.last_line if run.is_lost else run.sentence or run.last_line) or default,
        exit_code=run.exit_code,
        seconds=seconds,
        budget_seconds=0.0,
        run_id="" if launch is None else launch.run_id,
        world=WorldSummary(size=0, hosts=(), launcher="", backend=""),
        ranks=(),
        stages=(),
        checks=(),
        findings=(),
        recording_problems=(f"This is the report of {who}: it has the verdict only; rank 0 has the findings.",),
        version=ddpdiag.__version__,
    )


# The subprocess ------------------------------------------------------------------------------------------------------


class _ErrorMessage(Struct):
    message: str


class _ErrorFile(Struct):
    """The file in which a process of torchrun leaves its error: probes.host.programs.write_error_file."""

    message: _ErrorMessage


class _CheckRun(NamedTuple):
    """The end of `ddpdiag check` on this rank. `sentence` is the reason for an exit code other than 0, or empty."""

    exit_code: int
    stderr_text: str
    report: Report | None
    sentence: str

    @property
    def is_lost(self) -> bool:
        """Whether this rank left the run before its end: it then prints the reason. Others only get rank 0's."""
        return bool(self.sentence) and self.sentence in self.stderr_text

    @property
    def last_line(self) -> str:
        lines = readable(self.stderr_text).strip().splitlines()
        return lines[-1].removeprefix("ddpdiag: ") if lines else ""


def _run_check(options: Mapping[str, Option]) -> _CheckRun:
    """Run `ddpdiag check` with these options. UsageError if it refuses them. No file stays but those of the options."""
    if options.get("exit_codes") is not None:
        raise UsageError("exit_codes is an option of the command only: the report has the verdict")
    with tempfile.TemporaryDirectory(prefix="ddpdiag-") as folder:
        settings = {"json": str(Path(folder, "report.json")), **options}
        report_path, error_path = Path(str(settings["json"])), Path(folder, "error.json")
        arguments = [word for name, value in settings.items() for word in _option_arguments(option_name(name), value)]
        old_version = _version_of(report_path)
        # The check writes its error to this file of torchrun, which else shows it as the error of the training.
        code = run_command(("check", "--quiet", *arguments), {**os.environ, ERROR_FILE: str(error_path)}, folder)
        stderr_text = Path(folder, "stderr").read_text(errors="replace")
        report = sentence = None
        if _version_of(report_path) != old_version:
            report = decode(report_path.read_bytes(), Report, min_magnitude=SMALLEST_NUMBER)
        if error_path.exists():
            sentence = decode(error_path.read_bytes(), _ErrorFile).message.message
    if report is None and code == ExitCode.USAGE:
        raise UsageError(readable(stderr_text.strip().removeprefix("ddpdiag: ")))
    return _CheckRun(code, stderr_text, report, sentence or "")


def _version_of(path: Path) -> tuple[int, int] | None:
    """A value that changes when the file is replaced: with `json="run.json"` an earlier run may have left a report."""
    with contextlib.suppress(OSError):
        return path.stat().st_ino, path.stat().st_mtime_ns
    return None


def _option_arguments(option: str, value: object) -> list[str]:
    match value:
        case None | False:
            return []
        case True:
            return [option]
        case list() | tuple():
            return [f"{option}={each}" for each in value]
    return [f"{option}={value}"]


def run_command(words: Sequence[str], env: Mapping[str, str], folder: str, *, seconds: float | None = None) -> int:
    """Run `ddpdiag WORDS` to its end, and return its exit code: 128+n if signal n ended it. It is killed after
    `seconds`; the code is then negative.

    FOLDER, a temporary folder, gets its standard error as `stderr`, and is removed even if this process is killed. An
    exception here, such as Ctrl-C, also ends the command.
    """
    command = python_command("ddpdiag.child", str(os.getpid()), folder, *words)
    null, env = subprocess.DEVNULL, with_package_path(env)
    # A file, not a pipe: a pipe does not end while a worker that is stuck in the kernel holds it open.
    with (
        Path(folder, "stderr").open("wb") as stderr,
        subprocess.Popen(command, stdin=null, stdout=null, stderr=stderr, env=env) as process,
    ):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        except BaseException as error:
            process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            process.wait()
            raise
