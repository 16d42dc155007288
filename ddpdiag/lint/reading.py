"""All that a rule asks: the script, what its values are, and on which ranks a line runs."""

import ast

from ddpdiag.lint.guards import is_under, runs_here
from ddpdiag.lint.script import Script
from ddpdiag.lint.syntax import attribute_path
from ddpdiag.lint.values import Kind, Values
from ddpdiag.model import Severity

_MOVES = ("to", "cuda")


class Reading:
    """One script, read."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.values = Values(script)

    def surely_on_some_ranks(self, node: ast.AST) -> bool:
        """Does a line run on some ranks only, beyond doubt?"""
        return is_under(self.script, node, self.values.is_rank_test, sites=1)

    def maybe_on_some_ranks(self, node: ast.AST) -> bool:
        """May a line run on some ranks only? Then a rule about all ranks says nothing."""
        return is_under(self.script, node, self.values.depends_on_rank)

    def surely_on_all_ranks(self, node: ast.AST) -> bool:
        """Does every rank come by this line, beyond doubt: all its callers are in view, and none asks for the rank?"""
        return (
            runs_here(self.script, node) and self.script.runs_on_all_ranks(node) and not self.maybe_on_some_ranks(node)
        )

    @property
    def wrong_on_several_hosts(self) -> Severity:
        """What is right on one host and wrong on several is an error where the script means several."""
        return Severity.ERROR if self.script.means_several_hosts else Severity.WARNING

    @property
    def uses_gpus(self) -> bool:
        """Does it put anything on a GPU?"""
        backends = {"nccl", "cuda"}
        return bool(backends & self.script.texts) or any(
            self.script.callee(call).startswith("torch.cuda.") or is_bare_cuda(call) for call in self.script.calls
        )

    def is_wrapped(self, node: ast.expr) -> bool:
        """Can it be a DistributedDataParallel?"""
        return self.values.maybe(node, Kind.WRAPPED)


def is_bare_cuda(call: ast.Call) -> bool:
    """Is it `x.cuda()`, which takes the current GPU?"""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args and not call.keywords


def moved(call: ast.Call) -> ast.expr | None:
    """What `x.to(...)` or `x.cuda(...)` moves, or None."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in _MOVES else None


def same(one: ast.AST, other: ast.AST) -> bool:
    """Are both the same name, or the same attribute?"""
    path = attribute_path(one)
    return path is not None and path == attribute_path(other)
