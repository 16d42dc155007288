"""What the times of collectives mean: bandwidths, what hardware should reach, the bottleneck, the slow rank.

Formulas and counts are nccl-tests'; each module names the source of its own.
"""
