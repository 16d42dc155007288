"""Arithmetic and a process group on one host alone.

Each GPU that torch shows, or the CPU where it shows none, multiplies matrices of small integers, whose product is known
exactly; then a process group of this one rank is opened over the job's backend, with a store in memory, and sums once.
Neither needs a peer: sockets are opened on the loopback interface at most. `ddpdiag host --torch` runs it; elsewhere
the collectives and the training test more.

Findings:

Fix: drain the host; run `dcgmi diag -r 3` on the GPU. For a group that fails, install a torch with the backend.

Confirm by hand: `python -c "import torch; a = torch.ones(512, 512, device='cuda:0'); print((a @ a == 512).all())"` for
each GPU; `dcgmi diag -r 3`.

Sources: products of small integers are exact in float32 (IEEE 754: integers up to 2^24);
docs.pytorch.org/docs/stable/distributed.html (HashStore, GLOO_SOCKET_IFNAME); NCCL user guide, NCCL_SOCKET_IFNAME.
"""

from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage, new_trial
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.cards import smi_id
from ddpdiag.checks.hosts import leave_out
from ddpdiag.checks.known_errors import known_error
from ddpdiag.model import Finding, Kind, Trial
from ddpdiag.model.measurements import Group, Product
from ddpdiag.model.trial import Context
from ddpdiag.text import begun

FINDINGS = {
    "wrong": FindingSpec.error(
        "elements of the product are wrong: the memory or the arithmetic units of that GPU (or CPU) are faulty."
    ),
    "failed": FindingSpec.error("a GPU that torch lists could not compute; torch's error is shown."),
    "group": FindingSpec.error(
        "the process group of one rank could not be opened, or its sum was wrong: a torch without this backend, a "
        "broken NCCL library, no loopback interface."
    ),
}

# gloo and NCCL otherwise look up the host's name, and listen where others reach them.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Data(Struct, frozen=True, kw_only=True):
    """The products of each device, and the sum of a group of one rank."""

    products: tuple[Product, ...]
    group: Group


def measure(ctx: Context) -> Data:
    from ddpdiag.workloads.devices import products
    from ddpdiag.workloads.group import group_of_one

    return Data(products=tuple(products(ctx)), group=group_of_one(ctx, str(ctx.trial.params["backend"])))


def plan(seen: Seen[Data]) -> tuple[Trial, ...]:
    """Once, over the backend that a job would take."""
    return () if seen.trials else (new_trial(seen, params={"backend": seen.world.backend}, env=LOOPBACK),)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for rank, data in seen.by_rank.items():
        host = seen.world.host_of(rank)
        for product in data.products:
            if product.error is not None or product.wrong:
                yield _bad_product(seen, host, product)
        # Without CUDA there is no NCCL either, which GPU002 reports.
        torch, group = seen.of(devices.CHECK).by_rank.get(rank), data.group
        can_start = torch is None or (torch.cuda is not None and torch.error is None)
        if can_start and (group.error is not None or not group.right):
            yield seen.finding(
                "group",
                f"{group.backend} does not work on {host}, even with one rank",
                f"A process group of only one rank over {group.backend} "
                f"{'computed a wrong sum' if group.error is None else f'failed: {group.error}'}. No other rank or host "
                f"took part, so the cause is on {host}.",
                hosts=(host,),
                evidence={"backend": group.backend, "error": group.error},
                fix=_NCCL_FIX if group.backend == "nccl" else _GLOO_FIX,
                known=known_error(group.error or ""),
            )


def _bad_product(seen: Seen[Data], host: str, product: Product) -> Finding:
    """A device that failed to multiply, or computed wrong values."""
    where = begun(f"{product.device} on {host}{f' ({product.uuid})' if product.uuid else ''}")
    size, elements = f"{product.size} x {product.size}", product.size * product.size
    hosts, gpus = (host,), (product.uuid,) if product.uuid else ()
    if product.error is not None:
        return seen.finding(
            "failed",
            f"{product.device} cannot compute",
            f"{where} failed to multiply two matrices of {size}: {product.error}.",
            hosts=hosts,
            gpus=gpus,
            evidence={"error": product.error},
            fix=f"Run `nvidia-smi` on {host}, and as root `dmesg -T | grep -i xid`. Then, as root, reset the GPU "
            f"(`nvidia-smi --gpu-reset -i {smi_id(product.uuid)}`) or reboot. Until then {leave_out([host])}.",
            known=known_error(product.error),
        )
    tests = "GPU with `dcgmi diag -r 3`" if product.device.startswith("GPU") else "memory (memtest86+ or `memtester`)"
    return seen.finding(
        "wrong",
        f"{product.device} computes wrong values",
        f"{where} computed {product.wrong:,} of {elements:,} elements of a matrix product wrong. The product is of "
        "small integers, so every element must be exact.",
        hosts=hosts,
        gpus=gpus,
        evidence={"wrong_elements": product.wrong, "elements": elements},
        fix=f"Do not train on {host}: {leave_out([host])}. Ask the administrator to test the {tests}.",
    )


_NCCL_FIX = (
    "Run again with NCCL_DEBUG=WARN set: the line of NCCL before the error names what failed. After a system error "
    "look at NCCL_SOCKET_IFNAME, `df -h /dev/shm` and `ulimit -l`. After a CUDA error install a torch whose CUDA "
    "version is not above that of `nvidia-smi`."
)
_GLOO_FIX = (
    "Check that the loopback interface is up (`ip addr show lo`). Then reinstall torch: `python -m pip install "
    "--force-reinstall torch`."
)


# A CUDA context for each GPU, and NCCL's start.
CHECK: Check[Data] = Check(__name__, "HST005", "arithmetic", Stage.HOST, Scope.RANK, Kind.TORCH, deadline=30.0)
