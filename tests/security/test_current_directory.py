"""No file in the current directory, in which strangers may write, runs in a process that ddpdiag starts."""

import ast
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ddpdiag
from ddpdiag.errors import UsageError
from ddpdiag.watch.observer import read_gpu_uses

PACKAGE = Path(ddpdiag.__file__).parent
# Not a program to start: a folder to look in, a text, a part of a digest, and a variable for torchrun, which has
# PYTHONSAFEPATH, too.
NOT_STARTED = ("Path(sys.executable)", "digest(", "{sys.executable}", "'PYTHON_EXEC': sys.executable")


def check() -> None:
    with pytest.raises(UsageError, match="--stage"):
        ddpdiag.check(stage=["nonsense"])


@pytest.mark.parametrize("start", [check, lambda: read_gpu_uses(time.monotonic() + 20)], ids=["check", "watch"])
def test_a_planted_module_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]
) -> None:
    for name in ("ddpdiag", "json", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    start()
    assert not (tmp_path / "ran").exists()


def uses(tree: ast.AST, around: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, ...]]:
    """Each `sys.executable` of a module, behind the nodes that it is in."""
    if isinstance(tree, ast.Attribute) and ast.unparse(tree) == "sys.executable":
        yield (*around, tree)
    for child in ast.iter_child_nodes(tree):
        yield from uses(child, (*around, tree))


def is_safe(use: tuple[ast.AST, ...]) -> bool:
    """Whether Python is started with -P or -I, or not at all."""
    words = getattr(use[-2], "elts", [])
    if words:
        option = words[words.index(use[-1]) + 1]
        return isinstance(option, ast.Constant) and option.value in ("-P", "-I")
    return any(known in ast.unparse(each) for each in use[-3:-1] for known in NOT_STARTED)


def test_every_use_of_this_python_leaves_the_current_directory_alone() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{use[-1].lineno}": is_safe(use)
        for path in PACKAGE.rglob("*.py")
        for use in uses(ast.parse(path.read_text()))
    }
    assert len(found) >= 5
    assert [where for where, safe in found.items() if not safe] == []
