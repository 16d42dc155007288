"""GPU001's data, and what each rank of a host sees of its GPUs.

NVML ignores CUDA_VISIBLE_DEVICES: a job to which the variable shows no GPU trains on CPUs over gloo, without an error.

NCCL copies from GPU to GPU of one host by CUDA IPC. CUDA_VISIBLE_DEVICES alone does not hinder it (CUDA 10.1 and later
reach devices that the variable hides; NCCL, src/transport/p2p.cc), but a cgroup or container that closes the other
GPUs' device files does, as Slurm's --gpus-per-task and --gpu-bind do: NCCL then fails, hangs, or goes through the
host's memory (NCCL issue 1066). Its cuMem allocations, the default, fail as well (NCCL issues 1647 and 1948).

NVML then gives the GPU of each rank the same number. Since 2.30.6 NCCL takes ranks with equal numbers for ranks of one
GPU and leaves NVLink SHARP out (`hasMultiRankNvml` in src/init.cc and src/transport/nvls.cc). CUDA_VISIBLE_DEVICES does
not change NVML's numbers.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import answers_by_host, names_text, ranks_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.nvml import Enumeration, Gpu, Trouble
from ddpdiag.probes.gpu.visibility import PciFunction, named_gpus
from ddpdiag.text import count

_WITHOUT_PEERS = "If you cannot, set NCCL_P2P_DISABLE=1: NCCL then copies through the host's memory, which is slower."


class Data(Struct, frozen=True, kw_only=True):
    """The GPUs that a rank finds by NVML, on the PCI bus (None: unreadable), in /proc (None: no driver), in variables.

    `visible` counts what CUDA would show to this rank, `promised` what launcher, container or CUDA_VISIBLE_DEVICES name
    (None: nothing); `cuda_visible_devices` is that variable (None: unset). `wsl`: WSL2 shows a GPU of NVIDIA.
    """

    nvml: Enumeration
    functions: tuple[PciFunction, ...] | None = ()
    proc_gpus: int | None = None
    visible: int = 0
    promised: int | None = None
    cuda_visible_devices: str | None = None
    wsl: bool = False


class HostGpus(Struct, frozen=True, kw_only=True):
    """One host, from the answers of its ranks: with GPUs bound to ranks, each of these may see a part only.

    `listed` counts the driver's own list, `visible` what CUDA shows to the ranks together.
    """

    name: str
    ranks: tuple[int, ...]
    answers: Mapping[int, Data]
    gpus: tuple[Gpu, ...]
    lost: tuple[Gpu, ...]
    trouble: Trouble | None
    error: str
    functions: tuple[PciFunction, ...] | None
    listed: int
    visible: int
    promised: int | None
    wsl: bool

    @property
    def unopened(self) -> dict[str, str | None]:
        """PCI addresses of GPUs that NVML does not show, with their drivers."""
        known = {gpu.pci for gpu in self.gpus}
        return {function.address: function.driver for function in self.functions or () if function.address not in known}

    @property
    def is_sliced(self) -> bool:
        """Whether a GPU is cut into slices (MIG)."""
        return any(gpu.mig for gpu in self.gpus)


def host_gpus(seen: Seen[Data]) -> list[HostGpus]:
    """The hosts that answered, in order."""
    hosts = []
    for host, rows in answers_by_host(seen):
        every = [gpu for row in rows.values() for gpu in row.nvml.gpus]
        opened = {gpu.uuid or f"index {gpu.index}": gpu for gpu in every if gpu.error is None}
        troubled = next((row.nvml for row in rows.values() if row.nvml.trouble), Enumeration())
        promises = [row.promised for row in rows.values() if row.promised is not None]
        # Ranks that name or open different GPUs were bound to them, and theirs add up.
        names = {rank: (row.cuda_visible_devices, *(gpu.uuid for gpu in row.nvml.gpus)) for rank, row in rows.items()}
        one = HostGpus(
            name=host.name,
            ranks=host.ranks,
            answers=rows,
            gpus=tuple(opened.values()),
            lost=tuple({gpu.index: gpu for gpu in every if gpu.error is not None}.values()),
            trouble=troubled.trouble,
            error=troubled.error,
            functions=next((row.functions for row in rows.values() if row.functions is not None), None),
            listed=max(row.proc_gpus or 0 for row in rows.values()),
            visible=sum({names[rank]: row.visible for rank, row in rows.items()}.values()),
            # A MIG slice counts as a GPU for launchers and not for NVML, so the numbers cannot be compared.
            promised=max(promises) if promises and not any(gpu.mig for gpu in opened.values()) else None,
            wsl=any(row.wsl for row in rows.values()),
        )
        hosts.append(one)
    return hosts


def hidden_gpus(seen: Seen[Data], host: HostGpus) -> Iterator[Finding]:
    """At most one finding a host; what the user expects replaces what launcher and variables promise."""
    if not host.gpus:
        return
    expected = seen.options.expect_gpus
    # Unless every rank answered, GPUs that are bound to the absent would be missed.
    adds_up = len(seen.by_rank) == seen.world.size
    wrong = [
        rank
        for rank, row in host.answers.items()
        # CUDA decides what an index means on a GPU that is split into slices; an index that shows nothing is wrong.
        if not (row.visible and host.is_sliced) and row.visible < named_gpus(row.cuda_visible_devices)
    ]
    if expected is not None:
        if host.visible < expected and adds_up:
            yield _too_few(seen, host, Severity.ERROR, f"--expect-gpus is {expected}")
    elif wrong:
        yield _misnamed(seen, host, wrong)
    elif blind := [rank for rank, row in host.answers.items() if row.visible == 0]:
        yield _none(seen, host, blind)
    elif host.promised is not None and host.visible < host.promised and adds_up:
        # A job step or a shell may use fewer on purpose, and they work.
        yield _too_few(seen, host, Severity.WARNING, f"launcher or container name {host.promised}")


def _misnamed(seen: Seen[Data], host: HostGpus, ranks: Sequence[int]) -> Finding:
    row = host.answers[ranks[0]]
    named = named_gpus(row.cuda_visible_devices)
    twice = "" if named == 1 else ", or one GPU twice"
    said = (
        f"but {ranks_text(ranks)} {'sees' if len(ranks) == 1 else 'see'} {row.visible} of them: "
        f"{_variable(host, ranks)} names a GPU that does not exist{twice}"
    )
    fix = (
        f"Set CUDA_VISIBLE_DEVICES={_indices(row)} on {host.name} (each GPU once; or UUIDs of `nvidia-smi -L`), or "
        "unset it."
    )
    finding = _hidden(seen, host, ranks, said, fix, Severity.ERROR)
    title = "CUDA_VISIBLE_DEVICES names GPUs that do not exist"
    return structs.replace(finding, title=title, evidence=finding.evidence | {"named": named})


def _none(seen: Seen[Data], host: HostGpus, ranks: Sequence[int]) -> Finding:
    """An error where GPUs were promised or other ranks have some, because such a job cannot use NCCL."""
    promised = any(host.answers[rank].promised for rank in ranks)
    others = any(row.visible for row in seen.by_rank.values())
    meant = seen.options.backend == "gloo"
    unlisted = {host.answers[rank].cuda_visible_devices for rank in ranks} == {None}
    then = "CUDA may still find them" if unlisted else "the job would use CPUs"
    why = ", although launcher or container name some" if promised else ", but other ranks see some" if others else ""
    said = f"but {_variable(host, ranks)} shows none to {ranks_text(ranks)}{why}: no GPU was tested there, and {then}"
    severity = Severity.ERROR if (promised or others) and not meant else Severity.WARNING
    return _hidden(seen, host, ranks, said, _how_to_show(host, ranks), severity)


def _too_few(seen: Seen[Data], host: HostGpus, severity: Severity, wanted: str) -> Finding:
    ranks = tuple(host.answers)
    said = f"{wanted}, but {_variable(host, ranks)} shows {host.visible} to the ranks"
    return _hidden(seen, host, ranks, said, _how_to_show(host, ranks), severity)


def _hidden(seen: Seen[Data], host: HostGpus, ranks: Sequence[int], said: str, fix: str, severity: Severity) -> Finding:
    return seen.finding(
        "hidden",
        "GPUs are hidden from the job" if host.visible else f"all GPUs of {host.name} are hidden from the job",
        f"{host.name} has {count(len(host.gpus), 'GPU')}, {said}.",
        severity=severity,
        ranks=ranks,
        evidence={
            "gpus": len(host.gpus),
            "visible": host.visible,
            "promised": host.promised,
            "cuda_visible_devices": host.answers[ranks[0]].cuda_visible_devices,
        },
        fix=fix,
    )


def _how_to_show(host: HostGpus, ranks: Sequence[int]) -> str:
    values = {host.answers[rank].cuda_visible_devices for rank in ranks}
    cpus = "If that is intended" if host.visible else "If the job uses CPUs only"
    cpus += f", pass `--expect-gpus {host.visible}`."
    indices = _indices(host.answers[ranks[0]])
    if values == {None}:
        # Such as WSL: no procfs entry, and still a GPU.
        return (
            f"Set CUDA_VISIBLE_DEVICES={indices} on {host.name}, where the driver does not list all GPUs in "
            f"/proc/driver/nvidia/gpus. {cpus}"
        )
    if "NoDevFiles" in values:
        return f"Ask Slurm for GPUs (`--gres=gpu:{len(host.gpus)}`). {cpus}"
    return f"Run `unset CUDA_VISIBLE_DEVICES` on {host.name} before the job, or set it to {indices}. {cpus}"


def _variable(host: HostGpus, ranks: Sequence[int]) -> str:
    """The variable as the first of these ranks has it, and on which rank where they differ."""
    values = [host.answers[rank].cuda_visible_devices for rank in ranks]
    text = "CUDA_VISIBLE_DEVICES (unset)" if values[0] is None else f"CUDA_VISIBLE_DEVICES={values[0]!r}"
    return text if len(set(values)) == 1 else f"{text} (on rank {ranks[0]})"


def _indices(row: Data) -> str:
    """Bound to GPUs, every rank may count its own from 0."""
    return ",".join(str(gpu.index) for gpu in row.nvml.gpus)


def isolated_ranks(seen: Seen[Data], hosts: Sequence[HostGpus]) -> Iterator[Finding]:
    """One finding for all hosts whose device files are closed, and one for those whose variables differ."""
    apart = [host for host in hosts if len(host.answers) > 1 and not host.is_sliced]
    closed = [host for host in apart if _is_closed(host)]
    if closed:
        equal = any(len({gpu.index for row in host.answers.values() for gpu in row.nvml.gpus}) == 1 for host in closed)
        without_nvls = " NVML gives the GPU of each rank the same number: NCCL 2.30.6 and newer then turns NVLS off."
        first = [(host, *next(iter(host.answers.items()))) for host in closed]
        lines = [f"{host.name}: rank {n} sees {len(row.nvml.gpus)} of {len(host.gpus)} GPUs" for host, n, row in first]
        yield seen.finding(
            "isolated",
            "the GPUs of other ranks are hidden by the container or cgroup",
            f"{names_text(lines, 4)}; all are expected. NCCL needs CUDA IPC between the GPUs of a host: without it, "
            f"NCCL fails or copies through the host's memory.{without_nvls if equal else ''}",
            severity=Severity.WARNING,
            ranks=tuple(rank for host in closed for rank in host.answers),
            evidence={"hosts": len(closed), "gpus": [len(host.gpus) for host in closed]},
            fix="Show each rank all GPUs of its host: with Slurm replace --gpus-per-task by "
            f"`--gpus-per-node={len(closed[0].gpus)} --gpu-bind=none`. {_WITHOUT_PEERS}",
            guess=_WITHOUT_PEERS,
        )
    if masked := [host.name for host in apart if host not in closed and _is_masked(host)]:
        yield seen.finding(
            "isolated",
            "each rank sees one GPU of its own",
            f"{names_text(masked)}: CUDA_VISIBLE_DEVICES shows each rank one GPU, as cuda:0. NCCL still reaches the "
            "other GPUs. A script that uses cuda:LOCAL_RANK fails.",
            severity=Severity.NOTE,
            hosts=masked,
            fix="Nothing to do if the script uses cuda:0 on every rank. Otherwise set CUDA_VISIBLE_DEVICES to the same "
            "list on all ranks of a host.",
        )


def _is_closed(host: HostGpus) -> bool:
    """Whether NVML, which ignores variables, shows a rank fewer GPUs than the ranks see together."""
    # A GPU that one rank could not open is lost, and not hidden.
    whole = [row.nvml.gpus for row in host.answers.values() if all(gpu.uuid for gpu in row.nvml.gpus)]
    sets = [{gpu.uuid for gpu in gpus} for gpus in whole if gpus]
    together = set[str | None]().union(*sets)
    return len(sets) > 1 and any(own != together for own in sets)


def _is_masked(host: HostGpus) -> bool:
    """Whether each rank names exactly one GPU, a different one on each rank."""
    values = {row.cuda_visible_devices for row in host.answers.values() if row.visible == 1}
    return len(values) == len(host.answers)
