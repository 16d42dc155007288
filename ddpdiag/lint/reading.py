"""Answers for rules: the kind of a value in distributed training (a rank, a local rank, a wrapped model, a sampler),
and the conditions and ranks under which a line runs."""

import ast
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import Enum

from ddpdiag.lint.bindings import SPAWNED, Bindings, returned
from ddpdiag.lint.script import BLOCKS, attribute_path, is_function, keyword, names_in, text_of, variables_in
from ddpdiag.model import Severity


class Kind(Enum):
    """The kind of a value. OTHER is everything else, and whatever cannot be read."""

    RANK = "rank"
    LOCAL_RANK = "local rank"
    SPAWNED = "number of the process on this host"
    WORLD_SIZE = "world size"
    LOCAL_WORLD_SIZE = "ranks of this host"
    RANK_TEXT = "RANK as text"
    LOCAL_RANK_TEXT = "LOCAL_RANK as text"
    WORLD_SIZE_TEXT = "WORLD_SIZE as text"
    IS_RANK = "whether this is a certain rank"
    WRAPPED = "DistributedDataParallel"
    SAMPLER = "DistributedSampler"
    SHARD = "every n-th element"
    SAMPLED = "DataLoader with a DistributedSampler"
    INSIDE = "the module inside of a DistributedDataParallel"
    NONE = "None"
    OTHER = "other"


Kinds = frozenset[Kind]
OTHER: Kinds = frozenset({Kind.OTHER})
RANKS: Kinds = frozenset({Kind.RANK, Kind.LOCAL_RANK, Kind.SPAWNED})
# Variables of torchrun, Slurm, Open MPI and MPICH (README of ddpdiag: launchers).
VARIABLES = {
    **dict.fromkeys(("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), Kind.RANK_TEXT),
    **dict.fromkeys(
        ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"), Kind.LOCAL_RANK_TEXT
    ),
    **dict.fromkeys(("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"), Kind.WORLD_SIZE_TEXT),
}
NUMBERS = {Kind.RANK_TEXT: Kind.RANK, Kind.LOCAL_RANK_TEXT: Kind.LOCAL_RANK, Kind.WORLD_SIZE_TEXT: Kind.WORLD_SIZE}
_ANSWERS = {
    "get_rank": Kind.RANK,
    "get_global_rank": Kind.RANK,
    "get_local_rank": Kind.LOCAL_RANK,
    "get_node_local_rank": Kind.LOCAL_RANK,
    "get_world_size": Kind.WORLD_SIZE,
    "DistributedDataParallel": Kind.WRAPPED,
    "DistributedSampler": Kind.SAMPLER,
}
# Names of helpers that scripts import from other files of their project.
_IS_RANK = re.compile(r"_?is_(main|master|rank_?(0|zero)|primary|chief|root|leader)(_process|_node|_rank)?")
_RANKISH = re.compile(
    r"rank|main|master|primary|chief|leader|root|local|gpu|device|proc|worker|node|zero", re.IGNORECASE
)
_DIFFERS_BY_RANK = re.compile(r"rank|local|gpu|pid|uuid|host|proc|device|temp|tmp", re.IGNORECASE)
_DEPTH = 40
# No script written by hand has more early exits in one block; for generated ones the time would grow quadratically.
_MOST_EXITS = 1000
_TESTS = (ast.Compare, ast.UnaryOp, ast.BoolOp)


class Reading(Bindings):
    """A script with the kinds of its expressions, and the ranks on which its lines run."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._known: dict[ast.AST, Kinds] = {}
        self._provisional: dict[ast.AST, Kinds] = {}
        self._open: set[ast.AST] = set()
        self._rankish: dict[tuple[ast.AST, int], bool] = {}

    def kinds(self, node: ast.expr | None) -> Kinds:
        """The possible kinds of an expression; {OTHER} if nothing is known."""
        if node is None or node in self._open or len(self._open) > _DEPTH:
            return frozenset()
        if (known := self._known.get(node) or self._provisional.get(node)) is not None:
            return known
        self._open.add(node)
        found = (self._called(node) if isinstance(node, ast.Call) else self._read(node)) or OTHER
        self._open.discard(node)
        if self._open:
            self._provisional[node] = found  # kinds of open expressions may be missing, so it is not kept
        else:
            self._known[node] = found
            self._provisional.clear()
        return found

    def surely(self, node: ast.expr | None, *kinds: Kind) -> bool:
        """Whether each possible kind of the expression is one of `kinds`."""
        return node is not None and self.kinds(node) <= frozenset(kinds)

    def surely_within(self, node: ast.AST, *kinds: Kind) -> bool:
        """Whether a part of the expression is surely one of these kinds."""
        return any(isinstance(each, ast.expr) and self.surely(each, *kinds) for each in ast.walk(node))

    def maybe(self, node: ast.expr | None, *kinds: Kind) -> bool:
        """Whether a possible kind of the expression is one of `kinds`."""
        return node is not None and bool(self.kinds(node) & frozenset(kinds))

    def depends_on_rank(self, node: ast.AST) -> bool:
        """Whether an expression contains a value that may differ between ranks."""
        return self._may_differ(node, 3)

    def holds_rank(self, node: ast.AST) -> bool:
        """Whether a part of the expression is a rank, as a number or as text."""
        ranks = RANKS | {Kind.RANK_TEXT, Kind.LOCAL_RANK_TEXT}
        return any(isinstance(each, ast.expr) and self.kinds(each) & ranks for each in ast.walk(node))

    def may_be_own(self, path: ast.expr) -> bool:
        """Whether a path, or a value from which it comes, may differ between ranks."""
        parts = [path, *(origin for origin in self.origins(path) if origin is not None)]
        return any(self.holds_rank(part) or any(map(_DIFFERS_BY_RANK.search, names_in(part))) for part in parts)

    def _may_differ(self, node: ast.AST, depth: int) -> bool:
        if (node, depth) not in self._rankish:
            self._rankish[node, depth] = False  # in case a name leads back to itself
            found = any(map(_RANKISH.search, names_in(node))) or self.holds_rank(node)
            if not found and depth > 0:
                sources = (source.expression for each in variables_in(node) for source in self.sources(each))
                found = any(each is not None and self._may_differ(each, depth - 1) for each in sources)
            self._rankish[node, depth] = found
        return self._rankish[node, depth]

    def _read(self, node: ast.expr) -> Kinds:
        """The kinds of an expression that is no call."""
        match node:
            case ast.Constant(value=None):
                return frozenset({Kind.NONE})
            case ast.Name() | ast.Attribute():
                return self._named(node)
            case ast.IfExp(body=one, orelse=other):
                either = self.kinds(one) | self.kinds(other)
                # `model.module if isinstance(model, DDP) else model` is never the wrapper.
                return either - {Kind.WRAPPED} if Kind.INSIDE in either else either
            case ast.BoolOp(op=ast.Or(), values=values) if not any(isinstance(each, _TESTS) for each in values):
                return frozenset[Kind]().union(*map(self.kinds, values))
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return frozenset({Kind.IS_RANK}) if self.is_rank_test(node) else OTHER
            case ast.Subscript(value=whole, slice=index):
                if isinstance(index, ast.Slice):
                    sharded = self.maybe(index.lower, *RANKS) and index.step is not None
                    return frozenset({Kind.SHARD}) if sharded else OTHER
                return self._variable(text_of(index)) if self.name(whole) == "os.environ" else OTHER
            case ast.BinOp(op=ast.Mod(), left=left) if self.maybe(left, Kind.RANK):
                # rank % torch.cuda.device_count(): the usual way to a local rank.
                return frozenset({Kind.LOCAL_RANK})
            case (
                ast.BinOp(op=ast.Add(), left=ast.BinOp(), right=_) | ast.BinOp(op=ast.Add(), left=_, right=ast.BinOp())
            ):
                # node_rank * ranks_per_node + local_rank
                ranks = self.maybe(node.left, *RANKS) or self.maybe(node.right, *RANKS)
                return frozenset({Kind.RANK}) if ranks else OTHER
        return OTHER

    def _named(self, node: ast.Name | ast.Attribute) -> Kinds:
        if isinstance(node, ast.Attribute) and node.attr == "module" and self.maybe(node.value, Kind.WRAPPED):
            return frozenset({Kind.INSIDE})
        sources = self.sources(node)
        if not sources and isinstance(node, ast.Attribute) and node.attr == "local_rank" and node.attr in self.options:
            return frozenset({Kind.LOCAL_RANK})
        found: set[Kind] = set()
        for source in sources:
            if source.how == SPAWNED:
                found.add(Kind.SPAWNED)
            elif source.how or source.expression is None:
                found.add(Kind.OTHER)
            elif source.item is None:
                found |= self.kinds(source.expression)
            else:
                items = self.items(source.expression, source.item)
                found |= frozenset[Kind]().union(*map(self.kinds, items)) or OTHER
        return frozenset(found) or OTHER

    def _variable(self, name: str | None) -> Kinds:
        return frozenset({VARIABLES[name]}) if name in VARIABLES else OTHER

    def _called(self, call: ast.Call) -> Kinds:
        name = self.callee(call)
        last = call.func.attr if isinstance(call.func, ast.Attribute) else name.rpartition(".")[2]
        if last in ("int", "float") and call.args:
            return frozenset(NUMBERS.get(kind, kind) for kind in self.kinds(call.args[0]))
        if name in ("os.environ.get", "os.getenv", "os.environ.setdefault", "os.environ.pop") and call.args:
            # A default that is written as a number makes no text; one that is a text does not help.
            default = call.args[1] if len(call.args) > 1 and text_of(call.args[1]) is None else None
            return self._variable(text_of(call.args[0])) | self.kinds(default)
        own = [self.kinds(value) for function in self.targets(call) for value in returned(function) if value]
        if own and last != "__init__":
            return frozenset[Kind]().union(*own)
        # `mesh.get_rank()` of an object of another package is not the rank of the job.
        root, is_attribute, _ = name.partition(".")
        is_known = name.startswith((".", "torch", "apex")) or root in self.imported_packages
        if last in _ANSWERS and (is_known or not is_attribute):
            return frozenset({_ANSWERS[last]})
        if _IS_RANK.fullmatch(last):
            return frozenset({Kind.IS_RANK})
        if name == "torch.cuda.device_count":
            return frozenset({Kind.LOCAL_WORLD_SIZE})
        return self._made_of(call, last)

    def _made_of(self, call: ast.Call, last: str) -> Kinds:
        """Shards stay shards through whatever is built of them; a compiled or moved model stays wrapped."""
        if last == "range" and len(call.args) == 3 and self.maybe(call.args[0], *RANKS):
            return frozenset({Kind.SHARD})
        given = [*call.args, *(each.value for each in call.keywords)]
        if last in ("Subset", "DataLoader", "list", "tuple", "TensorDataset", "SubsetRandomSampler") and any(
            self.maybe(each, Kind.SHARD) for each in given
        ):
            return frozenset({Kind.SHARD})
        if last == "DataLoader" and self.maybe(keyword(call, "sampler", 3), Kind.SAMPLER):
            return frozenset({Kind.SAMPLED})
        if last == "compile" and call.args:
            return self.kinds(call.args[0])
        if last in ("to", "cuda", "train", "eval") and isinstance(call.func, ast.Attribute):
            return self.kinds(call.func.value) & {Kind.WRAPPED} or OTHER
        return OTHER

    # Tests of the rank

    def is_rank_test(self, test: ast.expr) -> bool:
        """Whether a condition is surely true on some ranks only (`rank == 0`, `not rank`, `is_main_process()`)."""
        match test:
            case ast.Compare(
                left=left, ops=[(ast.Eq() | ast.NotEq() | ast.Gt() | ast.Lt()) as relation], comparators=[right]
            ):
                equal = isinstance(relation, (ast.Eq, ast.NotEq))
                return self._is_rank_and_number(left, right, equal) or self._is_rank_and_number(right, left, equal)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.surely(inner, *RANKS) or self.is_rank_test(inner)
            case ast.BoolOp(op=ast.And(), values=values):
                return any(map(self.is_rank_test, values))
            case ast.BoolOp(op=ast.Or(), values=values):
                return all(map(self.is_rank_test, values))
            case ast.Name() | ast.Attribute() | ast.Call():
                return self.surely(test, Kind.IS_RANK)
        return False

    def _is_rank_and_number(self, one: ast.expr, other: ast.expr, equal: bool) -> bool:
        """Whether it compares like `rank == 3` or `rank > 0`; `rank < 4` may well mean a group of ranks."""
        if not self.surely(one, *RANKS) or not isinstance(other, ast.Constant):
            return False
        return type(other.value) is int and (other.value >= 0 if equal else 0 <= other.value <= 1)

    # The ranks that run a line

    def branch_of_some_ranks(self, node: ast.AST) -> ast.AST | None:
        """`node` if a test of the rank surely decides whether it runs, else the call leading to it for which one does.

        A function is followed to its caller only if there is one call of it. None: `node` may run on all ranks.
        """
        seen: set[ast.AST] = set()
        while not any(map(self.is_rank_test, self.conditions(node))):
            function = self.function_of(node)
            if function is None or function in seen or self._is_started(function):
                return None
            sites = self.sites.get(function, ())
            if len(sites) != 1:
                return None
            seen.add(function)
            node = sites[0]
        return node

    def maybe_on_some_ranks(self, node: ast.AST) -> bool:
        """Whether a line may run on some ranks only; a rule about all ranks then reports nothing."""
        return self._is_under(node, self.depends_on_rank)

    def surely_on_all_ranks(self, node: ast.AST) -> bool:
        """Whether every rank surely runs this line: all its callers are in the script, and none tests the rank."""
        # Code of a parent before it spawns runs once.
        is_run_by_all = not self.starts or self.function_of(node) in self.reached
        return self._is_reached(node) and is_run_by_all and not self.maybe_on_some_ranks(node)

    @property
    def wrong_on_several_hosts(self) -> Severity:
        """The severity of code that is wrong on several hosts only: an error if the script mentions several hosts."""
        return Severity.ERROR if self.means_several_hosts else Severity.WARNING

    def is_wrapped(self, node: ast.expr) -> bool:
        """Whether the expression can be a DistributedDataParallel."""
        return self.maybe(node, Kind.WRAPPED)

    def conditions(self, node: ast.AST) -> Iterator[ast.expr]:
        """The tests within the function (or module) that decide whether a node is run."""
        child = node
        for outer in self.around(node):
            match outer:
                case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if child is not test:
                    yield test
                case ast.BoolOp(op=ast.And(), values=values) if child in values[1:]:
                    yield from values[: values.index(child)]
            # `if rank != 0: return` further up in the same block.
            for name in BLOCKS:
                block = getattr(outer, name, None)
                if isinstance(block, list) and child in block:
                    exits = self.exits.get((outer, name), ())
                    before = bisect_left(exits, block.index(child), key=lambda exit: exit.place)
                    yield from (each.test for each in exits[max(0, before - _MOST_EXITS) : before])
            if is_function(outer):
                return
            child = outer

    def _is_under(
        self,
        node: ast.AST,
        matches: Callable[[ast.expr], bool],
        seen: frozenset[ast.AST] = frozenset(),
    ) -> bool:
        """Whether the line runs under a condition that matches, whichever call in the script leads to it."""
        if any(map(matches, self.conditions(node))):
            return True
        function = self.function_of(node)
        if function is None or function in seen or self._is_started(function):
            return False
        sites = self.sites.get(function, ())
        return bool(sites) and all(self._is_under(site, matches, seen | {function}) for site in sites)

    def _is_reached(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Whether the line can be reached from the top level of the script, so that all its callers are known."""
        function = self.function_of(node)
        if function is None or self._is_started(function):
            return True
        sites = self.sites.get(function, ())
        return function not in seen and any(self._is_reached(site, seen | {function}) for site in sites)

    def _is_started(self, function: ast.AST) -> bool:
        return any(function is each for each, _ in self.starts)


def path_or_text(node: ast.AST) -> str:
    """The name of a value in a sentence: its dotted name, else its source."""
    return attribute_path(node) or ast.unparse(node)


def is_bare_cuda(call: ast.Call) -> bool:
    """Whether it is `x.cuda()`, which takes the current GPU."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args and not call.keywords


def moved(call: ast.Call) -> ast.expr | None:
    """The object that `x.to(...)` or `x.cuda(...)` moves, or None."""
    return call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda") else None


def same(one: ast.AST, other: ast.AST) -> bool:
    """Whether both are the same name, or the same attribute."""
    path = attribute_path(one)
    return path is not None and path == attribute_path(other)
