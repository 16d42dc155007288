"""Rules on the model and its wrapping in DistributedDataParallel."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.analysis import RANKS, Analysis, Kind, is_same, moved_object, name_or_code
from ddpdiag.lint.script import (
    Function,
    argument,
    has_backward,
    has_unpacking,
    is_constant,
    names_in,
    text_of,
    words_in,
)
from ddpdiag.model import Severity

_DEVICE_NAME = re.compile(r"dev|gpu|cuda|rank", re.IGNORECASE)


@rule("LNT016", Severity.ERROR)
def wrapped_before_move(script: Analysis) -> Iterator[Hit]:
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
    if "set_default_device" in script.read_attributes:
        return
    fix = "Move the model first, then wrap it."
    for wrapping in script.wrappings:
        model = argument(wrapping, "module", 0)
        if model is None or not _is_unmoved(script, wrapping, model):
            continue
        device_ids = argument(wrapping, "device_ids", 1)
        if (move := _move_after(script, wrapping)) is not None:
            yield Hit(move, "the model is moved after DistributedDataParallel has wrapped it", fix)
        elif isinstance(device_ids, ast.List) and device_ids.elts:
            yield Hit(wrapping, "device_ids is set, but the model is still on the CPU: this call fails", fix)


def _is_unmoved(script: Analysis, wrapping: ast.Call, model: ast.expr) -> bool:
    """Whether `model` is surely a module of a known class that nothing has moved before `wrapping`."""
    origins: list[ast.expr | None] = []
    for each in script.origins(model):
        target = moved_object(each) if isinstance(each, ast.Call) else None
        # A later `model = model.to(device)` moves the wrapped model.
        moves_wrapped = target is not None and script.may_be(target, Kind.WRAPPED)
        is_later_move = moves_wrapped and each is not None and each.lineno > wrapping.lineno
        if each is not wrapping and target is not wrapping and not is_later_move:
            origins.append(each)
    if not origins or not all(isinstance(each, ast.Call) and _makes_cpu_module(script, each) for each in origins):
        return False
    function = script.function_of(wrapping)
    return not any(
        (target := moved_object(call)) is not None
        and is_same(target, model)
        and (call.lineno < wrapping.lineno or script.function_of(call) is not function)
        for call in script.calls
    )


def _makes_cpu_module(script: Analysis, call: ast.Call) -> bool:
    """Whether the call surely makes a module, and neither its arguments nor the module's class mention a device."""
    if any(_DEVICE_NAME.search(name) for each in (*call.args, *call.keywords) for name in names_in(each)):
        return False
    name = script.callee_name(call)
    if name.endswith(".convert_sync_batchnorm"):
        return bool(call.args) and _is_unmoved(script, call, call.args[0])
    model_class = script.classes.get(name)
    if model_class is not None:
        return not any(isinstance(each, ast.Call) and moved_object(each) is not None for each in ast.walk(model_class))
    return name.startswith(("torchvision.models.", "torch.nn."))


def _move_after(script: Analysis, wrapping: ast.Call) -> ast.Call | None:
    """The call that moves the model after `wrapping`, or None."""
    outer = script.parents.get(script.parents.get(wrapping, wrapping))
    if isinstance(outer, ast.Call) and moved_object(outer) is wrapping and _goes_to_device(script, outer):
        return outer
    statement = script.statement_of(wrapping)
    names = statement.targets if isinstance(statement, ast.Assign) and statement.value is wrapping else []
    for call in script.calls:
        target = moved_object(call)
        is_later = call.lineno > wrapping.lineno and script.function_of(call) is script.function_of(wrapping)
        is_model = target is not None and any(is_same(target, name) for name in names)
        if is_later and is_model and _goes_to_device(script, call):
            return call
    return None


def _goes_to_device(script: Analysis, call: ast.Call) -> bool:
    """Whether a call moves its object to a device, unlike `.to(torch.bfloat16)` or `.to(memory_format=...)`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return True
    device = argument(call, "device", 0)
    if device is None:
        return False
    if (text_of(device) or "").startswith("cuda") or script.may_be(device, *RANKS):
        return True
    return any(_DEVICE_NAME.search(name) for name in names_in(device))


_NO_GRAD = re.compile("no_grad|inference")
# Methods of torch.nn.Module that return the module, and functions that return it or one with the same parameters.
_RETURNS_SELF = {"to", "cuda", "cpu", "xpu", "half", "float", "double", "bfloat16", "type", "train", "eval"}
_RETURNS_SELF |= {"requires_grad_", "to_empty", "apply"}
_RETURNS_MODEL = {"compile", "convert_sync_batchnorm", "convert_syncbn_model", "prepare_model"}


@rule("LNT017", Severity.ERROR)
def bypassed_ddp(script: Analysis) -> Iterator[Hit]:
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
    if not script.wrappings or any(script.may_be(_called_model(call), Kind.WRAPPED) for call in script.calls):
        return
    passed_on = [call for call in script.calls if _passes_model_on(script, call)]
    for call in script.calls:
        if _calls_bare_model(script, call, by_name=not passed_on) and _is_in_training(script, call):
            yield Hit(
                call,
                f"{name_or_code(call.func)} is the model inside of DistributedDataParallel: its backward pass averages "
                "nothing, and every rank trains its own separate model",
                "Call the model that DistributedDataParallel returned.",
            )


def _called_model(call: ast.Call) -> ast.expr:
    """The callable of a call; of `model.forward(x)` it is `model`, because the call does the same as `model(x)`."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func


def _passes_model_on(script: Analysis, call: ast.Call) -> bool:
    """Whether the call passes the wrapped model to a function of another file, which may call the model."""
    if script.callees(call) or script.callee_name(call) in ("isinstance", "print", "len", "type"):
        return False
    arguments = (*call.args, *(each.value for each in call.keywords))
    return any(not isinstance(each, ast.Call) and script.may_be(each, Kind.WRAPPED) for each in arguments)


def _calls_bare_model(script: Analysis, call: ast.Call, *, by_name: bool) -> bool:
    """Whether the call is `ddp.module(x)`, or, with `by_name`, a call of the variable that was wrapped."""
    func = _called_model(call)
    if not isinstance(func, (ast.Name, ast.Attribute)):
        return False
    scope = script.scope_of(call)
    if script.may_be(func, Kind.BARE_MODEL):
        outer = script.parents.get(call)
        is_detached = isinstance(outer, ast.Attribute) and outer.attr == "detach"  # no gradient flows through it
        # A function of another file may call the wrapped model, and return the result that is trained.
        others = (other for other in script.calls if script.scope_of(other) is scope)
        results = (other for other in others if not isinstance(script.parents.get(other), ast.Expr))
        return not is_detached and not any(_passes_model_on(script, other) for other in results)
    return by_name and any(
        script.scope_of(wrapping) is scope and any(is_same(func, name) for name in _names_of_wrapped(script, wrapping))
        for wrapping in script.wrappings
    )


def _names_of_wrapped(script: Analysis, wrapping: ast.Call) -> Iterator[ast.expr]:
    """Yield the names of the model in `wrapping`: `model` of `DDP(model.cuda(0))`, and `net` if `model = net.to(0)`."""
    node = argument(wrapping, "module", 0)
    for _ in range(_MAX_DEPTH):
        while node is not None and (inner := _inner_model(node)) is not None:
            node = inner
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return
        yield node
        sources = [source for source in script.sources(node) if not source.role and source.element_index is None]
        value = sources[0].expression if len(sources) == 1 else None
        node = value if value is not None and _inner_model(value) is not None else None


def _inner_model(node: ast.expr) -> ast.expr | None:
    """`model` of a call such as `model.to(0)` or `compile(model)`, whose result has the same parameters; else None."""
    match node:
        case ast.Call(func=ast.Attribute(value=model, attr=name)) if name in _RETURNS_SELF:
            return model
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[model, *_]) if name in _RETURNS_MODEL:
            return model
    return None


def _is_in_training(script: Analysis, call: ast.Call) -> bool:
    """Whether a loop with a backward pass encloses the call in its function, and no_grad does not."""
    is_in_loop = False
    for outer in script.ancestors(call):
        if isinstance(outer, ast.With) and any(_NO_GRAD.search(ast.unparse(item.context_expr)) for item in outer.items):
            return False
        is_in_loop = is_in_loop or (isinstance(outer, (ast.For, ast.While)) and has_backward(outer))
        if isinstance(outer, Function):
            break
    return is_in_loop


_LAYER_CLASSES = re.compile("Linear|Bilinear|Conv[123]d|Embedding|LSTM|GRU|RNN|LayerNorm|MultiheadAttention")
_MAX_DEPTH = 5
# Names with which a model iterates over its layers, so that it may use any of them.
_LAYER_ITERATION = {"children", "named_children", "modules", "named_modules", "_modules", "__dict__", "getattr", "vars"}


@rule("LNT020", Severity.ERROR)
def unused_parameters(script: Analysis) -> Iterator[Hit]:
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
    for wrapping in script.wrappings:
        options = (argument(wrapping, "find_unused_parameters"), argument(wrapping, "static_graph"))
        is_tolerated = any(option is not None and not is_constant(option, False) for option in options)
        if has_unpacking(wrapping) or is_tolerated:
            continue
        for name in sorted(_possible_classes(script, argument(wrapping, "module", 0), _MAX_DEPTH)):
            owner = script.classes.get(name)
            if owner is not None and not _hides_layer_use(script, owner):
                yield from _unused_layers(script, owner)


def _possible_classes(script: Analysis, model: ast.expr | None, depth: int) -> set[str]:
    """The names of the classes that a model may have, seen through `.to(...)`, compile and convert_sync_batchnorm."""
    found: set[str] = set()
    for origin in script.origins(model) if model is not None and depth else ():
        if not isinstance(origin, ast.Call):
            continue
        last = script.last_name(origin)
        target = moved_object(origin)
        if target is not None:
            found |= _possible_classes(script, target, depth - 1)
        elif last in ("convert_sync_batchnorm", "compile") and origin.args:
            found |= _possible_classes(script, origin.args[0], depth - 1)
        else:
            found.add(last)
    return found


def _hides_layer_use(script: Analysis, model: ast.ClassDef) -> bool:
    """Whether unseen code may use layers: the class has a subclass, a base other than Module, or a loop over layers."""
    bases = [script.name(base) for base in model.bases]
    parents = {script.name(base) for each in script.classes.values() for base in each.bases}
    return bases != ["torch.nn.Module"] or model.name in parents or bool(_LAYER_ITERATION & set(words_in(model)))


def _unused_layers(script: Analysis, model: ast.ClassDef) -> Iterator[Hit]:
    for node in ast.walk(model):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call() as call):
                is_layer = _LAYER_CLASSES.fullmatch(script.last_name(call)) is not None
                is_of_torch = script.callee_name(call).startswith("torch.nn.")
                if is_layer and is_of_torch and name not in script.read_attributes and name not in script.strings:
                    yield Hit(
                        node,
                        f"no line uses self.{name}: its parameters get no gradient, and DistributedDataParallel stops "
                        "in the second step",
                        "Remove the layer, or pass find_unused_parameters=True.",
                    )


RULES = (wrapped_before_move, bypassed_ddp, unused_parameters)
