"""GPU001's second half: GPUs that are there, and that CUDA does not show to the ranks.

NVML knows nothing of CUDA_VISIBLE_DEVICES. A job that sees no GPU trains on CPUs over gloo, and all seems well.
"""

from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu.present.data import Data, View
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.probes.gpu.visibility import named_gpus

TITLE = "GPUs are there, but not shown to the job"


def hidden(seen: Seen[Data], view: View) -> Iterator[Finding]:
    """At most one finding a host; what the user expects replaces what launcher and variables promise."""
    if not view.gpus:
        return
    expected = seen.options.expect_gpus
    if expected is not None:
        if view.visible < expected and _may_add_up(seen):
            yield _too_few(seen, view, Severity.ERROR, f"--expect-gpus says {expected}")
    elif wrong := [rank for rank, row in view.answers.items() if _is_misnamed(view, row)]:
        yield _misnamed(seen, view, wrong)
    elif blind := [rank for rank, row in view.answers.items() if row.visible == 0]:
        yield _none(seen, view, blind)
    elif view.promised is not None and view.visible < view.promised and _may_add_up(seen):
        # A job step or a shell may mean to use fewer, and they work.
        yield _too_few(seen, view, Severity.WARNING, f"launcher or container name {view.promised}")


def _may_add_up(seen: Seen[Data]) -> bool:
    """Did every rank answer? Otherwise GPUs that are bound to the absent would be missed."""
    return len(seen.by_rank) == seen.world.size


def _is_misnamed(view: View, row: Data) -> bool:
    # What an index means on a GPU that is cut into slices is CUDA's to say; that it means nothing is clear.
    if row.visible and any(gpu.mig for gpu in view.gpus):
        return False
    return row.visible < named_gpus(row.cuda_visible_devices)


def _misnamed(seen: Seen[Data], view: View, ranks: Sequence[int]) -> Finding:
    row = view.answers[ranks[0]]
    named = named_gpus(row.cuda_visible_devices)
    return seen.finding(
        "hidden",
        "CUDA_VISIBLE_DEVICES names GPUs that are not there",
        f"{_there(view)}, but {_variable(view, ranks)} names {named} and shows {row.visible} of them "
        f"to {ranks_text(ranks)}.",
        severity=Severity.ERROR,
        ranks=ranks,
        evidence=_evidence(view, ranks) | {"named": named},
        fix=f"Name each GPU once in CUDA_VISIBLE_DEVICES ({_indices(row)} on {view.host.name}, or UUIDs that "
        "`nvidia-smi -L` shows), or unset it.",
    )


def _none(seen: Seen[Data], view: View, ranks: Sequence[int]) -> Finding:
    """An error where somebody promised GPUs or other ranks have some, because such a job cannot use NCCL."""
    promised = any(view.answers[rank].promised for rank in ranks)
    others = any(row.visible for row in seen.by_rank.values())
    meant = seen.options.backend == "gloo"
    unlisted = {view.answers[rank].cuda_visible_devices for rank in ranks} == {None}
    then = "CUDA may still find them" if unlisted else "the job would take CPUs"
    why = ", although launcher or container promise some" if promised else ", while others have some" if others else ""
    return seen.finding(
        "hidden",
        TITLE,
        f"{_there(view)}, but {_variable(view, ranks)} shows none to {ranks_text(ranks)}{why}: "
        f"no GPU was tested there, and {then}.",
        severity=Severity.ERROR if (promised or others) and not meant else Severity.WARNING,
        ranks=ranks,
        evidence=_evidence(view, ranks),
        fix=_how_to_show(view, ranks),
    )


def _too_few(seen: Seen[Data], view: View, severity: Severity, wanted: str) -> Finding:
    ranks = view.host.ranks
    return seen.finding(
        "hidden",
        TITLE,
        f"{_there(view)}, {wanted}, but {_variable(view, tuple(view.answers))} shows {view.visible} to the ranks.",
        severity=severity,
        ranks=ranks,
        evidence=_evidence(view, tuple(view.answers)),
        fix=_how_to_show(view, tuple(view.answers)),
    )


def _how_to_show(view: View, ranks: Sequence[int]) -> str:
    values = {view.answers[rank].cuda_visible_devices for rank in ranks}
    cpus = f"or say --expect-gpus {view.visible} if {'that is' if view.visible else 'CPUs are'} meant"
    indices = _indices(view.answers[ranks[0]])
    if values == {None}:
        # Such as WSL: no procfs entry, and still a GPU.
        return (
            f"Set CUDA_VISIBLE_DEVICES={indices} on {view.host.name}, where the driver does not list "
            f"all GPUs in /proc/driver/nvidia/gpus, {cpus}."
        )
    if "NoDevFiles" in values:
        return f"Ask Slurm for GPUs (--gres=gpu:N), {cpus}."
    return f"Unset CUDA_VISIBLE_DEVICES, or set it to {indices}, {cpus}."


def _there(view: View) -> str:
    count = len(view.gpus)
    return f"{view.host.name}: {count} {'GPU is' if count == 1 else 'GPUs are'} there"


def _variable(view: View, ranks: Sequence[int]) -> str:
    """The variable as the first of these ranks has it, and on which rank where they differ."""
    values = [view.answers[rank].cuda_visible_devices for rank in ranks]
    text = "CUDA_VISIBLE_DEVICES (unset)" if values[0] is None else f"CUDA_VISIBLE_DEVICES={values[0]!r}"
    return text if len(set(values)) == 1 else f"{text} (on rank {ranks[0]})"


def _indices(row: Data) -> str:
    """Bound to GPUs, every rank may count its own from 0."""
    return ",".join(str(gpu.index) for gpu in row.nvml.gpus)


def _evidence(view: View, ranks: Sequence[int]) -> dict[str, Scalar | list[Scalar]]:
    return {
        "gpus": len(view.gpus),
        "visible": view.visible,
        "promised": view.promised,
        "cuda_visible_devices": view.answers[ranks[0]].cuda_visible_devices,
    }
