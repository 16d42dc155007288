"""The step that TRN003 compares: what rounding does to its gradients, and what a wrong element does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from seen import seen_of
from torch import Tensor, nn

from ddpdiag.checks.training import ddp_step
from ddpdiag.checks.training.ddp_step import Data
from ddpdiag.model import Finding
from ddpdiag.model.measurements import Proof
from ddpdiag.workloads import mnist, proof
from ddpdiag.workloads.training import checksum

CPU = torch.device("cpu")
RANKS = 3


@contextmanager
def rounding(model: nn.Module, share: float, noise: torch.Generator) -> Iterator[None]:
    """Multiply each element of each layer's output, and so its gradient, by (1 + share) or (1 - share) by chance."""

    def disturb(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output * (1 + share * (2 * torch.randint(0, 2, output.shape, generator=noise) - 1))

    hooks = [layer.register_forward_hook(disturb) for layer in model.children()]
    yield
    for hook in hooks:
        hook.remove()


def proofs_with_rounding(
    share: float, seed: int, network: Callable[[torch.device], nn.Module] = proof.proof_network
) -> dict[int, Proof]:
    """The proofs of some ranks, each of whose gradients is computed with another rounding."""
    model, digits = network(CPU), mnist.load()
    noise = torch.Generator().manual_seed(seed)

    def gradient(images: range) -> Tensor:
        with rounding(model, share, noise):
            return proof.compute_gradient(model, digits, images, CPU)

    handed = [gradient(proof.shard(rank)) / RANKS for rank in range(RANKS)]
    averaged = torch.stack(handed).sum(dim=0)
    signs = proof.random_signs(len(averaged))
    found = {}
    for rank in range(RANKS):
        whole = gradient(range(RANKS * proof.IMAGES_PER_RANK))
        others = proof.ranks_to_verify(rank, RANKS)
        found[rank] = Proof(
            first_weights=checksum(model),
            dtype="float32",
            gradient_error=float((averaged - whole).abs().max() / whole.abs().max()),
            gradient_norm=float(whole.norm()),
            input_sketch=proof.sketch(signs, handed[rank]),
            expected_sketches={other: proof.sketch(signs, gradient(proof.shard(other)) / RANKS) for other in others},
        )
    return found


def judged(proofs: dict[int, Proof]) -> list[Finding]:
    return list(ddp_step.judge(seen_of(ddp_step.CHECK, {rank: Data(proof=own) for rank, own in proofs.items()})))


@pytest.mark.parametrize("share", [1e-7, 1e-6])
def test_rounding_in_each_layer_is_no_finding(share: float) -> None:
    for seed in range(8):
        assert judged(proofs_with_rounding(share, seed)) == []
