"""What the times of collectives mean: bandwidths, what hardware should reach, and which earlier runs compare.

Formulas and counts are nccl-tests'; each module names the source of its own.
"""
