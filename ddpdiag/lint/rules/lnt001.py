"""RANK, LOCAL_RANK or WORLD_SIZE is used as text.

What: variables of the environment are text. `os.environ["LOCAL_RANK"]` is "0", not 0.

Why: a comparison such as `os.environ["RANK"] == 0` is never true, so nobody saves and nobody logs, without an error.
As a device ("Invalid device string: '0'"), as a rank of a sampler or of init_process_group, it fails at once.

    if os.environ["RANK"] == 0:          # never
    if int(os.environ["RANK"]) == 0:     # on rank 0

Fix: int(os.environ["LOCAL_RANK"]).

Source: https://docs.python.org/3/library/os.html#os.environ (keys and values are strings);
https://docs.pytorch.org/docs/stable/elastic/run.html (the variables).
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import keyword
from ddpdiag.lint.values import NUMBERS, path_or_text
from ddpdiag.model import Severity

_TAKES_NUMBER = {
    "torch.cuda.set_device": ("device", 0),
    "torch.cuda.device": ("device", 0),
    "torch.distributed.init_process_group": ("rank", None),
    "torch.utils.data.DistributedSampler": ("rank", 2),
    "torch.utils.data.distributed.DistributedSampler": ("rank", 2),
}


def look(read: Reading) -> Iterator[Hit]:
    """Variables that are read as text and used as numbers: each where it is read, with its first use."""
    seen: set[ast.expr] = set()
    for node in read.script.nodes:
        for used in _used_as_number(read, node):
            if not read.values.surely(used, *NUMBERS):
                continue
            place = next((each for each in read.values.origins(used) if each is not None), used)
            if place not in seen:
                seen.add(place)
                yield _hit(place, used, is_compared=isinstance(node, ast.Compare))


def _hit(place: ast.expr, used: ast.expr, *, is_compared: bool) -> Hit:
    what = "this" if place is used else f"{path_or_text(used)} in line {used.lineno}"
    outcome = "the comparison is never true" if is_compared else "the call fails, which expects a number"
    return Hit(place, f"a variable of the environment is text: with {what}, {outcome}", "Write int(...) around it.")


def _used_as_number(read: Reading, node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left=left, ops=[_], comparators=[ast.Constant(value=int())]):
            yield left
        case ast.Compare(left=ast.Constant(value=int()), ops=[_], comparators=[right]):
            yield right
        case ast.keyword(arg="device_ids", value=ast.List(elts=devices)):
            yield from devices
        case ast.Call():
            name, position = _TAKES_NUMBER.get(read.script.callee(node), (None, None))
            if name is not None and (given := keyword(node, name, position)) is not None:
                yield given


RULE = Rule("LNT001", "rank-as-text", Severity.ERROR, __doc__ or "", look)
