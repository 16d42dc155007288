"""Processes are spawned when the script is imported.

What: mp.spawn is called at the top of the script, outside of `if __name__ == "__main__":`, or gets a lambda or a
function that is defined within another function.

Why: a spawned process imports the script anew to find its function, and would spawn again: "An attempt has been made to
start a new process before the current process has finished its bootstrapping phase". A lambda or an inner function
cannot be found by name: "Can't pickle <function <lambda>>".

Fix: move the call into `if __name__ == "__main__":`, and the function to the top of the file.

Source: https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods (safe importing of
main module); https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses.
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.guards import conditions
from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import keyword
from ddpdiag.model import Severity

_SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")


def look(read: Reading) -> Iterator[Hit]:
    """Calls of mp.spawn that their children would repeat, or cannot follow."""
    for call in read.script.calls_of(*_SPAWN):
        target = keyword(call, "fn", 0)
        if read.script.function_of(call) is None and not any(conditions(read.script, call)):
            yield Hit(
                call,
                "every spawned process imports this script, and so would spawn again",
                'Move the call into `if __name__ == "__main__":`.',
            )
        elif target is not None and _cannot_be_found(read, target):
            yield Hit(
                target,
                "a spawned process cannot find this function by its name: Can't pickle",
                "Define the function at the top of the file.",
            )


def _cannot_be_found(read: Reading, target: ast.expr) -> bool:
    if isinstance(target, ast.Lambda):
        return True
    if not isinstance(target, ast.Name):
        return False
    found = read.script.functions.get(target.id, ())
    return bool(found) and all(read.script.function_of(each) is not None for each in found)


RULE = Rule("LNT006", "spawn-at-import", Severity.ERROR, __doc__ or "", look)
