"""The Python API, for notebooks and launch scripts.

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
from ddpdiag.probes.host.programs import python_command, with_home


def check(*, nproc_per_node: int | str | None = None, **options: str | float | bool | Sequence[str] | None) -> Report:
    """Run `ddpdiag check` in a subprocess, for this host or this rank of an allocation, and return its report.

    The options are those of `ddpdiag check`: `check(stage=["rendezvous", "collective"], budget=30, strict=True)`.
    Raises UsageError for wrong options. Raises RuntimeError, with what the subprocess printed, if it wrote no report:
    of the ranks of a launcher only rank 0 writes one.
    """
    with tempfile.TemporaryDirectory(prefix="ddpdiag-") as folder:
        given = {"json": str(Path(folder, "report.json")), "nproc_per_node": nproc_per_node, **options}
        path = Path(str(given["json"]))
        words = [word for name, value in given.items() for word in _option_words(option_name(name), value)]
        command = python_command("ddpdiag", "check", "--quiet", *words)
        code, printed = _run_to_end(command)
        if path.exists():
            return decode(path.read_bytes(), Report, least=SMALLEST_NUMBER)
    if code == ExitCode.USAGE:
        raise UsageError(printed.strip().removeprefix("ddpdiag: "))
    raise RuntimeError(f"ddpdiag check exited with {code} and wrote no report: {readable(printed.strip())}")


def _option_words(option: str, value: object) -> list[str]:
    match value:
        case None | False:
            return []
        case True:
            return [option]
        case list() | tuple():
            return [f"{option}={each}" for each in value]
    return [f"{option}={value}"]


def _run_to_end(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end. Returns its exit code and its standard error. Ctrl-C is passed on to the command."""
    null, env = subprocess.DEVNULL, with_home(os.environ)
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            printed = process.communicate()[1]
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
        return process.returncode, printed


def judge(path: str | Path) -> Report:
    """Judge a recording (`--record`), or read a JSON report (`--json`). Raises UsageError for any other file."""
    return read_report(str(path))


def explain_text(text: str) -> Explanation:
    """Explain an error text or a log. `sightings` are the known error texts in it, the first cause first."""
    return explain_log([text.encode("utf-8", "surrogateescape")], "")
