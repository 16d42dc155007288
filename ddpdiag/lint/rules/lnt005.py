"""MASTER_ADDR is this host, though several hosts are meant.

What: the script sets MASTER_ADDR to localhost or 127.0.0.1, whatever the launcher says, or opens the process group at
tcp://127.0.0.1, and it speaks of several hosts (an option --nnodes or --node-rank, a variable NODE_RANK).

Why: every host then looks for rank 0 on itself. The first waits for ranks that never come, the others for a store that
is not there, until the time-out: "The client socket has timed out".

Fix: leave MASTER_ADDR to the launcher, or os.environ.setdefault("MASTER_ADDR", "localhost").

Source: https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization (address of rank 0).
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.guards import conditions
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import keyword, text_of
from ddpdiag.model import Severity

_HOME = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def look(read: Reading) -> Iterator[Hit]:
    """Where loopback is written as the address of rank 0."""
    if not read.script.means_several_hosts:
        return
    for node in read.script.nodes:
        if _sets_home(read, node) and not any(conditions(read.script, node)):
            yield Hit(
                node,
                "every host looks for rank 0 on itself: a job on several hosts never starts",
                'Leave MASTER_ADDR to the launcher, or os.environ.setdefault("MASTER_ADDR", "localhost").',
            )


def _sets_home(read: Reading, node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Subscript(value=whole, slice=key)], value=value):
            is_variable = text_of(key) == "MASTER_ADDR" and read.script.name(whole) == "os.environ"
            return is_variable and text_of(value) in _HOME
        case ast.Call() if node in read.script.groups:
            address = text_of(keyword(node, "init_method", 1)) or ""
            return address.startswith(tuple(f"tcp://{home}" for home in _HOME))
    return False


RULE = Rule("LNT005", "coordinator-at-home", Severity.ERROR, __doc__ or "", look)
