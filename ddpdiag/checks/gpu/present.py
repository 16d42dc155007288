"""GPUs that each host should have.

The PCI bus (sysfs), NVML, the launcher's variables and the other hosts should agree on how many GPUs a host has. "CPU
only" is concluded when neither the bus nor WSL2 shows an NVIDIA GPU, no launcher or variable names a GPU, and no other
host has one; `--expect-gpus 0` states that the job uses CPUs. A difference that the launcher explains (a job that was
given 2 of 8 GPUs, a container that has the device files of 2) is no finding.

GPUs that are present must also be visible to the ranks: CUDA_VISIBLE_DEVICES with a wrong index hides all that follow
it, an empty one hides all. And NCCL needs all ranks of a host to have access to all its GPUs. CUDA IPC and NCCL's
copies reach GPUs that the variable hides, but a cgroup or container that closes their device files (Slurm's
--gpus-per-task) stops them: NCCL then fails, hangs, or goes through the host's memory.

Findings:

Causes: no driver, or one that was updated while the old module is still loaded ("Driver/library version mismatch"); a
GPU that fell off the bus (Xid 79); a container without `--gpus`; a job that did not ask for GPUs. Fix: see the finding;
compare `nvidia-smi -L` with `lspci -d 10de:`.

Confirm by hand: `lspci -d 10de: ; nvidia-smi -L; ls -l /dev/nvidia*; echo $CUDA_VISIBLE_DEVICES` in each rank: the
numbers should agree.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), return codes; CUDA C++ programming guide,
CUDA_VISIBLE_DEVICES; srun(1), --gpus-per-task and --gpu-bind; nvidia-container-toolkit issue 48; NCCL's
src/transport/p2p.cc, and NCCL issues 1066, 1647 and 1948.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import data_by_host, leave_out, names_text, nvml_fix, ranks_text, xid_fix
from ddpdiag.model import Finding, Severity
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu, Trouble, enumerate_gpus
from ddpdiag.probes.gpu.visibility import (
    PciFunction,
    named_gpu_count,
    nvidia_functions,
    openable_gpus,
    promised_gpu_count,
    visible_gpu_count,
    withheld_gpu_count,
)
from ddpdiag.probes.host.kernel import proc_root, sys_root
from ddpdiag.text import byte_count, count

FINDINGS = {
    "fewer": FindingSpec.error(
        "fewer GPUs than the bus shows, than the launcher or a variable names, or than the other hosts have."
    ),
    "nvml": FindingSpec.warning("the driver's library does not answer."),
    "unreadable": FindingSpec.unchecked("nor does another source show how many GPUs there are.", same_item=True),
    "lost": FindingSpec.error("a GPU is on the bus, but does not answer."),
    "mismatch": FindingSpec.error(
        "the loaded driver and its library have different versions, so that no new CUDA process starts."
    ),
    "hidden": FindingSpec("GPUs are present, but CUDA_VISIBLE_DEVICES hides them."),
    "isolated": FindingSpec.warning("ranks of a host cannot open each other's GPUs."),
}

_CPUS_ONLY = "If the job uses CPUs only, pass `--expect-gpus 0`."
_WITHOUT_PEERS = "If you cannot, set NCCL_P2P_DISABLE=1: NCCL then copies through the host's memory, which is slower."


class Data(Struct, frozen=True, kw_only=True):
    """The GPUs that a rank finds with NVML, on the PCI bus (`functions`; None: unreadable), and by variables.

    `visible` is the number of GPUs that CUDA should show to this rank, by the driver's list or WSL2. `promised` is the
    number that launcher, container or CUDA_VISIBLE_DEVICES name. `cuda_visible_devices` is that variable.
    """

    nvml: Enumeration
    functions: tuple[PciFunction, ...] | None = ()
    visible: int = 0
    promised: int | None = None
    cuda_visible_devices: str | None = None


class HostGpus(Struct, frozen=True, kw_only=True):
    """The GPUs of one host, combined from its ranks' data, because a rank that is bound to GPUs may see only these.

    NVML lists the `lost` GPUs but cannot open them. `visible` counts the GPUs that CUDA shows to all ranks together.
    """

    name: str
    ranks: tuple[int, ...]
    data_by_rank: Mapping[int, Data]
    gpus: tuple[ListedGpu, ...]
    lost: tuple[ListedGpu, ...]
    trouble: Trouble | None
    error: str
    functions: tuple[PciFunction, ...] | None
    visible: int
    promised: int | None

    @property
    def driver_by_unopened_gpu(self) -> dict[str, str | None]:
        """The kernel driver of each GPU that is on the PCI bus but not shown by NVML, by PCI address."""
        known = {gpu.pci for gpu in self.gpus}
        return {function.address: function.driver for function in self.functions or () if function.address not in known}

    @property
    def is_sliced(self) -> bool:
        """Whether a GPU of the host is cut into slices (MIG)."""
        return any(gpu.mig for gpu in self.gpus)


def host_gpus(seen: Seen[Data]) -> list[HostGpus]:
    """Return the GPUs of each host that has data, in the order of hosts."""
    hosts = []
    for host, rows in data_by_host(seen):
        all_gpus = [gpu for row in rows.values() for gpu in row.nvml.gpus]
        opened = {gpu.uuid or f"index {gpu.index}": gpu for gpu in all_gpus if gpu.error is None}
        troubled = next((row.nvml for row in rows.values() if row.nvml.trouble), Enumeration())
        promises = [row.promised for row in rows.values() if row.promised is not None]
        # Ranks that name or open different GPUs are bound to them, so their counts add up.
        names = {rank: (row.cuda_visible_devices, *(gpu.uuid for gpu in row.nvml.gpus)) for rank, row in rows.items()}
        gpus = HostGpus(
            name=host.name,
            ranks=host.ranks,
            data_by_rank=rows,
            gpus=tuple(opened.values()),
            lost=tuple({gpu.index: gpu for gpu in all_gpus if gpu.error is not None}.values()),
            trouble=troubled.trouble,
            error=troubled.error,
            functions=next((row.functions for row in rows.values() if row.functions is not None), None),
            visible=sum({names[rank]: row.visible for rank, row in rows.items()}.values()),
            # A MIG slice counts as a GPU for launchers and not for NVML, so the numbers cannot be compared.
            promised=max(promises) if promises and not any(gpu.mig for gpu in opened.values()) else None,
        )
        hosts.append(gpus)
    return hosts


def measure(ctx: Context) -> Data:
    # Cheap readings come first, since NVML may hang.
    proc = proc_root(os.environ)
    listed = openable_gpus(proc)
    # A container or cgroup that received only some of the host's GPUs promises this number, too.
    received = len(listed) if listed and withheld_gpu_count(proc) else None
    functions = nvidia_functions(sys_root(os.environ))
    return Data(
        nvml=enumerate_gpus(ctx.step),
        functions=functions,
        visible=visible_gpu_count(os.environ, proc),
        promised=promised_gpu_count(os.environ) or received,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    hosts = host_gpus(seen)
    largest_host = max(hosts, key=lambda host: len(host.gpus), default=None)
    for host in hosts:
        where = ", ".join(host.driver_by_unopened_gpu)
        for gpu in host.lost:
            yield seen.finding(
                "lost",
                "a GPU cannot be opened",
                f"GPU {gpu.index} on {host.name}{f' (PCI {where})' if where else ''}: NVML reports {gpu.error!r}.",
                ranks=host.ranks,
                evidence={"index": gpu.index, "error": gpu.error, "pci": where},
                fix=f"{xid_fix(host.name)} Then reboot {host.name} (as root), or {leave_out([host.name])}.",
            )
        absent = list(_missing_findings(seen, host, largest_host))
        yield from absent
        # A GPU that is absent is not reported as hidden, too.
        if not any(finding.severity is Severity.ERROR for finding in absent):
            yield from _hidden_findings(seen, host)
    yield from _isolation_findings(seen, hosts)


def _has_named_gpus(seen: Seen[Data], host: HostGpus) -> bool:
    """Whether the host has as many GPUs as --expect-gpus or the launcher names. More on the bus are not the job's."""
    named = host.promised if seen.options.expect_gpus is None else seen.options.expect_gpus
    return named is not None and len(host.gpus) >= named


def _missing_findings(seen: Seen[Data], host: HostGpus, largest_host: HostGpus | None) -> Iterator[Finding]:
    if host.functions is None and not _has_named_gpus(seen, host):
        yield seen.finding(
            "unreadable",
            "the number of GPUs is not certain: the PCI bus cannot be read",
            f"{host.name}: NVML shows {count(len(host.gpus), 'GPU')}, but /sys/bus/pci/devices cannot be read, so it "
            "is not known whether the host has more.",
            ranks=host.ranks,
            fix="Mount /sys into the container, or pass the number of GPUs of each host, such as `--expect-gpus 8`.",
        )
    # A GPU that was reported as lost is not reported as missing, too.
    reasons = _reasons_to_expect_more(seen, host, largest_host, len(host.gpus) + len(host.lost))
    if host.trouble is Trouble.MISMATCH:
        yield seen.finding(
            "mismatch",
            "NVIDIA's kernel driver and library have different versions",
            f"{host.name}: NVML fails with {host.error!r}. The loaded kernel driver and the installed libnvidia-ml "
            "have different versions, so no new process can use CUDA.",
            ranks=host.ranks,
            evidence={"pci": list(host.driver_by_unopened_gpu)},
            fix=f"As root reboot {host.name}, which loads the new driver after an update. If you cannot, "
            f"{leave_out([host.name])}.",
        )
    elif reasons:
        yield _fewer_finding(seen, host, reasons)
    elif host.trouble is Trouble.OTHER:
        # The number may be known from another rank's NVML, or from the user.
        known = bool(host.gpus) or seen.options.expect_gpus is not None
        yield seen.finding(
            "nvml" if known else "unreadable",
            "NVML does not work",
            f"{host.name}: NVML, the driver's library, fails with {host.error!r}"
            f"{'' if known else ', so it is not known whether there are GPUs'}.",
            ranks=host.ranks,
            fix=nvml_fix(host.name) + ("" if known else f" {_CPUS_ONLY}"),
        )


def _reasons_to_expect_more(seen: Seen[Data], host: HostGpus, largest_host: HostGpus | None, present: int) -> list[str]:
    """Return the reasons to expect more GPUs than the `present` ones, as clauses."""
    reasons = []
    expected, promised = seen.options.expect_gpus, host.promised
    if expected is not None and present < expected:
        reasons.append(f"--expect-gpus is {expected}")
    if promised is not None and present < promised:
        reasons.append(f"the launcher, the container or CUDA_VISIBLE_DEVICES names {promised}")
    if _has_named_gpus(seen, host):
        return reasons
    if host.functions and present < len(host.functions):
        unopened_drivers = [
            f"{address} {f'with driver {driver}' if driver else 'without a driver'}"
            for address, driver in host.driver_by_unopened_gpu.items()
        ]
        reasons.append(f"the PCI bus shows {len(host.functions)} (not usable: {names_text(unopened_drivers, 4)})")
    elif not host.functions and promised is None and present < host.visible:
        reasons.append(f"the driver (/proc/driver/nvidia/gpus) or WSL2 shows {host.visible}")
    if largest_host is not None and present < len(largest_host.gpus):
        reasons.append(f"{largest_host.name} has {len(largest_host.gpus)}")
    return reasons


def _fewer_finding(seen: Seen[Data], host: HostGpus, reasons: list[str]) -> Finding:
    trouble = f" (NVML: {host.error})" if host.trouble else ""
    ask = f"Ask for GPUs (Slurm: `--gres=gpu:{seen.options.expect_gpus or host.promised or 'N'}`; docker: `--gpus all`)"
    leave = leave_out([host.name])
    if not host.driver_by_unopened_gpu:
        fix = f"{ask}, or {leave}. In WSL2 install NVIDIA's driver on Windows only."
    elif set(host.driver_by_unopened_gpu.values()) <= {"nvidia"}:
        fix = f"{ask}. If the job has them: {xid_fix(host.name)} Then reboot {host.name}, or {leave}. {_CPUS_ONLY}"
    else:
        fix = (
            f"As root load the NVIDIA driver on {host.name} (`modprobe nvidia`); `dmesg | grep -i nvrm` shows why it "
            f"does not load. If you cannot, {leave}. {_CPUS_ONLY}"
        )
    return seen.finding(
        "fewer",
        "GPUs are missing" if host.gpus else "no usable GPU",
        f"{host.name} has {count(len(host.gpus), 'usable GPU') if host.gpus else 'no usable GPU'}{trouble}, but "
        f"{' and '.join(reasons)}.",
        ranks=host.ranks,
        evidence={
            "gpus": len(host.gpus),
            "pci_gpus": None if host.functions is None else len(host.functions),
            "pci": list(host.driver_by_unopened_gpu),
            "promised": host.promised,
            "expected": seen.options.expect_gpus,
            "nvml": host.trouble.value if host.trouble else None,
        },
        fix=fix,
    )


def _hidden_findings(seen: Seen[Data], host: HostGpus) -> Iterator[Finding]:
    """Yield at most one finding, on GPUs that are hidden from ranks. --expect-gpus replaces what variables promise."""
    if not host.gpus:
        return
    expected, promised = seen.options.expect_gpus, host.promised
    severity = Severity.ERROR
    wrong = [
        rank
        for rank, row in host.data_by_rank.items()
        # Only CUDA knows what an index means on a GPU that is split into slices. An index that shows nothing is wrong.
        if not (row.visible and host.is_sliced) and row.visible < named_gpu_count(row.cuda_visible_devices)
    ]
    blind = [rank for rank, row in host.data_by_rank.items() if row.visible == 0]
    if expected is not None:
        # If a rank did not answer, the GPUs that are bound to it are not counted.
        if host.visible >= expected or len(seen.by_rank) < seen.world.size:
            return
        ranks, why = list(host.data_by_rank), f"--expect-gpus is {expected}"
    elif wrong:
        ranks, why = wrong, "the variable names a GPU that does not exist, or one GPU twice"
    elif blind:
        ranks, is_promised = blind, any(host.data_by_rank[rank].promised for rank in blind)
        has_others = any(row.visible for row in seen.by_rank.values())
        # NCCL needs GPUs on all ranks.
        if seen.options.backend == "gloo" or not (is_promised or has_others):
            severity = Severity.WARNING
        why = "no GPU was tested, and the job would use CPUs"
        if is_promised or has_others:
            why = "launcher or container name some" if is_promised else "other ranks see some"
    else:
        return
    row = host.data_by_rank[ranks[0]]
    value = row.cuda_visible_devices
    number = host.visible if len(ranks) == len(host.data_by_rank) else row.visible
    visible = f"{ranks_text(ranks)} {'sees' if len(ranks) == 1 else 'see'} {number} of them"
    setting = "unset" if value is None else f"set to {value!r}"
    fix = f"Ask Slurm for GPUs (`--gres=gpu:{len(host.gpus)}`)."
    if value != "NoDevFiles":
        # Each rank that is bound to GPUs may count them from 0.
        indices = ",".join(str(gpu.index) for gpu in row.nvml.gpus)
        fix = f"Set CUDA_VISIBLE_DEVICES={indices} on {host.name}."
    yield seen.finding(
        "hidden",
        "GPUs are hidden from the job",
        f"{host.name} has {count(len(host.gpus), 'GPU')}, but {visible} with CUDA_VISIBLE_DEVICES {setting}: {why}.",
        severity=severity,
        ranks=ranks,
        evidence={
            "gpus": len(host.gpus),
            "visible": host.visible,
            "promised": promised,
            "cuda_visible_devices": value,
        },
        fix=f"{fix} If that is intended, pass `--expect-gpus {host.visible}`.",
    )


def _isolation_findings(seen: Seen[Data], hosts: Sequence[HostGpus]) -> Iterator[Finding]:
    """Yield one finding for all hosts whose ranks cannot open each other's GPUs."""
    closed = [host for host in hosts if len(host.data_by_rank) > 1 and not host.is_sliced and _is_isolated(host)]
    if not closed:
        return
    first = [(host, *next(iter(host.data_by_rank.items()))) for host in closed]
    lines = [f"{host.name}: rank {n} sees {len(row.nvml.gpus)} of {len(host.gpus)} GPUs" for host, n, row in first]
    yield seen.finding(
        "isolated",
        "the GPUs of other ranks are hidden by the container or cgroup",
        f"{names_text(lines, 4)}; all are expected. NCCL needs CUDA IPC between the GPUs of a host: without it, NCCL "
        "fails or copies through the host's memory.",
        ranks=tuple(rank for host in closed for rank in host.data_by_rank),
        evidence={"hosts": len(closed), "gpus": [len(host.gpus) for host in closed]},
        fix="Show each rank all GPUs of its host: with Slurm replace --gpus-per-task by "
        f"`--gpus-per-node={len(closed[0].gpus)} --gpu-bind=none`. {_WITHOUT_PEERS}",
    )


def _is_isolated(host: HostGpus) -> bool:
    """Whether NVML, which ignores variables, shows a rank fewer GPUs than all ranks of the host see together."""
    # Ranks that could not open a GPU are left out, since that GPU is lost and not hidden.
    complete = [row.nvml.gpus for row in host.data_by_rank.values() if all(gpu.uuid for gpu in row.nvml.gpus)]
    sets = [{gpu.uuid for gpu in gpus} for gpus in complete if gpus]
    all_uuids = set[str | None]().union(*sets)
    return len(sets) > 1 and any(uuids != all_uuids for uuids in sets)


def report(seen: Seen[Data]) -> Contribution:
    """Add each host's GPUs, with their memory, and the driver to the report."""
    parts = {}
    for host in host_gpus(seen):
        models = Counter((gpu.name or "model unknown", gpu.memory_bytes) for gpu in host.gpus)
        texts = [f"{number} x {name} ({byte_count(size)})" for (name, size), number in models.items()]
        # In a container the bus may also show GPUs of other containers.
        unseen = len(host.lost) if texts else max(len(host.functions or ()), host.visible)
        texts += [f"{count(unseen, 'GPU')} that NVML does not show"] if unseen > 0 else []
        driver = next((row.nvml.driver for row in host.data_by_rank.values() if row.nvml.driver), None)
        if texts:
            parts[host.ranks[0]] = {"GPU": " and ".join(texts), **({"driver": driver} if driver else {})}
        elif host.functions is not None:
            parts[host.ranks[0]] = {"GPU": NONE, "driver": driver or NONE}
    return Contribution(inventory=parts)


CHECK: Check[Data] = Check(__name__, "GPU001", "enumeration", Stage.GPU, Scope.RANK, deadline=10.0)
