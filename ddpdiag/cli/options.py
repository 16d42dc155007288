"""Options that several commands share, as Typer wants them."""

from enum import Enum
from typing import Annotated

import typer


class Color(Enum):
    """Whether the report has colours; `AUTO`: on a terminal, unless NO_COLOR or TERM=dumb says otherwise."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


LAUNCH, WHAT, OUT = "Launch", "What is checked", "Output"


def examples(*lines: str) -> str:
    """An epilog of one example a line."""
    return "\n\n".join(["Examples:", *lines])


NprocPerNode = Annotated[
    int | None,
    typer.Option(metavar="N", help="Ranks to start on this host (default: its GPUs, else 2).", rich_help_panel=LAUNCH),
]
Nnodes = Annotated[
    int | None, typer.Option(metavar="N", help="Hosts, when started once on each by hand.", rich_help_panel=LAUNCH)
]
NodeRank = Annotated[int | None, typer.Option(metavar="I", help="This host's number, from 0.", rich_help_panel=LAUNCH)]
Rank = Annotated[
    int | None,
    typer.Option(metavar="R", help="This process's rank, when started by hand.", rich_help_panel=LAUNCH),
]
WorldSize = Annotated[int | None, typer.Option(metavar="N", help="Number of ranks in all.", rich_help_panel=LAUNCH)]
LocalRank = Annotated[
    int | None, typer.Option(metavar="R", help="This process's rank on its host.", rich_help_panel=LAUNCH)
]
MasterAddr = Annotated[
    str | None, typer.Option(metavar="HOST", help="Host name or address of rank 0.", rich_help_panel=LAUNCH)
]
MasterPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Port that the job would use.", rich_help_panel=LAUNCH)
]
RunId = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of this run, the same on all ranks.", rich_help_panel=LAUNCH),
]
BoardWait = Annotated[
    float,
    typer.Option(min=0.1, metavar="SECONDS", help="How long ranks wait for each other.", rich_help_panel=LAUNCH),
]
BoardPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=1, max=65535, help="Port of the control channel.", rich_help_panel=LAUNCH),
]
RequireAuth = Annotated[
    bool,
    typer.Option(help="Do not run unless the ranks share a secret (see docs/security.md).", rich_help_panel=LAUNCH),
]
PortRange = Annotated[
    str | None,
    typer.Option(metavar="LOW-HIGH", help="Ports that the firewall lets through.", rich_help_panel=LAUNCH),
]
SharedDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A directory that all hosts share: for file://, and so that the run survives the loss of rank 0. "
        "The lowest living rank then reports, and writes the files on its own host.",
        rich_help_panel=WHAT,
    ),
]
Json = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the JSON report ('-': standard output).", rich_help_panel=OUT),
]
Html = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the report as one HTML page, to attach to a ticket.", rich_help_panel=OUT),
]
Markdown = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write it as Markdown, for tickets and chat.", rich_help_panel=OUT),
]
Record = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the recording, for `ddpdiag judge`.", rich_help_panel=OUT)
]
Prometheus = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write Prometheus metrics (text format).", rich_help_panel=OUT),
]
Junit = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write JUnit XML, with one test case for each check.", rich_help_panel=OUT),
]
Nagios = Annotated[
    bool,
    typer.Option(
        "--nagios",
        help="Be a Nagios plug-in: print one line; exit code 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.",
        rich_help_panel=OUT,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Warnings count as errors in the exit code.", rich_help_panel=OUT)
]
Details = Annotated[bool, typer.Option("--details", help="Show every check and shorten nothing.", rich_help_panel=OUT)]
Timings = Annotated[
    bool,
    typer.Option("--timings", help="Show where the seconds went, and for whom the others waited.", rich_help_panel=OUT),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print the report alone: nothing while the run goes on.", rich_help_panel=OUT),
]
ColorWhen = Annotated[
    Color,
    typer.Option(
        "--color",
        help="Colours in the report (auto: on a terminal, if NO_COLOR is not set).",
        rich_help_panel=OUT,
    ),
]
ExcludeFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Write the hosts that errors blame, one a line (srun -x ./FILE).", rich_help_panel=OUT
    ),
]
EnvFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write the variables that the job needs here, for a shell to source; then errors that they get around "
        "are warnings.",
        rich_help_panel=OUT,
    ),
]
GoodHosts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write the hosts that no error concerns, one a line; where pairs of hosts were measured, the fastest "
        "first.",
        rich_help_panel=OUT,
    ),
]
NeedNodes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Hosts that the job needs: FIT if so many are good, whatever is wrong with the others.",
        rich_help_panel=OUT,
    ),
]
