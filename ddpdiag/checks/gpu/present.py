"""GPUs that each host should have.

The PCI bus (sysfs), NVML, the launcher's variables and the other hosts should agree on how many GPUs a host has. "CPU
only" is concluded when neither the bus nor WSL2 (/dev/dxg, and NVIDIA's driver in /usr/lib/wsl) shows an NVIDIA GPU, no
launcher or variable names a GPU, and no other host has one; `--expect-gpus 0` states that the job uses CPUs.
A difference that the launcher explains (a job that was given 2 of 8 GPUs, a container that has the device files of 2)
is no finding. GPUs that are present must also be visible to the ranks: CUDA_VISIBLE_DEVICES with a wrong index hides
all that follow it, an empty one hides all. And NCCL needs all ranks of a host to have access to all its GPUs, which
Slurm's --gpus-per-task may prevent.

Findings:

Causes: no driver, or one that was updated while the old module is still loaded ("Driver/library version mismatch"); a
GPU that fell off the bus (Xid 79); a container without `--gpus`; a job that did not ask for GPUs. Fix: see the finding;
compare `nvidia-smi -L` with `lspci -d 10de:`.

Confirm by hand: `lspci -d 10de: ; nvidia-smi -L; ls -l /dev/nvidia*; echo $CUDA_VISIBLE_DEVICES` in each rank: the
numbers should agree.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), return codes; CUDA C++ programming guide,
CUDA_VISIBLE_DEVICES; srun(1), --gpus-per-task and --gpu-bind; nvidia-container-toolkit issue 48; NCCL's
src/transport/p2p.cc and nvls.cc, and NCCL issues 1066, 1647 and 1948.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu.visibility import Data, HostGpus, hidden_gpus, host_gpus, isolated_ranks
from ddpdiag.checks.hosts import leave_out, names_text, nvml_fix, xid_fix
from ddpdiag.checks.registry import by_code
from ddpdiag.model import Finding, Severity
from ddpdiag.model.report import NONE
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.nvml import Trouble, enumerate_gpus
from ddpdiag.probes.gpu.visibility import (
    has_wsl_gpu,
    nvidia_functions,
    nvidia_gpus,
    promised_gpus,
    visible_gpus,
    withheld_gpus,
)
from ddpdiag.probes.host.kernel import proc_root, sys_root
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import byte_count, count

FINDINGS = {
    "fewer": FindingSpec.error(
        "fewer GPUs than the bus shows, than the launcher or a variable names, or than the other hosts have."
    ),
    "nvml": FindingSpec.warning("the driver's library does not answer."),
    "unreadable": FindingSpec.not_seen("nor does another source show how many GPUs there are.", same_item=True),
    "lost": FindingSpec.error("a GPU is on the bus, but does not answer."),
    "mismatch": FindingSpec.error(
        "the loaded driver and its library have different versions, so that no new CUDA process starts."
    ),
    "hidden": FindingSpec("GPUs are present, but CUDA_VISIBLE_DEVICES hides them."),
    "isolated": FindingSpec("ranks of a host cannot open each other's GPUs."),
    "mixed": FindingSpec.warning("GPUs of different models on one host."),
    "unlike-hosts": FindingSpec.warning("hosts have different models of GPUs."),
}


_CPUS_ONLY = "If the job uses CPUs only, pass `--expect-gpus 0`."


def measure(ctx: Context) -> Data:
    # Cheap facts first: NVML may hang, and its step then shows so.
    proc = proc_root(os.environ)
    listed = nvidia_gpus(proc)
    # What a container or a cgroup was given of the host's GPUs is a promise, too.
    given = len(listed) if listed and withheld_gpus(proc) else None
    functions = nvidia_functions(sys_root(os.environ))
    return Data(
        nvml=enumerate_gpus(ctx.step),
        functions=functions,
        proc_gpus=None if listed is None else len(listed),
        visible=visible_gpus(os.environ, proc),
        promised=promised_gpus(os.environ) or given,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        wsl=has_wsl_gpu(),
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    hosts = host_gpus(seen)
    most = max(hosts, key=lambda host: len(host.gpus), default=None)
    for host in hosts:
        where = ", ".join(host.unopened)
        for gpu in host.lost:
            yield seen.finding(
                "lost",
                "a GPU cannot be opened",
                f"GPU {gpu.index} on {host.name}{f' (PCI {where})' if where else ''}: NVML reports {gpu.error!r}.",
                ranks=host.ranks,
                evidence={"index": gpu.index, "error": gpu.error, "pci": where},
                fix=f"{xid_fix(host.name)} Then reboot {host.name} (as root), or {leave_out([host.name])}.",
            )
        absent = list(_absent(seen, host, most))
        yield from absent
        # What is not there cannot be shown either.
        if not any(finding.severity is Severity.ERROR for finding in absent):
            yield from hidden_gpus(seen, host)
    torch = seen.of(by_code("GPU002")).by_rank
    used = [_used(host, {rank: {gpu.uuid for gpu in row.gpus} for rank, row in torch.items()}) for host in hosts]
    for host in used:
        if odd := odd_ones_out({gpu.index: gpu.name for gpu in host.gpus if gpu.name}):
            said = " and ".join(f"{name} ({_gpus_text(indices)})" for name, indices in odd.groups.items())
            usual = max(odd.groups.values(), key=len)
            mask = ",".join(map(str, usual))
            yield seen.finding(
                "mixed",
                "different GPU models on one host",
                f"{host.name} has {said}. One model is expected, because the slowest GPU limits all ranks.",
                ranks=host.ranks,
                gpus=tuple(gpu.uuid for gpu in host.gpus if gpu.index in odd.ranks and gpu.uuid),
                fix=f"Use GPUs of one model: `export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={mask}` on "
                f"{host.name}. (Without CUDA_DEVICE_ORDER, CUDA counts the fastest GPU first.)",
            )
    yield from isolated_ranks(seen, hosts)
    models = {h.ranks[0]: ", ".join(sorted({gpu.name for gpu in h.gpus if gpu.name})) for h in used if h.gpus}
    if odd := odd_ones_out(models):
        said = "; ".join(f"{names} on {names_text(seen.world.hosts_of(of), 4)}" for names, of in odd.groups.items())
        others = seen.world.hosts_of(odd.ranks)
        yield seen.finding(
            "unlike-hosts",
            "hosts have different GPU models",
            f"GPU models differ between hosts: {said}. One model is expected, because the slowest GPU limits all "
            "ranks.",
            ranks=tuple(rank for host in used if host.ranks[0] in odd.ranks for rank in host.ranks),
            fix="Ask for one model (Slurm: `--constraint=FEATURE` or `--gres=gpu:MODEL:N`), or "
            f"{leave_out(others) if others else 'leave the hosts of one model out'}.",
        )


def _is_met(seen: Seen[Data], host: HostGpus) -> bool:
    """Whether the host has all GPUs that were named; the others on the bus are then not this job's."""
    named = host.promised if seen.options.expect_gpus is None else seen.options.expect_gpus
    return named is not None and len(host.gpus) >= named


def _absent(seen: Seen[Data], host: HostGpus, most: HostGpus | None) -> Iterator[Finding]:
    if host.functions is None and not _is_met(seen, host):
        yield seen.finding(
            "unreadable",
            "the number of GPUs is not certain: the PCI bus cannot be read",
            f"{host.name}: NVML shows {count(len(host.gpus), 'GPU')}, but /sys/bus/pci/devices cannot be read, so it "
            "is not known whether the host has more.",
            ranks=host.ranks,
            fix="Mount /sys into the container, or pass the number of GPUs of each host, such as `--expect-gpus 8`.",
        )
    # A GPU that was named as lost is not missed a second time.
    reasons = _reasons(seen, host, most, len(host.gpus) + len(host.lost))
    if host.trouble is Trouble.MISMATCH:
        yield seen.finding(
            "mismatch",
            "NVIDIA's kernel driver and library have different versions",
            f"{host.name}: NVML fails with {host.error!r}. The loaded kernel driver and the installed libnvidia-ml "
            "have different versions, so no new process can use CUDA.",
            ranks=host.ranks,
            evidence={"pci": list(host.unopened)},
            fix=f"As root reboot {host.name}, which loads the new driver after an update. If you cannot, "
            f"{leave_out([host.name])}.",
        )
    elif reasons:
        yield _fewer(seen, host, reasons)
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


def _reasons(seen: Seen[Data], host: HostGpus, most: HostGpus | None, present: int) -> list[str]:
    """Why more than the GPUs that are present were to be expected."""
    reasons = []
    expected, promised = seen.options.expect_gpus, host.promised
    if expected is not None and present < expected:
        reasons.append(f"--expect-gpus is {expected}")
    if promised is not None and present < promised:
        reasons.append(f"the launcher, the container or CUDA_VISIBLE_DEVICES names {promised}")
    if _is_met(seen, host):
        return reasons
    if host.wsl and not present:
        reasons.append("WSL2 shows one (/dev/dxg, and NVIDIA's driver in /usr/lib/wsl)")
    if host.functions and present < len(host.functions):
        unopened = [
            f"{address} {f'with driver {driver}' if driver else 'without a driver'}"
            for address, driver in host.unopened.items()
        ]
        reasons.append(f"the PCI bus shows {len(host.functions)} (not usable: {names_text(unopened, 4)})")
    elif not host.functions and present < host.listed:
        reasons.append(f"the driver lists {host.listed} (/proc/driver/nvidia/gpus)")
    if most is not None and present < len(most.gpus):
        reasons.append(f"{most.name} has {len(most.gpus)}")
    return reasons


def _fewer(seen: Seen[Data], host: HostGpus, reasons: list[str]) -> Finding:
    trouble = f" (NVML: {host.error})" if host.trouble else ""
    ask = f"Ask for GPUs (Slurm: `--gres=gpu:{seen.options.expect_gpus or host.promised or 'N'}`; docker: `--gpus all`)"
    leave = leave_out([host.name])
    if host.wsl and not host.unopened:
        fix = f"Install NVIDIA's driver on Windows, and none inside WSL2; `nvidia-smi` then lists the GPU. {_CPUS_ONLY}"
    elif not host.unopened:
        fix = f"{ask}, or {leave}."
    elif set(host.unopened.values()) <= {"nvidia"}:
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
            "pci": list(host.unopened),
            "promised": host.promised,
            "expected": seen.options.expect_gpus,
            "nvml": host.trouble.value if host.trouble else None,
        },
        fix=fix,
    )


def _gpus_text(indices: Sequence[int]) -> str:
    return f"{'GPU' if len(indices) == 1 else 'GPUs'} {', '.join(map(str, indices))}"


def _used(host: HostGpus, shown: Mapping[int, Set[str | None]]) -> HostGpus:
    """The host without GPUs that torch shows to no rank, such as one for the display; else as it is."""
    if not all(rank in shown for rank in host.ranks):
        return host
    every = set[str | None]().union(*(shown[rank] for rank in host.ranks))
    return structs.replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.uuid in every) or host.gpus)


def inventory(seen: Seen[Data]) -> dict[int, dict[str, str]]:
    """The GPUs of each host with their memory, and the driver."""
    parts = {}
    for host in host_gpus(seen):
        models = Counter((gpu.name or "model unknown", gpu.memory_bytes) for gpu in host.gpus)
        texts = [f"{number} x {name} ({byte_count(size)})" for (name, size), number in models.items()]
        # In a container the bus may show GPUs of others.
        dark = len(host.lost) if texts else max(len(host.functions or ()), host.listed, host.visible, host.wsl)
        texts += [f"{count(dark, 'GPU')} that NVML does not show"] if dark > 0 else []
        driver = next((own.nvml.driver for own in host.answers.values() if own.nvml.driver), None)
        if texts:
            parts[host.ranks[0]] = {"GPU": " and ".join(texts), **({"driver": driver} if driver else {})}
        elif host.functions is not None:
            parts[host.ranks[0]] = {"GPU": NONE, "driver": driver or NONE}
    return parts


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(inventory=inventory(seen))


CHECK: Check[Data] = Check(__name__, "GPU001", "enumeration", Stage.GPU, Scope.RANK, deadline=10.0)
