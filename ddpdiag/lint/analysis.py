"""Answers to the questions of lint rules about a script: which kinds of value an expression may have (a rank, a wrapped
model, a sampler), under which conditions a line runs, and on which ranks."""

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum

from ddpdiag.lint.bindings import PROCESS_INDEX, Bindings, return_values
from ddpdiag.lint.script import BLOCK_FIELDS, Function, argument, attribute_path, names_in, text_of, variables_in
from ddpdiag.model import Severity


class Kind(Enum):
    """The kind of a value. OTHER stands for any other value, and for one that is not known."""

    RANK = "rank"
    LOCAL_RANK = "local rank"
    PROCESS_INDEX = "index that mp.spawn or a loop gives to a started process"
    WORLD_SIZE = "world size"
    LOCAL_WORLD_SIZE = "ranks of this host"
    RANK_TEXT = "RANK as text"
    LOCAL_RANK_TEXT = "LOCAL_RANK as text"
    WORLD_SIZE_TEXT = "WORLD_SIZE as text"
    RANK_TEST = "whether this process is a certain rank"
    WRAPPED = "DistributedDataParallel"
    SAMPLER = "DistributedSampler"
    SHARD = "every n-th element"
    LOADER = "DataLoader with a DistributedSampler"
    BARE_MODEL = "the module inside of a DistributedDataParallel"
    NONE = "None"
    OTHER = "other"


Kinds = frozenset[Kind]
ONLY_OTHER: Kinds = frozenset({Kind.OTHER})
RANKS: Kinds = frozenset({Kind.RANK, Kind.LOCAL_RANK, Kind.PROCESS_INDEX})
# Variables that torchrun, Slurm, Open MPI and MPICH set for each rank, with the kind of their values.
_KINDS_BY_VARIABLE = {
    **dict.fromkeys(("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), Kind.RANK_TEXT),
    **dict.fromkeys(
        ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"), Kind.LOCAL_RANK_TEXT
    ),
    **dict.fromkeys(("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"), Kind.WORLD_SIZE_TEXT),
}
# The kind of int(x), by the kind of x.
INT_KINDS = {Kind.RANK_TEXT: Kind.RANK, Kind.LOCAL_RANK_TEXT: Kind.LOCAL_RANK, Kind.WORLD_SIZE_TEXT: Kind.WORLD_SIZE}
_KINDS_BY_FUNCTION = {
    "get_rank": Kind.RANK,
    "get_global_rank": Kind.RANK,
    "get_local_rank": Kind.LOCAL_RANK,
    "get_node_local_rank": Kind.LOCAL_RANK,
    "get_world_size": Kind.WORLD_SIZE,
    "DistributedDataParallel": Kind.WRAPPED,
    "DistributedSampler": Kind.SAMPLER,
}
# The names by which functions and variables are recognised, above all functions from other files of the project.
_RANK_TEST_NAME = re.compile(r"_?is_(main|master|rank_?(0|zero)|primary|chief|root|leader)(_process|_node|_rank)?")
_SUGGESTS_RANK = re.compile(
    r"rank|main|master|primary|chief|leader|root|local|gpu|device|proc|worker|node|zero", re.IGNORECASE
)
_SUGGESTS_RANK_PATH = re.compile(r"rank|local|gpu|pid|uuid|host|proc|device|temp|tmp", re.IGNORECASE)
_MAX_DEPTH = 40
# Early exits that are read in one block. Only generated scripts have more, for which the time would grow quadratically.
_MAX_EXITS = 1000
_BOOLEAN_NODES = (ast.Compare, ast.UnaryOp, ast.BoolOp)


class Analysis(Bindings):
    """A script with the kinds of its expressions, and the ranks on which its lines run."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._final_kinds: dict[ast.AST, Kinds] = {}
        self._provisional_kinds: dict[ast.AST, Kinds] = {}
        self._in_progress: set[ast.AST] = set()
        self._rank_dependence: dict[tuple[ast.AST, int], bool] = {}

    def kinds(self, node: ast.expr | None) -> Kinds:
        """The possible kinds of an expression. Empty if `node` is None, nested too deep, or refers to itself."""
        if node is None or node in self._in_progress or len(self._in_progress) > _MAX_DEPTH:
            return frozenset()
        if (known := self._final_kinds.get(node) or self._provisional_kinds.get(node)) is not None:
            return known
        self._in_progress.add(node)
        kinds = self._kinds_of_call(node) if isinstance(node, ast.Call) else self._kinds_of_non_call(node)
        kinds = kinds or ONLY_OTHER
        self._in_progress.discard(node)
        if self._in_progress:
            self._provisional_kinds[node] = kinds  # kinds of expressions in progress may be missing from it
        else:
            self._final_kinds[node] = kinds
            self._provisional_kinds.clear()
        return kinds

    def is_surely(self, node: ast.expr | None, *kinds: Kind) -> bool:
        """Whether all possible kinds of the expression are among `kinds`."""
        return node is not None and self.kinds(node) <= frozenset(kinds)

    def contains_surely(self, node: ast.AST, *kinds: Kind) -> bool:
        """Whether some part of the expression is surely one of `kinds`."""
        return any(isinstance(each, ast.expr) and self.is_surely(each, *kinds) for each in ast.walk(node))

    def may_be(self, node: ast.expr | None, *kinds: Kind) -> bool:
        """Whether at least one possible kind of the expression is among `kinds`."""
        return node is not None and bool(self.kinds(node) & frozenset(kinds))

    def contains_rank(self, node: ast.AST) -> bool:
        """Whether a part of the expression may be a rank, as a number or as text."""
        ranks = RANKS | {Kind.RANK_TEXT, Kind.LOCAL_RANK_TEXT}
        return any(isinstance(each, ast.expr) and self.kinds(each) & ranks for each in ast.walk(node))

    def may_differ_by_rank(self, path: ast.expr) -> bool:
        """Whether a path or dataset, or a value from which it is computed, may differ between ranks."""
        parts = [path, *(origin for origin in self.origins(path) if origin is not None)]
        return any(self.contains_rank(part) or any(map(_SUGGESTS_RANK_PATH.search, names_in(part))) for part in parts)

    def may_depend_on_rank(self, node: ast.AST, depth: int = 3) -> bool:
        """Whether an expression may depend on the rank: by its names, its kinds, and `depth` levels of its sources."""
        if (node, depth) not in self._rank_dependence:
            self._rank_dependence[node, depth] = False  # ends the recursion if a name depends on itself
            found = any(map(_SUGGESTS_RANK.search, names_in(node))) or self.contains_rank(node)
            if not found and depth > 0:
                sources = (source.expression for each in variables_in(node) for source in self.sources(each))
                found = any(each is not None and self.may_depend_on_rank(each, depth - 1) for each in sources)
            self._rank_dependence[node, depth] = found
        return self._rank_dependence[node, depth]

    def _kinds_of_non_call(self, node: ast.expr) -> Kinds:
        """The possible kinds of an expression other than a call."""
        match node:
            case ast.Constant(value=None):
                return frozenset({Kind.NONE})
            case ast.Name() | ast.Attribute():
                return self._kinds_of_name(node)
            case ast.IfExp(body=one, orelse=other):
                either = self.kinds(one) | self.kinds(other)
                # `model.module if isinstance(model, DDP) else model` is never a DistributedDataParallel.
                return either - {Kind.WRAPPED} if Kind.BARE_MODEL in either else either
            case ast.BoolOp(op=ast.Or(), values=values) if not any(isinstance(each, _BOOLEAN_NODES) for each in values):
                return frozenset[Kind]().union(*map(self.kinds, values))
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return frozenset({Kind.RANK_TEST}) if self.is_rank_test(node) else ONLY_OTHER
            case ast.Subscript(value=container, slice=index):
                if isinstance(index, ast.Slice):
                    sharded = self.may_be(index.lower, *RANKS) and index.step is not None
                    return frozenset({Kind.SHARD}) if sharded else ONLY_OTHER
                return (
                    self._kinds_of_environment_variable(text_of(index))
                    if self.name(container) == "os.environ"
                    else ONLY_OTHER
                )
            case ast.BinOp(op=ast.Mod(), left=left) if self.may_be(left, Kind.RANK):
                # rank % torch.cuda.device_count(): the usual way to a local rank.
                return frozenset({Kind.LOCAL_RANK})
            case (
                ast.BinOp(op=ast.Add(), left=ast.BinOp(), right=_) | ast.BinOp(op=ast.Add(), left=_, right=ast.BinOp())
            ):
                # node_rank * ranks_per_node + local_rank
                ranks = self.may_be(node.left, *RANKS) or self.may_be(node.right, *RANKS)
                return frozenset({Kind.RANK}) if ranks else ONLY_OTHER
        return ONLY_OTHER

    def _kinds_of_name(self, node: ast.Name | ast.Attribute) -> Kinds:
        if isinstance(node, ast.Attribute) and node.attr == "module" and self.may_be(node.value, Kind.WRAPPED):
            return frozenset({Kind.BARE_MODEL})
        sources = self.sources(node)
        if not sources and isinstance(node, ast.Attribute) and node.attr == "local_rank" and node.attr in self.options:
            return frozenset({Kind.LOCAL_RANK})
        found: set[Kind] = set()
        for source in sources:
            if source.role == PROCESS_INDEX:
                found.add(Kind.PROCESS_INDEX)
            elif source.role or source.expression is None:
                found.add(Kind.OTHER)
            elif source.element_index is None:
                found |= self.kinds(source.expression)
            else:
                items = self.returned_elements(source.expression, source.element_index)
                found |= frozenset[Kind]().union(*map(self.kinds, items)) or ONLY_OTHER
        return frozenset(found) or ONLY_OTHER

    def _kinds_of_environment_variable(self, name: str | None) -> Kinds:
        return frozenset({_KINDS_BY_VARIABLE[name]}) if name in _KINDS_BY_VARIABLE else ONLY_OTHER

    def _kinds_of_call(self, call: ast.Call) -> Kinds:
        name = self.callee_name(call)
        function_name = call.func.attr if isinstance(call.func, ast.Attribute) else name.rpartition(".")[2]
        if function_name in ("int", "float") and call.args:
            return frozenset(INT_KINDS.get(kind, kind) for kind in self.kinds(call.args[0]))
        if name in ("os.environ.get", "os.getenv", "os.environ.setdefault", "os.environ.pop") and call.args:
            # The default, if it is not text, may be the value instead of the variable's text.
            default = call.args[1] if len(call.args) > 1 and text_of(call.args[1]) is None else None
            return self._kinds_of_environment_variable(text_of(call.args[0])) | self.kinds(default)
        values = [value for function in self.callees(call) for value in return_values(function) if value]
        if values and function_name != "__init__":
            return frozenset[Kind]().union(*map(self.kinds, values))
        # `mesh.get_rank()` on an object of an unknown package may be something else than the rank in the job.
        root, is_attribute, _ = name.partition(".")
        is_known = name.startswith((".", "torch", "apex")) or root in self.imported_packages
        if function_name in _KINDS_BY_FUNCTION and (is_known or not is_attribute):
            return frozenset({_KINDS_BY_FUNCTION[function_name]})
        if _RANK_TEST_NAME.fullmatch(function_name):
            return frozenset({Kind.RANK_TEST})
        if name == "torch.cuda.device_count":
            return frozenset({Kind.LOCAL_WORLD_SIZE})
        return self._kinds_from_arguments(call, function_name)

    def _kinds_from_arguments(self, call: ast.Call, function_name: str) -> Kinds:
        """The kinds of a call's result, by the kinds of its arguments: a DataLoader or list of a shard is a shard."""
        if function_name == "range" and len(call.args) == 3 and self.may_be(call.args[0], *RANKS):
            return frozenset({Kind.SHARD})
        arguments = [*call.args, *(each.value for each in call.keywords)]
        if function_name in ("Subset", "DataLoader", "list", "tuple", "TensorDataset", "SubsetRandomSampler") and any(
            self.may_be(each, Kind.SHARD) for each in arguments
        ):
            return frozenset({Kind.SHARD})
        if function_name == "DataLoader" and self.may_be(argument(call, "sampler", 3), Kind.SAMPLER):
            return frozenset({Kind.LOADER})
        if function_name == "compile" and call.args:
            return self.kinds(call.args[0])
        if function_name in ("to", "cuda", "train", "eval") and isinstance(call.func, ast.Attribute):
            return self.kinds(call.func.value) & {Kind.WRAPPED} or ONLY_OTHER
        return ONLY_OTHER

    def is_rank_test(self, test: ast.expr) -> bool:
        """Whether a condition surely holds on some ranks only (`rank == 0`, `not rank`, `is_main_process()`)."""
        match test:
            case ast.Compare(
                left=left, ops=[(ast.Eq() | ast.NotEq() | ast.Gt() | ast.Lt()) as relation], comparators=[right]
            ):
                equal = isinstance(relation, (ast.Eq, ast.NotEq))
                return self._is_rank_and_number(left, right, equal) or self._is_rank_and_number(right, left, equal)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.is_surely(inner, *RANKS) or self.is_rank_test(inner)
            case ast.BoolOp(op=ast.And(), values=values):
                return any(map(self.is_rank_test, values))
            case ast.BoolOp(op=ast.Or(), values=values):
                return all(map(self.is_rank_test, values))
            case ast.Name() | ast.Attribute() | ast.Call():
                return self.is_surely(test, Kind.RANK_TEST)
        return False

    def _is_rank_and_number(self, one: ast.expr, other: ast.expr, equal: bool) -> bool:
        """Whether a rank is compared with a number, unless `equal` with 0 or 1: `rank < 4` may select ranks."""
        if not self.is_surely(one, *RANKS) or not isinstance(other, ast.Constant):
            return False
        return type(other.value) is int and (other.value >= 0 if equal else 0 <= other.value <= 1)

    def node_under_rank_test(self, node: ast.AST) -> ast.AST | None:
        """`node`, or the call through which it is reached, if that is surely under a rank test; else None.

        The search goes from a function to its call only if the script calls the function exactly once.
        """
        visited: set[ast.AST] = set()
        while not any(map(self.is_rank_test, self.conditions(node))):
            function = self.function_of(node)
            if function is None or function in visited or self._is_process_target(function):
                return None
            call_sites = self.call_sites.get(function, ())
            if len(call_sites) != 1:
                return None
            visited.add(function)
            node = call_sites[0]
        return node

    def runs_on_all_ranks(self, node: ast.AST) -> bool:
        """Whether every rank surely runs a node, from the script's top level and under no condition on the rank."""
        # In a script that spawns its ranks, only the functions of the spawned processes run on every rank.
        is_run_by_ranks = not self.process_starts or self.function_of(node) in self.process_functions
        return self._is_reached(node) and is_run_by_ranks and not self._may_run_on_some_ranks_only(node)

    @property
    def several_hosts_severity(self) -> Severity:
        """The severity of code that fails on several hosts only: ERROR if the script mentions several, else WARNING."""
        return Severity.ERROR if self.mentions_several_hosts else Severity.WARNING

    def conditions(self, node: ast.AST) -> Iterator[ast.expr]:
        """Yield the conditions in the node's function, or the module, that decide whether the node runs."""
        child = node
        for outer in self.ancestors(node):
            match outer:
                case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if child is not test:
                    yield test
                case ast.BoolOp(op=ast.And(), values=values) if child in values[1:]:
                    yield from values[: values.index(child)]
            # Statements such as `if rank != 0: return` before `node` in the same block.
            for name in BLOCK_FIELDS:
                block = getattr(outer, name, None)
                if isinstance(block, list) and child in block:
                    exits = self.early_exits.get((outer, name), ())
                    before = bisect_left(exits, block.index(child), key=lambda exit: exit.position)
                    yield from (each.test for each in exits[max(0, before - _MAX_EXITS) : before])
            if isinstance(outer, Function):
                return
            child = outer

    def _may_run_on_some_ranks_only(self, node: ast.AST, visited: frozenset[ast.AST] = frozenset()) -> bool:
        """Whether a condition around a node, or around every call of its function, may depend on the rank."""
        if any(map(self.may_depend_on_rank, self.conditions(node))):
            return True
        function = self.function_of(node)
        if function is None or function in visited or self._is_process_target(function):
            return False
        sites = self.call_sites.get(function, ())
        return bool(sites) and all(self._may_run_on_some_ranks_only(site, visited | {function}) for site in sites)

    def _is_reached(self, node: ast.AST, visited: frozenset[ast.AST] = frozenset()) -> bool:
        """Whether a node runs, through calls in the script, from its top level or in a process that it starts."""
        function = self.function_of(node)
        if function is None or self._is_process_target(function):
            return True
        call_sites = self.call_sites.get(function, ())
        return function not in visited and any(self._is_reached(site, visited | {function}) for site in call_sites)

    def _is_process_target(self, function: ast.AST) -> bool:
        return any(function is each for each, _ in self.process_starts)


def name_or_code(node: ast.AST) -> str:
    """The text of an expression for a sentence: its dotted name, else its source code."""
    return attribute_path(node) or ast.unparse(node)


def is_bare_cuda(call: ast.Call) -> bool:
    """Whether the call is `x.cuda()`, which uses the current GPU."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args and not call.keywords


def moved_object(call: ast.Call) -> ast.expr | None:
    """`x` if the call is `x.to(...)` or `x.cuda(...)`, else None."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda") else None


def is_same(one: ast.AST, other: ast.AST) -> bool:
    """Whether both nodes are the same dotted name."""
    path = attribute_path(one)
    return path is not None and path == attribute_path(other)
