"""Rules on the model and its wrapping in DistributedDataParallel."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.reading import RANKS, Kind, Reading, moved, path_or_text, same
from ddpdiag.lint.script import (
    has_unpacking,
    is_constant,
    is_function,
    keyword,
    names_in,
    text_of,
    trains,
    words_in,
)
from ddpdiag.model import Severity

_DEVICE = re.compile(r"dev|gpu|cuda|rank", re.IGNORECASE)
_FIX = "Move the model first, then wrap it."


@rule("LNT016", Severity.ERROR)
def wrapped_before_move(read: Reading) -> Iterator[Hit]:
    """The model is wrapped before it is moved to its GPU.

    What: `DistributedDataParallel(model).to(device)`, or a wrapped model that is moved afterwards, or device_ids with a
    model that nothing has moved.

    Why: DistributedDataParallel uses the parameters that the model has when it is wrapped: it sends them to all ranks
    and builds its buckets and hooks on them. With device_ids it refuses CPU parameters; over NCCL it fails ("No backend
    type associated with device type cpu").

        model = Net().to(device)
        model = DistributedDataParallel(model, device_ids=[local_rank])

    Fix: move the model first, then wrap it.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (the warning
    on changing parameters after wrapping; device_ids).
    """
    if "set_default_device" in read.attributes:
        return
    for wrapping in read.wrappings:
        model = keyword(wrapping, "module", 0)
        if model is None or not _is_unmoved(read, wrapping, model):
            continue
        device_ids = keyword(wrapping, "device_ids", 1)
        if (move := _move_after(read, wrapping)) is not None:
            yield Hit(move, "the model is moved after DistributedDataParallel has wrapped it", _FIX)
        elif isinstance(device_ids, ast.List) and device_ids.elts:
            yield Hit(wrapping, "device_ids is set, but the model is still on the CPU: this call fails", _FIX)


def _is_unmoved(read: Reading, wrapping: ast.Call, model: ast.expr) -> bool:
    """Whether `model` is surely a module of a known class that nothing has moved yet."""
    origins: list[ast.expr | None] = []
    for each in read.origins(model):
        target = moved(each) if isinstance(each, ast.Call) else None
        # The wrapped model itself, moved: `model = model.to(device)` further down.
        after = target is not None and read.is_wrapped(target) and each is not None and each.lineno > wrapping.lineno
        if each is not wrapping and target is not wrapping and not after:
            origins.append(each)
    if not origins or not all(isinstance(each, ast.Call) and _makes_module(read, each) for each in origins):
        return False
    here = read.function_of(wrapping)
    return not any(
        (target := moved(call)) is not None
        and same(target, model)
        and (call.lineno < wrapping.lineno or read.function_of(call) is not here)
        for call in read.calls
    )


def _makes_module(read: Reading, call: ast.Call) -> bool:
    if any(_DEVICE.search(name) for argument in (*call.args, *call.keywords) for name in names_in(argument)):
        return False
    name = read.callee(call)
    if name.endswith(".convert_sync_batchnorm"):
        return bool(call.args) and _is_unmoved(read, call, call.args[0])
    own = read.classes.get(name)
    if own is not None:
        return not any(isinstance(each, ast.Call) and moved(each) is not None for each in ast.walk(own))
    return name.startswith(("torchvision.models.", "torch.nn."))


def _move_after(read: Reading, wrapping: ast.Call) -> ast.Call | None:
    """The call that moves the wrapped model."""
    outer = read.parents.get(read.parents.get(wrapping, wrapping))
    if isinstance(outer, ast.Call) and moved(outer) is wrapping and _goes_to_device(read, outer):
        return outer
    statement = read.statement_of(wrapping)
    names = statement.targets if isinstance(statement, ast.Assign) and statement.value is wrapping else []
    for call in read.calls:
        target = moved(call)
        after = call.lineno > wrapping.lineno and read.function_of(call) is read.function_of(wrapping)
        if after and target is not None and any(same(target, name) for name in names) and _goes_to_device(read, call):
            return call
    return None


def _goes_to_device(read: Reading, call: ast.Call) -> bool:
    """Whether a call moves to a device, unlike `.to(torch.bfloat16)` or `.to(memory_format=...)`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return True
    device = keyword(call, "device", 0)
    if device is None:
        return False
    named = any(_DEVICE.search(name) for name in names_in(device)) or (text_of(device) or "").startswith("cuda")
    return named or read.maybe(device, *RANKS)


_NO_GRAD = re.compile("no_grad|inference")
# Methods of torch.nn.Module that return the module; functions that return it, or one with the same parameters.
_RETURNS_ITSELF = {"to", "cuda", "cpu", "xpu", "half", "float", "double", "bfloat16", "type", "train", "eval"}
_RETURNS_ITSELF |= {"requires_grad_", "to_empty", "apply"}
_RETURNS_MODEL = {"compile", "convert_sync_batchnorm", "convert_syncbn_model", "prepare_model"}


@rule("LNT017", Severity.ERROR)
def bypassed_ddp(read: Reading) -> Iterator[Hit]:
    """Training bypasses DistributedDataParallel.

    What: the training loop calls the bare model, `ddp.module(x)` or the variable from before wrapping, and never calls
    the wrapped model.

    Why: DistributedDataParallel prepares its all-reduce in its own forward pass. Without it the backward pass averages
    nothing: every rank trains its own separate model, without an error, and the saved model has seen a part of the data
    only.

        output = ddp.module(batch)      # no all-reduce
        output = ddp(batch)

    Fix: call the wrapped model. Evaluation with the bare model is correct.

    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design (forward pass);
    https://github.com/jingyaogong/minimind/issues/853; seen with torch 2.13: gradients differ between the ranks.
    """
    if not read.wrappings or any(read.is_wrapped(_of_forward(call)) for call in read.calls):
        return
    handed_on = [call for call in read.calls if _hands_on(read, call)]
    for call in read.calls:
        if _is_bare(read, call, named=not handed_on) and _is_in_training(read, call):
            yield Hit(
                call,
                f"{path_or_text(call.func)} is the model inside of DistributedDataParallel: its backward pass averages "
                "nothing, and every rank trains its own separate model",
                "Call the model that DistributedDataParallel returned.",
            )


def _of_forward(call: ast.Call) -> ast.expr:
    """`model` of `model.forward(x)`, which is as good as `model(x)`; else what is called."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func


def _hands_on(read: Reading, call: ast.Call) -> bool:
    """Whether the wrapped model is passed to a function of another file, which may call it."""
    if read.targets(call) or read.callee(call) in ("isinstance", "print", "len", "type"):
        return False
    given = (*call.args, *(each.value for each in call.keywords))
    return any(not isinstance(each, ast.Call) and read.is_wrapped(each) for each in given)


def _is_bare(read: Reading, call: ast.Call, *, named: bool) -> bool:
    """Whether the call is `ddp.module(x)`, or (if `named`) a call of the variable that was wrapped."""
    func = _of_forward(call)
    if not isinstance(func, (ast.Name, ast.Attribute)):
        return False
    scope = read.scope_of(call)
    if read.maybe(func, Kind.INSIDE):
        outer = read.parents.get(call)
        is_target = isinstance(outer, ast.Attribute) and outer.attr == "detach"  # not what is trained
        # The same function may take a result from a function of another file that gets the wrapped model.
        beside = (other for other in read.calls if read.scope_of(other) is scope)
        results = (other for other in beside if not isinstance(read.parents.get(other), ast.Expr))
        return not is_target and not any(_hands_on(read, other) for other in results)
    return named and any(
        read.scope_of(wrapping) is scope and any(same(func, name) for name in _names_of_wrapped(read, wrapping))
        for wrapping in read.wrappings
    )


def _names_of_wrapped(read: Reading, wrapping: ast.Call) -> Iterator[ast.expr]:
    """The names by which the wrapped model is known: `model` of `DDP(model.cuda(0))`, and what that was made of."""
    node = keyword(wrapping, "module", 0)
    for _ in range(_DEPTH):
        while node is not None and (inner := _same_model(node)) is not None:
            node = inner
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return
        yield node
        values = [source.expression for source in read.sources(node) if not source.how and source.item is None]
        made = [value for value in values if value is not None and _same_model(value) is not None]
        node = made[0] if len(values) == 1 and made else None


def _same_model(node: ast.expr) -> ast.expr | None:
    """The model in a call that returns it, or a module with its parameters; None for any other expression."""
    match node:
        case ast.Call(func=ast.Attribute(value=model, attr=name)) if name in _RETURNS_ITSELF:
            return model
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[model, *_]) if name in _RETURNS_MODEL:
            return model
    return None


def _is_in_training(read: Reading, call: ast.Call) -> bool:
    """Whether a call is within a loop of its function with a backward pass, and not under no_grad."""
    looped = False
    for outer in read.around(call):
        if isinstance(outer, ast.With) and any(_NO_GRAD.search(ast.unparse(item.context_expr)) for item in outer.items):
            return False
        looped = looped or (isinstance(outer, (ast.For, ast.While)) and trains(outer))
        if is_function(outer):
            break
    return looped


_LAYERS = re.compile("Linear|Bilinear|Conv[123]d|Embedding|LSTM|GRU|RNN|LayerNorm|MultiheadAttention")
_DEPTH = 5
# A model that walks over its own layers may use any of them.
_WALKS = {"children", "named_children", "modules", "named_modules", "_modules", "__dict__", "getattr", "vars"}


@rule("LNT020", Severity.ERROR)
def unused_parameters(read: Reading) -> Iterator[Hit]:
    """A layer of the wrapped model is never used.

    What: a class of this script makes a layer with parameters in `__init__`, no line of the script reads that
    attribute, and the model goes into DistributedDataParallel without find_unused_parameters=True.

    Why: DistributedDataParallel waits for the gradient of every parameter. A parameter without a gradient stops the
    second step: "Expected to have finished reduction in the prior iteration before starting a new one".

    Fix: remove the layer. find_unused_parameters=True is for layers that are used in some steps only; it walks over the
    graph in every step, which takes time. With TORCH_DISTRIBUTED_DEBUG=INFO the error names the parameters.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    (find_unused_parameters); https://github.com/pytorch/pytorch/issues/43259.
    """
    for wrapping in read.wrappings:
        options = (keyword(wrapping, "find_unused_parameters"), keyword(wrapping, "static_graph"))
        tolerates = any(option is not None and not is_constant(option, False) for option in options)
        if has_unpacking(wrapping) or tolerates:
            continue
        for name in sorted(_classes(read, keyword(wrapping, "module", 0), _DEPTH)):
            owner = read.classes.get(name)
            if owner is not None and not _is_beyond_reading(read, owner):
                yield from _unused(read, owner)


def _classes(read: Reading, model: ast.expr | None, depth: int) -> set[str]:
    """The classes that a model can be of, behind `.to(...)`, torch.compile and convert_sync_batchnorm."""
    found: set[str] = set()
    for origin in read.origins(model) if model is not None and depth else ():
        if not isinstance(origin, ast.Call):
            continue
        last = read.last_name(origin)
        target = moved(origin)
        if target is not None:
            found |= _classes(read, target, depth - 1)
        elif last in ("convert_sync_batchnorm", "compile") and origin.args:
            found |= _classes(read, origin.args[0], depth - 1)
        else:
            found.add(last)
    return found


def _is_beyond_reading(read: Reading, model: ast.ClassDef) -> bool:
    """Whether another base class, a subclass, or a walk over the layers hides which layers are used."""
    bases = [read.name(base) for base in model.bases]
    parents = {read.name(base) for each in read.classes.values() for base in each.bases}
    return bases != ["torch.nn.Module"] or model.name in parents or bool(_WALKS & set(words_in(model)))


def _unused(read: Reading, model: ast.ClassDef) -> Iterator[Hit]:
    for node in ast.walk(model):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call() as made):
                layer = read.callee(made)
                is_layer = layer.startswith("torch.nn.") and _LAYERS.fullmatch(read.last_name(made)) is not None
                if is_layer and name not in read.attributes and name not in read.texts:
                    yield Hit(
                        node,
                        f"no line uses self.{name}: its parameters get no gradient, and DistributedDataParallel stops "
                        "in the second step",
                        "Remove the layer, or pass find_unused_parameters=True.",
                    )


RULES = (wrapped_before_move, bypassed_ddp, unused_parameters)
