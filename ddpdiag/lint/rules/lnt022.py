"""All ranks save to one file.

What: torch.save writes to one path on every rank.

Why: the ranks write into each other's file; where they differ in speed, or the file system is shared between hosts, the
checkpoint is broken ("PytorchStreamReader failed reading zip archive"), which shows when it is loaded.

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()

Fix: save on rank 0 only, or put the rank into the name.

Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, keyword
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Saves that every rank comes by."""
    if not read.script.wrappings:
        return
    for call in read.script.calls_of("torch.save"):
        path = keyword(call, "f", 1)
        if path is None or has_unpacking(call) or _is_own(read, path) or not read.surely_on_all_ranks(call):
            continue
        yield Hit(
            call,
            "all ranks write to one file at once, and break it",
            "Save on rank 0 only: if dist.get_rank() == 0.",
        )


def _is_own(read: Reading, path: ast.expr) -> bool:
    """May each rank have a path of its own? Of a buffer, or a path that some function makes, nobody can tell."""
    return isinstance(path, ast.Call) or read.values.may_be_own(path)


RULE = Rule("LNT022", "save-on-all-ranks", Severity.WARNING, __doc__ or "", look)
