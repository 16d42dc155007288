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
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.known_errors import known_error
from ddpdiag.model import Finding, Kind, Trial
from ddpdiag.model.measurements import Group, Product
from ddpdiag.model.trial import Context

FINDINGS = {
    "wrong": Explained.error(
        "elements of the product are wrong: the memory or the arithmetic units of that GPU (or CPU) are faulty."
    ),
    "failed": Explained.error("a GPU that torch lists could not compute; torch's error is shown."),
    "group": Explained.error(
        "the process group of one rank could not be opened, or its sum was wrong: a torch without this backend, a "
        "broken NCCL library, no loopback interface."
    ),
}

# gloo and NCCL otherwise look up the host's name, and listen where others reach them.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Data(Struct, frozen=True, kw_only=True):
    """What each device multiplied, and what the group of one rank summed."""

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
        node = seen.world.node_of(rank)
        for product in data.products:
            where = f"{product.device} on {node}{f' ({product.uuid})' if product.uuid else ''}"
            elements = product.size * product.size
            if product.error is not None:
                yield seen.finding(
                    "failed",
                    f"{product.device} cannot compute",
                    f"{where}: a product of {product.size} x {product.size} matrices failed: {product.error}.",
                    nodes=(node,),
                    gpus=(product.uuid,) if product.uuid else (),
                    evidence={"error": product.error},
                    fix=f"Look at `nvidia-smi` and `dmesg` on {node}; reset the GPU or reboot.",
                    known=known_error(product.error),
                )
            elif product.wrong:
                yield seen.finding(
                    "wrong",
                    f"{product.device} computes wrong values",
                    f"{where}: {product.wrong:,} of {elements:,} elements of an exact product of integers are wrong; "
                    "0 expected.",
                    nodes=(node,),
                    gpus=(product.uuid,) if product.uuid else (),
                    evidence={"wrong_elements": product.wrong, "elements": elements},
                    fix=f"Drain {node}: no result from it can be trusted. Run `dcgmi diag -r 3` there, or a memory "
                    "test.",
                )
        # Without CUDA there is no NCCL either, which GPU002 reports.
        torch, group = seen.of(devices.CHECK).by_rank.get(rank), data.group
        can_start = torch is None or (torch.cuda is not None and torch.error is None)
        if can_start and (group.error is not None or not group.right):
            yield seen.finding(
                "group",
                f"a process group over {group.backend} does not work, even with one rank",
                f"{node}: a process group of one rank over {group.backend} "
                f"{'computed a wrong sum' if group.error is None else f'failed: {group.error}'}.",
                nodes=(node,),
                evidence={"backend": group.backend, "error": group.error},
                fix=f"Install a torch whose {group.backend} works with this driver (pytorch.org).",
                known=known_error(group.error or ""),
            )


CHECK = Check(
    "HST005",
    "arithmetic",
    Stage.HOST,
    Scope.RANK,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    plan=plan,
    kind=Kind.TORCH,
    by_name=True,
    # A CUDA context for each GPU, and NCCL's start.
    deadline=30.0,
)
