"""All ranks of a host take GPU 0.

What: the process group is opened over NCCL, tensors go to "cuda" without a number, and nothing says which GPU a rank
has: no torch.cuda.set_device, no device_ids, no device_id, no "cuda:N", no CUDA_VISIBLE_DEVICES.

Why: "cuda" is the current device, which is GPU 0 on every rank. NCCL then refuses ("Duplicate GPU detected"), or GPU 0
runs out of memory while the others idle.

Fix: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of a GPU.

Source: https://docs.pytorch.org/docs/stable/distributed.html#which-backend-to-use (each process needs exclusive access
to every GPU it uses); https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, is_bare_cuda
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import is_constant, keyword, words_in
from ddpdiag.model import Severity

_CHOOSES = {"set_device", "set_device_index", "device_index"}


def look(read: Reading) -> Iterator[Hit]:
    """The process group over NCCL, if no line chooses a GPU."""
    if _chooses(read) or not _takes_current(read):
        return
    for call in read.script.groups:
        if any(word == "nccl" or word.endswith(":nccl") for word in words_in(call)):
            yield Hit(
                call,
                "nothing says which GPU a rank has, so that all ranks of a host take GPU 0",
                'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of a GPU.',
            )


def _chooses(read: Reading) -> bool:
    script = read.script
    if script.attributes & _CHOOSES or "CUDA_VISIBLE_DEVICES" in script.texts:
        return True
    for node in script.nodes:
        match node:
            case ast.keyword(arg="device_ids" | "device_id" | "output_device", value=value):
                if not is_constant(value, None):
                    return True
            case ast.Constant(value=str(text)) if text.startswith("cuda:"):
                return True
            case ast.Call() if _has_index(read, node):
                return True
    # A helper from another file may choose.
    return any("device" in name.lower() or "distributed" in name.lower() for name in _imported_calls(read))


def _imported_calls(read: Reading) -> Iterator[str]:
    """Last names of called functions that come from files of the user's own, as far as one can tell."""
    for call in read.script.calls:
        name = read.script.callee(call)
        if not read.script.targets(call) and not name.startswith(("torch", "os.", "nn.", "argparse", "parser")):
            yield name.rpartition(".")[2]


def _has_index(read: Reading, call: ast.Call) -> bool:
    name = read.script.callee(call)
    if name in ("torch.device", "torch.cuda.device"):
        return len(call.args) > 1 or bool(call.args and not isinstance(call.args[0], (ast.Constant, ast.IfExp)))
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return bool(call.args or call.keywords)
    return False


def _takes_current(read: Reading) -> bool:
    """Does anything go to the current GPU?"""
    for call in read.script.calls:
        if is_bare_cuda(call):
            return True
        device = keyword(call, "device", 0)
        if is_constant(device, "cuda"):
            return True
        if isinstance(device, ast.IfExp) and is_constant(device.body, "cuda"):
            return True
    return False


RULE = Rule("LNT003", "one-gpu-for-all", Severity.ERROR, __doc__ or "", look)
