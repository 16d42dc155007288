"""GPU001's third part: ranks of one host that are each shown other GPUs, so that peers are hidden from each other.

NCCL copies from GPU to GPU of one host by CUDA IPC. CUDA_VISIBLE_DEVICES alone does not hinder it (CUDA 10.1 and later
reach devices that the variable hides; NCCL, src/transport/p2p.cc), but a cgroup or container that closes the other
GPUs' device files does, as Slurm's --gpus-per-task and --gpu-bind do: NCCL then fails, hangs, or goes through the
host's memory (NCCL issue 1066). NCCL's own cuMem allocations may still be shared.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.present.data import Data, View
from ddpdiag.checks.hosts import names_text
from ddpdiag.model import Finding, Severity


def isolated(seen: Seen[Data], views: Sequence[View]) -> Iterator[Finding]:
    """One finding for all hosts whose device files are closed, and one for those whose variables differ."""
    apart = [view for view in views if len(view.answers) > 1 and not any(gpu.mig for gpu in view.gpus)]
    closed = [view for view in apart if _is_closed(view)]
    if closed:
        yield _closed(seen, closed)
    if masked := [view for view in apart if view not in closed and _is_masked(view)]:
        yield _masked(seen, masked)


def _is_closed(view: View) -> bool:
    """Does NVML, which knows no variable, show some rank less than the ranks see together?"""
    # A GPU that one rank could not open is lost, and not hidden.
    whole = [row.nvml.gpus for row in view.answers.values() if all(gpu.uuid for gpu in row.nvml.gpus)]
    sets = [{gpu.uuid for gpu in gpus} for gpus in whole if gpus]
    together = set[str | None]().union(*sets)
    return len(sets) > 1 and any(own != together for own in sets)


def _is_masked(view: View) -> bool:
    """Does each rank name one GPU only, and another one than the rest?"""
    values = [row.cuda_visible_devices for row in view.answers.values()]
    return all(row.visible == 1 for row in view.answers.values()) and len(set(values)) == len(values)


def _example(view: View) -> str:
    rank, row = next(iter(view.answers.items()))
    return f"{view.host.name}: rank {rank} sees {len(row.nvml.gpus)} of {len(view.gpus)} GPUs"


def _closed(seen: Seen[Data], views: Sequence[View]) -> Finding:
    return seen.finding(
        "isolated",
        "the GPUs of other ranks are hidden by the container or cgroup",
        f"{names_text([_example(view) for view in views], 4)}; all are expected. NCCL needs CUDA IPC between the GPUs "
        "of a host: without it, it fails or goes through the host's memory.",
        severity=Severity.WARNING,
        ranks=tuple(rank for view in views for rank in view.answers),
        evidence={"hosts": len(views), "gpus": [len(view.gpus) for view in views[:16]]},
        fix="Show all GPUs of the host to each of its ranks: Slurm --gpus-per-node=N (or --gres=gpu:N) with "
        "--gpu-bind=none, in place of --gpus-per-task. Else try NCCL_CUMEM_ENABLE=1.",
    )


def _masked(seen: Seen[Data], views: Sequence[View]) -> Finding:
    return seen.finding(
        "isolated",
        "each rank is shown one GPU of its own",
        f"{names_text([view.host.name for view in views])}: CUDA_VISIBLE_DEVICES shows every rank one GPU, its cuda:0. "
        "NCCL still reaches the others, since their device files are open; programs that use cuda:local_rank fail.",
        severity=Severity.NOTE,
        nodes=tuple(view.host.name for view in views),
        fix="Nothing, if the job takes cuda:0 in each rank; else leave the variable alike in all ranks.",
    )
