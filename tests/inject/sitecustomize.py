"""Faults, injected from outside: Python imports this module at its start when its folder is on PYTHONPATH.

DDPDIAG_TEST_FAULT says "KIND RANK"; only processes with that RANK act on it, and the product knows nothing of it.
Supervisors never import torch, so only nurseries and their workers do. When the fault begins, the file
DDPDIAG_TEST_REACHED appears.

    sleep, gil, segv, raise   in the rank's first all-reduce
    import                    `import torch` never ends
    slow-import               `import torch` takes 5 s longer
"""

import ctypes
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

_COLLECTIVES = "torch.distributed.distributed_c10d"


def _forever():
    while True:
        time.sleep(1)


def _hold_the_gil():
    c = ctypes.PyDLL(None)  # PyDLL keeps the GIL during a call
    while True:
        c.sleep(1000)


def _raise():
    raise RuntimeError("injected")


_IN_ALL_REDUCE = {"sleep": _forever, "gil": _hold_the_gil, "segv": lambda: ctypes.string_at(0), "raise": _raise}
_IN_IMPORT = {"import": _forever, "slow-import": lambda: time.sleep(5)}


def _announced(act):
    def announce_and_act():
        Path(os.environ["DDPDIAG_TEST_REACHED"]).touch()
        act()

    return announce_and_act


class _Before(MetaPathFinder):
    """Acts before a module is looked for."""

    def __init__(self, module, act):
        self.module, self.act = module, act

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            self.act()


class _Wrapped(MetaPathFinder, Loader):
    """Puts a fault in the place of torch's all_reduce."""

    def __init__(self, act):
        self.act = act

    def find_spec(self, name, path=None, target=None):
        if name != _COLLECTIVES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        module.all_reduce = lambda *_arguments, **_options: self.act()


def _install(kind, rank):
    if os.environ.get("RANK") != rank:
        return
    if kind in _IN_IMPORT:
        sys.meta_path.insert(0, _Before("torch", _announced(_IN_IMPORT[kind])))
    else:
        sys.meta_path.insert(0, _Wrapped(_announced(_IN_ALL_REDUCE[kind])))


if "DDPDIAG_TEST_FAULT" in os.environ:
    _install(*os.environ["DDPDIAG_TEST_FAULT"].split())
