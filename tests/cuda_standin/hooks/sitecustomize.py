"""What the CUDA stand-in does in Python; imported at the start of Python where this folder is on PYTHONPATH.

time.perf_counter shows the stand-in's clock (src/cudart.h), so that rates are a GPU's; time.monotonic does not.

FAKETORCH_FAULT="KIND RANK NUMBER": what that rank does in its NUMBER-th all_reduce of CUDA tensors, from 1:
    sleep      it never posts it
    late       it posts it, and each later one, 0.3 s late
    raise      an exception
    exit       the process ends with code 3
    longer     one element more
    other      a broadcast in its place
"""

import ctypes
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

_COLLECTIVES = "torch.distributed.distributed_c10d"
_LATE_SECONDS = 0.3


def _sleep_for_ever():
    while True:
        time.sleep(1)


def _raise():
    raise RuntimeError("injected")


_AT_ONCE = {"sleep": _sleep_for_ever, "raise": _raise, "exit": lambda: os._exit(3)}


def _faulty(module, kind, rank, first):
    """all_reduce with the fault; a fork server's children count their own calls."""
    real, calls = module.all_reduce, []

    def all_reduce(tensor, *arguments, **options):
        # Ranks that a fork server starts differ in their environment after its import.
        if os.environ.get("RANK") != rank or not tensor.is_cuda:
            return real(tensor, *arguments, **options)
        calls.append(True)
        if kind == "late" and len(calls) >= first:
            time.sleep(_LATE_SECONDS)
        elif len(calls) == first:
            if kind in _AT_ONCE:
                _AT_ONCE[kind]()
            if kind == "other":
                return module.broadcast(tensor, 0, async_op=options.get("async_op", False))
            if kind == "longer":
                tensor = tensor.new_ones(tensor.numel() + 1)
        return real(tensor, *arguments, **options)

    return all_reduce


class _Changed(MetaPathFinder, Loader):
    """Changes torch's collectives when they have been loaded."""

    def __init__(self, kind, rank, first):
        self.fault = kind, rank, int(first)

    def find_spec(self, name, path=None, target=None):
        if name != _COLLECTIVES:
            return None
        spec = PathFinder.find_spec(name, path)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        module.all_reduce = _faulty(module, *self.fault)


def _stopwatch():
    library = ctypes.CDLL(None)
    if not hasattr(library, "fakecuda_stopwatch"):
        return time.perf_counter
    library.fakecuda_stopwatch.restype = ctypes.c_double
    return library.fakecuda_stopwatch


time.perf_counter = _stopwatch()
if os.environ.get("FAKETORCH_FAULT"):
    sys.meta_path.insert(0, _Changed(*os.environ["FAKETORCH_FAULT"].split()))
