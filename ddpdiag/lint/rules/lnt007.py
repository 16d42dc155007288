"""CUDA is used in a forked process.

What: a Dataset puts its items on a GPU in `__getitem__` while its DataLoader has workers, or the start method "fork" is
asked for and a GPU is used before the processes are started.

Why: a process that was forked from one that uses CUDA cannot use it: "Cannot re-initialize CUDA in forked subprocess".
DataLoader's workers are forked on Linux.

Fix: return CPU tensors from the Dataset and move the batch in the loop (pin_memory=True, non_blocking=True); start
processes with "spawn".

Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing;
https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading (not recommended to return CUDA tensors);
https://github.com/pytorch/pytorch/issues/40403.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, is_bare_cuda
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import attribute_path, has_unpacking, is_constant, keyword, text_of
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Datasets on a GPU, and forks after CUDA."""
    workers = any(_has_workers(loader) for loader in read.script.loaders)
    for function in read.script.functions.get("__getitem__", ()):
        if workers and _is_dataset(read.script.class_of(function)):
            yield from (_of_worker(call) for call in ast.walk(function) if _uses_gpu(call))
    yield from _forks(read)


def _has_workers(loader: ast.Call) -> bool:
    workers = keyword(loader, "num_workers", 5)
    spawned = text_of(keyword(loader, "multiprocessing_context")) in ("spawn", "forkserver")
    return workers is not None and not is_constant(workers, 0) and not spawned and not has_unpacking(loader)


def _is_dataset(owner: ast.ClassDef | None) -> bool:
    return owner is not None and any((attribute_path(base) or "").endswith("Dataset") for base in owner.bases)


def _uses_gpu(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    devices = [keyword(node, "device", 0)]
    return is_bare_cuda(node) or any((text_of(device) or "").startswith("cuda") for device in devices)


def _of_worker(call: ast.AST) -> Hit:
    return Hit(
        call,
        "a DataLoader's workers are forked, and CUDA cannot be used in a forked process",
        "Return CPU tensors from the Dataset, and move the batch in the training loop.",
    )


def _forks(read: Reading) -> Iterator[Hit]:
    """`fork`, after a line of the same function (or of the script's top) that uses a GPU."""
    for call in read.script.calls:
        last = read.script.callee(call).rpartition(".")[2]
        method = keyword(call, "start_method") or keyword(call, "method", 0)
        if last not in ("set_start_method", "get_context", "start_processes") or text_of(method) != "fork":
            continue
        here = read.script.function_of(call)
        if any(
            _uses_gpu(each) and each.lineno < call.lineno and read.script.function_of(each) in (None, here)
            for each in read.script.calls
        ):
            yield Hit(
                call,
                "CUDA is in use before these processes are forked, and cannot be used in a forked process",
                'Take the start method "spawn", or use no GPU before.',
            )


RULE = Rule("LNT007", "fork-after-cuda", Severity.ERROR, __doc__ or "", look)
