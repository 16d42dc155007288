"""Arithmetic of each GPU of one host alone.

Each GPU that torch shows, or the CPU if it shows none, multiplies matrices of small integers, whose product is known
exactly. This needs no other rank. `ddpdiag host --torch` runs this check. `ddpdiag check` runs it only if it is
selected by its code, because collectives and training steps also test the arithmetic.

Findings:

Causes: faulty memory or arithmetic units. Fix: drain the host; run `dcgmi diag -r 3` on the GPU.

Confirm by hand: `python -c "import torch; a = torch.ones(512, 512, device='cuda:0'); print((a @ a == 512).all())"` for
each GPU; `dcgmi diag -r 3`.

Sources: products of small integers are exact in float32 (IEEE 754: integers up to 2^24).
"""

from collections.abc import Iterator

from msgspec import Struct

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu.cards import smi_id
from ddpdiag.checks.hosts import leave_out
from ddpdiag.checks.known_errors import known_error
from ddpdiag.model import Finding, Kind
from ddpdiag.model.measurements import Product
from ddpdiag.model.trial import Context
from ddpdiag.text import begun

FINDINGS = {
    "wrong": FindingSpec.error(
        "elements of the product are wrong: the memory or the arithmetic units of that GPU (or CPU) are faulty."
    ),
    "failed": FindingSpec.error("a GPU that torch lists could not compute; torch's error is shown."),
}


class Data(Struct, frozen=True, kw_only=True):
    """The products that this rank's devices computed, one for each GPU, or one for the CPU."""

    products: tuple[Product, ...]


def measure(ctx: Context) -> Data:
    from ddpdiag.workloads.devices import check_products

    return Data(products=tuple(check_products(ctx)))


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for rank, data in seen.by_rank.items():
        for product in data.products:
            if product.error is not None or product.wrong:
                yield _bad_product(seen, seen.world.host_name(rank), product)


def _bad_product(seen: Seen[Data], host: str, product: Product) -> Finding:
    """The finding on a device that failed to multiply, or that computed wrong values."""
    subject = begun(f"{product.device} on {host}{f' ({product.uuid})' if product.uuid else ''}")
    size, elements = f"{product.size} x {product.size}", product.size * product.size
    hosts, gpus = (host,), (product.uuid,) if product.uuid else ()
    if product.error is not None:
        return seen.finding(
            "failed",
            f"{product.device} cannot compute",
            f"{subject} failed to multiply two matrices of {size}: {product.error}.",
            hosts=hosts,
            gpus=gpus,
            evidence={"error": product.error},
            fix=f"Run `nvidia-smi` on {host}, and as root `dmesg -T | grep -i xid`. Then, as root, reset the GPU "
            f"(`nvidia-smi --gpu-reset -i {smi_id(product.uuid)}`) or reboot. Until then {leave_out([host])}.",
            known_error=known_error(product.error),
        )
    test = "GPU with `dcgmi diag -r 3`" if product.device.startswith("GPU") else "memory (memtest86+ or `memtester`)"
    return seen.finding(
        "wrong",
        f"{product.device} computes wrong values",
        f"{subject} computed {product.wrong:,} of {elements:,} elements of a matrix product wrong. The product is of "
        "small integers, so every element must be exact.",
        hosts=hosts,
        gpus=gpus,
        evidence={"wrong_elements": product.wrong, "elements": elements},
        fix=f"Do not train on {host}: {leave_out([host])}. Ask the administrator to test the {test}.",
    )


# The deadline includes a CUDA context for each GPU.
CHECK: Check[Data] = Check(__name__, "HST005", "arithmetic", Stage.HOST, Scope.RANK, Kind.TORCH, deadline=30.0)
