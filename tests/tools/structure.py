"""Table of the package's size and structure, of one tree or of two side by side.

    python tests/tools/structure.py [TREE [TREE]] [--list]

A tree is a checkout; the default is this one.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".toml", ".html", ".css", ".js"}
LONGEST_FILES = 5


class Function(NamedTuple):
    """One `def`, nested ones included."""

    module: str
    name: str
    lines: int
    uses: int


class Module(NamedTuple):
    """What the source of one module says."""

    name: str
    functions: tuple[Function, ...]
    imports: frozenset[str]
    broad_excepts: int
    comment_lines: int


class Tree(NamedTuple):
    """A checkout: the lines of each file of the package, and its modules."""

    root: Path
    lines: dict[str, int]
    modules: tuple[Module, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", nargs="*", type=Path, default=[REPOSITORY], metavar="TREE")
    parser.add_argument(
        "--list", action="store_true", help="also list once-used private functions and one-importer modules"
    )
    arguments = parser.parse_args()
    trees = [read_tree(path.resolve()) for path in arguments.trees]
    columns = [dict(rows(tree)) for tree in trees]
    print_table(list(dict.fromkeys(name for column in columns for name in column)), columns)
    for tree in trees if arguments.list else ():
        print(f"\n{tree.root}: private functions used once")
        print("\n".join(f"  {function.module}.{function.name}" for function in once_used(tree)))
        print(f"{tree.root}: modules with one importer")
        print("\n".join(f"  {module} <- {importer}" for module, importer in one_importer(tree)))


def read_tree(root: Path) -> Tree:
    """The package `ddpdiag` of a checkout."""
    files = sorted(path for path in (root / "ddpdiag").rglob("*") if path.suffix in SUFFIXES)
    texts = {str(path.relative_to(root)): path.read_text() for path in files}
    names = {
        file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in texts
        if file.endswith(".py")
    }
    modules = tuple(read_module(name, texts[file], frozenset(names.values())) for file, name in names.items())
    return Tree(root, {file: len(text.splitlines()) for file, text in texts.items()}, modules)


def read_module(name: str, text: str, modules: frozenset[str]) -> Module:
    nodes = list(ast.walk(ast.parse(text)))
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name)) + Counter(
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    )
    return Module(
        name,
        tuple(
            Function(name, node.name, (node.end_lineno or node.lineno) - node.lineno + 1, uses[node.name])
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        frozenset(imported(nodes, modules)) - {name},
        sum(isinstance(node, ast.ExceptHandler) and is_broad(node.type) for node in nodes),
        sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline)),
    )


def imported(nodes: list[ast.AST], modules: frozenset[str]) -> Iterator[str]:
    """Modules of the package that a module imports, at the top or inside a function."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & modules
            if inner - modules:
                yield node.module


def is_broad(caught: ast.expr | None) -> bool:
    """Does `except` catch everything?"""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds
    )


def once_used(tree: Tree) -> list[Function]:
    """Private functions whose name is read once in their module."""
    functions = (function for module in tree.modules for function in module.functions)
    private = (function for function in functions if function.name.startswith("_") and not function.name.endswith("__"))
    return [function for function in private if function.uses == 1]


def one_importer(tree: Tree) -> list[tuple[str, str]]:
    importers: dict[str, list[str]] = {}
    for module in tree.modules:
        for name in module.imports:
            importers.setdefault(name, []).append(module.name)
    return sorted((name, by[0]) for name, by in importers.items() if len(by) == 1)


def rows(tree: Tree) -> Iterator[tuple[str, str]]:
    """Each figure's name and value."""
    python_lines = sum(count for file, count in tree.lines.items() if file.endswith(".py"))
    yield "lines (*.py, *.toml, templates)", f"{sum(tree.lines.values()):,}"
    yield "files", f"{len(tree.lines)}"
    yield from function_rows(tree)
    yield "modules with one importer", f"{len(one_importer(tree))} of {len(tree.modules)}"
    yield "internal imports per file, median", f"{statistics.median(len(module.imports) for module in tree.modules):g}"
    yield "broad excepts", f"{sum(module.broad_excepts for module in tree.modules)}"
    comments = sum(module.comment_lines for module in tree.modules)
    yield "lines with a comment", f"{comments} ({comments / python_lines:.1%})"
    yield "files over 350 lines", f"{sum(count > 350 for count in tree.lines.values())}"
    for place, file in enumerate(sorted(tree.lines, key=lambda file: -tree.lines[file])[:LONGEST_FILES], 1):
        yield f"longest file {place}", f"{tree.lines[file]} {file.removeprefix('ddpdiag/')}"
    packages = Counter(file.split("/")[1] for file in tree.lines if file.count("/") > 1)
    yield from ((f"files in {package}/", f"{packages[package]}") for package in sorted(packages))
    yield "files at the top", f"{len(tree.lines) - packages.total()}"


def function_rows(tree: Tree) -> Iterator[tuple[str, str]]:
    functions = [function for module in tree.modules for function in module.functions]
    lengths = [function.lines for function in functions]
    longest = max(functions, key=lambda function: function.lines)
    yield "functions", f"{len(functions)}"
    yield (
        "lines of a function, median / 90 %",
        f"{statistics.median(lengths):g} / {statistics.quantiles(lengths, n=10)[-1]:g}",
    )
    yield "longest function", f"{longest.lines} {longest.module.removeprefix('ddpdiag.')}.{longest.name}"
    once = len(once_used(tree))
    yield "private functions used once", f"{once} ({once / len(functions):.0%} of all functions)"


def print_table(names: list[str], columns: list[dict[str, str]]) -> None:
    first = max(map(len, names))
    widths = [max(len(column.get(name, "-")) for name in names) for column in columns]
    for name in names:
        cells = (column.get(name, "-").ljust(width) for column, width in zip(columns, widths, strict=True))
        print("  ".join([name.ljust(first), *cells]).rstrip())


if __name__ == "__main__":
    main()
