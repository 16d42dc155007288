"""GPUs as torch sees them, and the one that each rank takes.

torch must have been built with CUDA, CUDA must start, and torch must see as many GPUs as NVML. Each rank takes
cuda:local_rank, or cuda:0 when the launcher shows it one GPU only; two ranks on one GPU end in NCCL's "Duplicate GPU
detected".

Findings:

Causes: a CPU-only wheel (`+cpu`), a driver too old for torch's CUDA, CUDA_VISIBLE_DEVICES that names the same GPU for
every rank, more processes than GPUs. Fix: install a CUDA build of torch; start one process per GPU.

Confirm by hand: In each rank, `python -c 'import os, torch; print(torch.version.cuda, torch.cuda.device_count());
print(torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"])).uuid)'`; `nvidia-smi -L` lists the UUIDs.

Sources: NCCL's src/init.cc ("Duplicate GPU detected"; since 2.30 "Multiple Ranks are using the same GPU/Partition");
CUDA C++ programming guide, CUDA_DEVICE_ORDER; CUDA runtime API, cudaError.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import present
from ddpdiag.checks.hosts import Host, data_by_host, leave_out, nvml_fix, ranks_text, xid_fix
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.registry import check_by_code
from ddpdiag.model import Finding, Kind, Severity
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.probes.gpu.visibility import device_index
from ddpdiag.text import begun, count

FINDINGS = {
    "cpu-build": FindingSpec.error("torch was built without CUDA, and the host has GPUs."),
    "cuda-start": FindingSpec.error("CUDA does not start: the error is shown."),
    "count": FindingSpec("torch sees another number of GPUs than NVML."),
    "shared": FindingSpec("two ranks use one GPU, or one slice of a GPU (MIG). A warning for gloo, which accepts it."),
}

D = TypeVar("D")
# CUDA shows a process only one slice, even if it may use several (NVIDIA's MIG User Guide, "CUDA Device Enumeration").
SLICES_FIX = (
    "Set CUDA_VISIBLE_DEVICES to another slice for each rank (MIG-..., as `nvidia-smi -L` lists them); CUDA otherwise "
    "shows every process the first one. Or turn MIG off as root (`nvidia-smi -mig 0`)."
)


class TorchGpu(Struct, frozen=True):
    """A GPU that torch shows. `uuid` has the form that NVML uses; None if torch does not report it."""

    name: str
    uuid: str | None


class Data(Struct, frozen=True, kw_only=True):
    """torch's version, its CUDA or ROCm (None: CPU build), its GPUs, the rank's GPU index, CUDA's start error."""

    torch: str
    cuda: str | None = None
    gpus: tuple[TorchGpu, ...] = ()
    chosen: int | None = None
    error: str | None = None

    @property
    def gpu(self) -> TorchGpu | None:
        """The GPU that the rank uses; None if it uses none, or if the recording has no GPU with that index."""
        known = self.chosen is not None and 0 <= self.chosen < len(self.gpus)
        return self.gpus[self.chosen or 0] if known else None


def measure(ctx: Context) -> Data:
    import torch

    version, cuda = str(torch.__version__), torch.version.cuda or torch.version.hip
    if cuda is None:
        return Data(torch=version)
    ctx.step(CONTEXT_STEP)
    begin = time.perf_counter()
    try:
        # is_available() hides the error if CUDA does not start; this call raises it.
        torch.cuda.current_device()
        ctx.add_timing("context", time.perf_counter() - begin)
        ctx.step("GPU properties")
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return Data(torch=version, cuda=cuda, error=str(error).partition("\n")[0])
    gpus = tuple(TorchGpu(gpu.name, _uuid(gpu)) for gpu in properties)
    return Data(torch=version, cuda=cuda, gpus=gpus, chosen=device_index(ctx.place.local_rank, len(gpus)))


def _uuid(properties: object) -> str | None:
    uuid = str(getattr(properties, "uuid", "") or "")
    return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else None


NO_GPU_IN_TORCH = "torch shows no GPU to any rank that is there (GPU002)"


def skip(seen: Seen[Any]) -> SkipReason | None:
    """Skip the check if no rank may use a GPU. Whether a rank should have one is judged by GPU001."""
    return inapplicable(None if seen.world.gpu_count else "no GPU is visible on any host")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    nvml = {host.ranks: rows for host, rows in data_by_host(seen.of(present.CHECK))}
    for host, rows in data_by_host(seen):
        if not host.gpu_count:
            continue
        yield from _start_findings(seen, host, rows)
        # torch counts slices of a GPU, and NVML counts GPUs.
        if not any(gpu.mig for row in nvml.get(host.ranks, {}).values() for gpu in row.nvml.gpus):
            yield from _count_findings(seen, host, rows)
    # UUIDs are unique everywhere, so ranks in different containers of one host are compared as well.
    ranks_by_uuid: dict[str, list[int]] = defaultdict(list)
    for rank, row in seen.by_rank.items():
        if row.gpu is not None and row.gpu.uuid:
            ranks_by_uuid[row.gpu.uuid].append(rank)
    for uuid, ranks in ranks_by_uuid.items():
        if len(ranks) > 1:
            sliced = bool(sliced_hosts(seen).intersection(seen.world.host_names(ranks)))
            yield seen.finding(
                "shared",
                "ranks share a GPU",
                f"{begun(ranks_text(ranks))} on {', '.join(seen.world.host_names(ranks))} all use one GPU ({uuid}). "
                "NCCL refuses two ranks on one GPU.",
                severity=Severity.WARNING if seen.options.backend == "gloo" else Severity.ERROR,
                ranks=ranks,
                gpus=(uuid,),
                fix=SLICES_FIX
                if sliced
                else "Start one process per GPU (`torchrun --nproc-per-node=gpu`). Show every rank all GPUs of its "
                "host (Slurm: `--gpu-bind=none`), or each rank one of its own (`--gpus-per-task=1`).",
            )


def _start_findings(seen: Seen[Data], host: Host, rows: Mapping[int, Data]) -> Iterator[Finding]:
    if ranks := tuple(rank for rank, row in rows.items() if row.cuda is None):
        yield seen.finding(
            "cpu-build",
            "torch is a CPU build on a host with GPUs",
            f"{host.name}, {ranks_text(ranks)}: torch {rows[ranks[0]].torch} is built without CUDA and NCCL. The host "
            f"has {count(host.gpu_count, 'GPU')}.",
            ranks=ranks,
            evidence={"torch": rows[ranks[0]].torch, "gpus": host.gpu_count},
            fix="Install a CUDA build of torch: pytorch.org (Get started) shows the command. To train on CPUs, set "
            "CUDA_VISIBLE_DEVICES= (empty).",
        )
    for error in dict.fromkeys(row.error for row in rows.values() if row.error):
        ranks = tuple(rank for rank, row in rows.items() if row.error == error)
        # An older torch counts GPUs by NVML, and requests some that CUDA does not show (pytorch issue 130181).
        sliced = host.name in sliced_hosts(seen)
        yield seen.finding(
            "cuda-start",
            "CUDA does not start",
            f"{host.name}, {ranks_text(ranks)}: torch {rows[ranks[0]].torch}, built for CUDA {rows[ranks[0]].cuda}, "
            f'reports: "{error}".',
            ranks=ranks,
            evidence={"error": error, "cuda": rows[ranks[0]].cuda},
            fix=SLICES_FIX
            if sliced
            else f"{nvml_fix(host.name)} {xid_fix(host.name)} Then reboot {host.name}, or {leave_out([host.name])}.",
            known_error=None if sliced else known_error(error),
        )


def _count_findings(seen: Seen[Data], host: Host, rows: Mapping[int, Data]) -> Iterator[Finding]:
    """Yield a finding for each rank on which torch shows more or fewer GPUs than the rank should have."""
    for rank, row in rows.items():
        expected = seen.world.arrivals[rank].gpus
        if row.cuda is not None and not row.error and len(row.gpus) != expected:
            yield seen.finding(
                "count",
                "torch sees another number of GPUs than expected",
                f"Rank {rank} on {host.name}: torch sees {count(len(row.gpus), 'GPU')}. CUDA_VISIBLE_DEVICES and the "
                f"driver's list give {expected}.",
                severity=Severity.ERROR if len(row.gpus) < expected else Severity.WARNING,
                ranks=(rank,),
                evidence={"torch": len(row.gpus), "expected": expected},
                fix="In the job compare `nvidia-smi -L` with `echo $CUDA_VISIBLE_DEVICES`. If a GPU is missing in the "
                "first, ask for it (Slurm: `--gres=gpu:N`; docker: `--gpus all`). If none is, look for code that "
                "changes the variable, for MIG (CUDA uses one slice), and for errors (`dmesg -T | grep -i xid`, as "
                "root).",
            )


def sliced_hosts(seen: Seen[D]) -> frozenset[str]:
    """Return the names of the hosts that have GPUs split into slices (MIG), which GPU008 reports."""
    rows = seen.of(check_by_code("GPU003")).by_rank
    return frozenset(seen.world.host_name(rank) for rank, row in rows.items() if any(gpu.mig for gpu in row.gpus))


def uuids_of(seen: Seen[D], ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that these ranks use, as far as they are known."""
    data = seen.of(CHECK).by_rank
    gpus = (data[rank].gpu for rank in ranks if rank in data)
    return tuple(gpu.uuid for gpu in gpus if gpu is not None and gpu.uuid)


def report(seen: Seen[Data]) -> Contribution:
    """Add the UUID and name of each rank's GPU to the report."""
    gpus = {rank: row.gpu for rank, row in seen.by_rank.items()}
    return Contribution(
        columns={rank: {"gpu_uuid": gpu.uuid, "gpu_name": gpu.name} for rank, gpu in gpus.items() if gpu is not None}
    )


# The first CUDA process without persistence mode waits for the driver to start every GPU.
CHECK: Check[Data] = Check(__name__, "GPU002", "torch-view", Stage.GPU, Scope.RANK, Kind.TORCH, deadline=30.0)
