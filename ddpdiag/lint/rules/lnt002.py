"""A GPU is chosen by the global rank.

What: `torch.cuda.set_device(rank)`, `f"cuda:{rank}"` or `device_ids=[rank]` with the rank in the whole job.

Why: GPUs are numbered from 0 on every host, ranks are not. On the second host of two with eight GPUs, rank 8 asks for
GPU 8: "CUDA error: invalid device ordinal". On one host it works. A number that mp.spawn gives is one of this host, and
is right; so is `rank % torch.cuda.device_count()`.

    torch.cuda.set_device(dist.get_rank())                  # one host
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))    # any number

Fix: take the local rank. An error where the script speaks of several hosts (an option --nnodes, a variable NODE_RANK),
else a warning.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html (LOCAL_RANK, RANK);
https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading, moved
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import keyword, text_of
from ddpdiag.lint.values import Kind, path_or_text
from ddpdiag.model import Severity


def look(read: Reading) -> Iterator[Hit]:
    """Devices that are surely numbered by the global rank."""
    for node in read.script.nodes:
        for device in _devices(read, node):
            if read.values.surely(device, Kind.RANK):
                yield Hit(
                    node if isinstance(node, (ast.Call, ast.JoinedStr)) else device,
                    f"the GPU is chosen by the global rank ({path_or_text(device)}): the second host has no GPU of "
                    "that number",
                    'Use the local rank: int(os.environ["LOCAL_RANK"]).',
                    read.wrong_on_several_hosts,
                )


def _devices(read: Reading, node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that number a GPU in this node."""
    match node:
        case ast.keyword(arg="device_ids", value=ast.List(elts=devices)):
            yield from devices
        case ast.JoinedStr(values=[ast.Constant(value="cuda:"), ast.FormattedValue(value=device)]):
            yield device
        case ast.Call():
            yield from _argument(read, node)


def _argument(read: Reading, call: ast.Call) -> Iterator[ast.expr]:
    name = read.script.callee(call)
    if name in ("torch.cuda.set_device", "torch.cuda.device"):
        device = keyword(call, "device", 0)
    elif name == "torch.device" and text_of(keyword(call, "type", 0)) == "cuda":
        device = keyword(call, "index", 1)
    elif moved(call) is not None:
        device = keyword(call, "device", 0)
    else:
        device = None
    if device is not None and not isinstance(device, ast.JoinedStr):
        yield device


RULE = Rule("LNT002", "device-of-global-rank", Severity.WARNING, __doc__ or "", look)
