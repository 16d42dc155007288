"""The process group is never destroyed.

What: the script opens a process group and does not call destroy_process_group. A hint (`--details`).

Why: with NCCL, a process that ends while others still communicate may leave them hanging, and torch warns at exit:
"destroy_process_group() was not called before program exit, which can leak resources".

Fix: dist.destroy_process_group() at the end, on every rank.

Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown.
"""

from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import names_in
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """The first process group, if nothing closes it."""
    closing = {"destroy_process_group", "cleanup", "cleanup_distributed", "cleanup_ddp"}
    if read.script.groups and not closing & set(names_in(read.script.tree)) and not closing & set(read.script.imports):
        yield Hit(
            read.script.groups[0],
            "nothing destroys the process group: torch warns, and ranks that end early may leave others hanging",
            "Call dist.destroy_process_group() at the end.",
        )


RULE = Rule("LNT024", "no-destroy", Severity.INFO, __doc__ or "", look)
