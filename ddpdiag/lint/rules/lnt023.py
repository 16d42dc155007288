"""A checkpoint is loaded without map_location.

What: on every rank, torch.load without map_location gives what load_state_dict takes.

Why: tensors come back on the GPU that they were saved from, which is GPU 0: every rank of the host puts a copy of the
model (and of the optimizer's state) there. "CUDA out of memory" on GPU 0, while the others have room.

    state = torch.load(path, map_location="cpu")
    state = torch.load(path, map_location=f"cuda:{local_rank}")

Weights that are called pretrained are left alone: published files are saved from the CPU, as a rule.

Fix: map_location="cpu"; load_state_dict copies to where the model is.

Source: https://docs.pytorch.org/docs/stable/generated/torch.load.html (the note on GPU RAM surge);
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import attribute_path, has_unpacking, keyword, own_nodes, words_in
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Loads of model states on all ranks, where there are GPUs."""
    if not read.script.wrappings or not read.uses_gpus:
        return
    for call in read.script.calls_of("torch.load"):
        if keyword(call, "map_location", 1) is not None or has_unpacking(call):
            continue
        if _is_pretrained(read, call):
            continue
        if _becomes_state(read, call) and read.surely_on_all_ranks(call):
            yield Hit(
                call,
                "every rank loads the tensors to the GPU that they were saved from: GPU 0 runs out of memory",
                'Pass map_location="cpu".',
            )


def _is_pretrained(read: Reading, call: ast.Call) -> bool:
    """Weights that others publish are saved from the CPU, as a rule."""
    parts = [origin for arg in call.args for origin in (arg, *read.values.origins(arg)) if origin is not None]
    return any("pretrain" in word.lower() for part in parts for word in words_in(part))


def _becomes_state(read: Reading, call: ast.Call) -> bool:
    """Does it go into load_state_dict, at once or by a name of the same function?"""
    statement = read.script.statement_of(call)
    names = {attribute_path(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()
    for node in own_nodes(read.script.scope_of(call)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict":
            inner = [each for arg in node.args for each in ast.walk(arg)]
            if call in inner or any(attribute_path(each) in names - {None} for each in inner):
                return True
    return False


RULE = Rule("LNT023", "load-without-map-location", Severity.WARNING, __doc__ or "", look)
