"""Commands that read what is there, and run nothing: compare, explain, manual. Bodies import what they need."""

from typing import Annotated

import typer

from ddpdiag.cli import options

COMPARE = options.examples(
    "ddpdiag compare before.jsonl after.jsonl",
    "ddpdiag compare report-monday.json run.jsonl --markdown changes.md",
)
EXPLAIN = options.examples(
    "ddpdiag explain COL001",
    "ddpdiag explain TRN001.diverged",
    'ddpdiag explain "NCCL WARN Duplicate GPU detected"',
    "ddpdiag explain slurm-123.out",
    "cat rank*.log | ddpdiag explain -",
)
MANUAL = options.examples("ddpdiag manual --markdown manual.md")


def compare(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A recording (--record) or a JSON report (--json).")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another one, of a later run.")],
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write the changes as JSON ('-': standard output).", rich_help_panel=options.OUT
        ),
    ] = None,
    markdown: options.Markdown = None,
) -> None:
    """Say what changed between two runs: regressions first, beyond the noise that their repeats show.

    Exit code: 0 no regression, 1 regression, 2 a file that is no run, 3 no regression, but no figure was compared or
    the new run's verdict is UNKNOWN.
    """
    from ddpdiag.compare import command

    raise typer.Exit(command.run(old, new, command.Files(json=json, markdown=markdown)))


def explain(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="CODE|NAME|TEXT|FILE|-",
            help="A check's, finding's or lint rule's code, a check's name, an error text, or a log ('-': standard "
            "input).",
        ),
    ],
) -> None:
    """Print a manual page; or say what an error text means; or find the first cause in a job's log.

    Exit code: 0 explained, 2 no such code, 3 nothing in the text or log that is known.
    """
    from ddpdiag.cli import explain as command

    raise typer.Exit(command.run(what))


def manual(
    markdown: Annotated[
        str, typer.Option(metavar="FILE", help="Write it as one Markdown document ('-': standard output).")
    ] = "-",
) -> None:
    """All manual pages in one document: checks, then the rules of `ddpdiag lint`."""
    from ddpdiag.cli.manual import write_manual

    raise typer.Exit(write_manual(markdown))
