"""The Python API of ddpdiag, for notebooks and launch scripts.

    import ddpdiag

    report = ddpdiag.check(nproc_per_node=2)        # as `ddpdiag check --nproc-per-node 2`
    print(report)                                    # the verdict and its sentence
    report.verdict, report.findings
    ddpdiag.judge("run.jsonl")                       # as `ddpdiag judge`
    ddpdiag.explain_text("NCCL WARN Duplicate GPU")  # as `ddpdiag explain`

This module does not import torch.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddpdiag.cli.options import option_name
from ddpdiag.codec import SMALLEST_NUMBER, decode, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.judgement.reading import read_report
from ddpdiag.model import Report
from ddpdiag.probes.host.programs import python_command, with_package_path


def check(*, nproc_per_node: int | str | None = None, **options: str | float | bool | Sequence[str] | None) -> Report:
    """Run `ddpdiag check` in a subprocess, for this host or as one rank of a launcher, and return the report.

    The options are those of `ddpdiag check`: `check(stage=["rendezvous", "collective"], budget=30, strict=True)`.
    Raises UsageError for wrong options. Raises RuntimeError with the subprocess's standard error if there is no report,
    as on all ranks of a launcher but rank 0.
    """
    with tempfile.TemporaryDirectory(prefix="ddpdiag-") as folder:
        settings = {"json": str(Path(folder, "report.json")), "nproc_per_node": nproc_per_node, **options}
        report_path = Path(str(settings["json"]))
        arguments = [word for name, value in settings.items() for word in _option_arguments(option_name(name), value)]
        command = python_command("ddpdiag", "check", "--quiet", *arguments)
        code, stderr_text = _run_to_end(command)
        if report_path.exists():
            return decode(report_path.read_bytes(), Report, min_magnitude=SMALLEST_NUMBER)
    if code == ExitCode.USAGE:
        raise UsageError(stderr_text.strip().removeprefix("ddpdiag: "))
    raise RuntimeError(f"ddpdiag check exited with {code} and wrote no report: {readable(stderr_text.strip())}")


def _option_arguments(option: str, value: object) -> list[str]:
    match value:
        case None | False:
            return []
        case True:
            return [option]
        case list() | tuple():
            return [f"{option}={each}" for each in value]
    return [f"{option}={value}"]


def _run_to_end(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end. Returns its exit code and standard error. Ctrl-C also interrupts the command."""
    null, env = subprocess.DEVNULL, with_package_path(os.environ)
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            stderr_text = process.communicate()[1]
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
        return process.returncode, stderr_text


def judge(path: str | Path) -> Report:
    """Judge a recording (of `--record`), or read a JSON report (of `--json`). Raises UsageError for another file."""
    return read_report(str(path))


def explain_text(text: str) -> Explanation:
    """Explain an error text or a log. The result's `sightings` are its known errors, the first cause first."""
    return explain_log([text.encode("utf-8", "surrogateescape")], "")
