"""All ranks download the dataset at once.

What: a dataset of torchvision or torchaudio with download=True on every rank, with one root directory, and no barrier
around it.

Why: the ranks write the same files. One finds another's half-written archive ("File not found or corrupted"), or
unpacks it while it is replaced. It happens on the first run only, on a fresh machine.

    if local_rank == 0:
        MNIST(root, download=True)
    dist.barrier()
    data = MNIST(root)

Fix: download before the job, or on one rank of each host, and let the others wait.

Source: https://github.com/pytorch/examples/issues/1411; https://github.com/pytorch/tutorials/issues/3065.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import calls_method, is_constant, keyword
from ddpdiag.model import Severity

_LIBRARIES = ("torchvision.datasets.", "torchaudio.datasets.")


def look(read: Reading) -> Iterator[Hit]:
    """Datasets that every rank downloads."""
    for call in read.script.calls:
        if _downloads(read, call) and read.surely_on_all_ranks(call) and not _is_ordered(read, call):
            yield Hit(
                call,
                "all ranks download into one directory at once, and read each other's half-written files",
                "Download on local rank 0 only, and let the others wait at a barrier; or before the job.",
            )


def _downloads(read: Reading, call: ast.Call) -> bool:
    if not read.script.callee(call).startswith(_LIBRARIES) or not is_constant(keyword(call, "download"), True):
        return False
    root = keyword(call, "root", 0)
    return root is None or not read.values.may_be_own(root)


def _is_ordered(read: Reading, call: ast.Call) -> bool:
    """Is there a barrier in the same function, or a lock or a context such as local_main_process_first around it?"""
    around = read.script.function_of(call) or read.script.tree
    inside = any(isinstance(outer, ast.With) for outer in read.script.around(call))
    return inside or calls_method(around, "barrier")


RULE = Rule("LNT013", "download-race", Severity.WARNING, __doc__ or "", look)
