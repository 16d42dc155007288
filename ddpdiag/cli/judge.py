"""`ddpdiag judge`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import disassemble, read_recording
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge


def run(files: Sequence[str], outputs: Outputs) -> int:
    """Judge the recording in `files`; its verdict's exit code."""
    outputs.check(files)
    recording = read_recording([Path(file) for file in files])
    asked = recording.header.options
    if outputs.need_nodes is not None and (asked.bench is not None or asked.train is not None):
        raise UsageError("--need-nodes: this recording is of a benchmark, and its verdict is about all hosts")
    options = structs.replace(
        asked,
        strict=asked.strict or outputs.strict,
        uses_workarounds=asked.uses_workarounds or outputs.write_workaround is not None,
        need_nodes=asked.need_nodes if outputs.need_nodes is None else outputs.need_nodes,
    )
    recording = structs.replace(recording, header=structs.replace(recording.header, options=options))
    report = judge(recording, all_checks())
    publish(report, disassemble(recording), outputs, sys.stdout, sys.stderr)
    return outputs.exit_code(report)
