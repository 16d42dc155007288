"""`ddpdiag ticket`: print the filled-in issue form of a project, and write the files to attach as a bundle."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from msgspec import structs

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import is_one_file, progress_line, show
from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.probes.host.programs import python_command
from ddpdiag.render.files import check_writable, write
from ddpdiag.render.markup import draw_pieces, fit_pieces
from ddpdiag.runtime.launchers.slurm import node_name
from ddpdiag.ticket import Kind, TicketArgs
from ddpdiag.ticket.bundle import bundle
from ddpdiag.ticket.forms import COLLECT_ENV, FORMS, NEW_ISSUE, TOOLS, unanswered, warning_of
from ddpdiag.ticket.here import host_report, machine_text, output_of
from ddpdiag.ticket.job import Job, log_files, read_job

# NVIDIA's and the OFED's tools end within a second on a healthy host. collect_env imports torch and runs pip.
_TOOL_SECONDS, _COLLECT_SECONDS = 10.0, 90.0


def run(kind: Kind, files: Sequence[str], args: TicketArgs) -> int:
    """Fill in the form of `kind` from the reports in `files`, or from this host if there are none. Returns 0."""
    path, logs = args.write_bundle, log_files(args.log)
    if path is not None:
        if path == "-" or any(is_one_file(path, file) for file in (*files, *logs)):
            raise UsageError(f"--write-bundle {readable(path)}: expected a file that is no input and not '-'")
        check_writable(path)
    job = read_job(files, logs)
    with progress_line(quiet=args.quiet) as progress:
        job = _with_this_host(job, kind, progress.tell)
    attached = os.path.basename(path) if path is not None else ""
    form = "\n".join(fit_pieces(draw_pieces(FORMS[kind](job, attached)))).rstrip() + "\n"
    if path is not None:
        write(path, bundle(job, form))
    show(form, sys.stdout)
    if not args.quiet:
        if sentence := warning_of(job, kind):
            complain(sentence)
        complain(
            f"paste each section into the field of its name in {NEW_ISSUE[kind]}. Add what only you know (the job's "
            "code), and run the commands under 'Not available'. Read it first: it has names of hosts and users, "
            "addresses and paths"
        )
        if labels := unanswered(job, kind):
            complain(f"required, and not answered: {', '.join(labels)}")
    return 0


def _with_this_host(job: Job, kind: Kind, announce: Callable[[str], None]) -> Job:
    """Add what this host shows, if it is one of the job's hosts, or if no report was given."""
    if not job.reports:
        announce("ddpdiag host --torch ...")
        report = host_report()
        job = structs.replace(job, reports=(report,) if report is not None else ())
    elif node_name(os.environ, readable(socket.gethostname())) not in job.hosts:
        return job
    outputs = {}
    for tool in TOOLS[kind]:
        announce(f"{tool} ...")
        if tool != COLLECT_ENV:
            outputs[tool] = output_of(tool.split(), _TOOL_SECONDS)
        elif find_spec("torch") is not None:
            outputs[tool] = output_of(python_command("torch.utils.collect_env"), _COLLECT_SECONDS)
    return structs.replace(job, outputs=outputs, machine=machine_text(os.environ))
