"""`Script`, the imports, functions and calls in the syntax tree of a script; and functions that read single nodes."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Frameworks that open the process group, move the model and shard the data themselves, each in its own way.
_FRAMEWORKS = ("accelerate", "pytorch_lightning", "lightning", "lightning_fabric", "deepspeed", "horovod", "composer")
# The full names of the classes and functions whose calls `Script` collects.
_WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_GROUP_OPENERS = ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group")
_SAMPLERS = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_HOST_OPTIONS = {"nodes", "nnodes", "num_nodes", "n_nodes", "node_rank", "nr", "num_machines", "machine_rank"}
_HOST_VARIABLES = {"NODE_RANK", "GROUP_RANK", "NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NODEID"}
# The fields of a node that hold its statements.
BLOCK_FIELDS = ("body", "orelse", "finalbody")


class EarlyExit(NamedTuple):
    """An `if` whose body leaves the block, such as by `return`: its position in the block, and its condition."""

    position: int
    test: ast.expr


class Script:
    """The syntax tree of one source file, and what can be read from it. Most properties are computed at first use."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        # The calls that open a process group, and that make a DistributedDataParallel, a sampler, a DataLoader.
        self.group_openings = tuple(self.calls_of(*_GROUP_OPENERS))
        self.wrappings = tuple(self.calls_of(*_WRAPPERS))
        self.samplers = tuple(self.calls_of(*_SAMPLERS))
        self.loaders = tuple(self.calls_of(*_LOADERS))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, outer ones first."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """Every call, by line."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        return tuple(sorted(calls, key=lambda call: (call.lineno, call.col_offset)))

    @cached_property
    def functions(self) -> dict[str, tuple[Function, ...]]:
        """The functions and methods that the script defines, by name."""
        named: dict[str, list[Function]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, Function):
                named[node.name].append(node)
        return {name: tuple(each) for name, each in named.items()}

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes that the script defines, by name."""
        return {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, str]:
        """The full name of each imported name: {"DDP": "torch.nn.parallel.DistributedDataParallel"}."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{origin}.{alias.name}"
        return names

    def name(self, node: ast.AST) -> str:
        """The full dotted name to which an expression refers ("torch.distributed.get_rank"), or "" if it is no name."""
        path = attribute_path(node)
        if path is None:
            return ""
        first, dot, rest = path.partition(".")
        return self.imports.get(first, first) + dot + rest

    def callee_name(self, call: ast.Call) -> str:
        return self.name(call.func)

    def last_name(self, call: ast.Call) -> str:
        """The last part of the name of the called function: "get_rank"."""
        return self.callee_name(call).rpartition(".")[2]

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions with these full names, by line."""
        return (call for call in self.calls if self.callee_name(call) in names)

    @cached_property
    def imported_packages(self) -> frozenset[str]:
        return frozenset(origin.partition(".")[0] for origin in self.imports.values())

    @property
    def why_not_judged(self) -> str | None:
        """The reason why the script is not judged; None if it is."""
        for framework in _FRAMEWORKS:
            if framework in self.imported_packages:
                return f"{framework} sets up DistributedDataParallel in it"
        if not self.wrappings and not self.group_openings:
            return "it makes no process group and no DistributedDataParallel"
        return None

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that enclose `node`, the innermost first."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def function_of(self, node: ast.AST) -> Function | None:
        return next((outer for outer in self.ancestors(node) if isinstance(outer, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((outer for outer in self.ancestors(node) if isinstance(outer, ast.ClassDef)), None)

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The innermost function that encloses a node, else the module."""
        return self.function_of(node) or self.tree

    def statement_of(self, node: ast.AST) -> ast.AST:
        """The innermost statement that contains a node; the node itself if none does."""
        while not isinstance(node, ast.stmt) and node in self.parents:
            node = self.parents[node]
        return node

    @cached_property
    def early_exits(self) -> dict[tuple[ast.AST, str], tuple[EarlyExit, ...]]:
        """The early exits of each block, in order. The key of a block is its node and the field that holds it."""
        exits: dict[tuple[ast.AST, str], tuple[EarlyExit, ...]] = {}
        for node in self.nodes:
            for name in BLOCK_FIELDS:
                block = getattr(node, name, None)
                if isinstance(block, list):
                    ifs = ((index, each) for index, each in enumerate(block) if isinstance(each, ast.If))
                    exits[node, name] = tuple(EarlyExit(i, each.test) for i, each in ifs if leaves_block(each.body))
        return exits

    @cached_property
    def call_sites(self) -> dict[ast.AST, tuple[ast.Call, ...]]:
        """The calls of each function of the script: `f()`, `self.f()`, `Class()` for its `__init__`.

        `trainer.train()` is a call of the method `train` if no other function of the file has this name.
        """
        sites: dict[ast.AST, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            for function in self.callees(call):
                sites[function].append(call)
        return {function: tuple(calls) for function, calls in sites.items()}

    def callees(self, call: ast.Call) -> tuple[Function, ...]:
        """The functions defined in the script that a call may execute."""
        match call.func:
            case ast.Name(id=name) if name in self.classes:
                return tuple(self._methods(self.classes[name], "__init__"))
            case ast.Name(id=name):
                return tuple(each for each in self.functions.get(name, ()) if not self._is_method(each))
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                owner = self.class_of(call)
                return tuple(self._methods(owner, name)) if owner is not None else ()
            case ast.Attribute(attr=name):
                methods = self.functions.get(name, ())
                return methods if len(methods) == 1 and self._is_method(methods[0]) else ()
        return ()

    def _methods(self, owner: ast.ClassDef, name: str) -> Iterator[Function]:
        return (each for each in self.functions.get(name, ()) if self.parents.get(each) is owner)

    def _is_method(self, function: ast.AST) -> bool:
        return isinstance(self.parents.get(function), ast.ClassDef)

    def takes_self(self, function: Function) -> bool:
        """Whether the first parameter of the function is the object or the class (`self`, `cls`)."""
        static = any(attribute_path(each) == "staticmethod" for each in function.decorator_list)
        return self._is_method(function) and not static

    @cached_property
    def process_starts(self) -> tuple[tuple[Function, ast.Call], ...]:
        """The functions that mp.spawn, mp.Process and such run in new processes, each with the call that does so."""
        starts: list[tuple[Function, ast.Call]] = []
        for call in self.calls:
            last = self.last_name(call)
            if last not in ("spawn", "start_processes", "Process"):
                continue
            target = next((each.value for each in call.keywords if each.arg in ("fn", "target")), None)
            if target is None and call.args and last != "Process":
                target = call.args[0]
            if isinstance(target, ast.Name):
                starts += [(each, call) for each in self.functions.get(target.id, ())]
        return tuple(starts)

    @cached_property
    def process_functions(self) -> frozenset[ast.AST]:
        """The functions that new processes run, and all functions that these call."""
        reached: set[ast.AST] = set()
        waiting: list[ast.AST] = [function for function, _ in self.process_starts]
        while waiting:
            function = waiting.pop()
            if function in reached:
                continue
            reached.add(function)
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            waiting += [callee for call in calls for callee in self.callees(call)]
        return frozenset(reached)

    @cached_property
    def strings(self) -> frozenset[str]:
        return frozenset(text for node in self.nodes if (text := text_of(node)) is not None)

    @cached_property
    def read_attributes(self) -> frozenset[str]:
        """The name of every attribute that is read or called."""
        return frozenset(n.attr for n in self.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))

    @cached_property
    def options(self) -> dict[str, ast.Call]:
        """The calls of argparse's add_argument, by the name of the attribute that gets the value ("local_rank")."""
        options: dict[str, ast.Call] = {}
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                spellings = [text for arg in call.args if (text := text_of(arg)) is not None]
                spelled_out = [text for text in spellings if text.startswith("--")] or spellings
                dest = next((text_of(each.value) for each in call.keywords if each.arg == "dest"), None)
                for name in [dest] if dest else spelled_out[:1]:
                    options[name.lstrip("-").replace("-", "_")] = call
        return options

    @cached_property
    def mentions_several_hosts(self) -> bool:
        """Whether the script mentions hosts: an option such as --nnodes, a variable such as NODE_RANK."""
        return bool(_HOST_OPTIONS & self.options.keys()) or bool(_HOST_VARIABLES & self.strings)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument that is passed as keyword `name`, else the positional one at `position`; None if not passed."""
    for each in call.keywords:
        if each.arg == name:
            return each.value
    return call.args[position] if position is not None and position < len(call.args) else None


def has_unpacking(call: ast.Call) -> bool:
    """Whether the call is `f(*args)` or `f(**options)`, so that its arguments cannot be read."""
    return any(each.arg is None for each in call.keywords) or any(isinstance(arg, ast.Starred) for arg in call.args)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Whether `node` is a constant of this value (True is not 1)."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def text_of(node: ast.AST | None) -> str | None:
    """The value of a string constant; None for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def attribute_path(node: ast.AST) -> str | None:
    """The dotted name of an expression such as `a.b.c`. None if it is more than names and dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def words_in(node: ast.AST) -> Iterator[str]:
    """Yield every name, attribute name and string in an expression."""
    for each in ast.walk(node):
        match each:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                yield word


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield every name and attribute name in an expression."""
    return (each.id if isinstance(each, ast.Name) else each.attr for each in variables_in(node))


def variables_in(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Yield the node of every name and attribute in an expression."""
    return (each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))


def scope_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a function or module, without the contents of functions and classes defined in it."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))


def leaves_block(body: list[ast.stmt]) -> bool:
    """Whether the last statement is a return, raise, break, continue or exit, so that the code after it is not run."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return attribute_path(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


def calls_method(node: ast.AST, method: str) -> bool:
    """Whether `node` contains a call `....method(...)`."""
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method
        for each in ast.walk(node)
    )


def has_backward(node: ast.AST) -> bool:
    return calls_method(node, "backward")
