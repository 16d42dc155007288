"""GPUs that should be there, and are.

The PCI bus (sysfs), NVML, the launcher's promises and the other hosts should agree on how many GPUs a host has. "CPU
only" is concluded when the bus shows no NVIDIA display or 3D function, nobody promises a GPU, and no other host has
one; `--expect-gpus 0` says that CPUs are meant.
A difference that a promise explains (a job that was given 2 of 8 GPUs, a container that has the device files of 2) is
none. GPUs that are there must also be shown to the ranks: CUDA_VISIBLE_DEVICES with a wrong index hides all that
follow it, an empty one hides all. And NCCL needs the GPUs of one host to be open to all ranks there, which Slurm's
--gpus-per-task may prevent.

Findings:

Causes: no driver, or one that was updated while the old module is still loaded ("Driver/library version mismatch"); a
GPU that fell off the bus (Xid 79); a container without `--gpus`; a job that did not ask for GPUs. Fix: see the finding;
compare `nvidia-smi -L` with `lspci -d 10de:`.

Confirm by hand: `lspci -d 10de: ; nvidia-smi -L; ls -l /dev/nvidia*; echo $CUDA_VISIBLE_DEVICES` in each rank: the
numbers should agree.

Sources: NVML API reference (docs.nvidia.com/deploy/nvml-api), return codes; CUDA C++ programming guide,
CUDA_VISIBLE_DEVICES; srun(1), --gpus-per-task and --gpu-bind; nvidia-container-toolkit issue 48; NCCL's
src/transport/p2p.cc.
"""

import os
from collections.abc import Iterator, Mapping

from msgspec import structs

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu.present.data import Data, View, views_of
from ddpdiag.checks.gpu.present.hidden import hidden
from ddpdiag.checks.gpu.present.isolated import isolated
from ddpdiag.model import Finding, Severity
from ddpdiag.model.context import Context
from ddpdiag.probes.gpu.nvml import Trouble, enumerate_gpus
from ddpdiag.probes.gpu.visibility import nvidia_functions, nvidia_gpus, promised_gpus, visible_gpus, withheld_gpus
from ddpdiag.probes.host.kernel import proc_root, sys_root
from ddpdiag.stats import odd_ones_out

FINDINGS = {
    "fewer": Explained.error("fewer GPUs than the bus shows, than somebody promised, or than the other hosts have."),
    "nvml": Explained.warning("the driver's library does not answer."),
    "unreadable": Explained.not_seen("nor does anything else tell how many GPUs there are.", same_item=True),
    "lost": Explained.error("a GPU is on the bus, and does not answer."),
    "mismatch": Explained.error(
        "the loaded driver and its library have different versions, so that no new CUDA process starts."
    ),
    "hidden": Explained("GPUs are there, and CUDA_VISIBLE_DEVICES hides them."),
    "isolated": Explained("ranks of a host cannot open each other's GPUs."),
    "mixed": Explained.warning("GPUs of different models on one host."),
    "unlike-hosts": Explained.warning("hosts have different models of GPUs."),
}


def measure(ctx: Context) -> Data:
    # Cheap facts first: NVML may hang, and its step then says so.
    proc = proc_root(os.environ)
    listed = nvidia_gpus(proc)
    # What a container or a cgroup was given of the host's GPUs is a promise, too.
    given = len(listed) if listed and withheld_gpus(proc) else None
    functions = nvidia_functions(sys_root(os.environ))
    ctx.step("NVML")
    return Data(
        nvml=enumerate_gpus(),
        functions=functions,
        proc_gpus=None if listed is None else len(listed),
        visible=visible_gpus(os.environ, proc),
        promised=promised_gpus(os.environ) or given,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    views = views_of(seen)
    most = max(views, key=lambda view: len(view.gpus), default=None)
    for view in views:
        yield from _lost(seen, view)
        absent = list(_absent(seen, view, most))
        yield from absent
        # What is not there cannot be shown either.
        if not any(finding.severity is Severity.ERROR for finding in absent):
            yield from hidden(seen, view)
    shown = _shown(seen)
    used = [_used(view, shown) for view in views]
    for view in used:
        yield from _mixed(seen, view)
    yield from isolated(seen, views)
    yield from _unlike_hosts(seen, used)


def _is_met(seen: Seen[Data], view: View) -> bool:
    """Does the host have what was named? Then whatever else the bus or other hosts show is not this job's."""
    named = view.promised if seen.options.expect_gpus is None else seen.options.expect_gpus
    return named is not None and len(view.gpus) >= named


def _lost(seen: Seen[Data], view: View) -> Iterator[Finding]:
    for gpu in view.lost:
        where = ", ".join(_missing_functions(view))
        yield seen.finding(
            "lost",
            "a GPU cannot be opened",
            f"GPU {gpu.index} on {view.host.name}{f' (PCI {where})' if where else ''}: NVML says {gpu.error!r}.",
            ranks=view.host.ranks,
            evidence={"index": gpu.index, "error": gpu.error, "pci": where},
            fix=f"Look for Xid lines in `dmesg` on {view.host.name}; drain the host, reset the GPU or reboot.",
        )


def _missing_functions(view: View) -> tuple[str, ...]:
    known = {gpu.pci for gpu in view.gpus}
    return tuple(function.address for function in view.functions or () if function.address not in known)


def _absent(seen: Seen[Data], view: View, most: View | None) -> Iterator[Finding]:
    if view.functions is None and not _is_met(seen, view):
        yield _unreadable(seen, view)
    # A GPU that was named as lost is not missed a second time.
    reasons = _reasons(seen, view, most, len(view.gpus) + len(view.lost))
    if view.trouble is Trouble.MISMATCH:
        yield _mismatch(seen, view)
    elif reasons:
        yield _fewer(seen, view, reasons)
    elif view.trouble is Trouble.OTHER:
        yield _silent_nvml(seen, view)


def _reasons(seen: Seen[Data], view: View, most: View | None, count: int) -> list[str]:
    """Why more than `count` GPUs were to be expected."""
    reasons = []
    expected, promised = seen.options.expect_gpus, view.promised
    if expected is not None and count < expected:
        reasons.append(f"--expect-gpus says {expected}")
    if promised is not None and count < promised:
        reasons.append(f"launcher or CUDA_VISIBLE_DEVICES name {promised}")
    if _is_met(seen, view):
        return reasons
    if view.functions and count < len(view.functions):
        reasons.append(f"the PCI bus shows {len(view.functions)} ({_spelled(view)})")
    elif not view.functions and count < view.listed:
        reasons.append(f"the driver lists {view.listed} (/proc/driver/nvidia/gpus)")
    if most is not None and count < len(most.gpus):
        reasons.append(f"{most.host.name} has {len(most.gpus)}")
    return reasons


def _spelled(view: View) -> str:
    missing = _missing_functions(view)
    drivers = {function.address: function.driver or "no driver" for function in view.functions or ()}
    shown = [f"{address}: {drivers[address]}" for address in missing[:4]]
    return "; ".join(["not usable: " + ", ".join(shown), *([f"{len(missing) - 4} more"] if len(missing) > 4 else [])])


def _fewer(seen: Seen[Data], view: View, reasons: list[str]) -> Finding:
    name, trouble = view.host.name, f" (NVML: {view.error})" if view.trouble else ""
    return seen.finding(
        "fewer",
        "GPUs are missing" if view.gpus else "no usable GPU",
        f"{name}: {len(view.gpus)} GPUs{trouble}, but {' and '.join(reasons)}.",
        ranks=view.host.ranks,
        evidence={
            "gpus": len(view.gpus),
            "pci_gpus": None if view.functions is None else len(view.functions),
            "pci": list(_missing_functions(view)),
            "promised": view.promised,
            "expected": seen.options.expect_gpus,
            "nvml": view.trouble.value if view.trouble else None,
        },
        fix=_fix(view),
    )


def _fix(view: View) -> str:
    name, missing = view.host.name, set(_missing_functions(view))
    drivers = {function.driver for function in view.functions or () if function.address in missing}
    cpus = "or say --expect-gpus 0 if CPUs are meant"
    if not missing:
        return f"Ask for GPUs (Slurm --gres=gpu:N, docker --gpus all), or leave {name} out of the job."
    if drivers <= {"nvidia"}:
        return f"Look for Xid lines in `dmesg` on {name}; give the job its GPUs; reset the GPU or reboot; {cpus}."
    return f"Load the NVIDIA driver on {name} (`modprobe nvidia`; `dmesg` says why it did not bind), {cpus}."


def _mismatch(seen: Seen[Data], view: View) -> Finding:
    return seen.finding(
        "mismatch",
        "NVIDIA driver and library differ",
        f"{view.host.name}: the loaded kernel driver and libnvidia-ml have different versions ({view.error}); "
        "new CUDA processes fail.",
        ranks=view.host.ranks,
        evidence={"pci": list(_missing_functions(view))},
        fix=f"Reboot {view.host.name}, or reload the nvidia modules; keep the driver packages at one version.",
    )


def _unreadable(seen: Seen[Data], view: View) -> Finding:
    return seen.finding(
        "unreadable",
        "the PCI bus cannot be read",
        f"{view.host.name}: NVML shows {len(view.gpus)} GPUs, but /sys/bus/pci/devices cannot be read: UNKNOWN "
        "whether the host has more.",
        ranks=view.host.ranks,
        fix="Mount /sys into the container, or say with --expect-gpus how many GPUs each host has.",
    )


def _silent_nvml(seen: Seen[Data], view: View) -> Finding:
    # Another rank's NVML, or the user, may have told the number.
    known = bool(view.gpus) or seen.options.expect_gpus is not None
    return seen.finding(
        "nvml" if known else "unreadable",
        "NVML does not work",
        f"{view.host.name}: NVML says {view.error!r}{'' if known else '; UNKNOWN whether there are GPUs'}.",
        ranks=view.host.ranks,
        fix=f"Run `nvidia-smi` on {view.host.name} and follow what it says"
        f"{'' if known else '; say --expect-gpus 0 if CPUs are meant'}.",
    )


def _shown(seen: Seen[Data]) -> Mapping[int, frozenset[str | None]]:
    """UUIDs of the GPUs that torch shows to each rank."""
    from ddpdiag.checks.gpu import devices  # which imports this module

    return {rank: frozenset(gpu.uuid for gpu in row.gpus) for rank, row in seen.of(devices.CHECK).by_rank.items()}


def _used(view: View, shown: Mapping[int, frozenset[str | None]]) -> View:
    """The host without GPUs that no rank is shown, such as one for the display; as it is where that is untold."""
    if not all(rank in shown for rank in view.host.ranks):
        return view
    every = frozenset[str | None]().union(*(shown[rank] for rank in view.host.ranks))
    return structs.replace(view, gpus=tuple(gpu for gpu in view.gpus if gpu.uuid in every) or view.gpus)


def _mixed(seen: Seen[Data], view: View) -> Iterator[Finding]:
    odd = odd_ones_out({gpu.index: gpu.name for gpu in view.gpus if gpu.name})
    if odd:
        said = ", ".join(f"{name} (GPU {', '.join(map(str, indices))})" for name, indices in odd.groups.items())
        yield seen.finding(
            "mixed",
            "different GPU models on one host",
            f"{view.host.name}: {said}; one model is expected, the slowest sets the pace.",
            ranks=view.host.ranks,
            gpus=tuple(gpu.uuid for gpu in view.gpus if gpu.index in odd.ranks and gpu.uuid),
            fix="Choose GPUs of one model with CUDA_VISIBLE_DEVICES; set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            "because CUDA counts the fastest first.",
        )


def _unlike_hosts(seen: Seen[Data], views: list[View]) -> Iterator[Finding]:
    models = {
        view.host.ranks[0]: ", ".join(sorted({gpu.name for gpu in view.gpus if gpu.name}))
        for view in views
        if view.gpus
    }
    odd = odd_ones_out(models)
    if odd:
        said = "; ".join(f"{names} on {', '.join(seen.world.nodes_of(of)[:4])}" for names, of in odd.groups.items())
        yield seen.finding(
            "unlike-hosts",
            "hosts have different GPU models",
            f"GPU models differ between hosts: {said}; one model is expected, the slowest sets the pace.",
            ranks=tuple(rank for view in views if view.host.ranks[0] in odd.ranks for rank in view.host.ranks),
            fix="Ask for one model (Slurm --constraint or --gres=gpu:MODEL:N), or leave the other hosts out.",
        )


CHECK = Check(
    "GPU001",
    "enumeration",
    Stage.GPU,
    Scope.RANK,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    # Without persistence mode the driver starts every GPU for the first NVML client, about a second each.
    deadline=20.0,
)
