"""Which dtypes, ops and roots of a collective are measured: what was asked for, and what backend and torch have."""

import re
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth.formulas import Counts, counts
from ddpdiag.model.bench import Bench
from ddpdiag.workloads.operations import OUT_OF_PLACE_ONLY, REDUCING, ROOTED, Case, Missing, prepare
from ddpdiag.workloads.values import DTYPES, OPS

# What torch and its backends say of a dtype or an op that they lack. Anything else is a failure: a GPU that dies in its
# first call must not pass for the user's mistake.
_LACKS = re.compile(
    r"not (yet )?(support|implement)|unsupported|only supports|invalid scalar type|cannot use|can(not|'t) be cast|"
    r"no backend type",
    re.IGNORECASE,
)


class Kind(NamedTuple):
    """A dtype, an op ("none" where there is none) and a root (-1)."""

    dtype: str
    op: str
    root: int


class Found(NamedTuple):
    """What is measured; sentences on what was asked for by name and is not there, and on what "all" left out."""

    kinds: tuple[Kind, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


def kinds(bench: Bench, collective: str, device: torch.device) -> Found:
    """Tries every dtype with every op."""
    dtypes = tuple(DTYPES) if "all" in bench.dtypes else bench.dtypes
    ops = (tuple(OPS) if "all" in bench.ops else bench.ops) if collective in REDUCING else ("none",)
    ranks = tuple(range(dist.get_world_size())) if -1 in bench.roots else bench.roots
    roots = ranks if collective in ROOTED else (-1,)
    whys = {(dtype, op): _why_not(collective, Kind(dtype, op, roots[0]), device) for dtype in dtypes for op in ops}
    there = [pair for pair, why in whys.items() if why is None]
    missing: list[str] = []
    left_out: list[str] = []
    for (dtype, op), why in whys.items():
        if why is not None:
            what = f"{collective} of {dtype}" + (f" with {op}" if op != "none" else "")
            # A name is there if it is there with anything that "all" stands for.
            excused = any(dtype == other for other, _ in there) if "all" in bench.ops else False
            excused |= any(op == other for _, other in there) if "all" in bench.dtypes else False
            (left_out if excused else missing).append(f"{dist.get_backend()} cannot do {what}: {why}")
    measured = tuple(Kind(dtype, op, root) for dtype, op in there for root in roots)
    return Found(measured, tuple(missing), tuple(left_out))


def case_of(collective: str, kind: Kind, wanted_bytes: int, *, in_place: bool) -> Case:
    """One row's case."""
    return Case(collective, kind.dtype, kind.op, kind.root, counts_of(collective, kind, wanted_bytes), in_place)


def counts_of(collective: str, kind: Kind, wanted_bytes: int) -> Counts:
    """What a size comes to in the open group."""
    return counts(collective, wanted_bytes, DTYPES[kind.dtype].itemsize, dist.get_world_size())


def _why_not(collective: str, kind: Kind, device: torch.device) -> str | None:
    """Why backend or torch does not have this, or None: tried with as little as there is. Real failures are raised."""
    case = case_of(collective, kind, 1, in_place=collective not in OUT_OF_PLACE_ONLY)
    try:
        prepare(case, device).call()
        finish(device)
    except (Missing, NotImplementedError) as error:
        return _first_line(error)
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError) or not _LACKS.search(str(error)):
            raise
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
