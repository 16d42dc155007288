"""`ddpdiag judge`: judge a recording again, or show a JSON report again."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from msgspec import structs

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.edge import complain
from ddpdiag.cli.options import option_name
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import disassemble, read_recording, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.reading import read_run
from ddpdiag.model import Recording, Report

# Options that need a recording. A JSON report has no measurements that could be judged or written again.
_NEED_RECORDING = ("record", "write_workaround", "strict", "max_slowdown")


def run(files: Sequence[str], outputs: Outputs) -> int:
    """Judge the recording in `files`, or show the JSON report that is the only file. Returns the exit code."""
    outputs.check(files)
    content = read_run(files[0]) if len(files) == 1 else read_recording([Path(file) for file in files])
    return _show(content, files[0], outputs) if isinstance(content, Report) else _judge(content, outputs)


def _show(report: Report, path: str, outputs: Outputs) -> int:
    """Show a JSON report with its own verdict and findings, and return its exit code."""
    reason = f"{readable(path)} is a JSON report, which has no measurements"
    for each in fields(outputs):
        if each.name in _NEED_RECORDING and getattr(outputs, each.name) != each.default:
            raise UsageError(f"{option_name(each.name)}: {reason} to judge again; give the run's recording (--record)")
    if not outputs.quiet:
        complain(f"{reason}: this is its own verdict; the run's recording (--record) can be judged again")
    publish(report, (), outputs, sys.stdout, sys.stderr)
    return report.exit_code


def _judge(recording: Recording, outputs: Outputs) -> int:
    options = recording.header.options
    options = structs.replace(
        options,
        strict=options.strict or outputs.strict,
        max_slower_share=options.max_slower_share if outputs.max_slowdown is None else outputs.max_slowdown,
        uses_workarounds=options.uses_workarounds or outputs.write_workaround is not None,
    )
    recording = structs.replace(recording, header=structs.replace(recording.header, options=options))
    report = judge(recording, all_checks())
    publish(report, disassemble(recording), outputs, sys.stdout, sys.stderr)
    return report.exit_code
