"""How far rounding moves the gradients that TRN003 compares, and how often it is reported as a fault.

    python tests/benchmarks/rounding.py [--seeds 1000]

Three ranks compute their gradients with each layer's output multiplied by 1 + share or 1 - share, by chance for each
element and each computation, as with other algorithms of cuDNN. The network of TRN003 is smooth; beside it is the same
one with ReLU and max pooling, which switch. The bar: no finding of the smooth network with 1e-7 and 1e-6.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "torch"), str(TESTS / "unit")]

from test_proof import judged, proofs_with_rounding  # noqa: E402

from ddpdiag.workloads import proof, training  # noqa: E402

SHARES = (1e-7, 1e-6, 1e-5)


def with_relu(device: torch.device) -> nn.Module:
    torch.manual_seed(proof.SEED)
    return training.network(partial(nn.GroupNorm, 4)).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="computations of each kind (default: 1000)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | share | error, median | error, most | findings |\n|---|--:|--:|--:|--:|", flush=True)
    for name, network in (("GELU, mean pooling", proof.proof_network), ("ReLU, max pooling", with_relu)):
        for share in SHARES:
            runs = [proofs_with_rounding(share, seed, network) for seed in range(asked.seeds)]
            errors = sorted(own.error for proofs in runs for own in proofs.values())
            findings = sum(bool(judged(proofs)) for proofs in runs)
            middle, most = errors[len(errors) // 2], errors[-1]
            print(f"| {name} | {share:g} | {middle:.1e} | {most:.1e} | {findings} of {asked.seeds} |", flush=True)


if __name__ == "__main__":
    main()
