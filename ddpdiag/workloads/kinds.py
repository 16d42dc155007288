"""Which dtypes, ops and roots of a collective are measured: what was asked for, and what backend and torch have."""

import re
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.bandwidth.formulas import Counts, counts
from ddpdiag.model.bench import Bench
from ddpdiag.workloads.operations import OUT_OF_PLACE_ONLY, REDUCING, ROOTED, Case, Missing, prepare
from ddpdiag.workloads.values import DTYPES, OPS

# Failures of a connection, as gloo and torch word them. Anything else that is raised, before anything is sent, says in
# one of many ways that the backend lacks a dtype or an op ("Invalid scalar type", "can't be cast").
_FAILED = re.compile(r"gloo.transport|connect|(closed|reset) by peer|broken pipe|timed? ?out", re.IGNORECASE)


class Kind(NamedTuple):
    """A dtype, an op ("none" where there is none) and a root (-1)."""

    dtype: str
    op: str
    root: int


def kinds(bench: Bench, collective: str, device: torch.device) -> tuple[list[Kind], tuple[str, ...]]:
    """What is measured; and what was asked for by name, or for lack of anything else, and is not there."""
    there, missing = [], []
    dtypes = tuple(DTYPES) if "all" in bench.dtypes else bench.dtypes
    ops = (tuple(OPS) if "all" in bench.ops else bench.ops) if collective in REDUCING else ("none",)
    ranks = tuple(range(dist.get_world_size())) if -1 in bench.roots else bench.roots
    roots = ranks if collective in ROOTED else (-1,)
    for dtype in dtypes:
        for op in ops:
            why = _why_not(collective, Kind(dtype, op, roots[0]), device)
            if why is None:
                there += [Kind(dtype, op, root) for root in roots]
            else:
                what = f"{collective} of {dtype}" + (f" with {op}" if op != "none" else "")
                missing.append(f"{dist.get_backend()} cannot do {what}: {why}")
    by_name = not {"all"} & {*bench.dtypes, *bench.ops}
    return there, tuple(missing) if by_name or not there else ()


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
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError) or _FAILED.search(str(error)):
            raise
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
