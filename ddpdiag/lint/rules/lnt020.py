"""A layer of the wrapped model is never used.

What: a class of this script makes a layer with parameters in `__init__`, no line of the script reads that attribute,
and the model goes into DistributedDataParallel without find_unused_parameters=True.

Why: DistributedDataParallel waits for the gradient of every parameter. One that gets none stops the second step:
"Expected to have finished reduction in the prior iteration before starting a new one".

Fix: remove the layer. find_unused_parameters=True is for layers that are used in some steps only: it costs a walk over
the graph in every step. With TORCH_DISTRIBUTED_DEBUG=INFO the error names the parameters.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
(find_unused_parameters); https://github.com/pytorch/pytorch/issues/43259.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, moved
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, is_constant, keyword, words_in
from ddpdiag.model import Severity

_LAYERS = (
    "Linear",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "LSTM",
    "GRU",
    "RNN",
    "LayerNorm",
    "MultiheadAttention",
)
_DEPTH = 5
# Who walks over its own layers may use any of them.
_WALKS = {"children", "named_children", "modules", "named_modules", "_modules", "__dict__", "getattr", "vars"}


def look(read: Reading) -> Iterator[Hit]:
    """Layers that nobody reads, in models that are wrapped."""
    for wrapping in read.script.wrappings:
        if has_unpacking(wrapping) or _tolerates(wrapping):
            continue
        for name in sorted(_classes(read, keyword(wrapping, "module", 0), _DEPTH)):
            owner = read.script.classes.get(name)
            if owner is not None and not _is_beyond_reading(read, owner):
                yield from _unused(read, owner)


def _classes(read: Reading, model: ast.expr | None, depth: int) -> set[str]:
    """The classes that a model can be of, behind `.to(...)`, torch.compile and convert_sync_batchnorm."""
    found: set[str] = set()
    for origin in read.values.origins(model) if model is not None and depth else ():
        if not isinstance(origin, ast.Call):
            continue
        last = read.script.callee(origin).rpartition(".")[2]
        target = moved(origin)
        if target is not None:
            found |= _classes(read, target, depth - 1)
        elif last in ("convert_sync_batchnorm", "compile") and origin.args:
            found |= _classes(read, origin.args[0], depth - 1)
        else:
            found.add(last)
    return found


def _tolerates(wrapping: ast.Call) -> bool:
    options = (keyword(wrapping, "find_unused_parameters"), keyword(wrapping, "static_graph"))
    return any(option is not None and not is_constant(option, False) for option in options)


def _is_beyond_reading(read: Reading, model: ast.ClassDef) -> bool:
    """Another base class, a subclass, or a walk over the layers: what is used cannot be read."""
    bases = [read.script.name(base) for base in model.bases]
    parents = {read.script.name(base) for each in read.script.classes.values() for base in each.bases}
    return bases != ["torch.nn.Module"] or model.name in parents or bool(_WALKS & set(words_in(model)))


def _unused(read: Reading, model: ast.ClassDef) -> Iterator[Hit]:
    for node in ast.walk(model):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call() as made):
                layer = read.script.callee(made)
                is_layer = layer.startswith("torch.nn.") and layer.rpartition(".")[2] in _LAYERS
                if is_layer and name not in read.script.attributes and name not in read.script.texts:
                    yield Hit(
                        node,
                        f"no line uses self.{name}: its parameters get no gradient, and DistributedDataParallel stops "
                        "in the second step",
                        "Remove the layer, or pass find_unused_parameters=True.",
                    )


RULE = Rule("LNT020", "unused-parameters", Severity.ERROR, __doc__ or "", look)
