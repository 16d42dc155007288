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
import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, keyword, names_in
from ddpdiag.lint.values import RANKS
from ddpdiag.model import Severity

_OWN = re.compile(r"rank|local|gpu|pid|uuid|host|proc|device", re.IGNORECASE)


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
    """May each rank have a path of its own?"""
    parts: list[ast.AST] = [path, *(origin for origin in read.values.origins(path) if origin is not None)]
    for part in parts:
        inner = [each for each in ast.walk(part) if isinstance(each, (ast.Name, ast.Attribute))]
        if any(_OWN.search(name) for name in names_in(part)) or any(read.values.maybe(each, *RANKS) for each in inner):
            return True
        if isinstance(part, ast.Call) and part is path:
            return True  # a buffer, or a path that a function makes
    return False


RULE = Rule("LNT022", "save-on-all-ranks", Severity.WARNING, __doc__ or "", look)
