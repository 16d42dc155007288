"""The model is wrapped before it is moved to its GPU.

What: `DistributedDataParallel(model).to(device)`, or a wrapped model that is moved afterwards, or device_ids with a
model that nothing has moved.

Why: DistributedDataParallel takes the parameters as they are when it wraps them: it sends them to all ranks, builds its
buckets and hooks on them. With device_ids it refuses CPU parameters; over NCCL it fails ("No backend type associated
with device type cpu").

    model = Net().to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])

Fix: move the model first, then wrap it.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (the warning on
changing parameters after wrapping; device_ids).
"""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, moved, same
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import keyword, names_in, text_of
from ddpdiag.lint.values import RANKS
from ddpdiag.model import Severity

_DEVICE = re.compile(r"dev|gpu|cuda|rank", re.IGNORECASE)
_REMEDY = "Move the model first, then wrap it."


def look(read: Reading) -> Iterator[Hit]:
    """Wrappings of models that are still on the CPU."""
    if "set_default_device" in read.script.attributes:
        return
    for wrapping in read.script.wrappings:
        model = keyword(wrapping, "module", 0)
        if model is None or not _is_unmoved(read, wrapping, model):
            continue
        move = _move_after(read, wrapping)
        if move is not None:
            yield Hit(move, "the model is moved after DistributedDataParallel has wrapped it", _REMEDY)
        elif _names_devices(keyword(wrapping, "device_ids", 1)):
            yield Hit(wrapping, "device_ids is given, and the model is still on the CPU: this call fails", _REMEDY)


def _names_devices(device_ids: ast.expr | None) -> bool:
    return isinstance(device_ids, ast.List) and bool(device_ids.elts)


def _is_unmoved(read: Reading, wrapping: ast.Call, model: ast.expr) -> bool:
    """Is it surely a module of a known class that nothing has moved yet?"""
    found = read.values.origins(model)
    origins = [each for each in found if each is not wrapping and not _is_move_of(read, each, wrapping)]
    if not origins or not all(isinstance(each, ast.Call) and _makes_module(read, each) for each in origins):
        return False
    here = read.script.function_of(wrapping)
    return not any(
        (target := moved(call)) is not None
        and same(target, model)
        and (call.lineno < wrapping.lineno or read.script.function_of(call) is not here)
        for call in read.script.calls
    )


def _is_move_of(read: Reading, origin: ast.expr | None, wrapping: ast.Call) -> bool:
    """Is it the wrapped model itself, moved (`model = model.to(device)` further down)?"""
    if not isinstance(origin, ast.Call) or (target := moved(origin)) is None:
        return False
    return target is wrapping or (read.is_wrapped(target) and origin.lineno > wrapping.lineno)


def _makes_module(read: Reading, call: ast.Call) -> bool:
    if any(_DEVICE.search(name) for argument in (*call.args, *call.keywords) for name in names_in(argument)):
        return False
    name = read.script.callee(call)
    if name.endswith(".convert_sync_batchnorm"):
        return bool(call.args) and _is_unmoved(read, call, call.args[0])
    own = read.script.classes.get(name)
    if own is not None:
        return not any(isinstance(each, ast.Call) and moved(each) is not None for each in ast.walk(own))
    return name.startswith(("torchvision.models.", "torch.nn."))


def _move_after(read: Reading, wrapping: ast.Call) -> ast.Call | None:
    """The call that moves the wrapped model."""
    outer = read.script.parents.get(read.script.parents.get(wrapping, wrapping))
    if isinstance(outer, ast.Call) and moved(outer) is wrapping and _goes_to_device(read, outer):
        return outer
    statement = read.script.statement_of(wrapping)
    names = statement.targets if isinstance(statement, ast.Assign) and statement.value is wrapping else []
    for call in read.script.calls:
        target = moved(call)
        after = call.lineno > wrapping.lineno and read.script.function_of(call) is read.script.function_of(wrapping)
        if after and target is not None and any(same(target, name) for name in names) and _goes_to_device(read, call):
            return call
    return None


def _goes_to_device(read: Reading, call: ast.Call) -> bool:
    """Not `.to(torch.bfloat16)`, not `.to(memory_format=...)`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return True
    device = keyword(call, "device", 0)
    if device is None:
        return False
    named = any(_DEVICE.search(name) for name in names_in(device)) or (text_of(device) or "").startswith("cuda")
    return named or read.values.maybe(device, *RANKS)


RULE = Rule("LNT016", "wrapped-before-move", Severity.ERROR, __doc__ or "", look)
